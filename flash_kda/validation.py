"""The input contract, stated once: every check of every public function, before anything is computed or written.

Errors have one shape, ``<argument> must <requirement>, got <value>; <remedy>``. Shapes, dtypes, devices, strides and
aliasing are metadata and always checked. Contents are checked where they are free to read: offsets on a CPU. Contents of
device tensors are only read with ``FLASH_KDA_DEBUG=1`` (settings.py).
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import settings
from .constants import CHUNK, HEAD_DIM, LOWER_BOUND_MIN
from .host import readable
from .inputs import Inputs

Memo = dict[str, Any]
STATE_DTYPES = (torch.bfloat16, torch.float32)
GATE_DTYPES = (torch.bfloat16, torch.float32)
OFFSET_DTYPES = (torch.int32, torch.int64)

FORWARD_TENSORS = (
    "q", "k", "v", "g", "beta", "out", "A_log", "dt_bias", "initial_state", "final_state", "cu_seqlens"
)  # fmt: skip
OUT, INITIAL_STATE, FINAL_STATE = (FORWARD_TENSORS.index(name) for name in ("out", "initial_state", "final_state"))

SEEN_KEPT = 1024
"""Kinds of calls whose metadata is remembered as checked."""

Key = tuple[object, ...]
_seen: dict[Key, Memo] = {}


@dataclass(frozen=True)
class Problem:
    """A validated call.

    Attributes:
        inputs: the caller's tensors.
        cu_seqlens: ``[N + 1]`` offsets of the sequences, or None for N sequences of ``max_len`` tokens each.
        num_sequences: N.
        max_len: no sequence is longer (tokens); host integer.
        memo: shared by all calls that differ only in addresses and contents: a stage may keep here what depends on neither.
    """

    inputs: Inputs
    cu_seqlens: Tensor | None
    num_sequences: int
    max_len: int
    memo: Memo = field(default_factory=dict)

    def offsets(self) -> Tensor:
        """``[N + 1]`` offsets, made where there are none."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        return torch.arange(self.num_sequences + 1, device=self.inputs.g.device) * self.max_len


def check_forward(
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
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool = False,
) -> Problem:
    """The whole contract of ``fwd`` and ``fwd_cp``. Raises ValueError, TypeError or RuntimeError; writes nothing.

    What only depends on shapes, dtypes, strides and devices is remembered: a call like an earlier one costs the host a few
    microseconds. Aliasing and contents are looked at every time.
    """
    everything = (q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens)
    key = _metadata(everything, scale, lower_bound, output_final_state)
    memo = None if key is None else _seen.get(key)
    if memo is None:
        named: dict[str, Tensor | None] = dict(zip(FORWARD_TENSORS, everything, strict=True))
        tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        optional = {name: x for name, x in named.items() if name not in tensors}
        _check_no_grad(named)
        _check_tokens(tensors, optional, A_log, dt_bias, lower_bound, cu_seqlens, scale)
        if out is not None:
            _check_shape("out", out, "[B,T,H,V]", tuple(q.shape))
            _check_dtype("out", out, (torch.bfloat16,))
            _check_writable("out", out)
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        for name, state in (("initial_state", initial_state), ("final_state", final_state)):
            if state is not None:
                _check_shape(name, state, "[N,H,V,K]", (sequences, q.shape[2], HEAD_DIM, HEAD_DIM))
                _check_dtype(name, state, STATE_DTYPES)
        if final_state is not None:
            _check_writable("final_state", final_state)
        memo = {"extents": tuple(0 if x is None else _extent(x) for x in everything)}
        if key is not None:
            if len(_seen) >= SEEN_KEPT:
                _seen.clear()
            _seen[key] = memo
    extents = memo["extents"]
    starts = [0 if x is None else x.data_ptr() for x in everything]
    for target in (OUT, FINAL_STATE):
        first = starts[target]
        if not first:
            continue
        last = first + extents[target]
        for other, start in enumerate(starts):
            if start < last and first < start + extents[other] and other != target:
                _check_aliasing(everything, target, other)
    inputs = Inputs(q, k, v, g, beta, A_log, _per_head_bias(dt_bias, q.shape[2]), float(lower_bound), float(scale))
    return _problem(inputs, q.shape[0], q.shape[1], cu_seqlens, initial_state, memo)


