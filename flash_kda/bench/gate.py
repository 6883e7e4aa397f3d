"""Whether a result may be timed: finite everywhere, right against fp64 on the first tokens, and nowhere far from ``fwd``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..constants import CHUNK
from ..reference import Inputs, forward, recurrent_kda, state_summary, warmup_bound
from ..samples import TOKEN_TENSORS, Sample
from .impls import Problem
from .suites import Case

LIMIT = 1e-2
"""Relative L2 error of a result that is timed. Kernels with bf16 operands err 4e-3 to 5e-3 on the gates timed here, and a
dropped history 3e-2 and more; the accuracy that is demanded is a matter of tests and of suite ``accuracy``."""
APART = 2e-2
"""Relative L2 difference of two right results, on any head and :data:`BLOCK` tokens."""
BLOCK = 1024
PIECE = 1024
SLAB = 2**26
"""Values looked at at once."""


class WrongError(Exception):
    """A result that must not be timed, and why."""


class Exact:
    """fp64 answers of the chunked reference on the first tokens of the first and last head, each computed once."""

    def __init__(self) -> None:
        self.kept: dict[object, Tensor] = {}

    def error(self, case: Case, problem: Problem, out: Tensor) -> float:
        """Relative L2 error of ``out`` on the first ``case.checked`` tokens, sequences behind each other.

        Raises:
            WrongError: it is above :data:`LIMIT`, or NaN.
        """
        x, tokens = problem.sample, case.checked
        heads = sorted({0, case.heads - 1})
        ends = problem.packed_offsets.clamp(max=tokens)
        # Of one kind of gates and number of heads, longer inputs begin as shorter ones do (inputs.py).
        key = (case.gates, case.lower_bound, case.heads, tuple(ends.unique().tolist()))
        if key not in self.kept:
            q, k, v, g, beta = (getattr(x, name).flatten(0, 1)[:tokens, heads].double() for name in TOKEN_TENSORS)
            inputs = Inputs(q, k, v, g, beta, x.A_log[heads], x.dt_bias[heads], x.lower_bound, x.scale)
            exact = torch.zeros_like(inputs.v)
            forward(inputs, ends, exact, max_len=int(ends.diff().max()))
            self.kept[key] = exact
        exact = self.kept[key]
        error = relative(out.flatten(0, 1)[:tokens, heads].double(), exact)
        if not error < LIMIT:
            raise WrongError(f"relative error {error:.3g} of the first {tokens} tokens against fp64 must be below {LIMIT:g}")
        return error


def recurrence(sample: Sample) -> tuple[Tensor, Tensor]:
    """The fp64 token recurrence on one sequence: out ``[1, T, H, V]`` and final state ``[1, H, V, K]``.

    Piece by piece, which is the same to fp64 rounding: the outputs of single tokens, kept between states that come and go,
    would otherwise leave a CPU's memory in shreds.
    """
    outs: list[Tensor] = []
    state = None
    for start in range(0, sample.q.shape[1], PIECE):
        q, k, v, g, beta = (getattr(sample, name)[:, start : start + PIECE] for name in TOKEN_TENSORS)
        gate = (sample.A_log, sample.dt_bias, sample.lower_bound)
        out, state = recurrent_kda(q, k, v, g, beta, sample.scale, *gate, initial_state=state)
        outs.append(out)
    assert state is not None
    return torch.cat(outs, 1), state


def relative(x: Tensor, exact: Tensor) -> float:
    """``||x - exact|| / ||exact||``."""
    return float(torch.linalg.vector_norm(x - exact) / torch.linalg.vector_norm(exact))


def check_finite(out: Tensor) -> None:
    """Raises :class:`WrongError` if anything in ``out`` is NaN or inf; outputs that were not written still are."""
    for slab in out.view(-1).split(SLAB):
        if not bool(slab.isfinite().all()):
            raise WrongError("outputs must be finite, got NaN or inf")


def check_apart(out: Tensor, serial: Tensor) -> None:
    """Raises :class:`WrongError` if ``out`` is further than :data:`APART` from ``serial`` on some head and block of tokens."""
    heads, width = out.shape[-2:]
    rows = max(SLAB // (BLOCK * heads * width), 1) * BLOCK
    for a, b in zip(out.view(-1, heads, width).split(rows), serial.view(-1, heads, width).split(rows), strict=True):
        for x, exact in zip(_blocks(a), _blocks(b), strict=True):
            difference = torch.linalg.vector_norm(x.float() - exact.float(), dim=(1, 3))
            worst = float((difference / torch.linalg.vector_norm(exact.float(), dim=(1, 3))).max())
            if not worst < APART:
                raise WrongError(
                    f"relative difference {worst:.3g} from fwd on {BLOCK} tokens of a head must be below {APART:g}"
                )


def _blocks(x: Tensor) -> list[Tensor]:
    """``[n, BLOCK, H, V]`` of ``[T, H, V]``, and the rest as one block."""
    whole = x.shape[0] // BLOCK * BLOCK
    parts = (x[:whole].unflatten(0, (-1, BLOCK)) if whole else x[:0], x[whole:][None])
    return [part for part in parts if part.numel()]


def check_summary(problem: Problem, offsets: Tensor, ht: Tensor, mt: Tensor) -> None:
    """``state_only`` on the first segment of the first and last head, against the same scan in fp64.

    Raises:
        WrongError: a state or a transition is not finite, or off by more than :data:`LIMIT`.
    """
    check_finite(ht)
    check_finite(mt)
    x = problem.sample
    heads = sorted({0, x.heads - 1})
    first = offsets[:2]
    tokens = int(first[1])
    k, v, g, beta = (getattr(x, name).flatten(0, 1)[:tokens, heads].double() for name in ("k", "v", "g", "beta"))
    inputs = Inputs(None, k, v, g, beta, x.A_log[heads], x.dt_bias[heads], x.lower_bound)
    exact = state_summary(inputs, first, max_len=tokens)
    # After an exit one has 0 for what the other still has at the tolerance of the exit.
    tiny = 1e-3
    for what, got, want in (("ht", ht, exact.ht), ("mt", mt, exact.mt)):
        difference = torch.linalg.vector_norm(got[0, heads].double() - want[0], dim=(1, 2))
        error = float((difference / torch.linalg.vector_norm(want[0], dim=(1, 2)).clamp(min=tiny)).max())
        if not error < LIMIT:
            raise WrongError(f"relative error {error:.3g} of {what} against fp64 must be below {LIMIT:g}")


def check_warmup(problem: Problem, eps: float, chunks: Tensor, fallback: Tensor) -> None:
    """``get_warmup_chunks`` against the same bound in fp64: a chunk more or less where the sum ends at the threshold.

    Raises:
        WrongError: a count is off by more than one chunk, or fallback differs where the count does not say why.
    """
    x = problem.sample
    offsets = problem.packed_offsets
    longest = int(offsets.diff().max())
    want, unmet = warmup_bound(
        x.g.flatten(0, 1).double(), x.A_log.double(), x.dt_bias.double(), x.lower_bound, offsets, max_len=longest, eps=eps
    )
    off = (chunks.long() - want.long()).abs()
    settled = want < -(-longest // CHUNK) - 1
    if bool((off > 1).any()) or bool(((fallback != unmet) & settled).any()):
        raise WrongError(f"counts and fallback must be those of the bound, got counts up to {int(off.max())} chunks off")
