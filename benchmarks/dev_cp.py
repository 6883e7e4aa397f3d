"""Where the time of a cut call goes: graphs that hold its first kernels only, on a Hopper GPU.

PYTHONPATH=. python benchmarks/dev_cp.py

Medians of 12 replays of summary, summary and chain, and all of `fwd_cp`, one sequence; nothing is checked here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

import flash_kda
from flash_kda import samples
from flash_kda.sm90 import small, stages

CASES = [(16, 4096), (16, 16384), (16, 65536), (4, 65536), (8, 65536)]  # heads, tokens
GATES = [("random", -5.0), ("random", -0.5), ("real", -5.0), ("none", -5.0)]


def graph_ms(call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def nothing(*_arguments: object, **_options: object) -> None:
    """In place of a kernel."""


def main() -> None:
    chain, forward = small.chain, stages.forward
    for heads, tokens in CASES:
        for gates, lower_bound in GATES:
            sample = samples.make(gates, tokens, heads, lower_bound=lower_bound, device="cuda")
            arguments = sample.arguments() | {"out": torch.empty_like(sample.q)}

            def call(arguments: dict = arguments) -> object:
                return flash_kda.fwd_cp(**arguments, impl="sm90")

            whole = graph_ms(call)
            stages.forward = nothing
            both = graph_ms(call)
            small.chain = nothing
            summary = graph_ms(call)
            small.chain, stages.forward = chain, forward
            case = f"{gates} {lower_bound:g}, {heads} heads, {tokens} tokens"
            print(f"{case}: summary {summary:.4f}, and chain {both:.4f}, all {whole:.4f} ms")


if __name__ == "__main__":
    main()
