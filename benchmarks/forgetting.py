"""Prints how many chunks of 16 tokens each gate remembers: measured, bounded from the gates, and guessed by the mean rule.

    python benchmarks/forgetting.py          # a few minutes on two cores

For each gate a range over heads of: trailing chunks that the backward scan replays until ``||M||_F`` is at most 2^-16, 2^-20
and 2^-24; chunks of the sound a-priori bound for 2^-16 (``get_warmup_chunks``); chunks by the rules of the published recipe
(docs/recipe.md), its scan of the mean gate with the cross-head maximum, and whether its fast path says 1 instead.
"""

from __future__ import annotations

import argparse
import math

import torch
from gates import Inputs, make

import flash_kda
from flash_kda.constants import CHUNK

GATES = [("random", -5.0), ("random", -1.0), ("random", -0.5), ("slow_eighth", -5.0), ("log_uniform", -5.0), ("real", -5.0)]


def span(chunks: torch.Tensor, reached: torch.Tensor, total: int) -> str:
    """Smallest and largest over heads; heads that never get there count as ``> total``."""
    low, high = (str(int(f(chunks))) for f in (torch.min, torch.max))
    if not bool(reached.any()):
        return f"> {total}"
    high = high if bool(reached.all()) else f"> {total}"
    return low if low == high else f"{low}-{high}"


def mean_rule(x: Inputs) -> int | None:
    """Chunks by the scan of the published recipe: the mean over channels at one token in 16, the slowest head, 2^-10."""
    slope, bias = x["A_log"].exp(), x["dt_bias"].mean(-1)
    last_of_chunk = x["g"][0].float().mean(-1).flip(0)[::CHUNK]
    log2_decay = x["lower_bound"] * math.log2(math.e) * torch.sigmoid(slope * (last_of_chunk + bias)) * CHUNK
    met = (log2_decay.cumsum(0).amax(-1) < -10).nonzero()
    return int(met[0]) + 1 if len(met) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256 * CHUNK)
    parser.add_argument("--heads", type=int, default=4)
    args = parser.parse_args()
    total = args.tokens // CHUNK
    print("| gates | lower_bound | 2^-16 | 2^-20 | 2^-24 | a-priori bound, 2^-16 | mean rule | fast path |")
    print("|---|---|---|---|---|---|---|---|")
    for name, lower_bound in GATES:
        x = make(name, args.tokens, args.heads, lower_bound)
        gate = (x["A_log"], x["dt_bias"], lower_bound, None)
        cells = []
        for eps in (2.0**-16, 2.0**-20, 2.0**-24):
            _, info = flash_kda.state_only(x["k"], x["v"], x["g"], x["beta"], *gate, eps=eps, return_info=True)
            cells.append(span(info.chunks, ~info.fallback | (info.norm <= eps), total))
        chunks, fallback = flash_kda.get_warmup_chunks(x["g"], *gate, eps=2.0**-16)
        cells.append(span(chunks, ~fallback, total))
        guess = mean_rule(x)
        cells.append(f"> {total}" if guess is None else str(guess))
        cells.append("1" if lower_bound * math.log2(math.e) * 0.25 * CHUNK < -10 else "no")
        print(f"| {name} | {lower_bound:g} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
