"""How far an honest evaluation errs on a case, measured against the fp64 oracle: the unit of every tolerance."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from cases import Case, make, out_error, state, state_error
from torch import Tensor

OUT_MULTIPLE = 1.25
"""Rounding the oracle's own output to bf16 is the error that no implementation avoids; ours may add little to it."""

STATE_MULTIPLE = 4.0
"""Of the fp32 token recurrence's error plus one rounding to fp32; the measured worst is 2.2."""


@dataclass(frozen=True)
class Judge:
    """The oracle's answer to one call and the error per head that an honest evaluation makes."""

    o: Tensor
    final_state: Tensor
    out_unit: Tensor
    fp32_unit: Tensor
    state_unit: Tensor

    def out(self, out: Tensor, extra: float | Tensor = 0.0) -> None:
        """Bf16 outputs."""
        self._check("out", out, out_error(out, self.o), OUT_MULTIPLE * self.out_unit + extra)

    def fp32_out(self, out: Tensor) -> None:
        """Outputs of a stage that did not round them."""
        self._check("fp32 out", out, out_error(out, self.o), STATE_MULTIPLE * self.fp32_unit)

    def state(self, got: Tensor, extra: float | Tensor = 0.0) -> None:
        self._check("state", got, state_error(got, self.final_state), STATE_MULTIPLE * self.state_unit + extra)

    @staticmethod
    def _check(what: str, got: Tensor, error: Tensor, budget: Tensor) -> None:
        assert got.isfinite().all(), f"{what} is not finite"
        assert (error <= budget).all(), f"{what}: error per head {error.tolist()} exceeds {budget.tolist()}"


def judge(case: Case, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Judge:
    o, final = case.oracle(initial_state, cu_seqlens)
    o32, final32 = case.oracle(initial_state, cu_seqlens, dtype=torch.float32)
    unit = torch.finfo(torch.float32).eps / 2
    return Judge(
        o,
        final,
        out_unit=out_error(o.bfloat16(), o),
        fp32_unit=out_error(o32, o) + unit,
        state_unit=state_error(final32, final) + unit,
    )


@functools.cache
def judge_named(name: str, tokens: int, heads: int = 2, with_state: bool = True) -> Judge:
    return judge(make(name, tokens, heads), state(1, heads) if with_state else None)
