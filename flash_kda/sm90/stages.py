"""The stages on Hopper: tensors to kernel arguments, shapes to grids. Same signatures as reference/stages.py.

What the kernels cannot take is refused by name (:func:`refusal`) before anything is launched; nothing is copied to make it
fit. What depends on shapes, strides and dtypes alone is worked out once for each kind of call and kept.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs
from . import launch
from .kernels import flags
from .plan import Cut

WHOLE = 2**30
"""`segment_len` of a call that cuts nothing."""

VECTOR = 8
"""bf16 elements in 16 bytes: the tensor memory accelerator wants addresses and strides that are multiples of it."""

LONG = 1024
"""Mean tokens a segment from which each item gets a CTA of its own: the hardware then evens out unequal lengths, which gains
more than the CTAs' starts cost. Below, as many CTAs as SMs take the items in turn. Measured: docs/measured.md."""


def refusal(
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    out: Tensor,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    in_index: Tensor | None,
    out_index: Tensor | None,
    memo: dict[str, Any],
) -> str | None:
    """Why the kernels cannot take these tensors, or None.

    Args:
        inputs: the tensors, with or without batch axis.
        cu_seqlens: offsets, or None.
        out: like q.
        initial_state, final_state: states or pools, or None.
        in_index, out_index: their rows, or None.
        memo: of the kind of call: what depends on shapes, strides and dtypes alone is kept there.
    """
    reason: str | None
    if "refusal" not in memo:
        reason = _refusal(inputs, out, initial_state, final_state)
        vectors = {"cu_seqlens": cu_seqlens, "initial_state_indices": in_index, "final_state_indices": out_index}
        for name, x in vectors.items():
            if reason is None and x is not None and not x.is_contiguous():
                reason = f"{name} has stride {x.stride(0)}, the kernels need it contiguous"
        memo["refusal"] = reason
    reason = memo["refusal"]
    if reason is None:
        states = (("initial_state", initial_state), ("final_state", final_state))
        for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("g", inputs.g), ("out", out), *states):
            if x is not None and x.data_ptr() & 15:
                return f"{name} starts at address {x.data_ptr():#x}, the kernels need it 16-byte aligned"
    return reason


def _refusal(inputs: Inputs, out: Tensor, initial_state: Tensor | None, final_state: Tensor | None) -> str | None:
    if inputs.q is None:
        return "there is no q"
    if inputs.beta_is_activated:
        return "beta is activated, the kernels apply the sigmoid themselves"
    if inputs.tokens == 0:
        return None
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.g, "out": out, "beta": inputs.beta}
    for name, x in named.items():
        if x.dtype != torch.bfloat16:
            return f"{name} is {x.dtype}, the kernels read bfloat16"
        token = x.dim() - (2 if name == "beta" else 3)
        if token and x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1):
            return f"{name} has batch stride {x.stride(0)}, the kernels need T token strides, {x.shape[1] * x.stride(1)}"
        if name == "beta":
            continue
        strides = x.stride()[token:]
        # The stride of an axis of size 1 is never used, and torch leaves anything in it.
        steps = [s for s, n in zip(strides, (inputs.tokens, x.shape[-2]), strict=False) if n > 1]
        if strides[2] != 1 or any(s % VECTOR or s == 0 for s in steps):
            return (
                f"{name} has strides {strides} for (token, head, channel), the kernels need 1 for the last and positive "
                f"multiples of {VECTOR} elements for the others"
            )
    for name, parameter in (("A_log", inputs.A_log), ("dt_bias", inputs.dt_bias)):
        if parameter is not None and not parameter.is_contiguous():
            return f"{name} has strides {parameter.stride()}, the kernels need it contiguous"
    for name, state in (("initial_state", initial_state), ("final_state", final_state)):
        if state is not None and (not state[:1].is_contiguous() or state.stride(0) % 4):
            return (
                f"{name} has strides {state.stride()}, the kernels need contiguous [H,V,K] slots, multiples of 4 elements apart"
            )
    return None


