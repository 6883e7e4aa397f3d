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

from ..constants import EXIT_EPS, HEAD_DIM
from ..inputs import Inputs
from . import launch
from .kernels import flags
from .plan import Cut

WHOLE = 2**30
"""`segment_len` of a call that cuts nothing."""

VECTOR = 16
"""Bytes: the tensor memory accelerator wants addresses and strides that are multiples of it."""

STATE = (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1)
"""Strides of a [H, V, K] state."""

FP32_GATE = "_g32"
"""Ends the name of the variant that reads g in fp32."""

LONG = 1024
"""Mean tokens a segment from which each item gets a CTA of its own: the hardware then evens out unequal lengths, which gains
more than the CTAs' starts cost. Below, as many CTAs as SMs take the items in turn. Measured: docs/measured.md."""


Record = list[launch.Launched] | None
"""Where a stage notes its launches, for a later call that equals this one (repeat.py)."""


@dataclass(frozen=True)
class Saving:
    """States on the way that the forward kernel stores.

    Attributes:
        states, offsets, every: ``checkpoint_states``, ``checkpoint_offsets`` and ``checkpoint_every`` of ``fwd``; one of the
            last two is None.
    """

    states: Tensor
    offsets: Tensor | None
    every: int | None

    def step(self) -> int:
        """Elements from one state to the next."""
        return self.states.stride(1 if self.states.dim() == 5 and self.states.shape[1] > 1 else 0)


def saving_refusal(saving: Saving) -> str | None:
    """Why the forward kernel cannot store these states itself, or None."""
    states = saving.states
    axes = zip(states.stride()[-3:], STATE, states.shape[-3:], strict=True)
    if any(step != want for step, want, n in axes if n > 1) or saving.step() % 4:
        return (
            f"checkpoint_states has strides {states.stride()}, the kernels need contiguous [H,V,K] states, multiples of 4 "
            f"elements apart"
        )
    return misaligned(("checkpoint_states", states))


