"""Check and time configurations of the state summary kernel.

    PYTHONPATH=. python benchmarks/dev_summary.py [check] [time] CR,PR,NP,SP,LAG ...

Each configuration is compiled into a temporary folder and launched as the product launches it. The judge is the reference in
fp64; outputs are poisoned with NaN first; times are CUDA-graph medians.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from flash_kda import samples
from flash_kda.inputs import Inputs
from flash_kda.reference import state_summary
from flash_kda.sm90 import build, launch, stages
from flash_kda.sm90.variants import VARIANTS

DEV = "cuda"
CYCLES = 1.755e6  # a millisecond
PROCESSORS = 132


def use(spec: str) -> None:
    """Launch the configuration from now on."""
    names = ("CR", "PR", "NP", "SP", "LAG", "TERMS")
    shipped = next(v for v in VARIANTS if v.name == "summary")
    chosen = dict(zip(names, map(int, spec.split(",")), strict=True))
    variant = dataclasses.replace(shipped, constexprs={**shipped.constexprs, **chosen})
    folder = Path(tempfile.mkdtemp())
    entry = build.build(folder, [variant])["kernels"]["summary"]
    print(f"== {spec}: {entry['spill_bytes']} bytes spilled, {[w['code'] for w in entry['warnings']]}", flush=True)
    launch.kernel = launch.KernelLibrary(folder, [variant]).kernel


def inputs(gates: str, tokens: int, heads: int, lower_bound: float = -5.0) -> Inputs:
    x = samples.make(gates, tokens, heads, lower_bound=lower_bound, device=DEV)
    return Inputs(None, x.k[0], x.v[0], x.g[0], x.beta[0], x.A_log, x.dt_bias, lower_bound)


def outputs(rows: int, heads: int) -> dict[str, torch.Tensor]:
    nan = torch.full((2, rows, heads, 128, 128), torch.nan, device=DEV)
    count = torch.full((2, rows, heads), -7, dtype=torch.int32, device=DEV)
    norm = torch.full((rows, heads), torch.nan, device=DEV)
    return {"ht": nan[0], "mt": nan[1], "needs_mt": count[0], "chunks": count[1], "norm": norm}


def relative(x: torch.Tensor, want: torch.Tensor) -> float:
    """Worst head."""
    error, size = ((y.double() ** 2).sum((0, 2, 3)) for y in (x - want, want))
    return (error / size.clamp_min(1e-30)).sqrt().max().item()


def check() -> None:
    for gates, bound in (("random", -5.0), ("random", -0.5), ("slow_eighth", -5.0), ("none", -5.0), ("real", -5.0)):
        x = inputs(gates, 2048, 4, bound)
        cu = torch.tensor([0, 700, 2048], device=DEV)
        exact = dataclasses.replace(x, **{n: getattr(x, n).double() for n in ("k", "v", "g", "beta")})
        for eps in (0.0, 2.0**-20):
            got = outputs(2, 4)
            stages.state_summary(x, cu, max_len=2048, eps=eps, **got)
            want = state_summary(exact, cu, max_len=2048, eps=eps)
            print(
                f"{gates} {bound} eps {eps:.0e}: ht {relative(got['ht'], want.ht):.2e} mt {relative(got['mt'], want.mt):.2e}"
                f" norm {got['norm'].flatten().tolist()[:2]} chunks {got['chunks'].flatten().tolist()}"
                f" fp64 {want.chunks.flatten().tolist()}",
                flush=True,
            )


def graph_ms(call, replays: int = 20) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def timing() -> None:
    rows = [
        ("H16 8 x 8,192, to the start", "none", 16, 65536, 8192, -5.0, True),
        ("H16 8 x 8,192, no decay", "none", 16, 65536, 8192, -5.0, False),
        ("H16 8 x 8,192, real", "real", 16, 65536, 8192, -5.0, False),
        ("H16 8 x 8,192, random -0.5", "random", 16, 65536, 8192, -0.5, False),
        ("H16 8 x 8,192, random -5", "random", 16, 65536, 8192, -5.0, False),
        ("H16 8 x 512, random -5", "random", 16, 4096, 512, -5.0, False),
        ("H16 8 x 512, real", "real", 16, 4096, 512, -5.0, False),
        ("H4 33 x 1,984, to the start", "none", 4, 65472, 1984, -5.0, True),
        ("H4 33 x 1,984, real", "real", 4, 65472, 1984, -5.0, False),
    ]
    for name, gates, heads, tokens, length, bound, forced in rows:
        x = inputs(gates, tokens, heads, bound)
        count = tokens // length
        options = outputs(count, heads)
        if forced:
            options["num_chunks"] = torch.full((count, heads), 2**30, dtype=torch.int32, device=DEV)
        memo: dict = {}
        ms = graph_ms(
            lambda x=x, n=length, o=options, m=memo: stages.state_summary(x, None, max_len=n, fill=False, memo=m, **o)
        )
        done = options["chunks"].float()
        waves = -(-count * heads // PROCESSORS)
        print(
            f"time {name}: {ms:.4f} ms, chunks {done.mean().item():.1f} of {length // 16} (most {done.max().item():.0f}),"
            f" cycles a chunk {ms * CYCLES / waves / done.max().item():.0f}",
            flush=True,
        )


def main() -> None:
    for spec in [a for a in sys.argv[1:] if "," in a]:
        use(spec)
        if "check" in sys.argv:
            check()
        if "time" in sys.argv:
            timing()


if __name__ == "__main__":
    main()
