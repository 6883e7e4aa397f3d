"""``flash-kda run --distributed``: the same prefill with its tokens spread over processes, checked against one process."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import api, dispatch, distributed
from ..constants import EXIT_EPS, STEP
from ..distributed.layout import Part
from ..samples import TOKEN_TENSORS, Sample
from ..validation import check_eps
from . import files
from .check import Result, run_check
from .console import UserError, heading, line, steps, table
from .run import Options, count, milliseconds, pack, path_name, print_check, read_sample, result_of

RANKS = 2
"""Processes on a CPU, if not told otherwise."""


def main(options: Options) -> int:
    """As a process of torchrun, the work of a rank; else starts torchrun with this command.

    Returns:
        0 if the check passes, 1 if it fails or a rank does.

    Raises:
        UserError: bad input.
    """
    if not dist.is_available():
        raise UserError("distributed must be possible, got a PyTorch that was built without torch.distributed")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device must be one that PyTorch sees, got cuda and no CUDA device; see 'flash-kda doctor'")
    if options.output is not None:
        files.check_output(options.output, options.file)
    try:
        check_eps(EXIT_EPS if options.eps is None else options.eps)
        dispatch.choose(options.impl, torch.device(options.device))
    except (ValueError, NotImplementedError) as error:
        raise UserError(str(error)) from None
    if dist.is_torchelastic_launched():
        if options.ranks is not None:
            raise UserError(f"ranks must be left to torchrun where it starts the processes, got {options.ranks}")
        with _group(options.device) as device:
            return _run(options, device)
    read_sample(options)  # what is wrong with it is said once, and before processes are started
    gpus = torch.cuda.device_count() if options.device == "cuda" else None
    ranks = options.ranks or gpus or RANKS
    if gpus is not None and ranks > gpus:
        raise UserError(f"ranks must be at most the {gpus} GPUs there are, got {ranks}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    threads = str(max((os.cpu_count() or 1) // ranks, 1))
    sys.stdout.flush()
    command = [*torchrun, "-m", "flash_kda", *_without_ranks(sys.argv[1:])]
    return subprocess.call(command, env={"OMP_NUM_THREADS": threads, **os.environ}) and 1


def _without_ranks(arguments: list[str]) -> list[str]:
    """What was typed, but for ``--ranks N``, which has had its effect."""
    kept = list(arguments)
    for i, argument in enumerate(kept):
        if argument == "--ranks":
            return kept[:i] + kept[i + 2 :]
        if argument.startswith("--ranks="):
            return kept[:i] + kept[i + 1 :]
    return kept


@contextmanager
def _group(kind: str) -> Iterator[torch.device]:
    """The default process group, and the device of this rank."""
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _run(options: Options, device: torch.device) -> int:
    """Every rank reads the whole input, takes its shard and runs it; rank 0 puts the results together, checks and prints."""
    eps = EXIT_EPS if options.eps is None else options.eps
    sample, origin = read_sample(options)
    packed, offsets = pack(sample)
    heads, tokens = sample.heads, offsets[-1]
    shard_lens = distributed.even_shards(packed.q.shape[1], dist.get_world_size(), STEP)
    context = distributed.ContextParallel(None, offsets, heads, shard_lens=shard_lens, final_state="all", device=device)
    arguments = _shard(packed, context).to(device).arguments()
    del arguments["cu_seqlens"]  # the context knows
    speaks = context.rank == 0
    if speaks:
        line(f"flash-kda run: {origin}")
        line(f"T={tokens} H={heads} K=V={packed.q.shape[-1]}, {count(len(offsets) - 1, 'sequence')}")
        path = path_name(dispatch.choose(options.impl, device))
        line(f"on {count(context.size, 'rank')} of {dist.get_backend()} ({device.type}), computed by {path}")
        _print_layout(context)

    def call() -> Result:
        return result_of(
            distributed.fwd_cp(
                **arguments,
                context=context,
                output_final_state=True,
                segment_len=options.segment_len,
                eps=eps,
                impl=options.impl,
            )
        )

    call()
    times = [_timed(call, device)[1] for _ in range(options.repeat)]
    made, _ = _timed(call, device)
    everyone: list[Any] = [None] * context.size
    dist.gather_object((made.out.cpu(), times), everyone if speaks else None)
    passed = not speaks or _judge(options, packed, sample.q.shape[0], context, made.final_state.cpu(), everyone)
    # The others wait for rank 0's verdict, so that no process ends, and takes the rest down, before it is known.
    verdict = [passed]
    dist.broadcast_object_list(verdict, device=device if device.type == "cuda" else None)
    return 0 if verdict[0] else 1


def _judge(
    options: Options,
    packed: Sample,
    batch: int,
    context: distributed.ContextParallel,
    final_state: Tensor,
    everyone: list[tuple[Tensor, list[float]]],
) -> bool:
    """On rank 0: serial ``fwd`` on everything, in this process, and both against the oracle."""
    offsets = list(context.layout.offsets)
    over_ranks = Result(torch.cat([out for out, _ in everyone], 1), final_state)
    call_times = [max(times) for times in zip(*(times for _, times in everyone), strict=True)]
    with steps(options.repeat + 10) as begin:
        serial_times = []
        for i in range(options.repeat):
            begin(f"serial {i + 1}")
            start = time.perf_counter()
            serial = result_of(api.fwd(**packed.arguments(), output_final_state=True, impl=options.impl))
            serial_times.append(time.perf_counter() - start)
        found = run_check(packed, offsets, context.layout.shards[1:-1], serial, over_ranks, options.impl, begin)
    heading(f"Time (median of {options.repeat}; of the slowest rank)")
    a, b = statistics.median(serial_times), statistics.median(call_times)
    rows = [["serial fwd, one process", a], [f"fwd_cp over {count(context.size, 'rank')}", b]]
    table(("", "ms", "tokens/s"), [[what, milliseconds(t), f"{offsets[-1] / t:,.0f}"] for what, t in rows])
    if packed.q.device.type == "cpu":
        line("On CPUs this shows that it works; ranks share the cores of the machine.")
    print_check(found, packed.heads, cut=bool(context.layout.chains))
    if not found.passed:
        line("CHECK FAILED" + ("; nothing was written" if options.output is not None else ""))
        return False
    if options.output is not None:
        out = over_ranks.out.view(batch, -1, *over_ranks.out.shape[2:])
        files.write(options.output, {"out": out, "final_state": final_state})
        line(f"wrote out {list(out.shape)} and final_state {list(final_state.shape)} to {options.output}")
    line("CHECK PASSED")
    return True


def _shard(packed: Sample, context: distributed.ContextParallel) -> Sample:
    """This rank's tokens, and the initial states of the sequences that start here."""
    start, end = context.layout.shards[context.rank : context.rank + 2]
    state = packed.initial_state
    return Sample(
        **{name: getattr(packed, name)[:, start:end] for name in TOKEN_TENSORS},
        A_log=packed.A_log,
        dt_bias=packed.dt_bias,
        lower_bound=packed.lower_bound,
        scale=packed.scale,
        initial_state=None if state is None else state[list(context.starts)],
    )


def _timed(call: Any, device: torch.device) -> tuple[Result, float]:
    """One call that all ranks begin together."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    start = time.perf_counter()
    made: Result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return made, time.perf_counter() - start


def _print_layout(context: distributed.ContextParallel) -> None:
    layout = context.layout
    heading(f"Ranks; exchange of states: {context.exchange}")
    rows = []
    for rank in range(layout.ranks):
        before, after = layout.is_given(rank), layout.hands_on(rank)
        rows.append(
            [
                str(rank),
                str(layout.tokens(rank)),
                _named(layout.parts(rank)),
                f"{before[before.index(rank) - 1]}" if before else "-",
                f"{after[after.index(rank) + 1]}" if after else "-",
            ]
        )
    table(("rank", "tokens", "sequences", "goes on from", "goes on to"), rows)


def _named(parts: tuple[Part, ...]) -> str:
    numbers = [part.sequence for part in parts]
    if not numbers:
        return "-"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
