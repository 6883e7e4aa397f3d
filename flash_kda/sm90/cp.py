"""``fwd_cp`` on Hopper: summary, chain and forward of cut sequences, three launches on one stream.

    state_summary   ht, mt of every piece that has a successor, by a backward scan that stops where the past cannot matter
    chain           in place, ht becomes the state at the end of the piece
    forward         every piece from the state at the end of the one before

Where the host does not know the lengths and not every batch would gain, a fourth, small launch decides first whether to cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..constants import HEAD_DIM
from ..inputs import Inputs
from . import small, stages
from .kernels.flags import CHAINED
from .plan import Cut

CUTS_KEPT = 64
"""Cuts that are remembered for each kind of call: lengths that the host knows may ask for many."""


class Scratch(NamedTuple):
    """Memory of one call.

    Attributes:
        work: fp32, not initialised.
        zeros: int32 zeros, or None.
    """

    work: Tensor
    zeros: Tensor | None

    def addresses(self) -> tuple[int, int]:
        """Where it is."""
        return self.work.data_ptr(), 0 if self.zeros is None else self.zeros.data_ptr()


class Layout(NamedTuple):
    """How a cut call runs, apart from its tensors: where sequences are cut, and the scratch memory that this takes.

    Attributes:
        cut: where.
        heads: value heads.
        in_place: ``initial_state`` and ``final_state`` share memory.
        certify: also measure what the scans drop; slower.
    """

    cut: Cut
    heads: int
    in_place: bool
    certify: bool

    @property
    def anew(self) -> int:
        """Chains that begin anew. A certificate counts what the scans drop, and then that must be all."""
        return 0 if self.certify or self.cut.num_slots <= CHAINED else -(-self.cut.num_slots // CHAINED)

    def allocate(self, device: torch.device) -> Scratch:
        """Two states a slot and head, one more for every eighth slot, and a few bytes."""
        rows = self.cut.num_slots * self.heads
        state = self.heads * HEAD_DIM * HEAD_DIM
        work = torch.empty((2 * self.cut.num_slots + self.anew) * state + 3 * rows + 1, dtype=torch.float32, device=device)
        zeros = rows * (self.in_place + self.certify)
        return Scratch(work, torch.zeros(zeros, dtype=torch.int32, device=device) if zeros else None)

    def parts(self, scratch: Scratch) -> _Parts:
        """Views of it."""
        slots, heads = self.cut.num_slots, self.heads
        states, rows = (slots, heads, HEAD_DIM, HEAD_DIM), (slots, heads)
        of_head = HEAD_DIM * HEAD_DIM
        steps = (heads * of_head, of_head, HEAD_DIM, 1)
        size, few = slots * heads * of_head, slots * heads
        work, zeros = scratch
        end = (2 * slots + self.anew) * heads * of_head
        return _Parts(
            work.as_strided(states, steps, 0),
            work.as_strided(states, steps, size),
            work.as_strided((self.anew, *states[1:]), steps, 2 * size) if self.anew else None,
            work.as_strided(rows, (heads, 1), end),
            work.as_strided(rows, (heads, 1), end + few),
            work.as_strided(rows, (heads, 1), end + 2 * few),
            work.as_strided((1,), (1,), end + 3 * few) if self.cut.only_if_longer else None,
            zeros.as_strided(rows, (heads, 1), 0) if zeros is not None and self.in_place else None,
            zeros.as_strided(rows, (heads, 1), few * self.in_place) if zeros is not None and self.certify else None,
        )


class _Parts(NamedTuple):
    """Of the scratch memory; :class:`Scan` says what is in them. All are of 32-bit elements, whose type the kernels know."""

    slots: Tensor
    mt: Tensor
    effects: Tensor | None
    needs_mt: Tensor
    chunks: Tensor
    norm: Tensor
    decided: Tensor | None
    taken: Tensor | None
    entering: Tensor | None


@dataclass(frozen=True)
class Scan:
    """What the scan of each slot found: ``[M, H]`` of the slots of kernels/segments.py; unused slots hold anything.

    Attributes:
        states: ``[M, H, V, K]`` fp32, the state at the end of each piece.
        entering: fp32, norm of the state that enters the replayed chunks, 0 where they begin with the piece.
        needs_mt: int32, 1 where the scan reached the start of the piece.
        chunks: int32, trailing chunks replayed.
        norm: fp32, ``||M||_F`` where it stopped.
    """

    states: Tensor
    needs_mt: Tensor
    chunks: Tensor
    norm: Tensor
    entering: Tensor


def forward(
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    out: Tensor,
    *,
    max_len: int,
    layout: Layout,
    scratch: Scratch,
    eps: float,
    initial_state: Tensor | None = None,
    in_index: Tensor | None = None,
    final_state: Tensor | None = None,
    out_index: Tensor | None = None,
    saving: stages.Saving | None = None,
    memo: dict[Any, Any] | None = None,
    record: stages.Record = None,
) -> Scan | None:
    """Outputs of every sequence, and the states at their ends, as :func:`.stages.forward` gives them to rounding.

    Launches, and does nothing else: allocates nothing, does not wait.

    Args:
        layout: how.
        scratch: fresh from it.
        eps: the measured exit.
        record: the launches are appended.
        The others as in :func:`.stages.forward`.

    Returns:
        What the scans found, if the layout is to certify.
    """
    cut = layout.cut
    cuts: dict[Any, Any] = {} if memo is None else memo.setdefault("cuts", {})
    if len(cuts) >= CUTS_KEPT:
        cuts.clear()
    kept = cuts.setdefault(layout, {})
    slots, mt, effects, needs_mt, chunks, norm, decided, taken, entering = layout.parts(scratch)
    if decided is not None:
        assert cu_seqlens is not None
        stages.decide(cu_seqlens, inputs.tokens, cut, decided, record)
    stages.state_summary(
        inputs,
        cu_seqlens,
        max_len=max_len,
        ht=slots,
        mt=mt,
        needs_mt=needs_mt,
        chunks=chunks,
        norm=norm,
        num_slots=cut.num_slots,
        segment_len=cut.segment_len,
        decided=decided,
        eps=eps,
        fill=False,
        effects=effects,
        memo=kept,
        record=record,
    )
    small.chain(
        slots,
        mt,
        needs_mt,
        cu_seqlens,
        tokens=inputs.tokens,
        max_len=max_len,
        segment_len=cut.segment_len,
        decided=decided,
        initial_state=initial_state,
        in_index=in_index,
        effects=effects,
        norm=norm,
        eps=eps,
        overlap=True,
        memo=kept,
        record=record,
    )
    stages.forward(
        inputs,
        cu_seqlens,
        out,
        max_len=max_len,
        initial_state=initial_state,
        in_index=in_index,
        final_state=final_state,
        out_index=out_index,
        slots=slots,
        segment_len=cut.segment_len,
        decided=decided,
        taken=taken,
        chunks=chunks if layout.certify else None,
        entering=entering,
        saving=saving,
        overlap=True,
        memo=kept,
        record=record,
    )
    if entering is None:
        return None
    return Scan(slots, needs_mt.view(torch.int32), chunks.view(torch.int32), norm, entering.view(torch.float32))