def _metadata(tensors: tuple[Tensor | None, ...], scale: float, lower_bound: float, with_final: bool) -> Key | None:
    """All that the checks of a call can depend on besides addresses and contents; None if an argument is of no kind known."""
    if type(scale) not in (float, int) or type(lower_bound) not in (float, int):
        return None
    grad = torch.is_grad_enabled()
    key: list[object] = [scale, lower_bound, bool(with_final), grad, torch.is_inference_mode_enabled()]
    try:
        for x in tensors:
            if x is None:
                key.append(None)
            else:
                key += (x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad, x.is_inference())
    except (AttributeError, RuntimeError):
        return None
    return tuple(key)


def _extent(x: Tensor) -> int:
    """Bytes from the first element of a view to the end of its last."""
    if x.numel() == 0 or x.is_meta:
        return 0
    return (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


def _check_aliasing(tensors: tuple[Tensor | None, ...], target: int, other: int) -> None:
    """Two views whose address ranges meet: the one that is written must share no element with the other."""
    written, source = tensors[target], tensors[other]
    if written is None or source is None or not _overlap(written, source):
        return
    remedy = "allocate it separately"
    if target == FINAL_STATE and other == INITIAL_STATE:
        if _same_view(written, source):
            return
        remedy = "pass the very same tensor to update states in place, or separate memory"
    name, shared = FORWARD_TENSORS[target], FORWARD_TENSORS[other]
    raise ValueError(f"{name} must not share memory with {shared}, got overlapping views; {remedy}")


def check_shard(
    tensors: dict[str, Tensor | None],
    initial_state: Tensor | None,
    final_state: Tensor | None,
    *,
    tokens: int,
    heads: int,
    device: torch.device,
    starts: int,
    ends: int,
) -> None:
    """What ``distributed.fwd_cp`` wants beside the contract of ``fwd``: one rank's share of what its context says.

    Args:
        tensors: those of ``fwd``, which has been checked: q, k, v, g, beta and out, A_log, dt_bias or None.
        initial_state, final_state: as passed.
        tokens, heads, device: of the context, on this rank.
        starts, ends: rows that the states must have.
    """
    v = tensors["v"]
    assert v is not None
    if tuple(v.shape[:3]) != (1, tokens, heads):
        raise ValueError(
            f"v must have shape [1,T,H,V] = {(1, tokens, heads, HEAD_DIM)} on this rank, got {tuple(v.shape)}; "
            "T and H are those of the context"
        )
    states = {"initial_state": initial_state, "final_state": final_state}
    _check_tensors(states)
    _check_no_grad(states)
    for (name, state), rows in zip(states.items(), (starts, ends), strict=True):
        if state is not None:
            _check_shape(name, state, "[n,H,V,K]", (rows, heads, HEAD_DIM, HEAD_DIM))
            _check_dtype(name, state, STATE_DTYPES)
    check_devices({**tensors, **states}, device)
    if final_state is not None:
        _check_writable("final_state", final_state)
    pairs = [("final_state", other) for other in (*tensors, "initial_state")] + [("out", "initial_state")]
    for name, other in pairs:
        written, source = (states.get(x, tensors.get(x)) for x in (name, other))
        if written is not None and source is not None and _overlap(written, source):
            raise ValueError(f"{name} must not share memory with {other}, got overlapping views; allocate it separately")


def check_summary(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    cu_seqlens: Tensor | None,
) -> Problem:
    """The contract of ``state_only``: that of ``fwd`` for the tensors it takes."""
    tensors = {"k": k, "v": v, "g": g, "beta": beta}
    optional = {"A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens}
    _check_no_grad({**tensors, **optional})
    _check_tokens(tensors, optional, A_log, dt_bias, lower_bound, cu_seqlens, 1.0)
    inputs = Inputs(None, k, v, g, beta, A_log, _per_head_bias(dt_bias, k.shape[2]), float(lower_bound))
    return _problem(inputs, k.shape[0], k.shape[1], cu_seqlens)


def check_gates(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float, cu_seqlens: Tensor | None
) -> Problem:
    """The contract of ``get_warmup_chunks``. In the result k, v and beta are stand-ins that nothing uses."""
    _check_no_grad({"g": g, "A_log": A_log, "dt_bias": dt_bias})
    optional = {"A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens}
    _check_tokens({"g": g}, optional, A_log, dt_bias, lower_bound, cu_seqlens, 1.0)
    inputs = Inputs(None, g, g, g, g[..., 0], A_log, _per_head_bias(dt_bias, g.shape[2]), float(lower_bound))
    return _problem(inputs, g.shape[0], g.shape[1], cu_seqlens)


def check_num_warmup_chunks(x: Tensor, problem: Problem) -> Tensor:
    """``[NS, H]`` counts of ``state_only``, negative ones refused where free to read."""
    name = "num_warmup_chunks"
    x = per_head(name, x, problem.num_sequences, problem.inputs.heads, OFFSET_DTYPES)
    check_devices({name: x}, problem.inputs.k.device)
    if (readable(x) or settings.debug()) and bool((x < 0).any()):
        raise ValueError(f"{name} must be >= 0, got {int(x.min())}")
    return x


def check_correction(
    initial_state: Tensor | None, ht: Tensor, mt: Tensor | None, fallback: Tensor | None, seq_map: Tensor
) -> Tensor | None:
    """The contract of ``correct_initial_states``. Returns fallback as ``[NS, H]`` bool or None."""
    tensors = {"ht": ht, "mt": mt, "fallback": fallback, "seq_map": seq_map, "initial_state": initial_state}
    _check_tensors(tensors, required=("ht", "seq_map"))
    _check_no_grad(tensors)
    _check_rank("ht", ht, "[NS,H,V,K]", 4)
    segments, heads = ht.shape[:2]
    _check_shape("ht", ht, "[NS,H,V,K]", (segments, heads, HEAD_DIM, HEAD_DIM))
    _check_dtype("ht", ht, (torch.float32,))
    _check_offset_tensor("seq_map", seq_map)
    if mt is not None:
        _check_shape("mt", mt, "[NS,H,K,K]", (segments, heads, HEAD_DIM, HEAD_DIM))
        _check_dtype("mt", mt, (torch.float32,))
    if initial_state is not None:
        _check_shape("initial_state", initial_state, "[N,H,V,K]", (seq_map.numel() - 1, heads, HEAD_DIM, HEAD_DIM))
        _check_dtype("initial_state", initial_state, STATE_DTYPES)
    check_devices(tensors, ht.device)
    if readable(seq_map) or settings.debug():
        check_offsets("seq_map", seq_map, segments, "segments")
    if fallback is None:
        return None
    fallback = per_head("fallback", fallback, segments, heads, (torch.bool,))
    if mt is None and (readable(fallback) or settings.debug()) and bool(fallback.any()):
        raise ValueError(
            "mt must be given where fallback is True, got None; call state_only(..., calc_mt=True) or pass fallback=None"
        )
    return fallback


def check_plan(
    cu_seqlens: Tensor,
    total_tokens: int,
    num_heads: int,
    segment_len: int | None,
    num_processors: int | None,
    fixed_plan: bool,
    cu_seqlens_cpu: Tensor | Sequence[int] | None,
) -> list[int] | None:
    """The contract of ``plan_segments``. Returns the offsets, or None if the host does not know them."""
    _check_tensors({"cu_seqlens": cu_seqlens}, required=("cu_seqlens",))
    _check_offset_tensor("cu_seqlens", cu_seqlens)
    _check_integer("total_tokens", total_tokens, 0)
    _check_integer("num_heads", num_heads, 0)
    if num_processors is not None:
        _check_integer("num_processors", num_processors, 1)
    if segment_len is not None:
        _check_integer("segment_len", segment_len, CHUNK)
        if segment_len % CHUNK:
            raise ValueError(f"segment_len must be a multiple of {CHUNK}, got {segment_len}")
        if fixed_plan:
            raise ValueError(f"segment_len must be None with fixed_plan=True, got {segment_len}; pass one of the two")
    offsets = None
    if readable(cu_seqlens) or settings.debug():
        offsets = check_offsets("cu_seqlens", cu_seqlens, total_tokens, "tokens")
    if cu_seqlens_cpu is None:
        return offsets
    name = "cu_seqlens_cpu"
    if isinstance(cu_seqlens_cpu, Tensor):
        _check_offset_tensor(name, cu_seqlens_cpu)
        check_devices({name: cu_seqlens_cpu}, torch.device("cpu"))
    elif not isinstance(cu_seqlens_cpu, Sequence):
        raise TypeError(f"{name} must be a tensor or a sequence of integers, got {type(cu_seqlens_cpu).__name__}")
    elif not all(isinstance(x, numbers.Integral) for x in cu_seqlens_cpu):
        raise TypeError(f"{name} must hold integers, got {list(cu_seqlens_cpu)}")
    if len(cu_seqlens_cpu) != cu_seqlens.numel():
        raise ValueError(f"{name} must have the {cu_seqlens.numel()} offsets of cu_seqlens, got {len(cu_seqlens_cpu)}")
    known = check_offsets(name, cu_seqlens_cpu, total_tokens, "tokens")
    if offsets is not None and known != offsets:
        at = next(i for i, pair in enumerate(zip(known, offsets, strict=True)) if pair[0] != pair[1])
        raise ValueError(f"{name} must be a copy of cu_seqlens, got {known[at]} for {offsets[at]} at position {at}")
    return known


def per_head(name: str, x: Tensor, segments: int, heads: int, dtypes: Sequence[torch.dtype]) -> Tensor:
    """``[NS, H]`` from ``[NS, H]`` or the published per-segment form ``[NS]``."""
    _check_tensors({name: x})
    _check_dtype(name, x, dtypes)
    if x.dim() == 1 and x.shape[0] == segments:
        return x[:, None].expand(segments, heads)
    if tuple(x.shape) != (segments, heads):
        raise ValueError(f"{name} must have shape [NS,H] = {(segments, heads)} or [NS] = {(segments,)}, got {tuple(x.shape)}")
    return x


def _check_offset_tensor(name: str, x: Tensor) -> None:
    _check_rank(name, x, "[N+1]", 1)
    _check_dtype(name, x, OFFSET_DTYPES)
    if x.numel() == 0:
        raise ValueError(f"{name} must have shape [N+1], got (0,); it starts with 0")


def check_offsets(name: str, offsets: Tensor | Sequence[int], limit: int, unit: str) -> list[int]:
    """Reads offsets on the host: first 0, non-decreasing, last at most ``limit``."""
    values: list[int] = offsets.tolist() if isinstance(offsets, Tensor) else list(offsets)
    if values[0] != 0:
        raise ValueError(f"{name} must start with 0, got {values[0]}")
    for i, (a, b) in enumerate(itertools.pairwise(values)):
        if b < a:
            raise ValueError(f"{name} must be non-decreasing, got {a} then {b} at positions {i} and {i + 1}")
    if values[-1] > limit:
        raise ValueError(f"{name} must end at or before the {limit} {unit} there are, got {values[-1]}")
    return values


def check_lower_bound(lower_bound: float) -> float:
    """A finite number in [-5, 0]; 0 means no decay at all."""
    if lower_bound is None:
        raise ValueError(
            f"lower_bound must be a number in [{LOWER_BOUND_MIN:g}, 0], got None; None selects the unbounded softplus gate "
            "(Kimi-Linear-48B), which flash_kda does not implement: see the non-goals in the README"
        )
    value = _number("lower_bound", lower_bound)
    if not (LOWER_BOUND_MIN <= value <= 0):
        raise ValueError(
            f"lower_bound must be in [{LOWER_BOUND_MIN:g}, 0], got {value!r}; "
            "below it the factors of a chunk leave the range of fp32"
        )
    return value


def check_eps(eps: float) -> float:
    """Tolerance of the measured exit, a number in [0, 1)."""
    value = _number("eps", eps)
    if not 0 <= value < 1:
        raise ValueError(f"eps must be in [0, 1), got {value!r}; 0 scans every segment to its start")
    return value


def _check_tokens(
    tensors: dict[str, Tensor],
    optional: dict[str, Tensor | None],
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    cu_seqlens: Tensor | None,
    scale: float,
) -> None:
    """Shapes, dtypes and devices of what all functions take; nothing is read."""
    _check_tensors(tensors, required=tuple(tensors))
    _check_tensors(optional)
    check_lower_bound(lower_bound)
    _number("scale", scale)
    lead_name = next(iter(tensors))
    lead = tensors[lead_name]
    _check_rank(lead_name, lead, "[B,T,H,K]", 4)
    batch, tokens, heads, dim = lead.shape
    if dim != HEAD_DIM:
        raise ValueError(
            f"{lead_name} must have head dimension K = V = {HEAD_DIM}, got {dim} in shape {tuple(lead.shape)} of [B,T,H,K]"
        )
    if heads < 1:
        raise ValueError(f"{lead_name} must have at least one head, got shape {tuple(lead.shape)} of [B,T,H,K]")
    for name, x in tensors.items():
        layout = {"beta": "[B,T,H]", "v": "[B,T,H,V]"}.get(name, "[B,T,H,K]")
        _check_shape(name, x, layout, (batch, tokens, heads) if name == "beta" else (batch, tokens, heads, dim))
        _check_dtype(name, x, GATE_DTYPES if name in ("g", "beta") else (torch.bfloat16,))
    taken_from = f"; H is the third axis of {lead_name} [B,T,H,K] = {tuple(lead.shape)}"
    if A_log is not None:
        if tuple(A_log.shape) != (heads,):
            raise ValueError(f"A_log must have shape [H] = {(heads,)}, got {tuple(A_log.shape)}{taken_from}")
        _check_dtype("A_log", A_log, (torch.float32,))
    if dt_bias is not None:
        if tuple(dt_bias.shape) not in ((heads, dim), (heads * dim,)):
            raise ValueError(
                f"dt_bias must have shape [H,K] = {(heads, dim)} or [H*K] = {(heads * dim,)}, got {tuple(dt_bias.shape)}"
                + taken_from
            )
        _check_dtype("dt_bias", dt_bias, (torch.float32,))
    check_devices({**tensors, **optional}, lead.device)

    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(
                f"{lead_name} must have B = 1 with cu_seqlens, got shape {tuple(lead.shape)} of [B,T,H,K]; "
                "pack the sequences on the token axis"
            )
        _check_offset_tensor("cu_seqlens", cu_seqlens)


def _problem(
    inputs: Inputs,
    batch: int,
    tokens: int,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None = None,
    memo: Memo | None = None,
) -> Problem:
    """The call; reads contents where that is free or asked for."""
    num_sequences, max_len, covered = batch, tokens, tokens
    debug = settings.debug()
    if cu_seqlens is not None:
        num_sequences = cu_seqlens.numel() - 1
        if debug or readable(cu_seqlens):
            values = check_offsets("cu_seqlens", cu_seqlens, tokens, "tokens")
            max_len = max((b - a for a, b in itertools.pairwise(values)), default=0)
            covered = values[-1]
    if debug:
        token_tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.g, "beta": inputs.beta}
        _check_finite({name: None if x is None else x[:, :covered] for name, x in token_tensors.items()})
        _check_finite({"A_log": inputs.A_log, "dt_bias": inputs.dt_bias, "initial_state": initial_state})
    return Problem(inputs, cu_seqlens, num_sequences, max_len, {} if memo is None else memo)


def _per_head_bias(dt_bias: Tensor | None, heads: int) -> Tensor | None:
    return dt_bias if dt_bias is None or dt_bias.dim() == 2 else dt_bias.reshape(heads, HEAD_DIM)


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        hint = "; read it once with float(...)" if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}{hint}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name} must be finite in fp32, got {number!r}")
    return number


