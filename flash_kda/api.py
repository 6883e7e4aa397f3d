"""The public functions: validate, plan, call the stages.

``fwd`` has FlashKDA's name, signature and meaning (https://github.com/MoonshotAI/FlashKDA). ``fwd_cp`` gives the same answer
with sequences cut into segments that run side by side. ``plan_segments``, ``state_only``, ``get_warmup_chunks`` and
``correct_initial_states`` are its parts, for those who compose them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from . import checkpoints, debug, dispatch, ops, settings, views
from . import validation as check
from .constants import CHUNK, EXIT_EPS, FIXED_SEGMENT_LEN, HEAD_DIM
from .host import readable
from .plan import SegmentPlan, plan_segments, processor_count
from .reference import stages
from .sm90 import cp, repeat, small
from .sm90 import stages as sm90
from .sm90.launch import Launched
from .sm90.plan import Cut, slot_pieces
from .sm90.plan import choose as choose_cut

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class SummaryInfo:
    """What ``state_only`` measured, per segment and head.

    Attributes:
        fallback: ``[NS, HV]`` bool, True where the scan reached the segment's start, so that mt matters; the exit mask.
        chunks: ``[NS, HV]`` int32, trailing chunks replayed.
        norm: ``[NS, HV]`` fp32, ``||M||_F`` over the replayed suffix: what an exit drops is at most this times the norm of
            the state that enters the suffix.
    """

    fallback: Tensor
    chunks: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Certificate:
    """What ``fwd_cp`` did and a bound of what it dropped, one row per segment that has a successor.

    Attributes:
        plan: the segments.
        segment: ``[M]`` int64, the segment of each row; ``plan.capacity`` for unused rows.
        chunks, norm, fallback: as in :class:`SummaryInfo`, ``[M, HV]``.
        dropped: ``[M, HV]`` fp32, bound of the relative error of the state S_out that the segment hands on. Where its scan
            exited, ``||M||_F ||S_c||_F / ||S_out||_F`` with S_c the state that enters the replayed suffix; where it did not,
            what earlier exits of the sequence dropped and this segment let through, over ``||S_out||_F``. eps bounds the loss
            relative to S_c: where gates then erase all but what was dropped, it is large relative to S_out, and shows here.
    """

    plan: SegmentPlan
    segment: Tensor
    chunks: Tensor
    norm: Tensor
    fallback: Tensor
    dropped: Tensor


def _public(traced: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Leaves autocast for the call, which would round the reference's fp32 products to bf16; traced calls go to an operator.

    Args:
        traced: what torch.compile sees instead of the function.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        def eager(*args: P.args, **kwargs: P.kwargs) -> R:
            tensor = args[0] if args else None
            if not isinstance(tensor, Tensor):
                tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            device = "cpu" if tensor is None else tensor.device.type
            if device == "meta" or not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
                return function(*args, **kwargs)
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)

        @wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return cast(R, traced(*args, **kwargs))
            return eager(*args, **kwargs)

        wrapped.eager = eager  # type: ignore[attr-defined]
        return wrapped

    return decorate


@_public(ops.fwd)
def fwd(
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
    cu_seqlens: Tensor | None = None,
    *,
    output_final_state: bool = False,
    initial_state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_every: int | None = None,
    beta_is_activated: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention prefill, each sequence from start to end.

    ::

        q, k      <- x * rsqrt(sum(x^2) + 1e-6)
        log_alpha <- lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
        S <- Diag(exp(log_alpha)) S
        S <- S + sigmoid(beta) * k (v - k^T S)
        o  = scale * q^T S

    Args:
        q, k: ``[B, T, H, 128]`` bf16 queries and keys, any strides; normalised inside.
        v: ``[B, T, HV, 128]`` bf16 values; HV is a multiple of H, and value head h reads query and key head ``h // (HV / H)``.
        g: ``[B, T, HV, 128]`` bf16 or fp32 gate before activation.
        beta: ``[B, T, HV]`` bf16 or fp32 logits of the write strength.
        scale: finite factor of the outputs, usually ``128 ** -0.5``.
        out: ``[B, T, HV, 128]`` bf16, overwritten, or None to allocate. Must not share memory with an input. Tokens after
            ``cu_seqlens[-1]`` are neither read nor written (0 if allocated here).
        A_log: ``[HV]`` fp32, or None for 0.
        dt_bias: ``[HV, 128]`` or ``[HV * 128]`` fp32, or None for 0.
        lower_bound: in [-5, 0]: the log decay of one token lies in [lower_bound, 0]; 0 means no decay. None (the softplus
            gate) is refused.
        initial_state: ``[N, HV, V, K]`` bf16 or fp32, or None for zeros; N is B, or the number of packed sequences. Not
            modified unless it is also passed as ``final_state``.
        final_state: ``[N, HV, V, K]`` bf16 or fp32, overwritten, or None. Its dtype may differ from ``initial_state``'s: the
            state is fp32 throughout and rounded once when stored.
        cu_seqlens: ``[N + 1]`` int32 or int64 on the device of q: first 0, non-decreasing; B must be 1. Sequences may be
            empty.
        output_final_state: allocate an fp32 ``final_state`` if none is given.
        initial_state_indices: ``[N]`` int32, any stride: ``initial_state`` is a pool ``[slots, HV, V, K]``, slots any distance
            apart, and sequence n starts from slot ``initial_state_indices[n]``; from zeros where there is no such slot (-1, or
            too large).
        final_state_indices: ``[N]`` int32, any stride: ``final_state`` is a pool and sequence n ends in slot
            ``final_state_indices[n]``; nowhere if there is no such slot. Other slots are untouched. A slot is named once; in
            place (both pools the same tensor) only by the sequence that also reads it, or by none that reads.
        checkpoint_states: bf16 or fp32, written: states on the way, each what a call that stops there returns as
            ``final_state``, bit for bit at multiples of 32. Rows that are not asked for are untouched.
        checkpoint_offsets: ``[N, C]`` or ``[N]`` int32 or int64: the state of sequence n after ``checkpoint_offsets[n, c]`` of
            its tokens goes to ``checkpoint_states[n, c]``, of shape ``[N, C, HV, V, K]`` or ``[N, HV, V, K]``. A multiple of 16
            up to the sequence's length, or 0 or less for none. Anything else is an error where offsets can be read (on a
            CPU, or in debug mode); elsewhere its row becomes NaN.
        checkpoint_every: instead of offsets, every so many tokens of each sequence, a multiple of 16. ``checkpoint_states`` is
            ``[B * T // checkpoint_every, HV, V, K]``; the j-th of a sequence that starts at token t of the packed axis goes to
            row ``t // checkpoint_every + j - 1``.
        beta_is_activated: beta is the write strength itself, in [0, 2], and takes the place of ``sigmoid(beta)``. Above 1
            the transition has negative eigenvalues; every bound holds up to 2 (docs/algorithm.md, section 5).
        impl: ``"auto"``, ``"reference"`` or ``"sm90"``; FLASH_KDA_IMPL if None.

    Returns:
        ``(out, final_state)``: the tensors given, or fresh ones; None for a state that nobody asked for.

    Raises:
        ValueError, TypeError: an argument breaks the contract; nothing has been written.
        RuntimeError: an input requires grad while grad mode is on.
        NotImplementedError: the ``impl`` asked for cannot run here.

    Does not wait on a CUDA device.
    """
    tensors = check.Tensors(
        q,
        k,
        v,
        g,
        beta,
        out,
        A_log,
        dt_bias,
        initial_state,
        final_state,
        cu_seqlens,
        initial_state_indices,
        final_state_indices,
        checkpoint_states,
        checkpoint_offsets,
    )
    memo = check.check_kind(tensors, scale, lower_bound, output_final_state, beta_is_activated, checkpoint_every)
    out, final_state, addresses = _allocate(tensors, check.check_aliasing(memo, tensors), output_final_state)
    key = _key(memo, ("fwd", impl), tensors, addresses)
    program = repeat.find(key)
    if program is not None and program.run(addresses, None):
        dispatch.took("sm90")
        return out, final_state
    problem = check.check_contents(memo, tensors, scale, lower_bound, beta_is_activated, checkpoint_every)
    launches: list[Launched] = []
    _forward(problem, _choose(impl, problem, out, initial_state, final_state), out, initial_state, final_state, launches)
    repeat.keep(key, launches, addresses)
    if problem.debug:
        debug.check_results(problem, out, final_state)
    return out, final_state


