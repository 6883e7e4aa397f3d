"""The input contract, stated once: every check of every public function, before anything is computed or written.

Errors have one shape, ``<argument> must <requirement>, got <value>; <remedy>``. Shapes, dtypes, devices, strides and
aliasing are metadata and always checked. Contents are checked where they are free to read: offsets on a CPU. Contents of
device tensors are only read with ``FLASH_KDA_DEBUG`` (settings.py, debug.py).
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import debug, settings, views
from .constants import CHUNK, HEAD_DIM, LOWER_BOUND_MIN
from .host import readable
from .inputs import Inputs

Memo = dict[Any, Any]
STATE_DTYPES = (torch.bfloat16, torch.float32)
GATE_DTYPES = (torch.bfloat16, torch.float32)
OFFSET_DTYPES = (torch.int32, torch.int64)
FP32_MAX = torch.finfo(torch.float32).max


class Tensors(NamedTuple):
    """Those of ``fwd`` and ``fwd_cp``, as they were passed."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    out: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    final_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    initial_state_indices: Tensor | None = None
    final_state_indices: Tensor | None = None
    checkpoint_states: Tensor | None = None
    checkpoint_offsets: Tensor | None = None


NAMES = Tensors._fields
INITIAL_STATE, FINAL_STATE = NAMES.index("initial_state"), NAMES.index("final_state")
WRITTEN = tuple(NAMES.index(name) for name in ("out", "final_state", "checkpoint_states"))

SEEN_KEPT = 1024
"""Kinds of calls whose metadata is remembered as checked."""

Key = tuple[object, ...]
_seen: dict[Key, Memo] = {}
_serials = itertools.count()


class Problem(NamedTuple):
    """A validated call.

    Attributes:
        inputs: the caller's tensors.
        cu_seqlens: ``[N + 1]`` offsets of the sequences, or None for N sequences of ``max_len`` tokens each.
        num_sequences: N.
        max_len: no sequence is longer (tokens); host integer.
        memo: shared by all calls that differ only in addresses and contents: a stage may keep here what depends on neither.
        debug: what was asked to be looked for in contents.
        initial_state_indices, final_state_indices: ``[N]`` int32 rows of the states that each sequence reads and writes, or
            None for row n.
        checkpoint_states, checkpoint_offsets, checkpoint_every: states on the way and where they are taken, or None.
    """

    inputs: Inputs
    cu_seqlens: Tensor | None
    num_sequences: int
    max_len: int
    memo: Memo
    debug: tuple[str, ...] = ()
    initial_state_indices: Tensor | None = None
    final_state_indices: Tensor | None = None
    checkpoint_states: Tensor | None = None
    checkpoint_offsets: Tensor | None = None
    checkpoint_every: int | None = None

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
    beta_is_activated: bool = False,
) -> Problem:
    """The whole contract of ``fwd`` and ``fwd_cp``. Raises ValueError, TypeError or RuntimeError; writes nothing."""
    tensors = Tensors(q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens)
    memo = check_kind(tensors, scale, lower_bound, False, beta_is_activated, None)
    check_aliasing(memo, tensors)
    return check_contents(memo, tensors, scale, lower_bound, beta_is_activated, None)


def check_kind(
    tensors: Tensors,
    scale: float,
    lower_bound: float,
    output_final_state: bool,
    beta_is_activated: bool,
    checkpoint_every: int | None,
) -> Memo:
    """What a call must be by shapes, dtypes, strides and devices. It is remembered: one like an earlier one costs little.

    Args:
        The arguments of ``fwd`` of these names.

    Returns:
        What is remembered of this kind of call.
    """
    _check_flag("beta_is_activated", beta_is_activated)
    if checkpoint_every is not None:
        _check_multiple("checkpoint_every", checkpoint_every)
    key = _metadata(tensors, scale, lower_bound, bool(output_final_state), beta_is_activated, checkpoint_every)
    memo = None if key is None else _seen.get(key)
    if memo is not None:
        return memo
    q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens, in_index, out_index, saved, at = tensors
    named: dict[str, Tensor | None] = tensors._asdict()
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    optional = {name: x for name, x in named.items() if name not in tokens}
    _check_no_grad(named)
    _check_tokens(tokens, optional, A_log, dt_bias, lower_bound, cu_seqlens, scale)
    if out is not None:
        _check_shape("out", out, "[B,T,HV,V]", tuple(v.shape))
        _check_dtype("out", out, (torch.bfloat16,))
        _check_writable("out", out)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    _check_states("initial_state", initial_state, in_index, sequences, v.shape[2])
    _check_states("final_state", final_state, out_index, sequences, v.shape[2])
    if final_state is not None:
        _check_writable("final_state", final_state)
    _check_checkpoints(saved, at, checkpoint_every, sequences, v)
    memo = {"extents": [(i, views.extent(x)) for i, x in enumerate(tensors) if x is not None]}
    if key is not None:
        memo["serial"] = next(_serials)
        if len(_seen) >= SEEN_KEPT:
            _seen.clear()
        _seen[key] = memo
    return memo


