"""Prints what is not bitwise: calls split in pieces, ``fwd_cp`` against ``fwd``, many segments, and very loud history.

    python benchmarks/splits.py              # about two minutes on two cores

Relative L2 differences from the unsplit call, the largest over three gates and the splits named; then relative L2 errors
against the fp64 token recurrence, by number of segments and where history is much louder than what follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flash_kda
from flash_kda import samples
from flash_kda.constants import CHUNK
from flash_kda.reference import recurrent_kda

GATES = [("random", -1.0), ("log_uniform", -5.0), ("real", -5.0)]
TOKENS, HEADS, SEGMENT = 1500, 3, 256
ROWS: list[tuple[str, Sequence[Sequence[int]], torch.dtype, int | None]] = [
    ("fwd, two pieces at multiples of 32, fp32 state", [[32], [736], [1472]], torch.float32, None),
    ("fwd, two pieces elsewhere, fp32 state", [[1], [333], [700], [1303]], torch.float32, None),
    ("fwd, pieces of 37 tokens, fp32 state", [range(37, TOKENS, 37)], torch.float32, None),
    ("fwd, pieces of 256 tokens, bf16 state", [range(256, TOKENS, 256)], torch.bfloat16, None),
    ("fwd, pieces of 32 tokens, bf16 state", [range(32, TOKENS, 32)], torch.bfloat16, None),
    ("fwd_cp in segments of 256, two pieces at 96, 512 or 544", [[96], [512], [544]], torch.float32, SEGMENT),
]


def call(
    x: samples.Sample, span: slice, state: Tensor | None, dtype: torch.dtype, segment_len: int | None
) -> tuple[Tensor, Tensor]:
    part = replace(x, **{name: getattr(x, name)[:, span] for name in samples.TOKEN_TENSORS}, initial_state=state)
    final = torch.empty(1, x.heads, 128, 128, dtype=dtype)
    if segment_len is None:
        return flash_kda.fwd(**part.arguments(), final_state=final)[0], final
    return flash_kda.fwd_cp(**part.arguments(), final_state=final, segment_len=segment_len)[0], final


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact.double()).norm() / exact.double().norm())


def split_row(cuts: Sequence[Sequence[int]], dtype: torch.dtype, segment_len: int | None) -> tuple[float, float]:
    worst = (0.0, 0.0)
    for name, lower_bound in GATES:
        x = samples.make(name, TOKENS, HEADS, lower_bound=lower_bound)
        out, final = call(x, slice(None), None, torch.float32, segment_len)
        for cut in cuts:
            state, pieces = None, []
            for start, end in zip([0, *cut], [*cut, TOKENS], strict=True):
                piece, state = call(x, slice(start, end), state, dtype, segment_len)
                pieces.append(piece)
            assert state is not None
            worst = (max(worst[0], relative(torch.cat(pieces, 1), out)), max(worst[1], relative(state, final)))
    return worst


def segment_rows() -> Iterator[str]:
    """Errors of one sequence cut into more and more segments: they do not add up."""
    tokens = 4096
    arguments = samples.make("random", tokens, 2, lower_bound=-1.0).arguments()
    exact, exact_state = oracle(arguments)
    for count in (1, 2, 4, 16):
        out, state = flash_kda.fwd_cp(**arguments, output_final_state=True, segment_len=tokens // count)
        assert state is not None
        yield f"| {count} | {relative(out, exact):.2e} | {relative(state, exact_state):.1e} |"


def oracle(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return recurrent_kda(**{name: x for name, x in arguments.items() if name != "out"})


def loud_row(lower_bound: float) -> str:
    """v is 1e4 times larger up to where the first segment's scan stopped; errors of the 64 tokens after that segment."""
    tokens, segment = 1024, 512
    x = samples.make("random", tokens, 2, lower_bound=lower_bound)
    parameters = (x.A_log, x.dt_bias, lower_bound, torch.tensor([0, segment]))
    _, info = flash_kda.state_only(x.k, x.v, x.g, x.beta, *parameters, return_info=True)
    x.v[:, : segment - CHUNK * int(info.chunks.max())] *= 1e4
    after = slice(segment, segment + 64)
    arguments = x.arguments()
    exact = oracle(arguments)[0][:, after]
    serial = flash_kda.fwd(**arguments)[0][:, after]
    out, _, certificate = flash_kda.fwd_cp(**arguments, segment_len=segment, certificate=True)
    numbers = (relative(serial, exact), relative(out[:, after], exact), float(certificate.dropped.max()))
    return f"| random | {lower_bound:g} | " + " | ".join(f"{n:.2e}" for n in numbers) + " |"


def main() -> None:
    print("| split | outputs | final state |\n|---|---|---|")
    for label, cuts, dtype, segment_len in ROWS:
        out, state = split_row(cuts, dtype, segment_len)
        print(f"| {label} | {out:.1e} | {state:.1e} |", flush=True)
    pairs = []
    for name, lower_bound in GATES:
        x = samples.make(name, TOKENS, HEADS, lower_bound=lower_bound)
        serial, cut = (call(x, slice(None), None, torch.float32, length) for length in (None, SEGMENT))
        pairs.append([relative(a, b) for a, b in zip(cut, serial, strict=True)])
    out, state = (max(column) for column in zip(*pairs, strict=True))
    print(f"| fwd_cp in segments of 256, against fwd | {out:.1e} | {state:.1e} |")
    print("\n| segments | outputs | final state |\n|---|---|---|")
    for row in segment_rows():
        print(row, flush=True)
    print("\n| gates | lower_bound | out, fwd | out, fwd_cp | dropped |\n|---|---|---|---|---|")
    for lower_bound in (-5.0, -1.0, -0.5):
        print(loud_row(lower_bound), flush=True)


if __name__ == "__main__":
    main()
