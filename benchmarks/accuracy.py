"""Prints how far ``fwd`` and ``fwd_cp`` are from the fp64 token recurrence, on named gates and hard inputs.

    python benchmarks/accuracy.py            # the gates, about a minute
    python benchmarks/accuracy.py --hard     # the hard inputs, 65,536 tokens among them

Every number is a relative L2 error, the largest over heads. ``rounding`` is the error of the exact output rounded to bf16:
no bf16 output can be better. ``dropped`` is the certificate of ``fwd_cp``, the largest over segments and heads.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import flash_kda
from flash_kda import samples
from flash_kda.reference import recurrent_kda

GATES = [
    ("random", -5.0),
    ("random", -1.0),
    ("random", -0.5),
    ("random", -0.01),
    ("slow_eighth", -5.0),
    ("log_uniform", -5.0),
    ("none", -5.0),
    ("full", -5.0),
    ("real", -5.0),
]
HARD = [
    ("collinear", -5.0, 2048),
    ("rotating", -5.0, 2048),
    ("saturated", -5.0, 2048),
    ("random", -1e-6, 2048),
    ("slow_9999", -5.0, 1024),
    ("slow_9999", -5.0, 4096),
    ("slow_9999", -5.0, 16384),
    ("slow_9999", -5.0, 65536),
]


def error(x: Tensor, exact: Tensor, head_dim: int) -> float:
    dims = [d for d in range(x.dim()) if d != head_dim]
    difference = torch.linalg.vector_norm(x.double() - exact, dim=dims)
    return float((difference / torch.linalg.vector_norm(exact, dim=dims)).max())


def row(name: str, lower_bound: float, tokens: int, heads: int, segment_len: int) -> str:
    arguments = samples.make(name, tokens, heads, lower_bound=lower_bound).arguments()
    exact, exact_state = recurrent_kda(**{name: x for name, x in arguments.items() if name != "out"})
    out, state = flash_kda.fwd(**arguments, output_final_state=True)
    out_cp, state_cp, certificate = flash_kda.fwd_cp(
        **arguments, output_final_state=True, segment_len=segment_len, certificate=True
    )
    for x in (out, state, out_cp, state_cp):
        assert x.isfinite().all(), name
    numbers = [
        error(exact.bfloat16(), exact, 2),
        error(out, exact, 2),
        error(out_cp, exact, 2),
        error(state, exact_state, 1),
        error(state_cp, exact_state, 1),
        float(certificate.dropped.max()),
    ]
    return f"| {name} | {lower_bound:g} | {tokens:,} | " + " | ".join(f"{n:.1e}" for n in numbers) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hard", action="store_true", help="the hard inputs instead of the gates")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--segment-len", type=int, default=256)
    args = parser.parse_args()
    cases = HARD if args.hard else [(name, lower_bound, args.tokens) for name, lower_bound in GATES]
    print("| gates | lower_bound | T | rounding | out, fwd | out, fwd_cp | state, fwd | state, fwd_cp | dropped |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, lower_bound, tokens in cases:
        heads = 1 if tokens > 16384 else args.heads
        print(row(name, lower_bound, tokens, heads, args.segment_len), flush=True)


if __name__ == "__main__":
    main()
