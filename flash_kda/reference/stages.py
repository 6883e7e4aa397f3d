"""The stages of context-parallel KDA in plain PyTorch, on any device: the specification of every kernel.

forward        outputs and final states of segments from given initial states
state_summary  each segment's effect on the state, ``S_out = mt S_in + ht``, by a backward scan with a measured exit
chain          states at segment boundaries from those effects
warmup_bound   how many trailing chunks of a segment can matter at most, from the gates alone

All segments and heads advance together, so a call takes as many sequential steps as its longest segment has chunks. On a
CPU the host reads offsets, sorts items by length and drops finished ones. On other devices nothing is read back: finished
items stay in the batch, masked. Differentiable by autograd as long as the caller's ``out`` and states are fresh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..constants import CHUNK, EXIT_EPS
from ..host import readable
from ..inputs import Inputs
from .chunks import Factors, Items, Window, prepare, window
from .gate import log_decay

CPU_WINDOW = 256
"""(item, chunk) pairs prepared at once on a CPU: 2 MiB a factor, measured fastest among 128 .. 1024."""
CPU_GROUP = 64
"""Items advanced at once on a CPU: their states take 4 MiB."""
SCAN_WINDOW = 32
"""Chunks prepared at once for a scan that may stop at any of them."""
DEVICE_WINDOW = 16384
DEVICE_GROUP = 4096


@dataclass(frozen=True)
class Summary:
    """Effect of segments on the state, and how it was measured.

    Attributes:
        ht: ``[M, H, V, K]``, state at the end of the segment if it had started from zero.
        mt: ``[M, H, K, K]``, ``mt[..., i, j]`` is the derivative of ``S_out[i, :]`` by ``S_in[j, :]``; 0 after an exit.
        exited: ``[M, H]`` bool, the scan stopped before the segment's start: what entered it cannot matter.
        chunks: ``[M, H]`` int32, trailing chunks replayed.
        norm: ``[M, H]``, ``||M||_F`` where the scan stopped: bounds what the exit drops, relative to the state that enters
            the replayed suffix.
    """

    ht: Tensor
    mt: Tensor
    exited: Tensor
    chunks: Tensor
    norm: Tensor


def forward(
    inputs: Inputs,
    cu_seqlens: Tensor,
    out: Tensor,
    *,
    max_len: int,
    initial_state: Tensor | None = None,
    in_index: Tensor | None = None,
    final_state: Tensor | None = None,
    out_index: Tensor | None = None,
    probe: Tensor | None = None,
) -> Tensor | None:
    """Outputs of every segment, and the states at their ends.

    Args:
        inputs: raw tensors, q included.
        cu_seqlens: ``[NS + 1]`` int32 or int64 segment offsets. A segment that would end before it begins is empty.
        out: ``[T, H, V]``; rows of covered tokens are written, no others.
        max_len: no segment is longer (tokens); host bound, only read on devices whose offsets are not.
        initial_state: ``[M, H, V, K]`` or None for zeros.
        in_index: ``[NS]``, the row of ``initial_state`` that enters each segment; zeros if there is no such row. Row s if
            None.
        final_state: ``[M', H, V, K]``, written in place; may be ``initial_state`` itself.
        out_index: ``[NS]``, the row that each segment's final state is stored to; nowhere if there is no such row. Row s if
            None.
        probe: ``[NS, H]``, a chunk of each segment.

    Returns:
        ``[NS, H]`` Frobenius norm of the state that enters chunk ``probe``, or None without probe.
    """
    inputs = inputs.contiguous()
    dtype = _working_dtype(inputs)
    finite = _host_says_finite(inputs)
    rows = _OutputRows(out)
    store = None if final_state is None else _StateRows(final_state, out_index)
    norms = None
    if probe is not None:
        norms = torch.zeros(cu_seqlens.numel() - 1, inputs.heads, dtype=dtype, device=out.device)
    in_index = None if in_index is None else in_index.long()
    for items in _groups(cu_seqlens, inputs.heads):
        state = _load_state(initial_state, in_index, items, inputs, dtype)
        finished = []
        for start, count, active in _steps(items, max_len):
            finished.append(state[active:])
            win = window(items[:active], start, count, 1, inputs)
            factors = prepare(inputs, win, dtype, finite=finite)
            state, o, entering = _advance(state[:active], factors, probe is not None)
            rows.write(win, o)
            if norms is not None and probe is not None and entering is not None:
                at = (items.segment[:active], items.head[:active])
                chunk = torch.arange(start, start + count, device=out.device)
                norms[at] += torch.where(probe[at][:, None] == chunk, entering, 0).sum(1)
        if store is not None:
            store.write(items, torch.cat([state, *reversed(finished)]))
    rows.finish()
    if store is not None:
        store.finish()
    return norms


def state_summary(
    inputs: Inputs,
    cu_seqlens: Tensor,
    *,
    max_len: int,
    segments: Tensor | None = None,
    num_chunks: Tensor | None = None,
    eps: float = EXIT_EPS,
) -> Summary:
    """Effect of segments on the state, walking backward from their ends until what came before cannot matter.

    ::

        M = I, ht = 0
        for chunk = last .. first:
            P  = M kg^T
            ht = ht + P u
            M  = M Diag(gamma) - P w
            stop if ||M||_F <= eps

    Args:
        inputs: raw tensors; q is not used.
        cu_seqlens: ``[NS + 1]`` int32 or int64 segment offsets.
        max_len: no segment is longer (tokens); host bound.
        segments: ``[M]`` int64, the segments to summarise, all if None; values >= NS give ht = 0 and mt = I.
        num_chunks: ``[NS, H]``, replay exactly this many trailing chunks (at most all) instead of measuring.
        eps: the exit; 0 scans every segment to its start.

    Returns:
        Summary; see there. NaN or inf before the replayed suffix leaves no trace.
    """
    inputs = inputs.contiguous(with_q=False)
    dtype = _working_dtype(inputs)
    finite = _host_says_finite(inputs)
    heads, device = inputs.heads, inputs.k.device
    count = cu_seqlens.numel() - 1 if segments is None else segments.numel()
    v_dim, k_dim = inputs.v.shape[-1], inputs.k.shape[-1]
    ht = torch.zeros(count, heads, v_dim, k_dim, dtype=dtype, device=device)
    mt = torch.eye(k_dim, dtype=dtype, device=device).repeat(count, heads, 1, 1)
    norm = torch.full((count, heads), math.sqrt(k_dim), dtype=dtype, device=device)
    used = torch.zeros(count, heads, dtype=torch.int32, device=device)
    exited = torch.zeros(count, heads, dtype=torch.bool, device=device)
    for items in _groups(cu_seqlens, heads, segments):
        row = items.segment
        source = row if segments is None else segments[row].clamp(max=cu_seqlens.numel() - 2)
        wanted = items.chunks if num_chunks is None else items.chunks.minimum(num_chunks[source, items.head].long())
        scan = _Scan(items, wanted, k_dim, v_dim, dtype, eps if num_chunks is None else -1.0)
        for start, steps, active in _steps(items, max_len, grow=True):
            active = scan.compact(active)
            if not active:
                break
            win = window(scan.items, scan.items.chunks - 1 - start, steps, -1, inputs)
            scan.replay(prepare(inputs, win, dtype, finite=finite), start)
        at = (row, items.head)
        item_ht, item_mt, norm[at], chunks = scan.result()
        gone = chunks < items.chunks
        ht[at] = item_ht.mT
        mt[at] = torch.where(gone[:, None, None], 0, item_mt)
        used[at] = chunks.to(torch.int32)
        exited[at] = gone
    return Summary(ht, mt, exited, used, norm)


def chain(
    initial_state: Tensor | None,
    ht: Tensor,
    mt: Tensor | None,
    needs_mt: Tensor | None,
    slot_map: Tensor,
    max_slots: int,
) -> Tensor:
    """States at the ends of consecutive segments: ``h <- h mt^T + ht``, V-first, from each sequence's initial state.

    Args:
        initial_state: ``[N, H, V, K]`` or None for zeros.
        ht: ``[M, H, V, K]``.
        mt: ``[M, H, K, K]``, or None where no segment needs it.
        needs_mt: ``[M, H]`` bool; where False, mt and everything before the segment are skipped by selection. All need
            it if None and mt is given.
        slot_map: ``[N + 1]``, sequence n owns rows ``slot_map[n] .. slot_map[n + 1] - 1``.
        max_slots: no sequence has more rows; host bound.

    Returns:
        ``[M, H, V, K]``; rows that no sequence owns are 0.
    """
    rows = ht.shape[0]
    on_host = readable(ht)
    first, count = slot_map[:-1].long(), slot_map.diff().long()
    states = ht.new_zeros(rows + 1, *ht.shape[1:])
    if on_host:
        max_slots = int(count.max()) if count.numel() else 0
        going = (count > 0).nonzero().squeeze(1)
        first, count = first[going], count[going]
        initial_state = None if initial_state is None else initial_state[going]
    shape = (first.numel(), *ht.shape[1:])
    h = ht.new_zeros(shape) if initial_state is None else initial_state.to(ht.dtype)
    for j in range(max_slots if rows else 0):
        if on_host:
            going = (count > j).nonzero().squeeze(1)
            first, count, h = first[going], count[going], h[going]
        row = (first + j).clamp(max=rows - 1)
        new = ht[row]
        if mt is not None:
            carried = torch.matmul(h, mt[row].mT) + new
            new = carried if needs_mt is None else torch.where(needs_mt[row][..., None, None], carried, new)
        h = new
        states.index_copy_(0, torch.where(count > j, row, rows), h)
    return states[:rows]


def warmup_bound(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float, cu_seqlens: Tensor, *, max_len: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Trailing chunks after which the sound a-priori bound of ``||M||_F`` is at most eps.

    For l2-normalised keys and write strengths in [0, 2] every token shrinks the 2-norm of M at least by its *largest*
    channel decay, so ``||M||_F <= sqrt(K) exp(sum_t max_i log alpha[t, i])`` (docs/algorithm.md). No weaker statement
    about single channels is true: the delta rule moves mass between them.

    Args:
        g: ``[T, H, K]``.
        A_log, dt_bias, lower_bound: parameters of the gate.
        cu_seqlens: ``[NS + 1]`` segment offsets.
        max_len: no segment is longer (tokens); host bound.
        eps: the target.

    Returns:
        ``(num_warmup, fallback)``, ``[NS, H]`` int32 and bool. Where the bound is not met within the segment, fallback is
        True and num_warmup is all of its chunks.
    """
    tokens, heads, k_dim = g.shape
    dtype = torch.promote_types(g.dtype, torch.float32)
    segments = cu_seqlens.numel() - 1
    slowest = torch.cat(
        [
            log_decay(part.to(dtype), A_log, dt_bias, lower_bound).amax(-1)
            for part in torch.split(g, max(1, CPU_WINDOW * CHUNK // max(heads, 1)))
        ]
        or [g.new_zeros(0, heads, dtype=dtype)]
    )
    target = math.log(eps) - 0.5 * math.log(k_dim) if eps > 0 else -math.inf
    start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    chunks = (end - start + (CHUNK - 1)) // CHUNK
    total = torch.zeros(segments, heads, dtype=torch.float64 if g.device.type != "mps" else dtype, device=g.device)
    num = chunks[:, None].repeat(1, heads)
    fallback = torch.ones(segments, heads, dtype=torch.bool, device=g.device)
    padded = torch.cat([slowest, slowest.new_zeros(1, heads)])
    if readable(g):
        max_len = int((end - start).max()) if segments else 0
    for j in range(-(-max_len // CHUNK)):
        chunk = chunks - 1 - j
        token = start[:, None] + CHUNK * chunk[:, None] + torch.arange(CHUNK, device=g.device)
        valid = (chunk >= 0)[:, None] & (token < end.clamp(max=tokens)[:, None])
        total = total + padded[torch.where(valid, token, tokens)].sum(1)
        met = fallback & (total <= target) & (chunk >= 0)[:, None]
        num = torch.where(met, j + 1, num)
        fallback = fallback & ~met
        if readable(g) and not bool((fallback & (chunk > 0)[:, None]).any()):
            break
    return num.to(torch.int32), fallback


class _Scan:
    """Backward scan of a batch of items; items that stopped are frozen by neutral factors and dropped when possible."""

    def __init__(self, items: Items, wanted: Tensor, k_dim: int, v_dim: int, dtype: torch.dtype, eps: float) -> None:
        device = items.start.device
        self.items = items
        self.eps = eps
        self.wanted = wanted
        self.mt = torch.eye(k_dim, dtype=dtype, device=device).repeat(len(items), 1, 1)
        self.ht = torch.zeros(len(items), k_dim, v_dim, dtype=dtype, device=device)
        self.norm = torch.full((len(items),), math.sqrt(k_dim), dtype=dtype, device=device)
        self.chunks = torch.zeros(len(items), dtype=torch.int64, device=device)
        self.alive = self.wanted > 0
        self.place = torch.arange(len(items), device=device)
        self.parked: list[tuple[Tensor, ...]] = []
        self.readable = readable(items.start)

    def replay(self, factors: Factors, start: int) -> None:
        """Chunks ``start, start + 1, ...`` counted from the end."""
        for j in range(factors.kg.shape[1]):
            if self.readable and not bool(self.alive.any()):
                return
            kg, w, u, gamma = factors.kg[:, j], factors.w[:, j], factors.u[:, j], factors.gamma[:, j]
            poison = None if factors.state_poison is None else factors.state_poison[:, j]
            if not (self.readable and bool(self.alive.all())):
                on = self.alive[:, None, None]
                kg, w, u = (torch.where(on, x, 0) for x in (kg, w, u))
                gamma = torch.where(self.alive[:, None], gamma, 1)
                poison = None if poison is None else torch.where(self.alive[:, None], poison, 0)
            p = torch.bmm(self.mt, kg.mT)
            self.ht = torch.baddbmm(self.ht, p, u)
            self.mt = torch.baddbmm(self.mt * gamma[:, None, :], p, w, alpha=-1)
            if poison is not None:
                # M is lost if a key, gate or strength is not finite, that is if every column of the state is.
                self.ht = _poisoned(self.ht, poison[:, None, :])
                self.mt = torch.where(poison.isnan().all(-1)[:, None, None], torch.nan, self.mt)
            norm = torch.linalg.vector_norm(self.mt, dim=(1, 2))
            self.norm = torch.where(self.alive, norm, self.norm)
            self.chunks = torch.where(self.alive, start + j + 1, self.chunks)
            self.alive = self.alive & ~(norm <= self.eps) & (start + j + 1 < self.wanted)

    def compact(self, active: int) -> int:
        """Parks the results of stopped items if the host may look; returns how many go on."""
        if not self.readable:
            return active
        alive = int(self.alive.sum())
        if alive < len(self.items):
            stopped = (~self.alive).nonzero().squeeze(1)
            going = self.alive.nonzero().squeeze(1)
            self.parked.append(tuple(x[stopped] for x in (self.place, self.ht, self.mt, self.norm, self.chunks)))
            self.items = self.items[going]
            names = ("wanted", "ht", "mt", "norm", "chunks", "alive", "place")
            for name in names:
                setattr(self, name, getattr(self, name)[going])
        return alive

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ht (K-first), mt, norm and chunks in the order of the items given."""
        self.parked.append((self.place, self.ht, self.mt, self.norm, self.chunks))
        place, ht, mt, norm, chunks = (torch.cat(parts) for parts in zip(*self.parked, strict=True))
        order = place.argsort()
        return ht[order], mt[order], norm[order], chunks[order]


def _advance(state: Tensor, factors: Factors, with_norms: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """n chunks forward. State ``[I, K, V]``; returns it, outputs ``[I, n, C, V]``, norms ``[I, n]`` on entry."""
    qd, aqk = factors.qd, factors.aqk
    assert qd is not None
    assert aqk is not None
    items, n, _, v_dim = factors.u.shape
    reads, writes, norms = [], [], []
    wq = torch.cat([factors.w, qd], dim=2)
    for j in range(n):
        if with_norms:
            norms.append(torch.linalg.vector_norm(state, dim=(1, 2)))
        both = torch.bmm(wq[:, j], state)
        write = factors.u[:, j] - both[:, :CHUNK]
        state = torch.baddbmm(state * factors.gamma[:, j, :, None], factors.kg[:, j].mT, write)
        if factors.state_poison is not None:
            state = _poisoned(state, factors.state_poison[:, j, None, :])
        reads.append(both[:, CHUNK:])
        writes.append(write)
    written = torch.stack(writes, 1).view(items * n, CHUNK, v_dim)
    overflow = None
    if not (readable(written) and bool(written.isfinite().all())):
        # Finite inputs may overflow: from that token on, not before, which 0 * inf in the product below would reach.
        overflow = (~written.isfinite()).cumsum(-2) > 0
        written = torch.where(written.isfinite(), written, 0)
    o = torch.baddbmm(torch.stack(reads, 1).view(items * n, CHUNK, v_dim), aqk.view(items * n, CHUNK, CHUNK), written).view(
        items, n, CHUNK, v_dim
    )
    if overflow is not None:
        o = torch.where(overflow.view(o.shape), torch.nan, o)
    if factors.out_poison is not None:
        o = _poisoned(o, factors.out_poison)
    return state, o, torch.stack(norms, 1) if with_norms else None


def _poisoned(x: Tensor, poison: Tensor) -> Tensor:
    """NaN where ``poison`` is. By selection: adding its zeros would turn a -0 of a healthy sequence into 0."""
    return torch.where(poison.isnan(), poison, x)


def _working_dtype(inputs: Inputs) -> torch.dtype:
    return torch.promote_types(inputs.k.dtype, torch.float32)


def _host_says_finite(inputs: Inputs) -> bool:
    """True if the host may look and saw neither NaN nor inf."""
    if not readable(inputs.k):
        return False
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta) if x is not None and x.numel()]
    return all(math.isfinite(extreme.item()) for x in tensors for extreme in torch.aminmax(x))


def _groups(cu_seqlens: Tensor, heads: int, segments: Tensor | None = None) -> Iterator[Items]:
    """Every (segment, head), in batches; on a CPU by decreasing length and without the empty ones' chunks.

    With ``segments`` the items' ``segment`` is the position in that list.
    """
    device = cu_seqlens.device
    offsets = cu_seqlens.long()
    start, end = offsets[:-1], offsets[1:]
    if segments is not None:
        padded = torch.cat([offsets, offsets[-1:]])
        at = segments.clamp(max=offsets.numel() - 1)
        start, end = padded[at], padded[at + 1]
    count = start.numel()
    segment = torch.arange(count, device=device)
    if readable(cu_seqlens):
        segment = (end - start).argsort(descending=True, stable=True)
    segment = segment.repeat_interleave(heads, output_size=count * heads)
    head = torch.arange(heads, device=device).repeat(count)
    items = Items(segment, head, start[segment], end[segment])
    size = CPU_GROUP if readable(cu_seqlens) else DEVICE_GROUP
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _steps(items: Items, max_len: int, *, grow: bool = False) -> Iterator[tuple[int, int, int]]:
    """``(first chunk, chunks, items that have any of them)`` windows over a group sorted by decreasing length.

    With ``grow`` windows begin short and stay moderate, for scans that usually stop early.
    """
    cpu = readable(items.start)
    lengths = items.chunks.tolist() if cpu else []
    total = (lengths[0] if lengths else 0) if cpu else -(-max_len // CHUNK)
    active = len(items)
    first, count = 0, 4 if grow else total
    while first < total:
        while cpu and lengths[active - 1] <= first:
            active -= 1
        size = max(1, min(count, (CPU_WINDOW if cpu else DEVICE_WINDOW) // active, total - first))
        yield first, size, active
        first += size
        count = min(2 * count, SCAN_WINDOW) if grow else count


def _load_state(
    initial_state: Tensor | None, in_index: Tensor | None, items: Items, inputs: Inputs, dtype: torch.dtype
) -> Tensor:
    """``[I, K, V]`` in the working dtype."""
    if initial_state is None:
        return inputs.k.new_zeros(len(items), inputs.k.shape[-1], inputs.v.shape[-1], dtype=dtype)
    row = items.segment if in_index is None else in_index[items.segment]
    if in_index is None:
        return initial_state[row, items.head].to(dtype).mT.contiguous()
    there = (row >= 0) & (row < initial_state.shape[0])
    if initial_state.shape[0] == 0 or (readable(row) and not bool(there.any())):
        return _load_state(None, None, items, inputs, dtype)
    state = initial_state[torch.where(there, row, 0), items.head].to(dtype)
    return torch.where(there[:, None, None], state, 0).mT.contiguous()


class _OutputRows:
    """Writes outputs to ``out`` ``[T, H, V]``, covered tokens only.

    Directly where the host knows which rows are valid; elsewhere through a buffer with one row more for those that are not.
    """

    def __init__(self, out: Tensor) -> None:
        self.out = out
        self.direct = readable(out) and out.is_contiguous()
        self.written: Tensor | None = None
        if self.direct:
            self.flat = out.view(-1, out.shape[-1])
        else:
            rows = out.shape[0] * out.shape[1]
            self.flat = torch.zeros(rows + 1, out.shape[2], dtype=out.dtype, device=out.device)
            self.written = torch.zeros(rows + 1, dtype=torch.bool, device=out.device)

    def write(self, win: Window, o: Tensor) -> None:
        """o ``[I, n, C, V]`` to the window's rows."""
        rows, values = win.rows.flatten(), o.flatten(0, 2).to(self.flat.dtype)
        if not readable(rows):
            rows = torch.where(win.valid.flatten(), rows, self.flat.shape[0] - 1)
        elif not win.full:
            valid = win.valid.flatten()
            rows, values = rows[valid], values[valid]
        self.flat.index_copy_(0, rows, values)
        if self.written is not None:
            self.written.index_fill_(0, rows, True)

    def finish(self) -> None:
        if self.written is not None:
            written = self.written[:-1].view(*self.out.shape[:2], 1)
            self.out.copy_(torch.where(written, self.flat[:-1].view(self.out.shape), self.out))


class _StateRows:
    """Writes final states ``[I, K, V]`` to the rows of ``final_state`` ``[M, H, V, K]`` that ``out_index`` names."""

    def __init__(self, final_state: Tensor, out_index: Tensor | None) -> None:
        self.final_state = final_state
        self.out_index = None if out_index is None else out_index.long()
        self.ends: Tensor | None = None
        if self.out_index is not None and not readable(final_state):
            # Which segments store nothing is not known on the host: all end here first.
            self.ends = final_state.new_zeros(self.out_index.numel(), *final_state.shape[1:])

    def write(self, items: Items, state: Tensor) -> None:
        state, head, row = state.mT.to(self.final_state.dtype), items.head, items.segment
        if self.ends is not None:
            self.ends[row, head] = state
            return
        if self.out_index is None:
            self.final_state[row, head] = state
            return
        row = self.out_index[row]
        keep = ((row >= 0) & (row < self.final_state.shape[0])).nonzero().squeeze(1)
        self.final_state[row[keep], head[keep]] = state[keep]

    def finish(self) -> None:
        if self.ends is not None and self.out_index is not None and self.ends.numel() and self.final_state.numel():
            scatter_rows(self.final_state, self.out_index, self.ends)


def gather_rows(source: Tensor, row: Tensor) -> Tensor:
    """``source[row[i]]``, or zeros where there is no such row, without the host knowing where.

    Args:
        source: ``[M, ...]``.
        row: ``[N]`` integers.
    """
    if source.shape[0] == 0:
        return source.new_zeros(row.numel(), *source.shape[1:])
    there = (row >= 0) & (row < source.shape[0])
    return torch.where(there.view(-1, *[1] * (source.dim() - 1)), source[torch.where(there, row, 0)], 0)


def scatter_rows(target: Tensor, row: Tensor, values: Tensor) -> None:
    """``target[row[i]] = values[i]`` where there is such a row, without the host knowing where; no row twice.

    What has no row repeats the write of one that has, or, if none has, writes back what is there.

    Args:
        target: ``[M, ...]``, M > 0.
        row: ``[N]`` int64, N > 0.
        values: ``[N, ...]`` of the same dtype.
    """
    there = (row >= 0) & (row < target.shape[0])
    some = there.to(torch.int32).argmax()[None]
    any_there = there[some]
    instead = torch.where(any_there.view(-1, *[1] * (values.dim() - 1)), values[some], target[:1])
    row = torch.where(there, row, torch.where(any_there, row[some], 0))
    target.index_copy_(0, row, torch.where(there.view(-1, *[1] * (values.dim() - 1)), values, instead))
