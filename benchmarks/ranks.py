"""Suite ``ranks``: one sequence over the GPUs of a host against one of them, and what of it is the exchange.

    torchrun --nproc-per-node 2 benchmarks/ranks.py --commit HASH --output benchmarks/results/h200.jsonl
    torchrun --nproc-per-node 2 benchmarks/ranks.py --commit HASH --device cpu --heads 1 --tokens 512    # that it runs

Rank 0 runs ``fwd_cp`` on all tokens by itself, then all ranks run their shards; what they give next to their boundaries is
compared with it, and its beginning with fp64, before anything is timed. Times are of ordinary calls that all ranks begin
together after a barrier, the slowest rank of each; medians. ``exposed_us`` is what the call takes longer than one in which
every rank has its state already and nothing is sent.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flash_kda
from flash_kda import distributed, samples
from flash_kda.constants import STEP
from flash_kda.distributed import exchange as ways
from flash_kda.reference import Inputs, forward

LIMIT = 6e-3
"""No time is reported beyond this error or difference."""
CHECKED = 2048
"""Tokens that are compared at the beginning of each shard; of the first, two heads with fp64."""


def arguments_of(sample: samples.Sample, tokens: slice = slice(None)) -> dict[str, Any]:
    """Of ``fwd_cp`` on some of the tokens, with a poisoned ``out``."""
    arguments = sample.arguments() | {name: getattr(sample, name)[:, tokens] for name in samples.TOKEN_TENSORS}
    del arguments["cu_seqlens"], arguments["initial_state"]
    return arguments | {"out": torch.full_like(arguments["v"], torch.nan)}


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, from an idle device to an idle device."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end)
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e3


def slowest(call: Callable[[], object], context: distributed.ContextParallel, repeats: int) -> float:
    """Median over the repeats of the slowest rank's time, each begun together."""
    group, device = context.ranks.group, context.device
    times = []
    for _ in range(repeats + 2):
        dist.barrier(group, device_ids=[device.index] if device.type == "cuda" else None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(timed(call, device))
    every: list[Any] = context.ranks.all_gather_objects(times[2:], "the collection of times")
    return statistics.median(map(max, zip(*every, strict=True)))


@contextmanager
def nothing_sent(context: distributed.ContextParallel) -> Iterator[None]:
    """Every rank is given a state at once, of the right size."""

    class Given:
        def start(self, mine: object) -> None:
            pass

        def finish(self) -> Tensor | None:
            return None if context.given is None else state

    state = torch.zeros(context.heads, 128, 128, device=context.device)
    right = ways.make
    ways.make = lambda *_: Given()
    try:
        yield
    finally:
        ways.make = right


def error_of(sample: samples.Sample, out: Tensor) -> float:
    """Relative L2 of the first tokens of two heads against the reference in fp64."""
    cut = slice(0, min(CHECKED, out.shape[1]))
    tensors = (getattr(sample, name)[0, cut, :2].double() for name in samples.TOKEN_TENSORS)
    inputs = Inputs(*tensors, sample.A_log[:2], sample.dt_bias[:2], sample.lower_bound, sample.scale)
    want = torch.zeros_like(inputs.v)
    forward(inputs, torch.tensor([0, want.shape[0]], device=out.device), want, max_len=want.shape[0])
    return float((out[0, cut, :2].double() - want).norm() / want.norm())


def run(
    group: dist.ProcessGroup | None, device: torch.device, gates: str, heads: int, tokens: int, exchange: str, repeats: int
) -> dict[str, Any] | None:
    """What was measured, on rank 0.

    Raises:
        SystemExit: a result is wrong; on every rank.
    """
    sample = samples.make(gates, tokens, heads, device=device)
    ranks = dist.get_world_size(group)
    shard_lens = distributed.even_shards(tokens, ranks, STEP)
    context = distributed.ContextParallel(group, [0, tokens], heads, shard_lens=shard_lens, exchange=exchange, device=device)
    start, end = context.layout.shards[context.rank : context.rank + 2]
    shard = arguments_of(sample, slice(start, end))
    whole = arguments_of(sample) if context.rank == 0 else None

    def over_ranks() -> Tensor:
        return distributed.fwd_cp(**shard, context=context)[0]

    def alone() -> Tensor:
        return flash_kda.fwd_cp(**whole)[0] if whole is not None else shard["out"]

    # Compared where each shard begins: that is where a wrong state shows.
    got = over_ranks()[:, :CHECKED].float().cpu()
    context.check()
    every: list[Any] = context.ranks.all_gather_objects(got, "the collection of results")
    error, difference = 0.0, 0.0
    if whole is not None:
        want = alone()
        error = error_of(sample, want)
        starts = context.layout.shards
        pairs = [(x, want[:, at : at + x.shape[1]].float().cpu()) for x, at in zip(every, starts, strict=False) if x.numel()]
        difference = max(float((x - y).norm() / y.norm()) for x, y in pairs)
    (error, difference), *_ = context.ranks.all_gather_objects((error, difference), "the verdict")
    if not max(error, difference) < LIMIT:
        raise SystemExit(f"error {error} and difference {difference} must be below {LIMIT}; nothing is timed")

    one_ms = slowest(alone, context, repeats)
    all_ms = slowest(over_ranks, context, repeats)
    with nothing_sent(context):
        local_ms = slowest(over_ranks, context, repeats)
    if context.rank:
        return None
    return {
        "suite": "ranks",
        "impl": f"flash_kda.distributed.fwd_cp, {ranks} ranks",
        "gates": gates,
        "lower_bound": sample.lower_bound,
        "heads": heads,
        "tokens": tokens,
        "seq_lens": [tokens],
        "segments": None,
        "graph_ms": None,
        "graph_ms_p10": None,
        "graph_ms_p90": None,
        "eager_ms": all_ms,
        "floor_ms": None,
        "rel_l2_out": error,
        "rel_l2_state": None,
        "ranks": ranks,
        "exchange": context.exchange,
        "one_rank_ms": one_ms,
        "ratio": all_ms / one_ms,
        "exposed_us": (all_ms - local_ms) * 1e3,
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="of the code that runs; asked of git if not given")
    parser.add_argument("--output", type=Path, help="JSON lines to append to")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gates", nargs="*", choices=samples.GATES, default=["real", "none"])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", nargs="*", type=int, default=[262_144, 1_048_576])
    parser.add_argument("--exchange", nargs="*", choices=ways.EXCHANGES, default=["auto"])
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    common: dict[str, object] = {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "triton": "3.6.0 (build)",
        "commit": options.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["torchrun", "--nproc-per-node", str(dist.get_world_size()), *sys.argv]),
    }
    for tokens in options.tokens:
        for gates in options.gates:
            for exchange in options.exchange:
                row = run(None, device, gates, options.heads, tokens, exchange, options.repeats)
                if row is None:
                    continue
                print(
                    f"{row['ranks']} ranks, {gates}, {tokens} tokens, {row['exchange']}: {row['eager_ms']:.3f} ms, "
                    f"{row['ratio']:.3f} of {row['one_rank_ms']:.3f} ms on one, exchange exposed {row['exposed_us']:.0f} us, "
                    f"error {row['rel_l2_out']:.1e}, difference {row['difference']:.1e}",
                    flush=True,
                )
                if options.output is not None:
                    with options.output.open("a") as file:
                        file.write(json.dumps(row | common) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
