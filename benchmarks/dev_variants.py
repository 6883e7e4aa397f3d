"""Time configurations of the forward or the summary kernel beside each other, on a Hopper GPU.

    PYTHONPATH=. python benchmarks/dev_variants.py forward LAG=0 LAG=1 CR=160,PR=96
    PYTHONPATH=. python benchmarks/dev_variants.py summary NP=7 SP=7,LAG=2

Each configuration replaces constants of the variant that ships (flash_kda/sm90/variants.py). All are compiled first, without a
GPU, then timed in turn, twice; GPU clocks drift, so compare within a line's round. Nothing is checked here.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import flash_kda
from flash_kda import samples
from flash_kda.sm90 import build, launch
from flash_kda.sm90.variants import VARIANTS

FORWARD = [(16, [8192] * 8), (96, [8192]), (96, [1024] * 8), (12, [33] * 4096)]  # heads, lengths
SUMMARY = [("none", True, 8192), ("real", False, 8192), ("random", False, 512)]  # gates, to the start, segment; 16 heads


def graph_ms(call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def calls(kernel: str) -> dict[str, Callable[[], object]]:
    made: dict[str, Callable[[], object]] = {}
    if kernel == "forward":
        for heads, lengths in FORWARD:
            sample = samples.make("random", sum(lengths), heads, lower_bound=-5.0, device="cuda")
            offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
            arguments = sample.arguments() | {"out": torch.empty_like(sample.q), "cu_seqlens": offsets}
            made[f"{heads} x {len(lengths)} x {lengths[0]}"] = lambda a=arguments: flash_kda.fwd(**a, impl="sm90")
        return made
    for gates, to_the_start, length in SUMMARY:
        x = samples.make(gates, 8 * length, 16, lower_bound=-5.0, device="cuda")
        offsets = torch.arange(0, 8 * length + 1, length, device="cuda").int()
        count = torch.full((8, 16), 2**30, dtype=torch.int32, device="cuda") if to_the_start else None
        arguments = (x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.lower_bound, offsets, count, True)
        made[f"{gates} 8 x {length}"] = lambda a=arguments: flash_kda.state_only(*a, impl="sm90")
    return made


def main() -> None:
    kernel, *specs = sys.argv[1:]
    shipped = next(v for v in VARIANTS if v.name == kernel)
    libraries = {}
    for spec in specs:
        values = {name: int(value) for name, value in (pair.split("=") for pair in spec.split(","))}
        variant = dataclasses.replace(shipped, constexprs={**shipped.constexprs, **values})
        folder = Path(tempfile.mkdtemp())
        entry = build.build(folder, [variant])["kernels"][kernel]
        print(f"{spec}: {entry['spill_bytes']} bytes spilled, {[w['code'] for w in entry['warnings']]}", flush=True)
        libraries[spec] = launch.KernelLibrary(folder, [variant])
    others = launch.kernel
    for _ in range(2):
        for spec, library in libraries.items():
            launch.kernel = lambda name, mine=library: mine.kernel(name) if name == kernel else others(name)
            times = [f"{name} {graph_ms(call):.4f}" for name, call in calls(kernel).items()]
            print(f"{spec}: {', '.join(times)} ms", flush=True)


if __name__ == "__main__":
    main()
