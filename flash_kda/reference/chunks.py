"""Stage *prepare*: chunks of raw tokens to the factors that the recurrence consumes.

A *work item* is one head of one segment. Items are batched; a :class:`Window` is the same number of consecutive chunks of
each. All arithmetic is per item and chunk, by batched products whose bits do not depend on the size of the batch, which is
what the bitwise promises of docs/numerics.md rest on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..constants import CHUNK, L2_EPS
from ..host import readable
from ..inputs import Inputs
from .gate import log_decay, sigmoid


@dataclass(frozen=True)
class Items:
    """Work items, each one head of one segment; all fields ``[I]`` int64.

    Attributes:
        segment, head: which.
        start, end: its tokens ``[start, end)`` on the packed axis.
    """

    segment: Tensor
    head: Tensor
    start: Tensor
    end: Tensor

    def __len__(self) -> int:
        return self.segment.numel()

    def __getitem__(self, index: slice | Tensor) -> Items:
        return Items(self.segment[index], self.head[index], self.start[index], self.end[index])

    @property
    def chunks(self) -> Tensor:
        """``[I]``: chunks in each item, the last one possibly partial."""
        return (self.end - self.start + (CHUNK - 1)) // CHUNK


@dataclass(frozen=True)
class Factors:
    """Chunk factors of a window, ``[I, n, ...]``; see docs/algorithm.md for the algebra.

    ::

        S_next = Diag(gamma) S + kg^T (u - w S)          o = qd S + aqk (u - w S)

    Attributes:
        w: ``[I, n, C, K]``.
        u: ``[I, n, C, V]``.
        kg: ``[I, n, C, K]``.
        gamma: ``[I, n, K]``, decay over the whole chunk.
        qd: ``[I, n, C, K]``, or None if the inputs have no q.
        aqk: ``[I, n, C, C]``, or None likewise.
        state_poison: ``[I, n, V]`` NaN in the columns of the state that a NaN or inf of this chunk reaches, else 0; None
            if the inputs are known to be finite.
        out_poison: ``[I, n, C, V]`` likewise for outputs.
    """

    w: Tensor
    u: Tensor
    kg: Tensor
    gamma: Tensor
    qd: Tensor | None
    aqk: Tensor | None
    state_poison: Tensor | None
    out_poison: Tensor | None


@dataclass(frozen=True)
class Window:
    """Token rows of n chunks of every item.

    Attributes:
        rows: ``[I, n, C]`` row of each token and head in a ``[T * HV, ...]`` view; 0 where not valid.
        key_rows: the same in ``[T * H, ...]`` views of q and k.
        valid: ``[I, n, C]`` whether the token is one of the item's.
        head: ``[I]``.
        full: the host knows that every token is valid, so that masking can be skipped.
    """

    rows: Tensor
    key_rows: Tensor
    valid: Tensor
    head: Tensor
    full: bool


def window(items: Items, first: Tensor | int, count: int, step: int, inputs: Inputs) -> Window:
    """Chunks ``first, first + step, ...`` of every item, ``count`` of them; those out of range are not valid.

    Args:
        items: the batch.
        first: chunk index within the item, ``[I]`` or one for all.
        count: n.
        step: +1 or -1.
        inputs: gives the number of tokens and heads.
    """
    device = items.start.device
    chunk = torch.arange(0, step * count, step, device=device)
    chunk = (first[:, None] if isinstance(first, Tensor) else first) + chunk.expand(len(items), count)
    token = items.start[:, None, None] + CHUNK * chunk[:, :, None] + torch.arange(CHUNK, device=device)
    end = items.end.clamp(max=inputs.tokens)
    valid = (chunk >= 0)[:, :, None] & (token < end[:, None, None])
    head, heads, key_heads = items.head[:, None, None], inputs.heads, inputs.k.shape[-2]
    rows = key_rows = torch.where(valid, token * heads + head, 0)
    if key_heads != heads:
        key_rows = torch.where(valid, token * key_heads + head // (heads // key_heads), 0)
    return Window(rows, key_rows, valid, items.head, full=readable(valid) and bool(valid.all()))


def gather(x: Tensor, win: Window, dtype: torch.dtype, *, keys: bool = False) -> Tensor:
    """``[I, n, C, ...]`` rows of a contiguous ``x`` ``[T, HV, ...]`` (q or k: ``[T, H, ...]``), 0 where not valid."""
    rows = win.key_rows if keys else win.rows
    flat = x.view(-1, *x.shape[2:])
    got = flat.index_select(0, rows.flatten()).view(*rows.shape, *flat.shape[1:])
    if not win.full:
        valid = win.valid.view(*win.valid.shape, *[1] * (got.dim() - win.valid.dim()))
        got = torch.where(valid, got, 0)
    return got.to(dtype)


def prepare(inputs: Inputs, win: Window, dtype: torch.dtype, *, finite: bool) -> Factors:
    """Factors of one window.

    ::

        G    = cumulative sum of log alpha in the chunk, anchored at its first token
        kd   = k exp(G)      ki = k exp(-G)      kg = ki exp(G_last)      qd = scale q exp(G)
        inv  = (I + tril(Diag(beta) kd ki^T, -1))^-1
        w    = inv Diag(beta) kd                 u  = inv Diag(beta) v
        aqk  = tril(qd ki^T)                     gamma = exp(G_last)

    A token that is not valid counts as k = v = q = 0, beta = 0 and no decay: it changes nothing, bit for bit.

    Args:
        inputs: raw tensors.
        win: rows to take.
        dtype: working dtype, fp32 or fp64.
        finite: the inputs are known to hold no NaN or inf. If not, such values are replaced by 0 here and travel in
            ``state_poison`` and ``out_poison``, because 0 * NaN in a masked product would reach earlier tokens.
    """
    k = gather(inputs.k, win, dtype, keys=True)
    v = gather(inputs.v, win, dtype)
    g = gather(inputs.g, win, dtype)
    beta = gather(inputs.beta, win, dtype)
    q = None if inputs.q is None else gather(inputs.q, win, dtype, keys=True)
    state_poison = out_poison = None
    if not finite:
        # An infinite gate or logit saturates, as in the recurrence; only a NaN there is lost.
        largest = torch.finfo(dtype).max
        g = g.clamp(-largest, largest)
        if not inputs.beta_is_activated:
            beta = beta.clamp(-largest, largest)
        row = 0 * beta + (0 * k).sum(-1) + (0 * g).sum(-1)
        reach = (0 * v + row[..., None]).cumsum(-2)
        state_poison = reach[..., -1, :]
        out_poison = reach if q is None else reach + (0 * q).sum(-1, keepdim=True)
        k, v, g, beta = (torch.where(x.isfinite(), x, 0) for x in (k, v, g, beta))
        q = None if q is None else torch.where(q.isfinite(), q, 0)

    slope = None if inputs.A_log is None else inputs.A_log[win.head][:, None, None]
    bias = None if inputs.dt_bias is None else inputs.dt_bias[win.head][:, None, None, :]
    log_alpha = log_decay(g, slope, bias, inputs.lower_bound)
    strength = beta if inputs.beta_is_activated else sigmoid(beta)
    if not win.full:
        log_alpha = torch.where(win.valid[..., None], log_alpha, 0)
        strength = torch.where(win.valid, strength, 0)

    shape = (k.shape[0] * k.shape[1], CHUNK, -1)
    G = log_alpha.cumsum(-2)
    decay = G.exp()
    gamma = decay[..., -1, :]
    k = k * _inverse_norm(k)
    kd = (k * decay).view(shape)
    ki = k * (-G).exp()  # not k / decay: the derivative of a quotient is beyond fp32 where the decay is strong
    kg = ki * gamma[..., None, :]
    ki_t = ki.view(shape).mT
    # Write strengths scale rows and columns of 16x16 matrices, which is cheaper than scaling k and v.
    strength = strength.view(shape)
    inv_beta = _unit_lower_inverse(torch.bmm(kd, ki_t) * strength) * strength.mT
    w = torch.bmm(inv_beta, kd).view(k.shape)
    u = torch.bmm(inv_beta, v.view(shape)).view(v.shape)
    qd = aqk = None
    if q is not None:
        qd = q * (_inverse_norm(q) * inputs.scale) * decay
        aqk = torch.bmm(qd.view(shape), ki_t).tril().view(*qd.shape[:2], CHUNK, CHUNK)
    return Factors(w, u, kg, gamma, qd, aqk, state_poison, out_poison)


def _inverse_norm(x: Tensor) -> Tensor:
    return (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def _unit_lower_inverse(a: Tensor) -> Tensor:
    """``(I + tril(a, -1))^-1`` for a batch of ``[C, C]``, by forward substitution."""
    identity = torch.eye(CHUNK, dtype=a.dtype, device=a.device).expand_as(a)
    inverse: Tensor = torch.linalg.solve_triangular(a.tril(-1), identity, upper=False, unitriangular=True)
    return inverse