def get_workspace_size(total_tokens: int, num_heads: int, num_sequences: int = 1) -> int:
    """Bytes of workspace that :func:`fwd` wants from its caller: 0. For callers of FlashKDA, which ask before each call.

    Args:
        total_tokens: B * T.
        num_heads: H.
        num_sequences: N.

    Returns:
        0, for any shape: the kernels keep what they need in registers and shared memory.

    Raises:
        ValueError, TypeError: a number is negative, or no integer.
    """
    for name, value in (("total_tokens", total_tokens), ("num_heads", num_heads), ("num_sequences", num_sequences)):
        check.check_integer(name, value, 0)
    return 0


@_public(ops.fwd_cp)
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
    cu_seqlens: Tensor | None = None,
    auto_cp: bool = True,
    *,
    output_final_state: bool = False,
    initial_state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_every: int | None = None,
    beta_is_activated: bool = False,
    segment_len: int | None = None,
    fixed_plan: bool = False,
    eps: float = EXIT_EPS,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    certificate: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Certificate | None]:
    """The answer of :func:`fwd`, with sequences cut into segments that run side by side.

    Each segment's effect on the state is found by a backward scan that stops once it has measured that the state before the
    replayed part counts for at most ``eps`` of its norm (:func:`state_only`); the effects are chained, and all segments run
    from these initial states. For any gate the loss is at most ``eps`` relative to the state before the replayed part;
    :class:`Certificate` tells what that is relative to the states handed on (docs/algorithm.md, section 6).

    Args:
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens,
        output_final_state, initial_state_indices, final_state_indices, checkpoint_states, checkpoint_offsets,
        checkpoint_every, beta_is_activated, impl: as in :func:`fwd`; checkpoints with bits that do not depend on where the
        call stops need ``segment_len`` or ``fixed_plan``.
        auto_cp: False is :func:`fwd`.
        segment_len: tokens per segment, a multiple of 16; chosen from T, N, H and the processor count if None.
        fixed_plan: cut at multiples of a constant, so that the bits of a sequence do not depend on its batch.
        eps: the scan of a (segment, head) stops once ``||M||_F <= eps``; with 0 only where that is exactly 0 in fp32.
        cu_seqlens_cpu: host copy of ``cu_seqlens``, optional: lets the planner see lengths that are on a GPU.
        certificate: also return a :class:`Certificate`, or None if nothing was cut.

    Returns:
        ``(out, final_state)`` or ``(out, final_state, certificate)``.

    Raises:
        As :func:`fwd`.

    A NaN or inf does not cross an exit: what precedes a replayed suffix is not seen by later segments.
    """
    tensors = check.Tensors(
        q,
        k,
        v,
        g,
        beta,
        out,
        A_log,
        dt_bias,
        initial_state,
        final_state,
        cu_seqlens,
        initial_state_indices,
        final_state_indices,
        checkpoint_states,
        checkpoint_offsets,
    )
    memo = check.check_kind(tensors, scale, lower_bound, output_final_state, beta_is_activated, checkpoint_every)
    eps = check.check_eps(eps)
    if auto_cp:
        check.check_segment_len(segment_len, fixed_plan)
    out, final_state, addresses = _allocate(tensors, check.check_aliasing(memo, tensors), output_final_state)
    options = ("fwd_cp", impl, eps, bool(fixed_plan), segment_len) if auto_cp else ("fwd", impl)
    key = None if certificate or cu_seqlens_cpu is not None else _key(memo, options, tensors, addresses)
    program = repeat.find(key)
    scratch = None if program is None else program.allocate(out.device)
    if program is not None and program.run(addresses, scratch):
        dispatch.took("sm90")
        return out, final_state
    problem = check.check_contents(memo, tensors, scale, lower_bound, beta_is_activated, checkpoint_every)
    launches: list[Launched] = []
    saving, cannot_save = _saving(problem)
    cut_further = None
    if auto_cp and cannot_save is not None and (fixed_plan or segment_len is not None):
        cut_further = cannot_save if _choose_cut(problem, segment_len, fixed_plan, cu_seqlens_cpu) is not None else None
    path = _choose(impl, problem, out, initial_state, final_state, cut_further)
    made = None
    if not auto_cp:
        _forward(problem, path, out, initial_state, final_state, launches)
        repeat.keep(key, launches, addresses)
    elif path == "sm90":
        cut = _choose_cut(problem, segment_len, fixed_plan, cu_seqlens_cpu)
        if cannot_save is not None:
            cut = None  # the plan's own cuts give way to those of the checkpoints
        if cut is not None and certificate:
            cut = replace(cut, only_if_longer=0)  # a certificate names the pieces, so the host has to
        if cut is None:
            _forward(problem, path, out, initial_state, final_state, launches)
            repeat.keep(key, launches, addresses)
        else:
            in_place = initial_state is not None and final_state is not None and views.overlap(initial_state, final_state)
            layout = cp.Layout(cut, problem.inputs.heads, in_place, certificate)
            scratch = scratch or layout.allocate(out.device)
            scan = cp.forward(
                problem.inputs,
                problem.cu_seqlens,
                out,
                max_len=problem.max_len,
                layout=layout,
                scratch=scratch,
                eps=eps,
                initial_state=initial_state,
                in_index=problem.initial_state_indices,
                final_state=final_state,
                out_index=problem.final_state_indices,
                saving=saving,
                memo=memo,
                record=launches,
            )
            repeat.keep(key, launches, addresses, layout, scratch)
            made = None if scan is None else _certify(problem, cut, scan)
    else:
        hint = cu_seqlens_cpu
        if hint is None and cu_seqlens is None:
            hint = [b * q.shape[1] for b in range(problem.num_sequences + 1)]
        plan = plan_segments(
            problem.offsets(),
            problem.inputs.tokens,
            problem.inputs.heads,
            segment_len=segment_len,
            fixed_plan=fixed_plan,
            cu_seqlens_cpu=hint,
        )
        if plan.num_slots == 0:
            _forward(problem, path, out, initial_state, final_state, launches)
        else:
            with torch.no_grad():
                made = _forward_segments(problem, plan, out, initial_state, final_state, eps, certificate)
    if problem.debug:
        debug.check_results(problem, out, final_state)
    return (out, final_state, made) if certificate else (out, final_state)


