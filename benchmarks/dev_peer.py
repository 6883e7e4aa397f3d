"""Error against fla's chunk_kda on the same inputs: python benchmarks/dev_peer.py cr,pr,np,... (needs fla on the path)

Worst head's relative L2 error of the outputs against the fp64 token recurrence, ours and fla's, and their ratio.
"""
import sys

import torch
import triton

autotune = triton.autotune
triton.autotune = lambda configs, key, **kw: autotune(configs[:1], key, **kw)    # errors only, not times: the first will do

from dev_forward import ForwardConfig, adversarial_cases, forward, reference, rel  # noqa: E402
from fla.ops.kda.chunk import chunk_kda  # noqa: E402

cfg = ForwardConfig(*map(int, sys.argv[1].split(",")))
for name, (x, lb) in adversarial_cases().items():
    t, h, _ = x["v"].shape
    ref, _ = reference(x, [t], lower_bound=lb)
    ours = rel(forward(x, cfg, [t], lower_bound=lb), ref)
    try:
        peer, _ = chunk_kda(*(x[n][None] for n in ("q", "k", "v", "g", "beta")), use_qk_l2norm_in_kernel=True,
                            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=lb,
                            A_log=x["a_log"], dt_bias=x["dt_bias"].reshape(-1))
        peer = rel(peer[0], ref)
    except Exception as e:    # a case that it refuses
        print(name, "fla:", type(e).__name__, str(e)[:80])
        peer = float("nan")
    print(f"{name:24s} ours {ours:.3e} fla {peer:.3e} ratio {ours / peer:.3f}", flush=True)
