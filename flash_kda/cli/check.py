"""Whether serial and context-parallel results are right, at a cost that does not grow with the sequence.

The oracle is the fp64 token recurrence. It is too slow for a whole long sequence, so it runs over windows: the start of
sequences, both sides of the first and the last segment boundary, and the end. A window that does not begin where its sequence
does is given the state that serial ``fwd`` has there. Serial is thereby checked in every window and from the true start. That
the segments received the right states is seen after a boundary, and everywhere else by comparing the two results whole.

The unit of every tolerance is measured in place: what rounding the oracle's own values to bf16 costs, per head and window.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import api
from ..constants import STEP
from ..reference import recurrent_kda
from ..samples import TOKEN_TENSORS, Sample

LIMIT = 5.0
"""Errors may reach this many times the bf16 rounding of the exact values. A kernel with bf16 operands rounds W, U, its copy
of the state and what it stores: published ones err 2.5 to 4.7 times. History dropped
after one chunk shows as 18 times and more."""

START_TOKENS = 512
SIDE_TOKENS = 128
"""The oracle's windows: of the longest sequence's start, and on either side of a boundary."""
OTHER_SEQUENCES = 2
"""Starts of this many more sequences are checked, ``SIDE_TOKENS`` each."""
MAX_HEADS = 4
"""The oracle looks at no more heads than this, spread evenly."""


@dataclass(frozen=True)
class Result:
    """What a call returned."""

    out: Tensor
    final_state: Tensor


@dataclass(frozen=True)
class Finding:
    """One comparison. Errors are relative L2 of the worst head, and sequence.

    Attributes:
        what: which values.
        reference: ``"oracle"`` or ``"serial"``.
        rounding: what bf16 rounding of the reference costs; of the smallest head.
        serial, cp: the errors; serial is None where it is the reference.
        multiple: the largest error in units of the same head's rounding.
    """

    what: str
    reference: str
    rounding: float
    serial: float | None
    cp: float
    multiple: float

    @property
    def passed(self) -> bool:
        return self.multiple <= LIMIT


@dataclass(frozen=True)
class Window:
    """Tokens ``[start, end)`` of the packed axis, inside sequence ``sequence`` that starts at ``origin``."""

    what: str
    sequence: int
    origin: int
    start: int
    end: int
    final: bool


@dataclass(frozen=True)
class Check:
    findings: tuple[Finding, ...]
    heads: tuple[int, ...]
    oracle_tokens: int
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None and all(f.passed for f in self.findings)


def run_check(
    sample: Sample,
    offsets: list[int],
    cuts: Iterable[int],
    serial: Result,
    cp: Result,
    impl: str | None,
    begin: Callable[[str], None],
) -> Check:
    """Compares both results with the oracle on windows, and with each other everywhere.

    Args:
        sample: packed, one batch row.
        offsets: of its sequences.
        cuts: packed tokens before which sequences were cut, in order.
        serial, cp: ``out`` ``[1, T, H, V]`` and ``final_state`` ``[N, H, V, K]`` fp32.
        impl: who computes the states that enter windows.
        begin: told of each step.
    """
    heads = (
        sorted({i * sample.heads // MAX_HEADS for i in range(MAX_HEADS)})
        if sample.heads > MAX_HEADS
        else list(range(sample.heads))
    )
    for name, result in (("serial", serial), ("context-parallel", cp)):
        for what in ("out", "final_state"):
            if not bool(getattr(result, what).isfinite().all()):
                return Check((), tuple(heads), 0, f"{what} of the {name} forward has NaN or inf although the inputs are finite")
    some = _heads(sample, heads)
    windows = list(_windows(offsets, cuts))
    findings = []
    units: dict[str, list[float]] = {"out": [], "final_state": []}
    states = _entering(some, windows, impl, begin)
    for window, state in zip(windows, states, strict=True):
        begin(f"oracle: {window.what}")
        part = {name: getattr(some, name)[:, window.start : window.end] for name in TOKEN_TENSORS}
        exact, final = recurrent_kda(
            **part,
            scale=some.scale,
            A_log=some.A_log,
            dt_bias=some.dt_bias.view(some.heads, -1),
            lower_bound=some.lower_bound,
            initial_state=state,
        )
        cut = slice(window.start, window.end)
        got = [x.out[0, cut][:, heads].transpose(0, 1) for x in (serial, cp)]
        finding, unit = _against_oracle(window.what, exact[0].transpose(0, 1), *got)
        findings.append(finding)
        units["out"].append(unit)
        if window.final:
            got = [x.final_state[window.sequence, heads] for x in (serial, cp)]
            finding, unit = _against_oracle(f"final state of sequence {window.sequence}", final[0], *got)
            findings.append(finding)
            units["final_state"].append(unit)
    begin("serial against context-parallel")
    # Sequence by sequence: a lost state of a short one would drown in the norm of all.
    spans = list(itertools.pairwise(offsets))
    outs = [_error(*(x.out[0, a:b].transpose(0, 1) for x in (cp, serial))).max().item() for a, b in spans if b > a]
    ends = [_error(cp.final_state[n], serial.final_state[n]).max().item() for n in range(len(spans))]
    for kind, what, errors in (("out", "all outputs", outs), ("final_state", "all final states", ends)):
        unit = max(units[kind] or units["out"], default=0.0)
        error = max(errors, default=0.0)
        findings.append(Finding(what, "serial", unit, None, error, _multiple(error, unit)))
    return Check(tuple(findings), tuple(heads), sum(w.end - w.start for w in windows))


def _windows(offsets: list[int], cuts: Iterable[int]) -> Iterator[Window]:
    spans = sorted(((b, a, n) for n, (a, b) in enumerate(itertools.pairwise(offsets)) if b > a), key=lambda x: x[1] - x[0])
    for rank, (end, start, n) in enumerate(spans[: 1 + OTHER_SEQUENCES]):
        tokens = min(end - start, SIDE_TOKENS if rank else START_TOKENS)
        whole = tokens == end - start
        yield Window(f"sequence {n}, {'all' if whole else 'first'} {tokens} tokens", n, start, start, start + tokens, whole)
        if rank or whole:
            continue
        inside = [cut for cut in cuts if start < cut < end]
        done = False
        for cut in sorted({*inside[:1], *inside[-1:]}):
            first = start + max(cut - start - SIDE_TOKENS, 0) // STEP * STEP
            last = min(cut + SIDE_TOKENS, end)
            done = last == end
            yield Window(f"sequence {n}, around the cut at {cut - start}", n, start, first, last, done)
        if done:
            continue
        first = start + max(end - start - SIDE_TOKENS, 0) // STEP * STEP
        yield Window(f"sequence {n}, last {end - first} tokens", n, start, first, end, True)


def _entering(sample: Sample, windows: list[Window], impl: str | None, begin: Callable[[str], None]) -> list[Tensor | None]:
    """The state that enters each window: the sequence's own, or that of serial ``fwd``, which runs on from window to window."""
    states: list[Tensor | None] = []
    at, state = -1, None
    for window in windows:
        if window.start == window.origin:
            at, state = window.start, _initial(sample, window.sequence)
        elif window.start > at:
            begin(f"serial state before token {window.start}")
            part = {name: getattr(sample, name)[:, at : window.start] for name in TOKEN_TENSORS}
            piece = replace(sample, **part, initial_state=state, cu_seqlens=None)
            at, state = window.start, api.fwd(**piece.arguments(), output_final_state=True, impl=impl)[1]
        states.append(state)
    return states


