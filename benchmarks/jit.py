"""Launch the forward kernel through Triton's JIT: development and comparison only, the product launches cubins.

Same arguments in the same order as the cubin; see `launch_forward` for how tensors become arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_kda.sm90.kernels import flags as bits
from flash_kda.sm90.kernels import forward as kernel

BOX = gl.NVMMASharedLayout(128, 16, 3)


@dataclass(frozen=True)
class ForwardConfig:
    """Constexprs of `kda_forward`: registers of consumers (cr) and of the other warps (pr), prep warps, stages."""

    cr: int = 168
    pr: int = 88
    np: int = 7
    sp: int = 6
    vsplit: int = 1
    lag: int = 1

    def constexprs(self) -> dict:
        return {
            "CR": self.cr,
            "PR": self.pr,
            "NP": self.np,
            "SP": self.sp,
            "VSPLIT": self.vsplit,
            "LAG": self.lag,
        }


SERIAL = ForwardConfig()
SPLIT_V = ForwardConfig(cr=168, pr=112, np=11, sp=6, vsplit=2, lag=0)


def token_descriptor(x: torch.Tensor) -> TensorDescriptor:
    """[T, H, 128] bf16, token and head stride multiples of 8 elements, as boxes of 32 tokens x 1 head x 64 channels."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [32, 1, 64], BOX)


def forward_args(
    q,
    k,
    v,
    g,
    beta,
    a_log,
    dt_bias,
    out,
    *,
    cu_seqlens=None,
    seq_len=-1,
    n_segments=None,
    initial_state=None,
    final_state=None,
    in_index=None,
    out_index=None,
    slots=None,
    seg_len=2**30,
    lower_bound=-5.0,
    scale=None,
):
    """Arguments of `kda_forward` in order, without the constexprs. States are [slots, H, 128, 128], slot stride free."""
    t_total, heads = v.shape[0], v.shape[1]
    cu_words = 1
    if cu_seqlens is not None:
        seq_len = -1
        n_segments = cu_seqlens.numel() - 1
        cu_words = cu_seqlens.element_size() // 4
        cu_seqlens = cu_seqlens.view(torch.int32)
    none = torch.empty(0, dtype=torch.int32, device=q.device)
    flags = 0

    def state(x, present, is_bf16):
        if x is None:
            return none.view(torch.float32), 0, 0, 0
        return x.view(torch.float32), x.stride(0), x.shape[0], present | (is_bf16 if x.dtype == torch.bfloat16 else 0)

    h0, h0_stride, in_slots, f0 = state(initial_state, kernel.HAS_INITIAL.value, kernel.INITIAL_BF16.value)
    ht, ht_stride, out_slots, f1 = state(final_state, kernel.HAS_FINAL.value, kernel.FINAL_BF16.value)
    flags |= f0 | f1
    if in_index is not None:
        flags |= kernel.HAS_IN_INDEX.value
    if out_index is not None:
        flags |= kernel.HAS_OUT_INDEX.value
    if a_log is not None:
        flags |= bits.HAS_A_LOG
    if dt_bias is not None:
        flags |= bits.HAS_DT_BIAS
    nf = none.view(torch.float32)
    n_slots = 0 if slots is None else slots.shape[0]
    return (
        *(token_descriptor(x) for x in (q, k, v, g, out)),
        beta,
        out,
        nf if a_log is None else a_log,
        nf if dt_bias is None else dt_bias,
        none if cu_seqlens is None else cu_seqlens,
        h0,
        ht,
        nf if slots is None else slots,
        none,
        none if in_index is None else in_index,
        none if out_index is None else out_index,
        heads,
        heads // q.shape[1],
        (n_segments + n_slots) * heads,
        t_total,
        seq_len,
        cu_words,
        n_segments,
        n_slots,
        seg_len,
        flags,
        in_slots,
        out_slots,
        beta.stride(0),
        beta.stride(1),
        out.stride(0),
        out.stride(1),
        h0_stride,
        ht_stride,
        float(lower_bound),
        float(q.shape[-1] ** -0.5 if scale is None else scale),
    )


def launch_forward(args: tuple, n_items: int, config: ForwardConfig = SERIAL, ctas: int | None = None):
    """Grid: one CTA an item and V part, or `ctas` (x vsplit) CTAs that loop over the items."""
    grid = (min(n_items, ctas or n_items) * config.vsplit,)
    return kernel.kda_forward[grid](*args, **config.constexprs(), num_warps=8 // config.vsplit)