@_public(ops.state_only)
def state_only(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    cu_seqlens: Tensor | None,
    num_warmup_chunks: Tensor | None = None,
    calc_mt: bool = False,
    *,
    beta_is_activated: bool = False,
    eps: float = EXIT_EPS,
    return_info: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, SummaryInfo] | tuple[Tensor, Tensor, SummaryInfo]:
    """Effect of each segment on the state: ``S_out = mt S_in + ht``.

    Walks each segment backward, chunk by chunk, and stops as soon as ``||M||_F <= eps`` (docs/algorithm.md).

    Args:
        k, v, g, beta, A_log, dt_bias, lower_bound: as in :func:`fwd`.
        cu_seqlens: ``[NS + 1]`` segment offsets, e.g. ``SegmentPlan.cu_seqlens``; None takes each batch row as a segment.
        num_warmup_chunks: int32 or int64 ``[NS, HV]`` or ``[NS]``: replay exactly this many trailing chunks, at most all,
            instead of measuring.
        calc_mt: also return mt.
        beta_is_activated: as in :func:`fwd`.
        eps: the measured exit; with 0 only where ``||M||_F`` is exactly 0 in fp32.
        return_info: also return a :class:`SummaryInfo`; its ``fallback`` is what ``correct_initial_states`` takes.
        impl: as in :func:`fwd`.

    Returns:
        ``ht``, ``(ht, mt)``, ``(ht, info)`` or ``(ht, mt, info)``, fresh. ht is ``[NS, HV, V, K]`` fp32, the state at the
        segment's end had it begun at zero. mt is ``[NS, HV, K, K]`` fp32: ``mt[n, h, i, j]`` is the derivative of
        ``S_out[i, :]`` by ``S_in[j, :]``, so that V-first states go ``h_next = h @ mt.mT + ht``. After an exit mt is 0; for an
        empty segment ht = 0 and mt = I.

    Raises:
        As :func:`fwd`.
    """
    problem = check.check_summary(k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens, beta_is_activated)
    eps = check.check_eps(eps)
    if num_warmup_chunks is not None:
        num_warmup_chunks = check.check_num_warmup_chunks(num_warmup_chunks, problem)
    path = dispatch.choose(impl, k.device, lambda: sm90.summary_refusal(problem.inputs, problem.cu_seqlens, problem.memo))
    if path == "sm90":
        return _summary(problem, num_warmup_chunks, calc_mt, eps, return_info)
    with torch.no_grad():
        summary = stages.state_summary(
            problem.inputs, problem.offsets(), max_len=problem.max_len, num_chunks=num_warmup_chunks, eps=eps
        )
    info = SummaryInfo(~summary.exited, summary.chunks, summary.norm)
    if calc_mt:
        return (summary.ht, summary.mt, info) if return_info else (summary.ht, summary.mt)
    return (summary.ht, info) if return_info else summary.ht