def _initial(sample: Sample, sequence: int) -> Tensor | None:
    return None if sample.initial_state is None else sample.initial_state[sequence : sequence + 1]


def _heads(sample: Sample, heads: list[int]) -> Sample:
    if len(heads) == sample.heads:
        return sample
    part = {name: getattr(sample, name)[:, :, heads] for name in TOKEN_TENSORS}
    state = None if sample.initial_state is None else sample.initial_state[:, heads]
    bias = sample.dt_bias.view(sample.heads, -1)[heads]
    return replace(sample, **part, A_log=sample.A_log[heads], dt_bias=bias, initial_state=state)


def _against_oracle(what: str, truth: Tensor, serial: Tensor, cp: Tensor) -> tuple[Finding, float]:
    """``[H, ...]`` each; also the mean rounding over the heads."""
    unit = _error(truth.bfloat16(), truth)
    errors = [_error(x, truth) for x in (serial, cp)]
    multiple = max(_multiple(e, u) for x in errors for e, u in zip(x.tolist(), unit.tolist(), strict=True))
    worst = [x.max().item() for x in errors]
    return Finding(what, "oracle", unit.min().item(), worst[0], worst[1], multiple), unit.mean().item()


def _error(x: Tensor, truth: Tensor) -> Tensor:
    """``[H]`` relative L2 of ``[H, ...]``, head by head so that fp64 copies stay small; 0 where both are 0."""
    errors = []
    for a, b in zip(x, truth, strict=True):
        b = b.double()
        size = torch.linalg.vector_norm(b)
        error = torch.linalg.vector_norm(a.double() - b)
        errors.append(torch.where(error == 0, 0.0, error / size))
    return torch.stack(errors)


def _multiple(error: float, unit: float) -> float:
    if error == 0:
        return 0.0
    return error / unit if unit else float("inf")
