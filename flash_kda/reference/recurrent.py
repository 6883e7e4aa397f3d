"""The token recurrence: the definition of KDA and, in fp64, the only oracle of this package.

Kimi Linear (https://arxiv.org/abs/2510.26692), equation of the delta rule with a decay per channel; the bounded gate and
the l2 norm are those of FlashKDA (https://github.com/MoonshotAI/FlashKDA). One token at a time, no chunks, nothing shared
with the stages that it judges.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..constants import L2_EPS


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    beta_is_activated: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Outputs and final state by the recurrence over tokens.

    ::

        q, k      <- x * rsqrt(sum(x^2) + 1e-6)
        log_alpha <- lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
        S <- Diag(exp(log_alpha)) S
        S <- S + sigmoid(beta) * k (v - k^T S)
        o  = scale * q^T S

    Args:
        q, k: ``[B, T, H, K]``; any floating dtype. Value head h reads query and key head ``h // (HV / H)``.
        v: ``[B, T, HV, V]``.
        g: ``[B, T, HV, K]``.
        beta: ``[B, T, HV]`` logits.
        scale: factor of the outputs.
        A_log: ``[HV]``, or None for 0.
        dt_bias: ``[HV, K]``, or None for 0.
        lower_bound: lower end of the log decay.
        initial_state: ``[N, HV, V, K]`` or None for zeros; N is B, or the number of packed sequences.
        cu_seqlens: ``[N + 1]`` offsets of sequences packed into one batch row; its contents are read on the host.
        beta_is_activated: beta is the write strength itself.
        dtype: of the arithmetic and of the results.

    Returns:
        ``(o, final_state)``: ``[B, T, HV, V]`` and ``[N, HV, V, K]``. Fresh and differentiable. Tokens that no sequence
        covers have output 0.
    """
    batch, tokens, heads, _ = v.shape
    if cu_seqlens is None:
        spans = [(b, 0, tokens) for b in range(batch)]
    else:
        offsets = cu_seqlens.tolist()
        spans = [(0, start, end) for start, end in itertools.pairwise(offsets)]
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) if x.shape[2] != heads else x for x in (q, k))
    q = q * (q.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() * scale
    k = k * (k.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
    gate = g if dt_bias is None else g + dt_bias.to(dtype)
    if A_log is not None:
        gate = gate * A_log.to(dtype).exp().clamp(max=torch.finfo(dtype).max)[:, None]
    alpha = (lower_bound * torch.sigmoid(gate)).exp()
    strength = beta if beta_is_activated else torch.sigmoid(beta)

    outputs = []
    states = []
    covered = 0
    for n, (b, start, end) in enumerate(spans):
        if initial_state is None:
            state = q.new_zeros(heads, k.shape[-1], v.shape[-1])
        else:
            state = initial_state[n].to(dtype).transpose(-1, -2)
        rows = []
        for t in range(start, end):
            state = alpha[b, t, :, :, None] * state
            read = torch.einsum("hk,hkv->hv", k[b, t], state)
            write = strength[b, t, :, None] * (v[b, t] - read)
            state = state + k[b, t, :, :, None] * write[:, None, :]
            rows.append(torch.einsum("hk,hkv->hv", q[b, t], state))
        outputs.extend(rows)
        states.append(state.transpose(-1, -2))
        covered += end - start
    uncovered = batch * tokens - covered
    outputs.extend([q.new_zeros(heads, v.shape[-1])] * uncovered)
    o = torch.stack(outputs) if outputs else q.new_zeros(0, heads, v.shape[-1])
    final = torch.stack(states) if states else q.new_zeros(0, heads, v.shape[-1], k.shape[-1])
    return o.reshape(batch, tokens, heads, v.shape[-1]), final
