"""Prints how shards on several ranks differ from one process, by where they are cut: the table of docs/distributed.md.

    torchrun --nproc-per-node 8 benchmarks/shards.py      # two minutes on two cores

One sequence over 2, 4 and 8 ranks of gloo, in segments of 256 tokens. Relative L2 differences from ``fwd_cp`` in one process,
and errors of both against the fp64 token recurrence: the largest over gates and heads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import flash_kda
from flash_kda import distributed, samples
from flash_kda.reference import recurrent_kda

GATES = [("random", -5.0), ("random", -1.0), ("log_uniform", -5.0), ("none", -5.0), ("real", -5.0)]
TOKENS, HEADS, SEGMENT = 2048, 2, 256
STATE_SEED = 1


@dataclass(frozen=True)
class Cut:
    """Where shards begin: at multiples of ``multiple``, ``shift`` tokens after equal parts."""

    name: str
    multiple: int
    shift: int

    def shards(self, ranks: int) -> list[int]:
        at = [r * TOKENS // ranks // self.multiple * self.multiple + self.shift for r in range(1, ranks)]
        return [b - a for a, b in itertools.pairwise([0, *at, TOKENS])]


CUTS = [
    Cut("multiples of 256, the segment length", 256, 0),
    Cut("multiples of 32", 32, 96),
    Cut("multiples of 16", 16, 48),
    Cut("anywhere", 1, 37),
]
RANKS = (2, 4, 8)


def largest(x: Tensor, want: Tensor, head_axis: int) -> float:
    """Relative L2 of the worst head."""
    axes = [axis for axis in range(x.dim()) if axis != head_axis]
    error = (x.double() - want.double()).square().sum(axes) / want.double().square().sum(axes)
    return float(error.sqrt().max())


def over_ranks(sample: samples.Sample, cut: Cut, group: dist.ProcessGroup, exchange: str) -> tuple[Tensor, Tensor] | None:
    """The result, on the first rank."""
    ranks = dist.get_world_size(group)
    context = distributed.ContextParallel(
        group, [0, TOKENS], HEADS, shard_lens=cut.shards(ranks), final_state="all", exchange=exchange
    )
    start, end = context.layout.shards[context.rank : context.rank + 2]
    arguments = sample.arguments()
    del arguments["cu_seqlens"]
    arguments |= {name: arguments[name][:, start:end] for name in samples.TOKEN_TENSORS}
    arguments["initial_state"] = sample.initial_state if context.starts else None
    out, final = distributed.fwd_cp(**arguments, context=context, output_final_state=True, segment_len=SEGMENT)
    everyone: list[Tensor | None] | None = [None] * ranks if context.rank == 0 else None
    dist.gather_object(out, everyone, group=group)
    return None if everyone is None else (torch.cat([x for x in everyone if x is not None], 1), final)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}
    rows: dict[tuple[str, int], list[float]] = {}
    one = [0.0, 0.0]
    for name, lower_bound in GATES:
        sample = samples.make(name, TOKENS, HEADS, lower_bound=lower_bound)
        state = torch.randn(1, HEADS, 128, 128, generator=torch.Generator().manual_seed(STATE_SEED))
        arguments = sample.arguments() | {"initial_state": state}
        sample = samples.Sample(**{k: v for k, v in arguments.items() if k != "out"})
        if rank == 0:
            out, final = flash_kda.fwd_cp(**arguments, output_final_state=True, segment_len=SEGMENT)[:2]
            del arguments["out"]
            exact, exact_final = recurrent_kda(**arguments, dtype=torch.float64)
            one = [max(one[0], largest(out, exact, 2)), max(one[1], largest(final, exact_final, 1))]
        for cut, ranks, exchange in itertools.product(CUTS, RANKS, ("all_gather", "scan")):
            if rank >= ranks:
                continue
            made = over_ranks(sample, cut, groups[ranks], exchange)
            if made is None:
                continue
            found = [largest(made[0], out, 2), largest(made[1], final, 1)]
            found += [largest(made[0], exact, 2), largest(made[1], exact_final, 1)]
            kept = rows.setdefault((cut.name, ranks), [0.0] * 4)
            kept[:] = map(max, kept, found)
        dist.barrier()
    if rank == 0:
        print("| shards begin at | ranks | out, difference | state, difference | out, error | state, error |")
        print("|---|---|---|---|---|---|")
        print(f"| one process | 1 | | | {one[0]:.2e} | {one[1]:.1e} |")
        for (name, ranks), (*differences, out_error, state_error) in rows.items():
            shown = ["0" if x == 0 else f"{x:.1e}" for x in differences]
            print(f"| {name} | {ranks} | {' | '.join(shown)} | {out_error:.2e} | {state_error:.1e} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
