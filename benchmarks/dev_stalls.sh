#!/bin/sh
# Stall reasons, instruction-cache misses and shared-memory wavefronts of one launch.
M=""
for r in no_instruction long_scoreboard short_scoreboard wait barrier math_pipe_throttle mio_throttle dispatch_stall selected gmma not_selected branch_resolve sleeping membar; do
  M="$M,smsp__average_warps_issue_stalled_${r}_per_issue_active.ratio"; done
M="$M,smsp__inst_executed.sum,smsp__cycles_active.avg,sm__icc_requests_lookup_hit.sum,sm__icc_requests_lookup_miss.sum,l1tex__data_bank_conflicts_pipe_lsu.sum,l1tex__data_pipe_lsu_wavefronts.sum,smsp__sass_inst_executed_op_local.sum"
timeout 100 ncu --clock-control none -k regex:kda_forward -s 1 -c 1 --metrics "${M#,}" python3 benchmarks/dev_profile.py "$@" 2>&1 | grep -E "smsp__|sm__|l1tex__" | sed 's/smsp__average_warps_issue_//; s/_per_issue_active.ratio//'
