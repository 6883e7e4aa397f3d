"""States on the way: a forward stage in rounds, each segment cut at its checkpoints.

Round r runs the r-th piece of every segment from the state that round r - 1 left, so a checkpoint is the final state of a
call that stops there. Any forward stage will do: pieces are segments to it. The table of a round lists them in reverse order,

    start of piece NS-1, its end, start of piece NS-2, its end, ...

so that what lies between two pieces ends before it begins, which a stage takes for an empty segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .constants import CHUNK
from .host import readable
from .inputs import Inputs
from .reference.stages import scatter_rows

Stage = Callable[..., Tensor | None]


@dataclass(frozen=True)
class Cuts:
    """Where segments are interrupted.

    Attributes:
        states: ``[R, HV, V, K]`` rows that are written.
        ends: ``[NS, C]`` int64, tokens from the segment's start to the end of its piece in each round, non-decreasing.
        rows: ``[NS, C]`` int64, the row of ``states`` that the state there is stored to; negative for none.
        refused: ``[NS, C]`` bool, where NaN is stored instead, or None if nothing can be.
        max_len: no piece of a round is longer (tokens); host bound.
    """

    states: Tensor
    ends: Tensor
    rows: Tensor
    refused: Tensor | None
    max_len: int


@dataclass(frozen=True)
class Segments:
    """Segments that are cut: ``[NS]`` int64 each.

    Attributes:
        owner: sequence.
        start: tokens before it in its sequence.
        length: tokens.
        max_len: no segment is longer; host bound.
    """

    owner: Tensor
    start: Tensor
    length: Tensor
    max_len: int


def at_offsets(states: Tensor, offsets: Tensor, lengths: Tensor, segments: Segments) -> Cuts:
    """Checkpoints at chosen tokens of each sequence.

    Args:
        states: ``[N, C, HV, V, K]``, or ``[N, HV, V, K]`` with offsets ``[N]``.
        offsets: ``[N, C]`` integers, tokens from the sequence's start; 0 or less: none. What is no multiple of 16, or lies
            beyond the sequence, is refused: its row becomes NaN.
        lengths: ``[N]`` int64 tokens of the sequences.
        segments: of these sequences.
    """
    offsets = offsets.long() if offsets.dim() == 2 else offsets.long()[:, None]
    sequences, columns = offsets.shape
    rows = torch.arange(sequences * columns, device=offsets.device).view(sequences, columns)
    asked = offsets > 0
    good = asked & (offsets % CHUNK == 0) & (offsets <= lengths[:, None])
    ends = offsets[segments.owner] - segments.start[:, None]
    here = good[segments.owner] & (ends > 0) & (ends <= segments.length[:, None])
    refused = (asked & ~good)[segments.owner] & (segments.start == 0)[:, None]
    ends, order = torch.where(here, ends, 0).sort(dim=1, stable=True)
    rows = torch.where(here | refused, rows[segments.owner], -1)
    flat = states if states.dim() == 4 else states.flatten(0, 1)
    return Cuts(flat, ends, rows.gather(1, order), refused.gather(1, order), segments.max_len)


def at_every(states: Tensor, every: int, first_token: Tensor, segments: Segments) -> Cuts:
    """Checkpoints at every multiple of ``every`` tokens of each sequence, row ``first_token // every + j - 1`` for the j-th.

    These rows lie in order and apart, whatever the lengths are, since a sequence of t tokens has ``t // every`` of them.

    Args:
        states: ``[T_total // every, HV, V, K]``.
        every: tokens.
        first_token: ``[N]`` int64, tokens before each sequence.
        segments: of these sequences.
    """
    columns = segments.max_len // every + bool(segments.max_len % every)
    j = (segments.start // every + 1)[:, None] + torch.arange(columns, device=first_token.device)
    ends = j * every - segments.start[:, None]
    here = ends <= segments.length[:, None]
    rows = torch.where(here, (first_token // every)[segments.owner][:, None] + j - 1, -1)
    ends = torch.where(here, ends, 0).cummax(1).values
    return Cuts(states, ends, rows, None, min(every, segments.max_len))


def forward(
    stage: Stage,
    cuts: Cuts,
    inputs: Inputs,
    cu_seqlens: Tensor,
    out: Tensor,
    *,
    initial_state: Tensor | None = None,
    in_index: Tensor | None = None,
    final_state: Tensor | None = None,
    out_index: Tensor | None = None,
    probe: Tensor | None = None,
) -> Tensor | None:
    """What ``stage`` computes of these segments, and their checkpoints. Arguments as in reference/stages.py."""
    count, rounds = cuts.ends.shape
    if count == 0:
        return stage(inputs, cu_seqlens, out, max_len=cuts.max_len)
    device = out.device
    offsets = cu_seqlens.long()
    start, length = offsets[:-1], offsets.diff()
    carried = torch.empty(count, *cuts.states.shape[1:], dtype=torch.float32, device=device)
    own = torch.arange(count, device=device)
    done = torch.zeros_like(length)
    state, index, norms = initial_state, own if in_index is None else in_index.long(), None
    for r in range(rounds + 1):
        last = r == rounds
        end = length if last else cuts.ends[:, r]
        target, target_index = (final_state, out_index) if last else (carried, None)
        if not last and readable(end) and not bool(((end > done) | (cuts.rows[:, r] >= 0)).any()):
            continue
        norm = stage(
            inputs,
            _table(start + done, start + end).to(cu_seqlens.dtype),
            out,
            max_len=cuts.max_len,
            initial_state=state,
            in_index=_spread(index),
            final_state=target,
            out_index=_spread(own if target_index is None else target_index.long()),
            **({} if probe is None else {"probe": _probe(probe, done, end)}),
        )
        if norm is not None:
            norms = norm.flip(0)[::2] if norms is None else norms + norm.flip(0)[::2]
        if not last:
            state, index, done = carried, own, end
            _store(cuts, r, carried)
    return norms


def _table(start: Tensor, end: Tensor) -> Tensor:
    """``[2 NS]`` offsets of the pieces, in reverse order; the segments between them are empty."""
    return torch.stack([start.flip(0), end.flip(0)], 1).flatten()


def _spread(index: Tensor) -> Tensor:
    """``[2 NS - 1]`` int32 of ``[NS]``: rows of the pieces in the order of the table, none for what lies between."""
    spread = torch.stack([index.flip(0), torch.full_like(index, -1)], 1).flatten()[:-1]
    return spread.to(torch.int32)


def _probe(probe: Tensor, done: Tensor, end: Tensor) -> Tensor:
    """The chunk to probe, counted from the piece's start; -1 if it lies in another piece."""
    chunk = probe - (done // CHUNK)[:, None]
    chunk = torch.where((chunk >= 0) & (CHUNK * chunk < (end - done)[:, None]), chunk, -1)
    return torch.stack([chunk.flip(0), torch.full_like(chunk, -1)], 1).flatten(0, 1)[:-1]


def _store(cuts: Cuts, r: int, carried: Tensor) -> None:
    if cuts.states.numel() == 0 or carried.numel() == 0:
        return
    values = carried.to(cuts.states.dtype)
    if cuts.refused is not None:
        values = torch.where(cuts.refused[:, r, None, None, None], torch.nan, values)
    scatter_rows(cuts.states, cuts.rows[:, r], values)
