"""Prints what the one-chunk fast path of the published recipe costs on the packaged activations of a KDA layer.

    python benchmarks/recipe.py

Every segment hands on ``ht`` of its last chunk alone and no transition, as the recipe does for lower_bound < -1.73. Compared
with the serial answer: relative L2 errors of the outputs by head, over all tokens and over the first 64 of each segment.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import flash_kda
from flash_kda import samples
from flash_kda.constants import CHUNK


def relative(x: Tensor, exact: Tensor) -> str:
    """``[T, H, V]``: by head, smallest and largest."""
    x, exact = x.double(), exact.double()
    errors = torch.linalg.vector_norm(x - exact, dim=(0, 2)) / torch.linalg.vector_norm(exact, dim=(0, 2))
    return f"{100 * errors.min():.2f}-{100 * errors.max():.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--segment-len", type=int, nargs="+", default=[1024, 512, 256])
    args = parser.parse_args()
    x = samples.make("real", args.tokens, 4).arguments()
    summary_inputs = [x[name] for name in ("k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound")]
    serial, _ = flash_kda.fwd(**x)

    for chunks in (1, 2, 10):
        ends = torch.arange(0, args.tokens + 1, 256)
        count = torch.full((len(ends) - 1,), chunks)
        _, info = flash_kda.state_only(*summary_inputs, ends, count, return_info=True)
        norm = info.norm.square().mean(0).sqrt()
        print(f"||M||_F over the last {chunks} of a segment's chunks, by head: " + ", ".join(f"{n:.2f}" for n in norm))

    print("\n| segment | replayed | all tokens | first 64 of a segment | fwd_cp, all tokens |")
    print("|---|---|---|---|---|")
    for segment_len in args.segment_len:
        plan = flash_kda.plan_segments(torch.tensor([0, args.tokens]), args.tokens, 4, segment_len=segment_len)
        exact, _ = flash_kda.fwd_cp(**x, segment_len=segment_len)
        for chunks in (1, 10):
            count = torch.full((plan.capacity,), chunks)
            ht = flash_kda.state_only(*summary_inputs, plan.cu_seqlens, count)
            h0 = flash_kda.correct_initial_states(None, ht, None, None, plan.seq_map)
            out, _ = flash_kda.fwd(**{**x, "initial_state": h0, "cu_seqlens": plan.cu_seqlens})
            starts = torch.arange(args.tokens) % segment_len < 4 * CHUNK
            starts[: 4 * CHUNK] = False
            cells = [relative(out[0], serial[0]), relative(out[0, starts], serial[0, starts]), relative(exact[0], serial[0])]
            print(f"| {segment_len:,} | {chunks} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
