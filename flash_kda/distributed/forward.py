"""``fwd_cp`` over ranks: summarise what is handed on, exchange it, meanwhile do the rest, then what had to wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .. import api
from .. import validation as check
from ..constants import EXIT_EPS
from ..host import readable
from . import exchange as ways
from .context import ContextParallel
from .layout import Part
from .local import Arguments, Effect, PartRun
from .verdict import FORGOTTEN

R = TypeVar("R")


def fwd_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    *,
    context: ContextParallel,
    output_final_state: bool = False,
    beta_is_activated: bool = False,
    segment_len: int | None = None,
    fixed_plan: bool = False,
    eps: float = EXIT_EPS,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """This rank's share of :func:`flash_kda.fwd_cp` on the packed sequences of all ranks. Every rank of the group calls it.

    Args:
        q, k, v, g, beta: ``[1, T, H, ...]``, the tokens of this rank's shard, T = ``context.tokens``; otherwise, like scale,
            A_log, dt_bias, lower_bound and beta_is_activated, as in :func:`flash_kda.fwd`. The latter must be the same on
            every rank.
        out: ``[1, T, H, V]``, overwritten, or None to allocate. Padding at the end is neither read nor written (0 if allocated
            here).
        initial_state: ``[n, H, V, K]`` bf16 or fp32, of the n sequences ``context.starts``, or None for zeros. Each rank
            decides for itself.
        final_state: ``[n, H, V, K]`` bf16 or fp32, overwritten, of the sequences ``context.ends``; of all N on every rank if
            the context was made with ``final_state="all"``. Must not share memory with another argument.
        context: which tokens are where.
        output_final_state: allocate an fp32 ``final_state`` if none is given.
        segment_len, fixed_plan, eps: as in :func:`flash_kda.fwd_cp`; segments are counted from the start of each part.
        impl: as in :func:`flash_kda.fwd`.

    Returns:
        ``(out, final_state)``: the tensors given, or fresh ones; None for a state that nobody asked for.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as :func:`flash_kda.fwd_cp`, on the rank whose arguments are
            wrong; its outputs are not written.
        RankError: on the other ranks, with the reason; their outputs are not to be used. Also if a rank did not come within
            the timeout of the process group or has died: then on all that are left, and the group is of no more use.

    On a GPU the host does not wait. So the failure of another rank is not known yet when the call returns: what depends on
    that rank is NaN, and the next call or ``context.check()`` raises.
    """
    share = _Share(context)
    exchange = ways.make(context.exchange, context.ranks, context.layout)

    def begin() -> Effect | None:
        context.verdicts.look(wait=False)
        check.check_forward(
            q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, None, None, None, beta_is_activated=beta_is_activated
        )
        tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "out": out, "A_log": A_log, "dt_bias": dt_bias}
        check.check_shard(tensors, initial_state, final_state, **context.shard())
        x = Arguments(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            scale=scale,
            out=torch.zeros(v.shape, dtype=v.dtype, device=v.device) if out is None else out,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            beta_is_activated=beta_is_activated,
            eps=check.check_eps(eps),
            segment_len=segment_len,
            fixed_plan=fixed_plan,
            impl=impl,
        )
        return share.begin(x, initial_state, final_state, output_final_state)

    handed_on = share.attempt(begin)
    exchange.start(context.nothing() if handed_on is None else handed_on)
    share.attempt(share.work_meanwhile)
    given = exchange.finish()
    early = share.failure
    share.attempt(lambda: share.work_with(given))
    if context.final_state == "all":
        share.collect(final_state, output_final_state)
    context.verdicts.conclude(share.failure, share.remembers, after_exchange=early is None)
    return share.x.out, share.final_state


class _Share:
    """What this rank does in one call, in steps around the exchange. After a step that failed the rest are left out.

    Attributes:
        failure: of that step.
        remembers: bool scalar: with ``send_mt=False``, mt would have been needed. None if the host has seen that it was not.
        x, final_state: what is returned.
    """

    x: Arguments
    final_state: Tensor | None

    def __init__(self, context: ContextParallel) -> None:
        self._context = context
        self.failure: Exception | None = None
        self.remembers: Tensor | None = None
        self._ends: Tensor | None = None

    def attempt(self, step: Callable[[], R]) -> R | None:
        if self.failure is None:
            try:
                return step()
            except Exception as error:
                self.failure = error
        return None

    def begin(
        self, x: Arguments, initial_state: Tensor | None, final_state: Tensor | None, output_final_state: bool
    ) -> Effect | None:
        """Takes checked arguments; returns what this rank hands on, or None."""
        context = self._context
        self.x, self._initial, self.final_state = x, initial_state, final_state
        if context.final_state == "end":
            if final_state is None and output_final_state:
                self.final_state = context.states(len(context.ends))
            self._ends = self.final_state
        else:
            self._ends = context.states(context.most_ends)
        first, last = context.given, context.hands_on
        self._last = None if last is None else self._run(last)
        self._first = self._last if first is last else None if first is None else self._run(first)
        if self._last is None:
            return None
        self._last.summarise()
        if self._last is not self._first:
            return self._last.state(self._own_state())
        effect = self._last.map()
        if context.send_mt:
            return effect
        assert effect.mt is not None
        # The rule of the scan, for the part as a whole: none of its segments need have exited by itself.
        remembers = ~(torch.linalg.vector_norm(effect.mt, dim=(-2, -1)) <= x.eps)
        if readable(remembers) and bool(remembers.any()):
            raise ValueError(FORGOTTEN)
        self.remembers = remembers.any()
        return Effect(torch.where(remembers[:, None, None], torch.nan, effect.ht))

    def work_meanwhile(self) -> None:
        """All that needs no state from another rank."""
        if self._first is not None and self._first is not self._last:
            self._first.summarise()
        self._run_whole()
        if self._last is not None and self._last is not self._first:
            self._last.run(self._own_state())

    def work_with(self, given: Tensor | None) -> None:
        """The part that another rank begins."""
        if self._first is not None:
            final = self._first.run(given)
            if final is not None and self._ends is not None:
                self._ends[0].copy_(final)

    def collect(self, final_state: Tensor | None, output_final_state: bool) -> None:
        """Final states of all sequences, from the ranks where they end."""
        context = self._context
        ends = context.states(context.most_ends) if self._ends is None or self.failure is not None else self._ends
        every, work = context.ranks.all_gather(ends, "the exchange of final states")
        work.wait()
        if self.failure is not None or (final_state is None and not output_final_state):
            return
        # Sequences end in order, and so do the ranks where they do.
        rows = torch.cat([x[:count] for x, count in zip(every, context.ends_of_ranks, strict=True)])
        self.final_state = rows if final_state is None else final_state.copy_(rows)

    def _run(self, part: Part) -> PartRun:
        plan = self._context.plan(part, self.x.segment_len, self.x.fixed_plan)
        return PartRun(self.x.cut(part.start, part.end), plan, hands_on=not part.last)

    def _own_state(self) -> Tensor | None:
        """What the sequence that goes on to the next rank begins with."""
        return None if self._initial is None else self._initial[-1].float()

    def _run_whole(self) -> None:
        """The sequences that begin and end here."""
        parts = self._context.whole
        if not parts:
            return
        x = self.x.cut(parts[0].start, parts[-1].end)
        offsets, cu_seqlens = self._context.whole_offsets()
        before = int(self._first is not None and self._first is not self._last)
        api.fwd_cp(
            **x.forwarded(),
            initial_state=None if self._initial is None else self._initial[: len(parts)],
            final_state=None if self._ends is None else self._ends[before : before + len(parts)],
            cu_seqlens=cu_seqlens,
            segment_len=x.segment_len,
            fixed_plan=x.fixed_plan,
            eps=x.eps,
            cu_seqlens_cpu=offsets,
        )
