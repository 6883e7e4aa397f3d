"""The small stages on Hopper: states along a sequence's pieces, and the a-priori bound of how far back a segment reaches.

As in stages.py, what the kernels cannot take is refused by name and nothing is copied to make it fit.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..constants import HEAD_DIM
from ..inputs import Inputs
from . import launch
from .kernels import flags
from .stages import VECTOR, Record, _multiprocessors, far_apart, gate_suffix, misaligned, words

ROWS = 16
"""V rows of a state that a CTA of the chain carries. Measured: docs/measured.md."""

FEW = 2
"""(segment, head) pairs for each SM up to which a longer block of tokens is read at once: latency, not bandwidth, counts."""


def warmup_refusal(inputs: Inputs, cu_seqlens: Tensor | None) -> str | None:
    """Why :func:`warmup_bound` cannot take these tensors, or None. Only ``g`` and the gate's parameters are looked at."""
    g = inputs.g
    if g.dim() == 4 and g.shape[0] > 1 and g.stride(0) != g.shape[1] * g.stride(1):
        return f"g has batch stride {g.stride(0)}, the kernels need T token strides, {g.shape[1] * g.stride(1)}"
    token, head, channel = g.stride()[-3:]
    unit = VECTOR // g.element_size()
    if g.numel() and (channel != 1 or token % unit or head % unit):
        return (
            f"g has strides {(token, head, channel)} for (token, head, channel), the kernels need 1 for the last and "
            f"multiples of {unit} elements for the others"
        )
    for name, parameter in (("A_log", inputs.A_log), ("dt_bias", inputs.dt_bias)):
        if parameter is not None and not parameter.is_contiguous():
            return f"{name} has strides {parameter.stride()}, the kernels need it contiguous"
    return far_apart({"cu_seqlens": cu_seqlens}) or misaligned(("g", g))


def warmup_bound(inputs: Inputs, cu_seqlens: Tensor | None, *, max_len: int, eps: float) -> tuple[Tensor, Tensor]:
    """Trailing chunks after which the a-priori bound of ``||M||_F`` is at most eps; see reference/stages.py.

    One launch on the current stream of the tensors' device; does not wait.

    Args:
        inputs: with or without batch axis; only g and the gate's parameters are read.
        cu_seqlens: ``[NS + 1]`` int32 or int64, or None for segments of ``max_len`` tokens each.

    Returns:
        ``(num_warmup, fallback)``, fresh, ``[NS, H]`` int32 and bool.
    """
    g = inputs.g
    tokens, heads = g.shape[:-2].numel(), g.shape[-2]
    segments = _rows(cu_seqlens, g)
    num = torch.empty(segments, heads, dtype=torch.int32, device=g.device)
    fallback = torch.empty(segments, heads, dtype=torch.bool, device=g.device)
    if segments * heads == 0:
        return num, fallback
    bits = (flags.HAS_A_LOG if inputs.A_log is not None else 0) | (flags.HAS_DT_BIAS if inputs.dt_bias is not None else 0)
    few = segments * heads <= FEW * _multiprocessors(g.device.index)
    launch.kernel(("warmup_16" if few else "warmup") + gate_suffix(g)).launch(
        g.device.index,
        (segments * heads, 1, 1),
        *(_address(x) for x in (g, inputs.A_log, inputs.dt_bias, cu_seqlens, num, fallback)),
        heads,
        tokens,
        max_len if cu_seqlens is None else -1,
        words(cu_seqlens),
        bits,
        *g.stride()[-3:-1],
        inputs.lower_bound,
        (math.log(eps) if eps > 0 else -math.inf) - 0.5 * math.log(HEAD_DIM),
    )
    return num, fallback


def chain_refusal(initial_state: Tensor | None, ht: Tensor, mt: Tensor | None, seq_map: Tensor | None) -> str | None:
    """Why :func:`chain` and :func:`entering_states` cannot take these tensors, or None."""
    for name, x in (("ht", ht), ("mt", mt)):
        if x is not None and not x.is_contiguous():
            return f"{name} has strides {x.stride()}, the kernels need it contiguous"
    if initial_state is not None and (not initial_state[:1].is_contiguous() or initial_state.stride(0) % 4):
        return (
            f"initial_state has strides {initial_state.stride()}, the kernels need contiguous [H,V,K] slots, multiples of 4 "
            f"elements apart"
        )
    return far_apart({"seq_map": seq_map}) or misaligned(("ht", ht), ("mt", mt), ("initial_state", initial_state))


