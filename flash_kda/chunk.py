"""``chunk_kda`` with the argument names of flash-linear-attention (https://github.com/fla-org/flash-linear-attention)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .api import fwd_cp
from .constants import HEAD_DIM


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention prefill, by :func:`fwd_cp` with its automatic plan; allocates what it returns.

    Args:
        q, k, v, g, beta, cu_seqlens, A_log, dt_bias, lower_bound, impl: as in :func:`fwd`.
        scale: ``128 ** -0.5`` if None.
        initial_state: ``[N, HV, K, V]`` bf16 or fp32, ``[N, HV, V, K]`` with ``state_v_first``, or None for zeros. K-first
            states that are not a transposed view cost a copy.
        output_final_state: also return the state at the end, fp32, in the layout of ``initial_state``.
        use_qk_l2norm_in_kernel, use_gate_in_kernel: must be True: normalisation and gate are part of the operation.
        use_beta_sigmoid_in_kernel: beta is logits; otherwise it is the write strength itself.
        allow_neg_eigval: twice the sigmoid of beta; needs ``use_beta_sigmoid_in_kernel``.
        cu_seqlens_cpu: host copy of ``cu_seqlens``, optional, for the planner.
        return_intermediate_states, cp_context: must be False and None. Instead: ``fwd(..., checkpoint_every=64)``.
        safe_gate, disable_recompute, use_graph, max_num_seqs: nothing depends on them here. The gate is always the bounded one,
            nothing is kept for a backward pass, and every call may be captured in a CUDA graph.

    Returns:
        ``(o, final_state)``: ``[B, T, HV, V]`` bf16 and the state or None; a K-first state is a transposed view.

    Raises:
        ValueError: a flag asks for another operation; what :func:`fwd` raises.

    Does not wait on a CUDA device.
    """
    reason = refusal(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        return_intermediate_states=return_intermediate_states,
        cp_context=cp_context,
    )
    if reason is not None:
        raise ValueError(reason)
    if initial_state is not None and not state_v_first:
        initial_state = initial_state.mT
        if not initial_state.is_contiguous():
            initial_state = initial_state.contiguous()
    if allow_neg_eigval:
        beta = 2 * torch.sigmoid(beta.float())
    out, final_state, *_ = fwd_cp(
        q,
        k,
        v,
        g,
        beta,
        HEAD_DIM**-0.5 if scale is None else scale,
        None,
        A_log,
        dt_bias,
        lower_bound,  # type: ignore[arg-type]  # None is refused there, by name
        initial_state,
        None,
        cu_seqlens,
        output_final_state=output_final_state,
        beta_is_activated=allow_neg_eigval or not use_beta_sigmoid_in_kernel,
        cu_seqlens_cpu=cu_seqlens_cpu,
        impl=impl,
    )
    return out, final_state if final_state is None or state_v_first else final_state.mT


def refusal(
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    return_intermediate_states: bool = False,
    cp_context: object | None = None,
    **_others: Any,
) -> str | None:
    """Why these flags of ``chunk_kda`` ask for an operation that is not this one, or None."""
    if not use_qk_l2norm_in_kernel:
        return "use_qk_l2norm_in_kernel must be True, got False; q and k are normalised inside"
    if not use_gate_in_kernel:
        return "use_gate_in_kernel must be True, got False; g is the gate before activation"
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        return "use_beta_sigmoid_in_kernel must be True with allow_neg_eigval, got False; pass strengths up to 2 without both"
    if return_intermediate_states:
        return "return_intermediate_states must be False, got True; use fwd(..., checkpoint_every=64)"
    if cp_context is not None:
        return f"cp_context must be None, got {type(cp_context).__name__}; one device is used"
    return None
