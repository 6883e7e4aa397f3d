"""What one rank does by itself, through the public functions of this package alone: kernels slot in behind those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from .. import api
from ..plan import SegmentPlan, plan_segments


@dataclass(frozen=True)
class Effect:
    """``S_out = mt S_in + ht`` of some tokens: ht ``[H, V, K]``, mt ``[H, K, K]`` or None where S_in does not matter."""

    ht: Tensor
    mt: Tensor | None = None


@dataclass(frozen=True)
class Arguments:
    """Tensors and options of one call on this rank; token tensors ``[1, T, ...]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    out: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    lower_bound: float
    beta_is_activated: bool
    eps: float
    segment_len: int | None
    fixed_plan: bool
    impl: str | None

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    def cut(self, start: int, end: int) -> Arguments:
        """Views of the tokens ``[start, end)``."""
        names = ("q", "k", "v", "g", "beta", "out")
        return replace(self, **{name: getattr(self, name)[:, start:end] for name in names})

    def parameters(self) -> dict[str, Any]:
        names = ("A_log", "dt_bias", "lower_bound", "beta_is_activated", "impl")
        return {name: getattr(self, name) for name in names}

    def summarised(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("k", "v", "g", "beta")} | self.parameters() | {"eps": self.eps}

    def forwarded(self) -> dict[str, Any]:
        names = ("q", "k", "v", "g", "beta", "scale", "out")
        return {name: getattr(self, name) for name in names} | self.parameters()


def plan_part(tokens: int, heads: int, device: torch.device, segment_len: int | None, fixed_plan: bool) -> SegmentPlan:
    """The segments of one part. Its boundaries are made on the device, nothing is copied to it."""
    boundaries = torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=device)
    return plan_segments(boundaries, tokens, heads, segment_len=segment_len, fixed_plan=fixed_plan, cu_seqlens_cpu=[0, tokens])


class PartRun:
    """A part that touches a rank boundary: its segments are summarised first, and run once the state before them is known.

    Args:
        x: its tokens.
        plan: its segments.
        hands_on: it has a successor, so its last segment is summarised too.
    """

    def __init__(self, x: Arguments, plan: SegmentPlan, hands_on: bool) -> None:
        self.x, self.plan, self.hands_on = x, plan, hands_on
        self._summary: tuple[Tensor, Tensor, Tensor] | None = None

    def summarise(self) -> None:
        """ht, mt, fallback of the segments that have a successor, here or on another rank, and of an empty one after them."""
        cu = self.plan.cu_seqlens
        offsets = torch.cat([cu, cu[-1:]] if self.hands_on else [cu[:-1], cu[-2:-1]])
        if offsets.numel() > 2:
            made = api.state_only(**self.x.summarised(), cu_seqlens=offsets, calc_mt=True, return_info=True)
            ht, mt, info = cast("tuple[Tensor, Tensor, api.SummaryInfo]", made)
            self._summary = ht, mt, info.fallback

    def state(self, initial_state: Tensor | None) -> Effect:
        """The state handed on, from ``[H, V, K]`` or 0."""
        return Effect(self._states(initial_state)[-1])

    def map(self) -> Effect:
        """The whole part as a map of the state that enters it."""
        ht, mt, fallback = self._made()
        identity = torch.eye(ht.shape[-1], dtype=ht.dtype, device=ht.device).expand(ht.shape[1:])
        # V-first states are multiplied by mt^T from the right: what the chain makes of the identity is the whole mt^T.
        transition = _chain(identity, torch.zeros_like(ht), mt, fallback)[-1].mT.contiguous()
        return Effect(self._states(None)[-1], transition)

    def run(self, initial_state: Tensor | None) -> Tensor | None:
        """Outputs of the part from ``[H, V, K]`` or 0; the state ``[H, V, K]`` fp32 at its end if the sequence ends here."""
        if self._summary is None:
            states = None if initial_state is None else initial_state[None].float()
        else:
            states = self._states(initial_state)[: self.plan.capacity]
        final = None
        if not self.hands_on:
            shape = (self.plan.capacity, self.x.heads, self.x.v.shape[-1], self.x.k.shape[-1])
            final = torch.empty(shape, dtype=torch.float32, device=self.x.v.device)
        api.fwd(**self.x.forwarded(), initial_state=states, final_state=final, cu_seqlens=self.plan.cu_seqlens)
        return None if final is None else final[-1]

    def _states(self, initial_state: Tensor | None) -> Tensor:
        return _chain(initial_state, *self._made())

    def _made(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._summary is None:
            raise RuntimeError("summarise must come first")
        return self._summary


def compose(later: Effect, earlier: Effect) -> Effect:
    """One effect after another. Where ``later`` has forgotten all, ``earlier`` is skipped by selection."""
    if later.mt is None:
        return later
    ht = entering(earlier.ht, [later])[-1]
    if earlier.mt is None:
        return Effect(ht)
    nothing = torch.zeros_like(later.ht)
    return Effect(ht, entering(earlier.mt.mT, [Effect(nothing, later.mt)])[-1].mT.contiguous())


def entering(initial_state: Tensor | None, effects: Sequence[Effect]) -> Tensor:
    """``[n + 1, H, V, K]``: the states before each of n effects and after the last, from ``[H, V, K]`` or 0."""
    nothing = torch.zeros_like(effects[0].ht)
    ht = torch.stack([*(x.ht for x in effects), nothing])
    mt = torch.stack([*(nothing if x.mt is None else x.mt for x in effects), nothing])
    # An exit has left exactly 0: what came before is skipped. A transition that is only small counts, and so does a NaN.
    return _chain(initial_state, ht, mt, (mt != 0).flatten(-2).any(-1))


def _chain(initial_state: Tensor | None, ht: Tensor, mt: Tensor, fallback: Tensor) -> Tensor:
    rows = ht.shape[0]
    one_sequence = torch.arange(0, rows + 1, rows, dtype=torch.int32, device=ht.device)
    initial_state = None if initial_state is None else initial_state[None]
    return api.correct_initial_states(initial_state, ht, mt, fallback, one_sequence)
