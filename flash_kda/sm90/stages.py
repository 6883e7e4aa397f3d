"""The stages on Hopper: tensors to kernel arguments, shapes to grids. Same signatures as reference/stages.py.

What the kernels cannot take is refused by name (:func:`refusal`) before anything is launched; nothing is copied to make it
fit.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..constants import HEAD_DIM
from ..reference.inputs import Inputs
from . import launch
from .kernels import flags

VECTOR = 8
"""bf16 elements in 16 bytes: the tensor memory accelerator wants addresses and strides that are multiples of it."""


def refusal(inputs: Inputs, out: Tensor, states: tuple[Tensor | None, ...]) -> str | None:
    """Why the kernels cannot take these tensors, or None.

    Args:
        inputs: packed tensors.
        out: ``[B, T, H, V]``.
        states: initial and final state.
    """
    if out.shape[0] > 1 and out.stride(0) != out.shape[1] * out.stride(1):
        return f"out has batch stride {out.stride(0)}, the kernels need T token strides"
    q = inputs.q
    for name, x in (("q", q), ("k", inputs.k), ("v", inputs.v), ("g", inputs.g), ("out", out)):
        if x is None:
            return f"{name} is missing"
        if x.dtype != torch.bfloat16:
            return f"{name} is {x.dtype}, the kernels read bfloat16"
        token, head, channel = x.stride()[-3:]
        if channel != 1 or token % VECTOR or head % VECTOR or x.data_ptr() % 16 or (token == 0 and x.shape[-3] > 1):
            return (
                f"{name} has strides {(token, head, channel)} and address {x.data_ptr():#x}; the kernels need a last stride "
                "of 1, others that are positive multiples of 8 elements, and a 16-byte aligned address"
            )
    if inputs.beta.dtype != torch.bfloat16:
        return f"beta is {inputs.beta.dtype}, the kernels read bfloat16"
    for name, parameter in (("A_log", inputs.A_log), ("dt_bias", inputs.dt_bias)):
        if parameter is not None and not parameter.is_contiguous():
            return f"{name} has strides {parameter.stride()}, the kernels need it contiguous"
    for name, state in zip(("initial_state", "final_state"), states, strict=True):
        if state is not None and state.stride()[1:] != (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1):
            return f"{name} has strides {state.stride()}, the kernels need contiguous [H,V,K] slots"
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
) -> None:
    """Outputs of every segment, and the states at their ends; see reference/stages.py.

    One launch on the current stream of the tensors' device; allocates nothing and does not wait.

    Args:
        cu_seqlens: as there, or None for segments of ``max_len`` tokens each.
        in_index, out_index: int32.
    """
    tokens, heads = inputs.tokens, inputs.heads
    q, k, v, g, beta = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta
    assert q is not None
    if tokens == 0:  # a tensor map cannot describe nothing
        if final_state is not None:
            final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
        return
    segments = tokens // max_len if cu_seqlens is None else cu_seqlens.numel() - 1
    items = segments * heads
    if items == 0:
        return
    bits = 0
    if inputs.A_log is not None:
        bits |= flags.HAS_A_LOG
    if inputs.dt_bias is not None:
        bits |= flags.HAS_DT_BIAS
    if initial_state is not None:
        bits |= flags.HAS_INITIAL | (flags.INITIAL_BF16 if initial_state.dtype == torch.bfloat16 else 0)
    if in_index is not None:
        bits |= flags.HAS_IN_INDEX
    if final_state is not None:
        bits |= flags.HAS_FINAL | (flags.FINAL_BF16 if final_state.dtype == torch.bfloat16 else 0)
    if out_index is not None:
        bits |= flags.HAS_OUT_INDEX
    device = out.device.index
    # Two CTAs an item, each with half of V, repeat the preparation: worth it only for SMs that would idle.
    split = 2 if 2 * items <= _multiprocessors(device) else 1
    beta_t, beta_h = beta.stride()
    out_t, out_h, _ = out.stride()
    launch.kernel("forward_split_v" if split == 2 else "forward").launch(
        device,
        (items * split, 1, 1),
        (q.data_ptr(), q.shape, q.stride()),
        (k.data_ptr(), k.shape, k.stride()),
        (v.data_ptr(), v.shape, v.stride()),
        (g.data_ptr(), g.shape, g.stride()),
        (out.data_ptr(), out.shape, out.stride()),
        beta.data_ptr(),
        out.data_ptr(),
        _address(inputs.A_log),
        _address(inputs.dt_bias),
        _address(cu_seqlens),
        _address(initial_state),
        _address(final_state),
        _address(in_index),
        _address(out_index),
        heads,
        heads // q.shape[1],
        items,
        tokens,
        -1 if cu_seqlens is not None else max_len,
        cu_seqlens.element_size() // 4 if cu_seqlens is not None else 1,
        bits,
        0 if initial_state is None else initial_state.shape[0],
        0 if final_state is None else final_state.shape[0],
        beta_t,
        beta_h,
        out_t,
        out_h,
        0 if initial_state is None else initial_state.stride(0),
        0 if final_state is None else final_state.stride(0),
        inputs.lower_bound,
        inputs.scale,
    )


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