@_public(ops.get_warmup_chunks)
def get_warmup_chunks(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    cu_seqlens: Tensor | None,
    *,
    eps: float = EXIT_EPS,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """How many trailing chunks of each segment can matter at most, from the gates alone.

    Sound for any keys, values and write strengths in [0, 2]: after that many chunks
    ``sqrt(K) exp(sum_t max_i log alpha[t, i]) <= eps``, which bounds ``||M||_F`` (docs/algorithm.md). It is loose; the scan of
    :func:`state_only` measures and usually stops earlier.

    Args:
        g, A_log, dt_bias, lower_bound: as in :func:`fwd`.
        cu_seqlens: ``[NS + 1]`` segment offsets, or None.
        eps: the target.
        impl: as in :func:`fwd`.

    Returns:
        ``(num_warmup, fallback)``: ``[NS, HV]`` int32 and bool. Where the bound is not met inside the segment, fallback is
        True and num_warmup is all of its chunks: such a segment needs mt.

    Raises:
        As :func:`fwd`.
    """
    problem = check.check_gates(g, A_log, dt_bias, lower_bound, cu_seqlens)
    eps = check.check_eps(eps)
    path = dispatch.choose(impl, g.device, lambda: small.warmup_refusal(problem.inputs, problem.cu_seqlens))
    if path == "sm90":
        return small.warmup_bound(problem.inputs, problem.cu_seqlens, max_len=problem.max_len, eps=eps)
    x = problem.inputs.contiguous()
    with torch.no_grad():
        return stages.warmup_bound(x.g, x.A_log, x.dt_bias, x.lower_bound, problem.offsets(), max_len=problem.max_len, eps=eps)


@_public(ops.correct_initial_states)
def correct_initial_states(
    initial_state: Tensor | None,
    ht: Tensor,
    mt: Tensor | None,
    fallback: Tensor | None,
    seq_map: Tensor,
    *,
    impl: str | None = None,
) -> Tensor:
    """State that enters each segment: ``h[i + 1] = h[i] @ mt[i].mT + ht[i]`` along each sequence, V-first.

    Args:
        initial_state: ``[N, HV, V, K]`` bf16 or fp32, or None for zeros.
        ht: ``[NS, HV, V, K]`` fp32 from :func:`state_only`.
        mt: ``[NS, HV, K, K]`` fp32, or None if no segment needs it: then ``h[i + 1] = ht[i]``.
        fallback: ``[NS, HV]`` or ``[NS]`` bool, True where mt matters; where False, mt and all that precedes the segment are
            skipped, by selection. None: True everywhere if mt is given.
        seq_map: ``[N + 1]`` int32 or int64: sequence n owns segments ``seq_map[n] .. seq_map[n + 1] - 1``
            (``SegmentPlan.seq_map``).
        impl: as in :func:`fwd`.

    Returns:
        ``[NS, HV, V, K]`` fp32, fresh; 0 for segments that no sequence owns.

    Raises:
        As :func:`fwd`. ValueError also if fallback is True somewhere and mt is None (checked where free).
    """
    needs_mt = check.check_correction(initial_state, ht, mt, fallback, seq_map)
    path = dispatch.choose(impl, ht.device, lambda: small.chain_refusal(initial_state, ht, mt, seq_map))
    if path == "sm90":
        return small.entering_states(initial_state, ht, mt, needs_mt, seq_map)
    rows = ht.shape[0]
    with torch.no_grad():
        ends = stages.chain(initial_state, ht, mt, needs_mt, seq_map, max_slots=rows)
        segment = torch.arange(rows, device=ht.device)
        sequence = torch.searchsorted(seq_map, segment.to(seq_map.dtype), right=True) - 1
        owned = sequence < seq_map.numel() - 1
        first = seq_map.long()[sequence.clamp(min=0)] == segment
        states = torch.where((owned & ~first)[:, None, None, None], ends.roll(1, 0), 0)
        if initial_state is not None and seq_map.numel() > 1:
            start = initial_state.to(ht.dtype)[sequence.clamp(0, seq_map.numel() - 2)]
            states = torch.where((owned & first)[:, None, None, None], start, states)
    return states


def _allocate(
    tensors: check.Tensors, addresses: tuple[int, ...], output_final_state: bool
) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """What a call writes, and the addresses with those of what is fresh."""
    v, out, final_state, offsets = tensors.v, tensors.out, tensors.final_state, tensors.cu_seqlens
    if out is None:
        out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
        addresses += (out.data_ptr(),)
    if final_state is None and output_final_state:
        sequences = v.shape[0] if offsets is None else offsets.numel() - 1
        final_state = torch.empty(sequences, v.shape[2], HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=v.device)
        addresses += (final_state.data_ptr(),)
    return out, final_state, addresses


def _key(memo: check.Memo, options: tuple[object, ...], tensors: check.Tensors, addresses: tuple[int, ...]) -> Hashable | None:
    """All that decides what a call launches, but for addresses; None if contents of tensors may play a part."""
    serial = memo.get("serial")
    if serial is None or settings.debug():
        return None
    for x in (tensors.cu_seqlens, tensors.checkpoint_offsets):
        if x is not None and readable(x):
            return None
    same = len(set(addresses)) < len(addresses)  # states in place, or one tensor given as two
    return serial, options, settings.impl(), tuple(map(addresses.index, addresses)) if same else None


def _pack(out: Tensor) -> Tensor:
    """``[B * T, H, V]`` of ``[B, T, H, V]``: a view where the strides allow, else a fresh tensor."""
    if out.shape[0] == 1:
        return out[0]
    if out.stride(0) == out.shape[1] * out.stride(1):
        return out.flatten(0, 1)
    return torch.zeros(out.shape[0] * out.shape[1], *out.shape[2:], dtype=out.dtype, device=out.device)


def _unpack(packed: Tensor, out: Tensor) -> None:
    if packed.numel() and packed.data_ptr() != out.data_ptr():
        out.copy_(packed.view(out.shape))


def _choose(
    impl: str | None,
    problem: check.Problem,
    out: Tensor,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cut_further: str | None = None,
) -> str:
    """Who runs the forward stage on these tensors; cut_further tells why not the kernels, if they could."""

    def refusal() -> str | None:
        if cut_further is not None:
            return cut_further
        indices = (problem.initial_state_indices, problem.final_state_indices)
        return sm90.refusal(problem.inputs, problem.cu_seqlens, out, initial_state, final_state, *indices, problem.memo)

    return dispatch.choose(impl, out.device, refusal)


def _forward(
    problem: check.Problem,
    path: str,
    out: Tensor,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    launches: list[Launched],
) -> None:
    """The forward stage alone. Launches are appended if they are all that was done."""
    inputs, offsets = problem.inputs, problem.cu_seqlens
    states: dict[str, Any] = {
        "initial_state": initial_state,
        "in_index": problem.initial_state_indices,
        "final_state": final_state,
        "out_index": problem.final_state_indices,
    }
    saving, cannot_save = _saving(problem)
    if path == "sm90" and cannot_save is None:
        sm90.forward(inputs, offsets, out, max_len=problem.max_len, **states, saving=saving, memo=problem.memo, record=launches)
        return
    offsets = problem.offsets()
    with torch.no_grad():
        packed = out if path == "sm90" else _pack(out)
        if problem.checkpoint_states is None:
            stages.forward(inputs, offsets, packed, max_len=problem.max_len, **states)
        else:
            stage = sm90.forward if path == "sm90" else stages.forward
            whole = checkpoints.Segments(offsets.diff().long(), problem.max_len)
            checkpoints.forward(stage, _cuts(problem, whole), inputs, offsets, packed, **states)
        if packed is not out:
            _unpack(packed, out)


def _saving(problem: check.Problem) -> tuple[sm90.Saving | None, str | None]:
    """What the kernels store of the checkpoints that were asked for, or why they cannot."""
    states = problem.checkpoint_states
    if states is None or states.numel() == 0:
        return None, None
    if problem.inputs.tokens == 0:
        return None, "there are no tokens"
    saving = sm90.Saving(states, problem.checkpoint_offsets, problem.checkpoint_every)
    return saving, sm90.saving_refusal(saving)


def _cuts(problem: check.Problem, segments: checkpoints.Segments) -> checkpoints.Cuts:
    """Where the checkpoints that were asked for interrupt segments."""
    states, offsets = problem.checkpoint_states, problem.offsets()
    assert states is not None
    if problem.checkpoint_offsets is not None:
        return checkpoints.at_offsets(states, problem.checkpoint_offsets, offsets.diff().long(), segments)
    assert problem.checkpoint_every is not None
    return checkpoints.at_every(states, problem.checkpoint_every, offsets[:-1].long(), segments)


def _summary(
    problem: check.Problem, num_chunks: Tensor | None, calc_mt: bool, eps: float, return_info: bool
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, SummaryInfo] | tuple[Tensor, Tensor, SummaryInfo]:
    """What :func:`state_only` returns, by the Hopper kernel."""
    rows, device = (problem.num_sequences, problem.inputs.v.shape[-2]), problem.inputs.v.device
    ht = torch.empty(*rows, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=device)
    mt = torch.empty_like(ht) if calc_mt else None
    needs_mt, chunks = torch.empty(2, *rows, dtype=torch.int32, device=device).unbind()
    norm = torch.empty(rows, dtype=torch.float32, device=device)
    sm90.state_summary(
        problem.inputs,
        problem.cu_seqlens,
        max_len=problem.max_len,
        ht=ht,
        mt=mt,
        needs_mt=needs_mt,
        chunks=chunks,
        norm=norm,
        num_chunks=None if num_chunks is None else num_chunks.clamp(max=2**31 - 1).to(torch.int32).contiguous(),
        eps=eps,
    )
    if not return_info:
        return ht if mt is None else (ht, mt)
    info = SummaryInfo(needs_mt.bool(), chunks, norm)
    return (ht, info) if mt is None else (ht, mt, info)


def _choose_cut(
    problem: check.Problem, segment_len: int | None, fixed_plan: bool, cu_seqlens_cpu: Tensor | Sequence[int] | None
) -> Cut | None:
    """Where Hopper cuts this call; None: nowhere."""
    inputs, offsets = problem.inputs, problem.cu_seqlens
    lengths: tuple[int, ...] | None = None
    if offsets is None and cu_seqlens_cpu is None:
        check.check_segment_len(segment_len, fixed_plan)
        lengths = (problem.max_len,) * problem.num_sequences
    else:
        hint = check.check_plan(problem.offsets(), inputs.tokens, inputs.heads, segment_len, None, fixed_plan, cu_seqlens_cpu)
        lengths = None if hint is None else tuple(end - start for start, end in itertools.pairwise(hint))
    if fixed_plan:
        segment_len = FIXED_SEGMENT_LEN
    if segment_len is None:
        processors = processor_count(inputs.v.device)
        return choose_cut(inputs.tokens, problem.num_sequences, inputs.v.shape[-2], processors, lengths)
    if problem.num_sequences == 0 or (lengths is not None and max(lengths, default=0) <= segment_len):
        return None
    return Cut.every(segment_len, inputs.tokens)


def _forward_segments(
    problem: check.Problem,
    plan: SegmentPlan,
    out: Tensor,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    eps: float,
    certify: bool,
) -> Certificate | None:
    """Summary, chain, forward. Slots hold the state handed on at the end of every segment that has a successor."""
    inputs, device = problem.inputs, out.device
    if initial_state is not None and problem.initial_state_indices is not None:
        initial_state = stages.gather_rows(initial_state, problem.initial_state_indices)
    of_slot = plan.segment_of_slot()
    summary = stages.state_summary(inputs, plan.cu_seqlens, max_len=plan.max_segment_len, segments=of_slot, eps=eps)
    handed_on = stages.chain(initial_state, summary.ht, summary.mt, ~summary.exited, plan.slot_map(), max_slots=plan.num_slots)
    segment = torch.arange(plan.capacity, device=device)
    sequence = plan.sequence_of_segment()
    used = sequence < plan.num_sequences
    owner = sequence.clamp(max=plan.num_sequences - 1)
    first = plan.seq_map[owner] == segment
    last = plan.seq_map[owner + 1] == segment + 1
    # One table of entering states: the slots, then the sequences' initial states.
    in_index = torch.where(used & ~first, segment - 1 - owner, -1)
    if initial_state is not None:
        in_index = torch.where(used & first, plan.num_slots + owner, in_index)
        handed_on = torch.cat([handed_on, initial_state.to(handed_on.dtype)])
    probe = None
    if certify:
        table = torch.full((plan.capacity + 1, inputs.heads), -1, dtype=torch.int64, device=device)
        suffix = plan.segment_len // CHUNK - summary.chunks.long()
        probe = table.index_copy_(0, of_slot, torch.where(summary.exited, suffix, -1))[:-1]
    row = owner if problem.final_state_indices is None else problem.final_state_indices.long()[owner]
    out_index = torch.where(used & last, row, -1)
    packed = _pack(out)
    states = {"initial_state": handed_on, "in_index": in_index, "final_state": final_state, "out_index": out_index}
    if problem.checkpoint_states is None:
        entering = stages.forward(inputs, plan.cu_seqlens, packed, max_len=plan.max_segment_len, **states, probe=probe)
    else:
        begin = torch.where(used, (segment - plan.seq_map[owner]) * plan.segment_len, 0)
        cut = checkpoints.Segments(plan.cu_seqlens.diff().long(), plan.max_segment_len, owner, begin)
        entering = checkpoints.forward(
            stages.forward, _cuts(problem, cut), inputs, plan.cu_seqlens, packed, **states, probe=probe
        )
    _unpack(packed, out)
    if entering is None:
        return None
    entering = torch.cat([entering, entering.new_zeros(1, inputs.heads)])[of_slot]
    starts = torch.isin(torch.arange(plan.num_slots, device=device), plan.slot_map()[:-1])
    dropped = _dropped(handed_on[: plan.num_slots], starts, summary.exited, summary.norm, entering)
    return Certificate(plan, of_slot, summary.chunks, summary.norm, ~summary.exited, dropped)


def _dropped(states: Tensor, starts: Tensor, exited: Tensor, norm: Tensor, entering: Tensor) -> Tensor:
    """``[M, H]`` bound of the relative error of the states handed on; see :class:`Certificate`.

    Args:
        states: ``[M, H, V, K]``, at the ends of pieces that follow each other.
        starts: ``[M]`` bool, the piece begins a sequence.
        exited, norm: ``[M, H]``, of the scan.
        entering: ``[M, H]``, norm of the state that enters the replayed suffix.
    """
    leaving = torch.linalg.vector_norm(states, dim=(-2, -1))
    lost = torch.zeros_like(norm[0])
    losses = []
    for slot in range(len(states)):
        # What an exit drops, or what was lost before and goes through a segment scanned whole: ||M||_2 <= 1.
        carried = torch.where(starts[slot], 0, lost) * norm[slot].clamp(max=1)
        lost = torch.where(exited[slot], norm[slot] * entering[slot], carried)
        losses.append(lost)
    dropped: Tensor = torch.stack(losses) / leaving.clamp(min=torch.finfo(leaving.dtype).tiny)
    return dropped


def _certify(problem: check.Problem, cut: Cut, scan: cp.Scan) -> Certificate:
    """The certificate of a call that Hopper cut."""
    assert scan.entering is not None
    inputs, offsets = problem.inputs, problem.offsets()
    plan = plan_segments(offsets, inputs.tokens, inputs.v.shape[-2], segment_len=cut.segment_len)
    sequence, piece, used = slot_pieces(offsets, cut)
    segment = torch.where(used, plan.seq_map[sequence] + piece, plan.capacity)
    fallback = scan.needs_mt.bool() | ~used[:, None]
    dropped = _dropped(scan.states, piece == 0, ~fallback, scan.norm, scan.entering)
    return Certificate(plan, segment, scan.chunks, scan.norm, fallback, torch.where(used[:, None], dropped, 0))
