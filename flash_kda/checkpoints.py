"""States on the way: a forward stage in rounds, each segment cut at its checkpoints.

Round r runs the r-th piece of every segment from the state that round r - 1 left, so a checkpoint is the final state of a
call that stops there. Any forward stage will do: pieces are segments to it. The table of a round lists them in reverse order,

    start of piece NS-1, its end, start of piece NS-2, its end, ...

so that what lies between two pieces ends before it begins, which a stage takes for an empty segment. On a GPU every line of
this file that computes is a kernel of its own: what can be, is done for all rounds at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .constants import CHUNK
from .host import readable
from .inputs import Inputs

Stage = Callable[..., Tensor | None]


@dataclass(frozen=True)
class Cuts:
    """Where segments are interrupted.

    Attributes:
        states: ``[R, HV, V, K]`` rows that are written.
        ends: ``[NS, C]`` int64, tokens from the segment's start to the end of its piece in each round, non-decreasing.
        rows: ``[NS, C]`` int64, the row of ``states`` that the state there is stored to; none if there is no such row.
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
    """Segments that are cut.

    Attributes:
        length: ``[NS]`` int64 tokens.
        max_len: no segment is longer; host bound.
        owner: ``[NS]`` int64 sequence, or None if segments are sequences.
        start: ``[NS]`` int64 tokens before it in its sequence, with ``owner``.
    """

    length: Tensor
    max_len: int
    owner: Tensor | None = None
    start: Tensor | None = None


def at_offsets(states: Tensor, offsets: Tensor, lengths: Tensor, segments: Segments) -> Cuts:
    """Checkpoints at chosen tokens of each sequence.

    Args:
        states: ``[N, C, HV, V, K]``, or ``[N, HV, V, K]`` with offsets ``[N]``.
        offsets: ``[N, C]`` integers, tokens from the sequence's start; 0 or less: none. What is no multiple of 16, or lies
            beyond the sequence, is refused: its row becomes NaN.
        lengths: ``[N]`` int64 tokens of the sequences.
        segments: of these sequences.
    """
    flat = states if states.dim() == 4 else states.flatten(0, 1)
    offsets = offsets.long() if offsets.dim() == 2 else offsets.long()[:, None]
    sequences, columns = offsets.shape
    row = torch.arange(sequences * columns, device=offsets.device).view(sequences, columns)
    good = (offsets % CHUNK == 0) & (offsets <= lengths[:, None])
    here = (offsets > 0) & good
    refused = (offsets > 0) & ~good
    ends = offsets
    if segments.owner is not None and segments.start is not None:
        start = segments.start[:, None]
        row, ends = row[segments.owner], offsets[segments.owner] - start
        here = here[segments.owner] & (ends > 0) & (ends <= segments.length[:, None])
        refused = refused[segments.owner] & (start == 0)
    rows = torch.where(here | refused, row, -1)
    ends = torch.where(here, ends, 0)
    if columns > 1:
        ends, order = ends.sort(dim=1, stable=True)
        rows, refused = rows.gather(1, order), refused.gather(1, order)
    return Cuts(flat, ends, rows, refused, segments.max_len)


