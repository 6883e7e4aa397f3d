"""Times of GPU calls: CUDA-graph replays, eager calls, and the copy bandwidth that bounds both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """Milliseconds: median, 10th and 90th percentile of graph replays, median of eager calls."""

    graph_ms: float
    graph_ms_p10: float
    graph_ms_p90: float
    eager_ms: float


def measure(call: Callable[[], object], repeats: int = 30) -> Times:
    """Warms up, captures ``call`` in a graph, times its replays and then ordinary calls, each by events."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        graph.replay()
    replays = sorted(_timed(graph.replay) for _ in range(repeats))
    eager = [_timed(call) for _ in range(repeats)]
    at = (len(replays) - 1) / 10
    return Times(statistics.median(replays), replays[round(at)], replays[round(9 * at)], statistics.median(eager))


def host_us(call: Callable[[], object], repeats: int = 2000) -> float:
    """Microseconds of host time that one call costs, the GPU kept from falling behind."""
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats // 10):
            call()
        best = min(best, (time.perf_counter() - start) / (repeats // 10) * 1e6)
    torch.cuda.synchronize()
    return best


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of an elementwise kernel over 2 GiB: the ceiling of anything memory-bound."""
    x = torch.randn(2**29, device="cuda", dtype=torch.float32)
    y = torch.empty_like(x)
    milliseconds = min(_timed(lambda: torch.add(x, 1.0, out=y)) for _ in range(12))
    return 2 * x.numel() * x.element_size() / milliseconds * 1e3


def _timed(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
