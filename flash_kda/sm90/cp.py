"""``fwd_cp`` on Hopper: summary, chain and forward of cut sequences, three launches on one stream.

    state_summary   ht, mt of every piece that has a successor, by a backward scan that stops where the past cannot matter
    chain           in place, ht becomes the state at the end of the piece
    forward         every piece from the state at the end of the one before

Where the host does not know the lengths and not every batch would gain, a fourth, small launch decides first whether to cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import views
from ..constants import HEAD_DIM
from ..inputs import Inputs
from . import small, stages
from .kernels.flags import CHAINED
from .plan import Cut

CUTS_KEPT = 64
"""Cuts that are remembered for each kind of call: lengths that the host knows may ask for many."""


@dataclass(frozen=True)
class Scan:
    """What the scan of each slot found: ``[M, H]`` of the slots of kernels/segments.py; unused slots hold anything.

    Attributes:
        states: ``[M, H, V, K]`` fp32, the state at the end of each piece.
        entering: fp32, norm of the state that enters the replayed chunks, 0 where they begin with the piece; None unless asked.
        needs_mt: int32, 1 where the scan reached the start of the piece.
        chunks: int32, trailing chunks replayed.
        norm: fp32, ``||M||_F`` where it stopped.
    """

    states: Tensor
    needs_mt: Tensor
    chunks: Tensor
    norm: Tensor
    entering: Tensor | None


def forward(
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    out: Tensor,
    *,
    max_len: int,
    cut: Cut,
    eps: float,
    initial_state: Tensor | None = None,
    in_index: Tensor | None = None,
    final_state: Tensor | None = None,
    out_index: Tensor | None = None,
    certify: bool = False,
    saving: stages.Saving | None = None,
    memo: dict[Any, Any] | None = None,
) -> Scan:
    """Outputs of every sequence, and the states at their ends, as :func:`.stages.forward` gives them to rounding.

    Allocates two states a slot and head, one more for every eighth slot, and a few bytes. Does not wait.

    Args:
        cut: where.
        eps: the measured exit.
        certify: also measure ``entering``; slower.
        The others as in :func:`.stages.forward`.
    """
    heads, device = inputs.v.shape[-2], out.device
    in_place = initial_state is not None and final_state is not None and views.overlap(initial_state, final_state)
    cuts: dict[Any, Any] = {} if memo is None else memo.setdefault("cuts", {})
    if len(cuts) >= CUTS_KEPT:
        cuts.clear()
    kept = cuts.setdefault((cut, in_place, certify), {})
    # A certificate counts what the scans drop, and then that must be all: no chain begins anew.
    anew = 0 if certify or cut.num_slots <= CHAINED else -(-cut.num_slots // CHAINED)
    slots = torch.empty(cut.num_slots, heads, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=device)
    mt = torch.empty(cut.num_slots, heads, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=device)
    effects = torch.empty(anew, heads, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=device) if anew else None
    needs_mt, chunks, norm = torch.empty(3, cut.num_slots, heads, dtype=torch.int32, device=device).unbind()
    norm = norm.view(torch.float32)
    # of few bytes, and filled before the summary begins
    taken = torch.zeros(cut.num_slots, heads, dtype=torch.int32, device=device) if in_place else None
    entering = torch.zeros(cut.num_slots, heads, device=device) if certify else None
    decided = None
    if cut.only_if_longer:
        assert cu_seqlens is not None
        decided = torch.empty(1, dtype=torch.int32, device=device)
        stages.decide(cu_seqlens, inputs.tokens, cut, decided)
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
        chunks=chunks if certify else None,
        entering=entering,
        saving=saving,
        overlap=True,
        memo=kept,
    )
    return Scan(slots, needs_mt, chunks, norm, entering)