def check_aliasing(memo: Memo, tensors: Tensors) -> tuple[int, ...]:
    """What is written must share no memory with anything else, but for states updated in place. Returns all addresses.

    Args:
        memo: of :func:`check_kind`.
    """
    extents = memo["extents"]
    spans = [(i, tensors[i].data_ptr(), extent) for i, extent in extents]  # type: ignore[union-attr]
    for target, first, extent in spans:
        if target in WRITTEN:
            last = first + extent
            for other, start, size in spans:
                if start < last and first < start + size and other != target:
                    _check_aliasing(tensors, target, other)
    return tuple([start for _, start, _ in spans])


def check_contents(
    memo: Memo, tensors: Tensors, scale: float, lower_bound: float, beta_is_activated: bool, checkpoint_every: int | None
) -> Problem:
    """The rest: contents, where the host may look or was asked to. Arguments as in :func:`check_kind`, which was called."""
    q, k, v, g, beta, _, A_log, dt_bias, initial_state, final_state, cu_seqlens, in_index, out_index, saved, at = tensors
    bias = _per_head_bias(dt_bias, v.shape[2])
    inputs = Inputs(q, k, v, g, beta, A_log, bias, float(lower_bound), float(scale), beta_is_activated)
    problem = _problem(inputs, q.shape[0], q.shape[1], cu_seqlens, memo, in_index, out_index, saved, at, checkpoint_every)
    if at is not None and ("bounds" in problem.debug or readable(at)):
        debug.check_checkpoints(problem)
    if problem.debug:
        shared = initial_state is not None and final_state is not None and views.overlap(initial_state, final_state)
        debug.check_call(problem, initial_state, final_state, shared)
    return problem


def _metadata(tensors: Tensors, scale: float, lower_bound: float, *flags: object) -> Key | None:
    """All that the checks of a call can depend on besides addresses and contents; None if an argument is of no kind known."""
    if type(scale) not in (float, int) or type(lower_bound) not in (float, int):
        return None
    grad = torch.is_grad_enabled()
    key: list[object] = [scale, lower_bound, *flags, grad, torch.is_inference_mode_enabled()]
    try:
        for x in tensors:
            if x is None:
                key.append(None)
            else:
                key += (x.shape, x.stride(), x.dtype, x.device)
        if grad:
            key += [x is not None and x.requires_grad for x in tensors]
        for i in WRITTEN:
            x = tensors[i]
            key.append(x is not None and x.is_inference())
    except (AttributeError, RuntimeError):
        return None
    return tuple(key)


