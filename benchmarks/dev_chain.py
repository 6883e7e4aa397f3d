"""Time the small kernels on their bars: states along a sequence's pieces, and the a-priori bound from the gates.

    PYTHONPATH=. python benchmarks/dev_chain.py [chain] [warmup]

A graph of 20 launches, a twentieth of its median; the memory of the chain fits the L2 cache, as it does behind a summary.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

from flash_kda.constants import EXIT_EPS
from flash_kda.inputs import Inputs
from flash_kda.sm90 import small

LAUNCHES = 20
BANDWIDTH = 4.2e12


def microseconds(call: Callable[[], object]) -> float:
    """Time of one of LAUNCHES launches in a graph, median of 30 replays."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    times = []
    for _ in range(33):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(times[3:])


def chain() -> None:
    print("states: heads, slots, flags, initial state -> us")
    for heads, slots in ((16, 7), (4, 32), (1, 127), (8, 15), (16, 3), (96, 1), (32, 3)):
        for kind, with_start in (("all", True), ("all", False), ("half", True), ("none", True)):
            ht = torch.randn(slots, heads, 128, 128, device="cuda")
            mt = torch.randn(slots, heads, 128, 128, device="cuda") * 0.9 * 128**-0.5
            share = {"all": 1.0, "half": 0.5, "none": 0.0}[kind]
            needs = (torch.rand(slots, heads, device="cuda") < share).int()
            start = torch.randn(1, heads, 128, 128, device="cuda") if with_start else None
            offsets = torch.tensor([0, slots * 1024 + 1], device="cuda")
            options = {"tokens": slots * 1024 + 1, "max_len": 0, "segment_len": 1024, "initial_state": start}
            time = microseconds(lambda: small.chain(ht, mt, needs, offsets, **options))  # noqa: B023
            print(f"  {heads:3} {slots:4} {kind:5} {with_start!s:5} {time:8.2f}")


def warmup() -> None:
    print("bound: heads, tokens, segments -> us, floor of the bytes it needs, bar, mean chunks")
    for heads, tokens, segments, lower_bound in (
        (16, 65536, 64, -0.5),
        (32, 65536, 64, -0.5),
        (16, 65536, 64, -5.0),
        (1, 65536, 4, -0.01),
        (4, 65536, 8, -0.5),
        (96, 8192, 8, -0.5),
    ):
        g = torch.randn(1, tokens, heads, 128, device="cuda").bfloat16()
        dt_bias = torch.randn(heads, 128, device="cuda")
        inputs = Inputs(None, g, g, g, g[..., 0], -0.2 * torch.rand(heads, device="cuda"), dt_bias, lower_bound)
        offsets = torch.arange(segments + 1, device="cuda") * (tokens // segments)
        num, _ = small.warmup_bound(inputs, offsets, max_len=tokens, eps=EXIT_EPS)
        floor = int(num.sum()) * 16 * 256 / BANDWIDTH * 1e6
        time = microseconds(lambda: small.warmup_bound(inputs, offsets, max_len=tokens, eps=EXIT_EPS))  # noqa: B023
        mean = float(num.float().mean())
        print(f"  {heads:3} {tokens} {segments:3} {lower_bound:5} {time:8.2f} {floor:8.2f} {1.5 * floor + 5:8.2f} {mean:6.1f}")


if __name__ == "__main__":
    asked = sys.argv[1:] or ["chain", "warmup"]
    for name in asked:
        {"chain": chain, "warmup": warmup}[name]()