def forward(
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    out: Tensor,
    *,
    max_len: int,
    initial_state: Tensor | None = None,
    in_index: Tensor | None = None,
    final_state: Tensor | None = None,
    out_index: Tensor | None = None,
    slots: Tensor | None = None,
    segment_len: int = WHOLE,
    decided: Tensor | None = None,
    memo: dict[str, Any] | None = None,
) -> None:
    """Outputs of every sequence, and the states at their ends; see reference/stages.py.

    One launch on the current stream of the tensors' device; allocates nothing and does not wait.

    Args:
        inputs, out: with or without batch axis.
        cu_seqlens: as there, or None for sequences of ``max_len`` tokens each.
        in_index, out_index: int32.
        slots: ``[M, H, V, K]`` fp32, contiguous: cuts sequences every ``segment_len`` tokens; the state at the end of every
            piece that has a successor, in the order of kernels/segments.py.
        decided: one int32 that holds the length of pieces instead (:func:`decide`).
        memo: of the kind of call, as in :func:`refusal`.
    """
    if inputs.tokens == 0 and (final_state is None or final_state.numel() == 0):
        return
    call: _Call | None = None if memo is None else memo.get("call")
    if call is None:
        num_slots = 0 if slots is None else slots.shape[0]
        call = _Call.of(
            inputs, cu_seqlens, out, max_len, initial_state, in_index, final_state, out_index, num_slots, segment_len, decided
        )
        if memo is not None:
            memo["call"] = call
    if call.grid == 0:
        return
    q, k, v, g, o = inputs.q, inputs.k, inputs.v, inputs.g, out
    if inputs.tokens == 0 and final_state is not None:
        # States still move. A tensor map cannot describe nothing: it describes memory that nobody will touch.
        q = k = v = g = o = final_state
    assert q is not None
    q_view, k_view, v_view, g_view, out_view = call.views
    launch.kernel(call.kernel).launch(
        call.device,
        (call.grid, 1, 1),
        (q.data_ptr(), *q_view),
        (k.data_ptr(), *k_view),
        (v.data_ptr(), *v_view),
        (g.data_ptr(), *g_view),
        (o.data_ptr(), *out_view),
        inputs.beta.data_ptr(),
        out.data_ptr(),
        *(
            0 if x is None else x.data_ptr()
            for x in (
                inputs.A_log,
                inputs.dt_bias,
                cu_seqlens,
                initial_state,
                final_state,
                slots,
                decided,
                in_index,
                out_index,
            )
        ),
        *call.scalars,
    )


def decide(cu_seqlens: Tensor, total_tokens: int, cut: Cut, decided: Tensor) -> None:
    """Stores the length of pieces: that of ``cut`` if a sequence is long enough, else one that cuts nothing."""
    launch.kernel("decide").launch(
        decided.device.index,
        (1, 1, 1),
        cu_seqlens.data_ptr(),
        decided.data_ptr(),
        cu_seqlens.element_size() // 4,
        total_tokens,
        cu_seqlens.numel() - 1,
        cut.segment_len,
        cut.only_if_longer,
    )


@dataclass(frozen=True)
class _Call:
    """What a launch needs besides addresses.

    Attributes:
        kernel: the variant.
        device: its index.
        grid: CTAs; 0 if there is nothing to do.
        views: (shape, strides) of q, k, v, g, out as ``[T, H, 128]``.
        scalars: the arguments that follow the pointers.
    """

    kernel: str
    device: int
    grid: int
    views: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    scalars: tuple[int | float, ...]

    @staticmethod
    def of(
        inputs: Inputs,
        cu_seqlens: Tensor | None,
        out: Tensor,
        max_len: int,
        initial_state: Tensor | None,
        in_index: Tensor | None,
        final_state: Tensor | None,
        out_index: Tensor | None,
        num_slots: int,
        segment_len: int,
        decided: Tensor | None,
    ) -> _Call:
        q, tokens, heads = inputs.q, inputs.tokens, inputs.v.shape[-2]
        assert q is not None
        dense = tokens // max_len if max_len else inputs.k.shape[0]
        sequences = dense if cu_seqlens is None else cu_seqlens.numel() - 1
        segments = sequences + num_slots
        items = segments * heads
        # Two CTAs an item, each with half of V, repeat the preparation: worth it only for SMs that would idle.
        processors = _multiprocessors(out.device.index)
        split = 2 if 2 * items <= processors else 1
        ctas = items if tokens > LONG * segments else min(items, processors)
        bits = sum(
            bit
            for given, bit in (
                (inputs.A_log, flags.HAS_A_LOG),
                (inputs.dt_bias, flags.HAS_DT_BIAS),
                (initial_state, flags.HAS_INITIAL),
                (in_index, flags.HAS_IN_INDEX),
                (final_state, flags.HAS_FINAL),
                (out_index, flags.HAS_OUT_INDEX),
                (decided, flags.CUT_ON_DEVICE),
            )
            if given is not None
        )
        for state, bit in ((initial_state, flags.INITIAL_BF16), (final_state, flags.FINAL_BF16)):
            bits |= bit if state is not None and state.dtype == torch.bfloat16 else 0
        slots = [(0, 0) if state is None else (state.shape[0], state.stride(0)) for state in (initial_state, final_state)]
        return _Call(
            "forward_split_v" if split == 2 else "forward",
            out.device.index,
            ctas * split,
            tuple(((max(tokens, 1), *x.shape[-2:]), x.stride()[-3:]) for x in (q, inputs.k, inputs.v, inputs.g, out)),
            (
                heads,
                heads // q.shape[-2],
                items,
                tokens,
                max_len if cu_seqlens is None else -1,
                1 if cu_seqlens is None else cu_seqlens.element_size() // 4,
                sequences,
                num_slots,
                segment_len,
                bits,
                slots[0][0],
                slots[1][0],
                *inputs.beta.stride()[-2:],
                *out.stride()[-3:-1],
                slots[0][1],
                slots[1][1],
                inputs.lower_bound,
                inputs.scale,
            ),
        )


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
