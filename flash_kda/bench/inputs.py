"""Tokens made once at the largest size and cut to each case: views, so that a sweep spends its time on what it measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from .. import samples
from ..constants import HEAD_DIM
from ..samples import TOKEN_TENSORS, Sample
from .suites import Case

ALIKE = ("random", "slow_eighth", "log_uniform", "none", "full", "saturated")
"""Gates whose tokens and heads are all drawn alike: any [T, H] of them may be read from one long row."""
MOST_HEADS = 128


class Source:
    """Inputs of some cases, one kind of gates at a time in memory.

    Args:
        cases: all that will be asked for, so that the largest of each kind is made at once.
        device: where.
    """

    def __init__(self, cases: Iterable[Case], device: torch.device) -> None:
        self.device = device
        self.rows: dict[object, int] = {}
        for case in cases:
            size = case.tokens * (case.heads if case.gates in ALIKE else 1)
            self.rows[_kind(case)] = max(self.rows.get(_kind(case), 0), size)
        self.kept: tuple[object, Sample] | None = None

    def sample(self, case: Case) -> Sample:
        """One batch row ``[1, T_total, H, 128]`` of the case's gates; for :data:`ALIKE` contiguous views of what is kept."""
        kind = _kind(case)
        if self.kept is None or self.kept[0] != kind:
            self.kept = None  # the old one first: there may not be room for both
            heads = 1 if case.gates in ALIKE else case.heads
            made = samples.make(case.gates, self.rows[kind], heads, lower_bound=case.lower_bound, device=self.device)
            self.kept = (kind, made)
        made = self.kept[1]
        if case.gates not in ALIKE:
            return replace(made, **{name: getattr(made, name)[:, : case.tokens] for name in TOKEN_TENSORS})
        shape = (1, case.tokens, case.heads)
        count = case.tokens * case.heads
        cut = {name: getattr(made, name)[0, :count].view(*shape, HEAD_DIM) for name in TOKEN_TENSORS if name != "beta"}
        of_heads = samples.make(case.gates, 1, MOST_HEADS, device=self.device)
        return replace(
            made,
            **cut,
            beta=made.beta[0, :count].view(shape),
            A_log=of_heads.A_log[: case.heads].clone(),
            dt_bias=of_heads.dt_bias[: case.heads].clone(),
            lower_bound=case.lower_bound,
        )


def _kind(case: Case) -> object:
    """What has to be made anew: the gates, and all that belongs to them where tokens and heads are not alike."""
    return case.gates if case.gates in ALIKE else (case.gates, case.heads, case.lower_bound)