def _check_integer(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


def _check_tensors(tensors: dict[str, Tensor] | dict[str, Tensor | None], required: Sequence[str] = ()) -> None:
    for name, x in tensors.items():
        if x is None and name not in required:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a dense strided tensor, got layout {x.layout}; call .to_dense()")


def _check_no_grad(tensors: dict[str, Tensor] | dict[str, Tensor | None]) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise RuntimeError(
                f"{name} must not require grad, got requires_grad=True with grad mode on: this function has no backward; "
                "call it under torch.no_grad() or inference_mode(), or use the differentiable flash_kda.reference"
            )


def _check_rank(name: str, x: Tensor, layout: str, rank: int) -> None:
    if x.dim() != rank:
        raise ValueError(f"{name} must have shape {layout}, got {tuple(x.shape)}")


def _check_shape(name: str, x: Tensor, layout: str, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {layout} = {shape}, got {tuple(x.shape)}")


def _check_dtype(name: str, x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {str(x.dtype).removeprefix('torch.')}")


def check_devices(tensors: dict[str, Tensor] | dict[str, Tensor | None], device: torch.device) -> None:
    for name, x in tensors.items():
        if x is not None and x.device != device:
            raise ValueError(f"{name} must be on {device} like the other tensors, got {x.device}")


def _check_writable(name: str, x: Tensor) -> None:
    """Every element has memory of its own: no expanded or self-overlapping view. And writing to it is allowed."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name} must be writable here, got a tensor made under inference_mode; "
            "call under torch.inference_mode() or make it outside"
        )
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride < extent:
            raise ValueError(
                f"{name} must not overlap itself, got strides {x.stride()} for shape {tuple(x.shape)}; "
                "do not expand a tensor that is written to"
            )
        extent = stride * (size - 1) + extent


def _check_finite(tensors: dict[str, Tensor] | dict[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is not None and not bool(x.isfinite().all()):
            where = (~x.isfinite()).nonzero()[0].tolist()
            raise ValueError(f"{name} must be finite, got {x[tuple(where)].item()} at {where} (FLASH_KDA_DEBUG=1)")


def _same_view(a: Tensor, b: Tensor) -> bool:
    """The same elements in the same order; strides of axes of size 1 mean nothing."""
    strides = (tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1) for x in (a, b))
    return (a.data_ptr(), a.shape, next(strides), a.dtype) == (b.data_ptr(), b.shape, next(strides), b.dtype)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views may share memory. Interleaved slices of one buffer, as of a fused projection, do not."""
    if a.numel() == 0 or b.numel() == 0 or a.is_meta:
        return False
    spans = []
    for x in (a, b):
        reach = sum((n - 1) * abs(s) for n, s in zip(x.shape, x.stride(), strict=True))
        spans.append((x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()))
    if spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]:
        return False
    # Modulo the common period of all strides but those of the contiguous last axes, each view is one run of bytes.
    period = 0
    runs = []
    for x in (a, b):
        axes = [(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
        run = 1
        while axes and axes[-1][1] == run:
            run *= axes.pop()[0]
        for _, s in axes:
            period = math.gcd(period, s * x.element_size())
        runs.append(run * x.element_size())
    if period == 0:
        return True
    shift = (b.data_ptr() - a.data_ptr()) % period
    return not (shift >= runs[0] and shift + runs[1] <= period)