def at_every(states: Tensor, every: int, first_token: Tensor, segments: Segments) -> Cuts:
    """Checkpoints at every multiple of ``every`` tokens of each sequence, row ``first_token // every + j - 1`` for the j-th.

    These rows lie in order and apart, whatever the lengths are, since a sequence of t tokens has ``t // every`` of them.

    Args:
        states: ``[T_total // every, HV, V, K]``.
        every: tokens.
        first_token: ``[N]`` int64, tokens before each sequence.
        segments: of these sequences.
    """
    columns = -(-segments.max_len // every)
    start = torch.zeros_like(segments.length) if segments.start is None else segments.start
    first = first_token // every if segments.owner is None else (first_token // every)[segments.owner]
    j = (start // every + 1)[:, None] + torch.arange(columns, device=first_token.device)
    ends = j * every - start[:, None]
    here = ends <= segments.length[:, None]
    rows = torch.where(here, first[:, None] + j - 1, -1)
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
    start = cu_seqlens[:-1, None]
    bounds = torch.cat([start, start + cuts.ends, cu_seqlens[1:, None]], 1)
    tables = bounds.flip(0).unfold(1, 2, 1).transpose(0, 1).reshape(rounds + 1, 2 * count).to(cu_seqlens.dtype)
    own = _spread(torch.arange(count, device=out.device))
    store = _Store(cuts, out.device)
    states, index, norms = initial_state, own if in_index is None else _spread(in_index), None
    for r in range(rounds + 1):
        last = r == rounds
        if not last and store.nothing_to_do(r):
            continue
        target, target_index = (final_state, out_index) if last else (store.carried, None)
        norm = stage(
            inputs,
            tables[r],
            out,
            max_len=cuts.max_len,
            initial_state=states,
            in_index=index,
            final_state=target,
            out_index=own if target_index is None else _spread(target_index),
            **({} if probe is None else {"probe": _probe(probe, bounds, r)}),
        )
        if norm is not None:
            norms = norm[::2].flip(0) if norms is None else norms + norm[::2].flip(0)
        if not last:
            states, index = store.carried, own
            store.write(r)
    return norms


def _spread(index: Tensor) -> Tensor:
    """``[2 NS - 1]`` int32 of ``[NS]``: rows of the pieces in the order of the table, none for what lies between."""
    return torch.stack([index.flip(0), torch.full_like(index, -1)], 1).flatten()[:-1].to(torch.int32)


def _probe(probe: Tensor, bounds: Tensor, r: int) -> Tensor:
    """The chunk to probe, counted from the piece's start; -1 if it lies in another piece."""
    begin, end = (bounds[:, r + i, None] - bounds[:, :1] for i in range(2))
    chunk = probe - begin // CHUNK
    chunk = torch.where((chunk >= 0) & (CHUNK * chunk < end - begin), chunk, -1)
    return torch.stack([chunk.flip(0), torch.full_like(chunk, -1)], 1).flatten(0, 1)[:-1]


class _Store:
    """Copies the states that a round left to the rows that were asked for, without the host knowing which.

    Attributes:
        carried: ``[NS, HV, V, K]`` fp32, the state at the end of every segment's latest piece.
    """

    def __init__(self, cuts: Cuts, device: torch.device) -> None:
        self.cuts = cuts
        count = cuts.ends.shape[0]
        buffer = torch.empty(count + 1, *cuts.states.shape[1:], dtype=torch.float32, device=device)
        self.buffer, self.carried = buffer, buffer[:-1]
        source = torch.arange(count, device=device)[:, None].expand_as(cuts.rows)
        if cuts.refused is not None:
            buffer[-1].fill_(torch.nan)
            source = torch.where(cuts.refused, count, source)
        self.there = (cuts.rows >= 0) & (cuts.rows < cuts.states.shape[0])
        if cuts.rows.numel() == 0:
            return
        # A segment that stores nothing repeats the write of one that does; where none does, row 0 is written back.
        one = self.there.to(torch.uint8).argmax(0, keepdim=True)
        self.any_there = self.there.gather(0, one)[0]
        self.source = torch.where(self.there, source, source.gather(0, one)).t().contiguous()
        self.target = torch.where(self.there, cuts.rows, cuts.rows.gather(0, one)).t().clamp(min=0).contiguous()

    def nothing_to_do(self, r: int) -> bool:
        """The host may look, and sees that no segment moves or stores in this round."""
        if not readable(self.there):
            return False
        ends = self.cuts.ends
        moves = ends[:, r] > (ends[:, r - 1] if r else 0)
        return not bool((moves | self.there[:, r]).any())

    def write(self, r: int) -> None:
        states = self.cuts.states
        if states.numel():
            now = self.buffer[self.source[r]].to(states.dtype)
            before = states[self.target[r]]
            states.index_copy_(0, self.target[r], torch.where(self.any_there[r], now, before))