def refusal(
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    out: Tensor,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    in_index: Tensor | None,
    out_index: Tensor | None,
    memo: dict[Any, Any],
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
        memo["refusal"] = reason or far_apart(vectors)
    reason = memo["refusal"]
    states = (("initial_state", initial_state), ("final_state", final_state))
    tokens = (("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("g", inputs.g), ("out", out))
    return reason or misaligned(*tokens, *states)


def summary_refusal(inputs: Inputs, cu_seqlens: Tensor | None, memo: dict[Any, Any]) -> str | None:
    """Why :func:`state_summary` cannot take these tensors, or None. q is not looked at; memo as in :func:`refusal`."""
    reason: str | None
    if "summary_refusal" not in memo:
        reason = _unfit(inputs, {"k": inputs.k, "v": inputs.v, "g": inputs.g})
        memo["summary_refusal"] = reason or far_apart({"cu_seqlens": cu_seqlens})
    reason = memo["summary_refusal"]
    return reason or misaligned(("k", inputs.k), ("v", inputs.v), ("g", inputs.g))


def _refusal(inputs: Inputs, out: Tensor, initial_state: Tensor | None, final_state: Tensor | None) -> str | None:
    if inputs.q is None:
        return "there is no q"
    reason = _unfit(inputs, {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.g, "out": out})
    if reason is not None:
        return reason
    for name, state in (("initial_state", initial_state), ("final_state", final_state)):
        if state is not None and (not state[:1].is_contiguous() or state.stride(0) % 4):
            return (
                f"{name} has strides {state.stride()}, the kernels need contiguous [H,V,K] slots, multiples of 4 elements apart"
            )
    return None


def _unfit(inputs: Inputs, named: dict[str, Tensor]) -> str | None:
    """The same of the token tensors `named`, beta and the parameters of the gate, by shapes, strides and dtypes."""
    if inputs.tokens == 0:
        return None
    for name, x in {**named, "beta": inputs.beta}.items():
        token = x.dim() - (2 if name == "beta" else 3)
        if token and x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1):
            return f"{name} has batch stride {x.stride(0)}, the kernels need T token strides, {x.shape[1] * x.stride(1)}"
        if name == "beta":
            continue
        strides = x.stride()[token:]
        # The stride of an axis of size 1 is never used, and torch leaves anything in it.
        steps = [s for s, n in zip(strides, (inputs.tokens, x.shape[-2]), strict=False) if n > 1]
        unit = VECTOR // x.element_size()
        if strides[2] != 1 or any(s % unit or s == 0 for s in steps):
            return (
                f"{name} has strides {strides} for (token, head, channel), the kernels need 1 for the last and positive "
                f"multiples of {unit} elements for the others"
            )
    for name, parameter in (("A_log", inputs.A_log), ("dt_bias", inputs.dt_bias)):
        if parameter is not None and not parameter.is_contiguous():
            return f"{name} has strides {parameter.stride()}, the kernels need it contiguous"
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
    taken: Tensor | None = None,
    chunks: Tensor | None = None,
    entering: Tensor | None = None,
    saving: Saving | None = None,
    overlap: bool = False,
    memo: dict[Any, Any] | None = None,
    record: Record = None,
) -> None:
    """Outputs of every sequence, and the states at their ends; see reference/stages.py.

    One launch on the current stream of the tensors' device; allocates nothing and does not wait.

    Args:
        inputs, out: with or without batch axis.
        cu_seqlens: as there, or None for sequences of ``max_len`` tokens each.
        in_index, out_index: int32, any stride.
        slots: ``[M, H, V, K]`` fp32, contiguous: cuts sequences every ``segment_len`` tokens; the state at the end of every
            piece that has a successor, in the order of kernels/segments.py.
        decided: one int32 that holds the length of pieces instead (:func:`decide`).
        taken: ``[M, H]`` int32 zeros, needed with ``slots`` where ``initial_state`` and ``final_state`` share memory.
        chunks, entering: ``[M, H]`` int32 and fp32: store the norm of the state that enters the last ``chunks`` chunks of each
            piece, where there are any before.
        saving: states on the way to store; needs tokens, and :func:`saving_refusal` to have nothing against it.
        overlap: the kernel before on the stream is the chain that fills ``slots``; start beside it.
        memo: of the kind of call, as in :func:`refusal`.
        record: the launch is appended.
    """
    if inputs.tokens == 0:
        if final_state is None or final_state.numel() == 0:
            return
        inputs = inputs._replace(A_log=None, dt_bias=None)  # nobody needs them, and they may have any strides
    call: _Call | None = None if memo is None else memo.get("call")
    if call is None:
        num_slots = 0 if slots is None else slots.shape[0]
        call = _Call.of(
            inputs,
            cu_seqlens,
            out,
            max_len,
            initial_state,
            in_index,
            final_state,
            out_index,
            num_slots,
            segment_len,
            decided,
            taken,
            chunks,
            saving,
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
        *[
            0 if x is None else x.data_ptr()
            for x in (
                inputs.A_log,
                inputs.dt_bias,
                cu_seqlens,
                initial_state,
                final_state,
                slots,
                taken,
                chunks,
                entering,
                decided,
                in_index,
                out_index,
                None if saving is None else saving.states,
                None if saving is None else saving.offsets,
            )
        ],
        *call.scalars,
        overlap=overlap,
        record=record,
    )


def decide(cu_seqlens: Tensor, total_tokens: int, cut: Cut, decided: Tensor, record: Record = None) -> None:
    """Stores the length of pieces: that of ``cut`` if a sequence is long enough, else one that cuts nothing."""
    launch.kernel("decide").launch(
        decided.device.index,
        (1, 1, 1),
        cu_seqlens.data_ptr(),
        decided.data_ptr(),
        words(cu_seqlens),
        total_tokens,
        cu_seqlens.numel() - 1,
        cut.segment_len,
        cut.only_if_longer,
        record=record,
    )


def state_summary(
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    *,
    max_len: int,
    ht: Tensor,
    mt: Tensor | None,
    needs_mt: Tensor,
    chunks: Tensor,
    norm: Tensor,
    num_slots: int = 0,
    segment_len: int = WHOLE,
    decided: Tensor | None = None,
    num_chunks: Tensor | None = None,
    eps: float = EXIT_EPS,
    fill: bool = True,
    effects: Tensor | None = None,
    memo: dict[Any, Any] | None = None,
    record: Record = None,
) -> None:
    """Effect of segments on the state, ``h <- h mt^T + ht``; see reference/stages.py. Fills the outputs.

    A row is a segment: one of the ``num_slots`` pieces that have a successor, in the order of kernels/segments.py, or with
    ``num_slots`` = 0 a whole sequence. One launch on the current stream of the tensors' device; allocates nothing and does
    not wait. The exit is tested after 1, 2, 4, 8, 16, 24, ... steps of 32 tokens.

    Args:
        inputs: with or without batch axis; q is not used.
        cu_seqlens: int32 or int64 offsets, or None for sequences of ``max_len`` tokens each.
        max_len: no sequence is longer (tokens).
        ht: ``[M, H, V, K]`` fp32, contiguous.
        mt: ``[M, H, K, K]`` fp32, contiguous, or None. Where the scan exits it holds 0, or what it held (``fill``).
        needs_mt: ``[M, H]`` int32: 1 where the scan reached the start of the segment, 0 where it exited.
        chunks: ``[M, H]`` int32: trailing 16-token chunks replayed.
        norm: ``[M, H]`` fp32: ``||M||_F`` at the end of the scan.
        num_slots, segment_len, decided: sequences are cut every ``segment_len`` tokens, as in :func:`forward`.
        num_chunks: ``[M, H]`` int32, replay this many trailing chunks (at most all) and test nothing.
        eps: the scan stops once ``||M||_F <= eps``; NaN never stops it.
        fill: rows without tokens get ht = 0 and mt = I, and exited ones mt = 0; otherwise they are left alone.
        effects: ``[M // CHAINED + 1, H, V, K]`` fp32, contiguous: also store the ht that a chain needs to begin anew.
        memo: of the kind of call, as in :func:`refusal`; the fields that the shapes above, ``fill`` and the presence of mt,
            num_chunks and effects decide.
        record: the launch is appended.
    """
    if inputs.tokens == 0:
        needs_mt.fill_(1)
        chunks.zero_()
        norm.fill_(ht.shape[-1] ** 0.5)
        if fill:
            ht.zero_()
            if mt is not None:
                mt.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
        return
    call: _Call | None = None if memo is None else memo.get("summary")
    if call is None:
        call = _Call.of_summary(inputs, cu_seqlens, max_len, num_slots, segment_len, decided, mt, num_chunks, fill, effects)
        if memo is not None:
            memo["summary"] = call
    if call.grid == 0:
        return
    k_view, v_view, g_view = call.views
    launch.kernel(call.kernel).launch(
        call.device,
        (call.grid, 1, 1),
        (inputs.k.data_ptr(), *k_view),
        (inputs.v.data_ptr(), *v_view),
        (inputs.g.data_ptr(), *g_view),
        inputs.beta.data_ptr(),
        *[
            0 if x is None else x.data_ptr()
            for x in (inputs.A_log, inputs.dt_bias, cu_seqlens, decided, num_chunks, ht, mt, effects, needs_mt, chunks, norm)
        ],
        *call.scalars,
        eps,
        record=record,
    )


@dataclass(frozen=True)
class _Call:
    """What a launch needs besides addresses.

    Attributes:
        kernel: the variant.
        device: its index.
        grid: CTAs; 0 if there is nothing to do.
        views: (shape, strides) of q, k, v, g, out (forward) or k, v, g (summary) as ``[T, H, 128]``.
        scalars: the arguments that follow the pointers, but for eps.
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
        taken: Tensor | None,
        probe: Tensor | None,
        saving: Saving | None,
    ) -> _Call:
        q, tokens, heads = inputs.q, inputs.tokens, inputs.v.shape[-2]
        assert q is not None
        dense = tokens // max_len if max_len else inputs.k.shape[0]
        sequences = dense if cu_seqlens is None else cu_seqlens.numel() - 1
        segments = sequences + num_slots
        items = segments * heads
        # Two CTAs an item, each with half of V, repeat the preparation: worth it only for SMs that would idle.
        processors = _multiprocessors(out.device.index)
        split = 2 if 2 * items <= processors and probe is None else 1
        # A last piece may wait for its first (taken): with one CTA an item, started in their order, that one runs or has run.
        ctas = items if taken is not None or tokens > LONG * segments else min(items, processors)
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
                (taken, flags.IN_PLACE),
            )
            if given is not None
        )
        bits |= _beta_bits(inputs)
        for state, bit in ((initial_state, flags.INITIAL_BF16), (final_state, flags.FINAL_BF16)):
            bits |= bit if state is not None and state.dtype == torch.bfloat16 else 0
        saved: tuple[int, ...] = (0,) * 6
        if saving is not None:
            states, at = saving.states, saving.offsets
            bits |= flags.SAVED_BF16 if states.dtype == torch.bfloat16 else 0
            bits |= flags.SAVED_AT_INT64 if at is not None and at.dtype == torch.int64 else 0
            columns = 1
            steps: tuple[int, ...] = (0, 0)
            if at is not None:
                columns = at.shape[1] if at.dim() == 2 else 1
                steps = tuple(step * at.element_size() // 4 for step in (*at.stride(), 0)[:2])
            saved = (saving.every or 0, columns, states.shape[:-3].numel(), saving.step(), *steps)
        slots = [(0, 0) if state is None else (state.shape[0], state.stride(0)) for state in (initial_state, final_state)]
        return _Call(
            "forward"
            + ("_checkpoints" if saving is not None else "")
            + ("_split_v" if split == 2 else "_probe" if probe is not None else "")
            + gate_suffix(inputs.g),
            out.device.index,
            ctas * split,
            tuple(_view(x, tokens) for x in (q, inputs.k, inputs.v, inputs.g, out)),
            (
                heads,
                heads // q.shape[-2],
                items,
                tokens,
                max_len if cu_seqlens is None else -1,
                words(cu_seqlens),
                sequences,
                num_slots,
                segment_len,
                bits,
                slots[0][0],
                slots[1][0],
                words(in_index),
                words(out_index),
                *inputs.beta.stride()[-2:],
                *out.stride()[-3:-1],
                slots[0][1],
                slots[1][1],
                *saved,
                inputs.lower_bound,
                inputs.scale,
            ),
        )

    @staticmethod
    def of_summary(
        inputs: Inputs,
        cu_seqlens: Tensor | None,
        max_len: int,
        num_slots: int,
        segment_len: int,
        decided: Tensor | None,
        mt: Tensor | None,
        num_chunks: Tensor | None,
        fill: bool,
        effects: Tensor | None,
    ) -> _Call:
        tokens, heads = inputs.tokens, inputs.v.shape[-2]
        sequences = tokens // max_len if cu_seqlens is None else cu_seqlens.numel() - 1
        bits = sum(
            bit
            for given, bit in (
                (inputs.A_log is not None, flags.HAS_A_LOG),
                (inputs.dt_bias is not None, flags.HAS_DT_BIAS),
                (decided is not None, flags.CUT_ON_DEVICE),
                (mt is not None, flags.HAS_MT),
                (num_chunks is not None, flags.HAS_NUM_CHUNKS),
                (fill, flags.FILL),
                (effects is not None, flags.HAS_EFFECTS),
            )
            if given
        )
        bits |= _beta_bits(inputs)
        return _Call(
            "summary" + gate_suffix(inputs.g),
            inputs.k.device.index,
            (num_slots or sequences) * heads,
            tuple(_view(x, tokens) for x in (inputs.k, inputs.v, inputs.g)),
            (
                heads,
                heads // inputs.k.shape[-2],
                tokens,
                max_len if cu_seqlens is None else -1,
                words(cu_seqlens),
                sequences,
                num_slots,
                segment_len,
                bits,
                *inputs.beta.stride()[-2:],
                inputs.lower_bound,
            ),
        )


def gate_suffix(g: Tensor) -> str:
    """The end of the name of the variants that read g in its dtype."""
    return FP32_GATE if g.dtype == torch.float32 else ""


def _beta_bits(inputs: Inputs) -> int:
    return (flags.BETA_FP32 if inputs.beta.dtype == torch.float32 else 0) | (
        flags.BETA_ACTIVATED if inputs.beta_is_activated else 0
    )


def words(vector: Tensor | None) -> int:
    """32-bit words from one element to the next."""
    return 1 if vector is None else vector.stride(0) * vector.element_size() // 4


def far_apart(vectors: dict[str, Tensor | None]) -> str | None:
    """Which of these vectors the kernels' 32-bit arithmetic cannot walk, or None."""
    for name, x in vectors.items():
        if x is not None and x.numel() * words(x) >= 2**31:
            return f"{name} has stride {x.stride(0)}, the kernels need its {x.numel()} elements within 8 GiB"
    return None


def misaligned(*tensors: tuple[str, Tensor | None]) -> str | None:
    """Which of these tensors does not start at a multiple of 16 bytes, or None."""
    for name, x in tensors:
        if x is not None and x.data_ptr() & 15:
            return f"{name} starts at address {x.data_ptr():#x}, the kernels need it 16-byte aligned"
    return None


def _view(x: Tensor, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of ``x`` as ``[T, H, 128]``; axes that take no step get strides that a tensor map can hold."""
    heads, channels = x.shape[-2:]
    if tokens == 0:
        return (1, heads, channels), (heads * channels, channels, 1)
    token, head, channel = x.stride()[-3:]
    head = channels if heads == 1 else head
    token = heads * head if tokens == 1 else token
    return (tokens, heads, channels), (token, head, channel)


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
