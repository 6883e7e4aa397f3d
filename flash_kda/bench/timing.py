"""Times: CUDA-graph replays, ordinary calls, host time, and the copy bandwidth that bounds them. On a CPU, ordinary calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FEWEST, MOST = 3, 30
"""Repetitions of one measurement, as the seconds given allow."""
HEAD_START = 100_000
"""Cycles, about 50 us, that the GPU sleeps while the host queues a replay between two events: host time is not in it."""
COPIED = {"cuda": 2**29, "cpu": 2**22}
"""Floats of the copy that measures the bandwidth: 2 GiB and 16 MiB."""


@dataclass(frozen=True)
class Times:
    """Milliseconds: median, 10th and 90th percentile of graph replays, None without them; median of ordinary calls."""

    graph_ms: float | None
    graph_ms_p10: float | None
    graph_ms_p90: float | None
    eager_ms: float


def measure(call: Callable[[], object], device: torch.device, seconds: float) -> Times:
    """Warms up, times replays of ``call`` captured in a graph and then ordinary calls, each by events.

    Args:
        call: takes and allocates the same each time.
        device: where it runs; on a CPU there are no graphs.
        seconds: to spend, about; never fewer than :data:`FEWEST` repetitions of each kind.

    A call that cannot be captured has no ``graph_ms``.
    """
    call()
    first = _eager(call, device)
    repeats = max(FEWEST, min(MOST, int(seconds / 2e-3 / max(first, 1e-3))))
    replays = _replays(call, repeats) if device.type == "cuda" else []
    eager = statistics.median(_eager(call, device) for _ in range(repeats))
    if not replays:
        return Times(None, None, None, eager)
    at = (len(replays) - 1) / 10
    return Times(statistics.median(replays), replays[round(at)], replays[round(9 * at)], eager)


def host_us(call: Callable[[], object], device: torch.device, repeats: int = 2000) -> float:
    """Microseconds of host time that one call costs, the best of ten rounds; a GPU is kept from falling behind."""
    best = float("inf")
    for _ in range(10):
        _wait(device)
        start = time.perf_counter()
        for _ in range(max(repeats // 10, 1)):
            call()
        best = min(best, (time.perf_counter() - start) / max(repeats // 10, 1) * 1e6)
    _wait(device)
    return best


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read plus written, of an elementwise operation: the ceiling of anything memory-bound."""
    x = torch.randn(COPIED[device.type], device=device, dtype=torch.float32)
    y = torch.empty_like(x)
    milliseconds = min(_eager(lambda: torch.add(x, 1.0, out=y), device) for _ in range(12))
    return 2 * x.numel() * x.element_size() / milliseconds * 1e3


def _replays(call: Callable[[], object], repeats: int) -> list[float]:
    """Sorted milliseconds of single replays; none if the call does something that a graph cannot hold."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # Not `torch.cuda.graph`, which collects garbage and empties the cache each time: a sweep captures a thousand.
        with torch.cuda.stream(torch.cuda.Stream()):
            call()
            torch.cuda.synchronize()
            graph.capture_begin()
            try:
                call()
            finally:
                graph.capture_end()
    except RuntimeError:
        torch.cuda.synchronize()
        return []
    graph.replay()
    return sorted(_queued(graph.replay) for _ in range(repeats))


def _queued(replay: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)
    start.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _eager(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