def chain(
    slots: Tensor,
    mt: Tensor | None,
    needs_mt: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    tokens: int,
    max_len: int,
    segment_len: int,
    decided: Tensor | None = None,
    initial_state: Tensor | None = None,
    in_index: Tensor | None = None,
    effects: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    overlap: bool = False,
    memo: dict[Any, Any] | None = None,
    record: Record = None,
) -> None:
    """States at the ends of the pieces that have a successor, in place of their effects: ``h <- h mt^T + ht``, V-first.

    One launch on the current stream of the tensors' device; allocates nothing and does not wait. A slot that no piece owns
    is neither read nor written.

    Args:
        slots: ``[M, H, V, K]`` fp32, contiguous: ht on entry, states on exit, in the order of kernels/segments.py.
        mt: ``[M, H, K, K]`` fp32, contiguous, or None where no slot needs it.
        needs_mt: ``[M, H]`` int32 or bool, 0 where the slot's ht already is the state (its mt is not read); all need it if
            None and mt is given.
        cu_seqlens: ``[N + 1]`` int32 or int64 token offsets, or None for sequences of ``max_len`` tokens each.
        tokens: T_total.
        segment_len, decided: every ``segment_len`` tokens a sequence is cut, as in :func:`.stages.forward`.
        initial_state: ``[N or pool, H, V, K]`` bf16 or fp32, or None for zeros.
        in_index: ``[N]`` int32, each sequence's row of ``initial_state``; out of range for zeros.
        effects, norm, eps: what :func:`.stages.state_summary` made: begin anew every CHAINED slots where what came before
            cannot matter. The loss is at most ``eps`` relative to the state before.
        overlap: the kernel before on the stream is the state summary; start beside its end.
        memo: of the kind of call, as in :func:`.stages.refusal`; what shapes and the presence of tensors decide.
        record: the launch is appended.
    """
    sequences = tokens // max_len if cu_seqlens is None and max_len else 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    dense = max_len if cu_seqlens is None else -1
    pieces = _Pieces(cu_seqlens, dense, tokens, sequences, segment_len, decided)
    bits = 0 if effects is None else flags.HAS_EFFECTS
    _launch(slots, slots, mt, needs_mt, pieces, initial_state, in_index, bits, overlap, memo, (effects, norm, eps), record)


def entering_states(
    initial_state: Tensor | None, ht: Tensor, mt: Tensor | None, fallback: Tensor | None, seq_map: Tensor
) -> Tensor:
    """State that enters each segment; see ``correct_initial_states``. One launch, does not wait.

    Returns:
        ``[NS, H, V, K]`` fp32, fresh.
    """
    sequences = seq_map.numel() - 1
    if sequences < 1:
        return torch.zeros_like(ht)
    out = torch.empty_like(ht)
    pieces = _Pieces(seq_map, -1, ht.shape[0], sequences, 1, None)
    _launch(ht, out, mt, fallback, pieces, initial_state, None, flags.ENTERING, False, None)
    return out


class _Pieces(NamedTuple):
    """Which slots belong to which sequence; fields as the kernel's arguments of these names."""

    offsets: Tensor | None
    dense: int
    total: int
    sequences: int
    segment_len: int
    decided: Tensor | None


def _launch(
    ht: Tensor,
    out: Tensor,
    mt: Tensor | None,
    needs_mt: Tensor | None,
    pieces: _Pieces,
    initial_state: Tensor | None,
    in_index: Tensor | None,
    bits: int,
    overlap: bool,
    memo: dict[Any, Any] | None,
    anew: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0),
    record: Record = None,
) -> None:
    if ht.shape[0] * ht.shape[1] == 0 or pieces.sequences < 1 or (mt is None and not bits & flags.ENTERING):
        return
    call = None if memo is None else memo.get("chain")
    if call is None:
        call = _call(ht, mt, needs_mt, pieces, initial_state, in_index, bits)
        if memo is not None:
            memo["chain"] = call
    grid, view, scalars = call
    launch.kernel("chain").launch(
        ht.device.index,
        grid,
        (_address(ht if mt is None else mt), *view),
        *[_address(x) for x in (ht, out, anew[0], needs_mt, anew[1], pieces.offsets, pieces.decided, initial_state, in_index)],
        *scalars,
        anew[2],
        overlap=overlap,
        record=record,
    )


def _call(
    ht: Tensor,
    mt: Tensor | None,
    needs_mt: Tensor | None,
    pieces: _Pieces,
    initial_state: Tensor | None,
    in_index: Tensor | None,
    bits: int,
) -> tuple[tuple[int, int, int], tuple[tuple[int, int], tuple[int, int]], tuple[int, ...]]:
    """Grid, shape and strides of mt, and the scalars of a launch."""
    slots, heads = ht.shape[:2]
    for given, bit in (
        (initial_state, flags.HAS_INITIAL),
        (in_index, flags.HAS_IN_INDEX),
        (mt, flags.HAS_MT),
        (None if mt is None else needs_mt, flags.HAS_NEEDS),
        (pieces.decided, flags.CUT_ON_DEVICE),
    ):
        bits |= 0 if given is None else bit
    if initial_state is not None and initial_state.dtype == torch.bfloat16:
        bits |= flags.INITIAL_BF16
    group = HEAD_DIM // ROWS
    groups = min(slots * heads, max(1, _multiprocessors(ht.device.index) // group))
    needs = (0, 0) if needs_mt is None else tuple(stride * needs_mt.element_size() for stride in needs_mt.stride())
    scalars = (
        heads,
        pieces.dense,
        words(pieces.offsets),
        pieces.total,
        pieces.sequences,
        slots,
        pieces.segment_len,
        bits,
        0 if initial_state is None else initial_state.shape[0],
        words(in_index),
        *needs,
        0 if initial_state is None else initial_state.stride(0),
    )
    return (groups * group, 1, 1), ((slots * heads * HEAD_DIM, HEAD_DIM), (HEAD_DIM, 1)), scalars


def _rows(cu_seqlens: Tensor | None, g: Tensor) -> int:
    if cu_seqlens is not None:
        return cu_seqlens.numel() - 1
    return g.shape[0] if g.dim() == 4 else 1


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