def _check_aliasing(tensors: Tensors, target: int, other: int) -> None:
    """Two views whose address ranges meet: the one that is written must share no element with the other."""
    written, source = tensors[target], tensors[other]
    in_place = target == FINAL_STATE and other == INITIAL_STATE
    if (in_place and written is source) or written is None or source is None or not views.overlap(written, source):
        return
    remedy = "allocate it separately"
    if in_place:
        if views.same_view(written, source):
            return
        remedy = "pass the very same tensor to update states in place, or separate memory"
    name, shared = NAMES[target], NAMES[other]
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
        if written is not None and source is not None and views.overlap(written, source):
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
    beta_is_activated: bool = False,
) -> Problem:
    """The contract of ``state_only``: that of ``fwd`` for the tensors it takes."""
    tensors = {"k": k, "v": v, "g": g, "beta": beta}
    optional = {"A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens}
    _check_no_grad({**tensors, **optional})
    _check_tokens(tensors, optional, A_log, dt_bias, lower_bound, cu_seqlens, 1.0)
    _check_flag("beta_is_activated", beta_is_activated)
    bias = _per_head_bias(dt_bias, v.shape[2])
    inputs = Inputs(None, k, v, g, beta, A_log, bias, float(lower_bound), beta_is_activated=beta_is_activated)
    problem = _problem(inputs, k.shape[0], k.shape[1], cu_seqlens)
    if problem.debug:
        debug.check_call(problem)
    return problem


def check_gates(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float, cu_seqlens: Tensor | None
) -> Problem:
    """The contract of ``get_warmup_chunks``. In the result k, v and beta are stand-ins that nothing uses."""
    _check_no_grad({"g": g, "A_log": A_log, "dt_bias": dt_bias})
    optional = {"A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens}
    _check_tokens({"g": g}, optional, A_log, dt_bias, lower_bound, cu_seqlens, 1.0)
    inputs = Inputs(None, g, g, g, g[..., 0], A_log, _per_head_bias(dt_bias, g.shape[2]), float(lower_bound))
    problem = _problem(inputs, g.shape[0], g.shape[1], cu_seqlens)
    if problem.debug:
        debug.check_call(problem)
    return problem


def check_num_warmup_chunks(x: Tensor, problem: Problem) -> Tensor:
    """``[NS, HV]`` counts of ``state_only``, negative ones refused where free to read."""
    name = "num_warmup_chunks"
    x = per_head(name, x, problem.num_sequences, problem.inputs.heads, OFFSET_DTYPES)
    check_devices({name: x}, problem.inputs.k.device)
    if (readable(x) or "bounds" in settings.debug()) and bool((x < 0).any()):
        raise ValueError(f"{name} must be >= 0, got {int(x.min())}")
    return x


def check_correction(
    initial_state: Tensor | None, ht: Tensor, mt: Tensor | None, fallback: Tensor | None, seq_map: Tensor
) -> Tensor | None:
    """The contract of ``correct_initial_states``. Returns fallback as ``[NS, HV]`` bool or None."""
    tensors = {"ht": ht, "mt": mt, "fallback": fallback, "seq_map": seq_map, "initial_state": initial_state}
    _check_tensors(tensors, required=("ht", "seq_map"))
    _check_no_grad(tensors)
    _check_rank("ht", ht, "[NS,HV,V,K]", 4)
    segments, heads = ht.shape[:2]
    _check_shape("ht", ht, "[NS,HV,V,K]", (segments, heads, HEAD_DIM, HEAD_DIM))
    _check_dtype("ht", ht, (torch.float32,))
    _check_offset_tensor("seq_map", seq_map)
    if mt is not None:
        _check_shape("mt", mt, "[NS,HV,K,K]", (segments, heads, HEAD_DIM, HEAD_DIM))
        _check_dtype("mt", mt, (torch.float32,))
    if initial_state is not None:
        _check_shape("initial_state", initial_state, "[N,HV,V,K]", (seq_map.numel() - 1, heads, HEAD_DIM, HEAD_DIM))
        _check_dtype("initial_state", initial_state, STATE_DTYPES)
    check_devices(tensors, ht.device)
    if readable(seq_map) or "bounds" in settings.debug():
        check_offsets("seq_map", seq_map, segments, "segments")
    if fallback is None:
        return None
    fallback = per_head("fallback", fallback, segments, heads, (torch.bool,))
    if mt is None and (readable(fallback) or "bounds" in settings.debug()) and bool(fallback.any()):
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
    check_integer("total_tokens", total_tokens, 0)
    check_integer("num_heads", num_heads, 0)
    if num_processors is not None:
        check_integer("num_processors", num_processors, 1)
    check_segment_len(segment_len, fixed_plan)
    offsets = None
    if readable(cu_seqlens) or "bounds" in settings.debug():
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


def check_segment_len(segment_len: int | None, fixed_plan: bool) -> None:
    """A multiple of 16, or None; not both this and ``fixed_plan``."""
    if segment_len is None:
        return
    _check_multiple("segment_len", segment_len)
    if fixed_plan:
        raise ValueError(f"segment_len must be None with fixed_plan=True, got {segment_len}; pass one of the two")


def per_head(name: str, x: Tensor, segments: int, heads: int, dtypes: Sequence[torch.dtype]) -> Tensor:
    """``[NS, HV]`` from ``[NS, HV]`` or the published per-segment form ``[NS]``."""
    _check_tensors({name: x})
    _check_dtype(name, x, dtypes)
    if x.dim() == 1 and x.shape[0] == segments:
        return x[:, None].expand(segments, heads)
    if tuple(x.shape) != (segments, heads):
        raise ValueError(f"{name} must have shape [NS,HV] = {(segments, heads)} or [NS] = {(segments,)}, got {tuple(x.shape)}")
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
    lead_layout = "[B,T,HV,K]" if lead_name == "g" else "[B,T,H,K]"
    _check_rank(lead_name, lead, lead_layout, 4)
    batch, tokens, heads, dim = lead.shape
    if dim != HEAD_DIM:
        raise ValueError(
            f"{lead_name} must have head dimension K = V = {HEAD_DIM}, got {dim} in shape {tuple(lead.shape)} of {lead_layout}"
        )
    if heads < 1:
        raise ValueError(f"{lead_name} must have at least one head, got shape {tuple(lead.shape)} of {lead_layout}")
    source = "v" if "v" in tensors else lead_name
    value_heads = _value_heads(tensors[source], heads, lead_name) if source == "v" else heads
    taken_from = f"; HV is the third axis of {source} = {tuple(tensors[source].shape)}"
    for name, x in tensors.items():
        if name in ("q", "k"):
            _check_shape(name, x, "[B,T,H,K]", (batch, tokens, heads, dim))
        elif name == "beta":
            _check_shape(name, x, "[B,T,HV]", (batch, tokens, value_heads), taken_from)
        else:
            layout = "[B,T,HV,V]" if name == "v" else "[B,T,HV,K]"
            _check_shape(name, x, layout, (batch, tokens, value_heads, dim), "" if name == source else taken_from)
        _check_dtype(name, x, GATE_DTYPES if name in ("g", "beta") else (torch.bfloat16,))
    if A_log is not None:
        _check_shape("A_log", A_log, "[HV]", (value_heads,), taken_from)
        _check_dtype("A_log", A_log, (torch.float32,))
    if dt_bias is not None:
        pair, flat = (value_heads, dim), (value_heads * dim,)
        if tuple(dt_bias.shape) not in (pair, flat):
            raise ValueError(
                f"dt_bias must have shape [HV,K] = {pair} or [HV*K] = {flat}, got {tuple(dt_bias.shape)}{taken_from}"
            )
        _check_dtype("dt_bias", dt_bias, (torch.float32,))
    check_devices({**tensors, **optional}, lead.device)

    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(
                f"{lead_name} must have B = 1 with cu_seqlens, got shape {tuple(lead.shape)} of {lead_layout}; "
                "pack the sequences on the token axis"
            )
        _check_offset_tensor("cu_seqlens", cu_seqlens)


def _problem(
    inputs: Inputs,
    batch: int,
    tokens: int,
    cu_seqlens: Tensor | None,
    memo: Memo | None = None,
    *given: Any,
) -> Problem:
    """The call; reads offsets where that is free or asked for."""
    num_sequences, max_len = batch, tokens
    asked = settings.debug()
    if cu_seqlens is not None:
        num_sequences = cu_seqlens.numel() - 1
        if readable(cu_seqlens) or "bounds" in asked:
            values = check_offsets("cu_seqlens", cu_seqlens, tokens, "tokens")
            max_len = max((b - a for a, b in itertools.pairwise(values)), default=0)
    return Problem(inputs, cu_seqlens, num_sequences, max_len, {} if memo is None else memo, asked, *given)


def _check_states(name: str, state: Tensor | None, indices: Tensor | None, sequences: int, heads: int) -> None:
    """One state a sequence, or a pool and the slot of each."""
    if state is not None:
        slots, layout = sequences, "[N,HV,V,K]"
        if indices is not None:
            _check_rank(name, state, "[slots,HV,V,K]", 4)
            slots, layout = state.shape[0], "[slots,HV,V,K]"
        _check_shape(name, state, layout, (slots, heads, HEAD_DIM, HEAD_DIM))
        _check_dtype(name, state, STATE_DTYPES)
    if indices is not None:
        if state is None:
            raise ValueError(f"{name} must be given with {name}_indices, got None; they name its slots")
        _check_shape(f"{name}_indices", indices, "[N]", (sequences,))
        _check_dtype(f"{name}_indices", indices, (torch.int32,))


def _check_checkpoints(states: Tensor | None, offsets: Tensor | None, every: int | None, sequences: int, v: Tensor) -> None:
    """Where to put states on the way, and one way to say where they are taken."""
    if offsets is not None and every is not None:
        raise ValueError(f"checkpoint_every must be None with checkpoint_offsets, got {every}; pass one of the two")
    if states is None:
        if offsets is None and every is None:
            return
        name = "checkpoint_every" if offsets is None else "checkpoint_offsets"
        raise ValueError(f"checkpoint_states must be given with {name}, got None; it is where the states go")
    state = (v.shape[2], HEAD_DIM, HEAD_DIM)
    if offsets is not None:
        if offsets.dim() not in (1, 2) or offsets.shape[0] != sequences:
            raise ValueError(
                f"checkpoint_offsets must have shape [N,C] or [N] with N = {sequences}, got {tuple(offsets.shape)}"
            )
        _check_dtype("checkpoint_offsets", offsets, OFFSET_DTYPES)
        layout = "[N,HV,V,K]" if offsets.dim() == 1 else "[N,C,HV,V,K]"
        _check_shape("checkpoint_states", states, layout, (*offsets.shape, *state))
        if (
            states.dim() == 5
            and states.numel()
            and states.shape[0] > 1
            and states.stride(0) != states.shape[1] * states.stride(1)
        ):
            raise ValueError(
                f"checkpoint_states must have its N axis C states apart, got strides {states.stride()} "
                f"for shape {tuple(states.shape)}"
            )
    elif every is not None:
        rows = v.shape[0] * v.shape[1] // every
        _check_shape("checkpoint_states", states, "[B*T//checkpoint_every,HV,V,K]", (rows, *state))
    else:
        raise ValueError("checkpoint_states must come with checkpoint_offsets or checkpoint_every, got neither")
    _check_dtype("checkpoint_states", states, STATE_DTYPES)
    _check_writable("checkpoint_states", states)


def _value_heads(v: Tensor, heads: int, lead_name: str) -> int:
    """HV, a multiple of the H heads that q and k have."""
    _check_rank("v", v, "[B,T,HV,V]", 4)
    value_heads = v.shape[2]
    if value_heads < heads or value_heads % heads:
        raise ValueError(
            f"v must have a multiple of the H = {heads} heads of {lead_name} as HV, got shape {tuple(v.shape)} of [B,T,HV,V]; "
            "value head h reads query and key head h // (HV / H)"
        )
    return value_heads


def _per_head_bias(dt_bias: Tensor | None, heads: int) -> Tensor | None:
    return dt_bias if dt_bias is None or dt_bias.dim() == 2 else dt_bias.reshape(heads, HEAD_DIM)


def _number(name: str, value: float) -> float:
    if type(value) is float and abs(value) <= FP32_MAX:  # the common case, at a tenth of the time
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        hint = "; read it once with float(...)" if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}{hint}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= FP32_MAX:
        raise ValueError(f"{name} must be finite in fp32, got {number!r}")
    return number


def check_integer(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


def _check_multiple(name: str, value: int) -> None:
    """Whole chunks."""
    check_integer(name, value, CHUNK)
    if value % CHUNK:
        raise ValueError(f"{name} must be a multiple of {CHUNK}, got {value}")


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


def _check_shape(name: str, x: Tensor, layout: str, shape: tuple[int, ...], remedy: str = "") -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {layout} = {shape}, got {tuple(x.shape)}{remedy}")


def _check_flag(name: str, value: bool) -> None:
    if value is not True and value is not False:
        raise TypeError(f"{name} must be True or False, got {value!r}")


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
