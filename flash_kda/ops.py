"""The public functions as operators of torch.library, for torch.compile and torch.export.

``torch.ops.flash_kda.fwd`` and its like write into what they are given and say so in their schemas; their fake kernels know
the shapes of what they return. Eager calls do not come this way, which would cost the host more. Traced ones do: each public
function has a twin here, which allocates what is to be returned and calls the operator.

``fwd`` has the positional arguments of the operator in vLLM's fork (https://github.com/vllm-project/FlashKDA), ``workspace``
included, which is not used. Importing this module registers the operators; using any public function imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .constants import EXIT_EPS, HEAD_DIM

_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out"
_GATE = "Tensor? A_log, Tensor? dt_bias, float lower_bound"
_STATES = "Tensor? initial_state=None, Tensor(b!)? final_state=None, Tensor? cu_seqlens=None"
_CHECKPOINTS = "Tensor(c!)? checkpoint_states=None, Tensor? checkpoint_offsets=None"
_INDICES = "Tensor? initial_state_indices=None, Tensor? final_state_indices=None"
_OPTIONS = "int? checkpoint_every=None, bool beta_is_activated=False, str? impl=None"


_library = torch.library.Library("flash_kda", "FRAGMENT")


def _operator(name: str, schema: str, fake: Callable[..., Any]) -> None:
    """Registers ``flash_kda::name``, which runs the public function of that name.

    Not by ``torch.library.custom_op``, whose Python costs 42 us a call on a CPU where this costs 5.
    """

    def run(*given: Any, **options: Any) -> Any:
        from . import api

        named = dict(zip(names, given, strict=False)) | options  # the dispatcher leaves out what equals its default
        named.pop("workspace", None)
        if name != "state_only":
            result = getattr(api, name).eager(**named)
            return result if returns else None
        result = api.state_only.eager(**named, return_info=True)  # type: ignore[attr-defined]
        info = result[-1]
        mt = result[1] if named.get("calc_mt") else result[0].new_empty(0)
        return result[0], mt, info.fallback, info.chunks, info.norm

    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_kda::{name}", fake, lib=_library)
    declared = getattr(torch.ops.flash_kda, name).default._schema
    names, returns = [argument.name for argument in declared.arguments], bool(declared.returns)


def _writes(*_given: Any, **_options: Any) -> None:
    return None


def _fake_state_only(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    cu_seqlens: Tensor | None,
    num_warmup_chunks: Tensor | None = None,
    calc_mt: bool = False,
    **_options: Any,
) -> tuple[Tensor, ...]:
    of_each = (_sequences(k, cu_seqlens), v.shape[2])
    ht = k.new_empty((*of_each, HEAD_DIM, HEAD_DIM), dtype=torch.float32)
    return (
        ht,
        torch.empty_like(ht) if calc_mt else ht.new_empty(0),
        ht.new_empty(of_each, dtype=torch.bool),
        ht.new_empty(of_each, dtype=torch.int32),
        ht.new_empty(of_each),
    )


def _fake_get_warmup_chunks(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float, cu_seqlens: Tensor | None, **_options: Any
) -> tuple[Tensor, Tensor]:
    of_each = (_sequences(g, cu_seqlens), g.shape[2])
    return g.new_empty(of_each, dtype=torch.int32), g.new_empty(of_each, dtype=torch.bool)


def _fake_correct_initial_states(
    initial_state: Tensor | None, ht: Tensor, mt: Tensor | None, fallback: Tensor | None, seq_map: Tensor
) -> Tensor:
    return ht.new_empty(ht.shape)


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


_operator(
    "fwd",
    f"({_TOKENS}, Tensor? workspace, {_GATE}, {_STATES}, {_CHECKPOINTS}, {_INDICES}, *, {_OPTIONS}) -> ()",
    _writes,
)
_operator(
    "fwd_cp",
    f"({_TOKENS}, {_GATE}, {_STATES}, bool auto_cp=True, {_CHECKPOINTS}, {_INDICES}, Tensor? cu_seqlens_cpu=None, "
    f"*, {_OPTIONS}, int? segment_len=None, bool fixed_plan=False, float eps) -> ()",
    _writes,
)
_operator(
    "state_only",
    f"(Tensor k, Tensor v, Tensor g, Tensor beta, {_GATE}, Tensor? cu_seqlens, Tensor? num_warmup_chunks=None, "
    "bool calc_mt=False, *, bool beta_is_activated=False, float eps, str? impl=None) "
    "-> (Tensor ht, Tensor mt, Tensor fallback, Tensor chunks, Tensor norm)",
    _fake_state_only,
)
_operator(
    "get_warmup_chunks",
    f"(Tensor g, {_GATE}, Tensor? cu_seqlens, *, float eps, str? impl=None) -> (Tensor num_warmup, Tensor fallback)",
    _fake_get_warmup_chunks,
)
_operator(
    "correct_initial_states",
    "(Tensor? initial_state, Tensor ht, Tensor? mt, Tensor? fallback, Tensor seq_map) -> Tensor",
    _fake_correct_initial_states,
)


# What a traced call of a public function does instead.


def fwd(
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
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    output_final_state: bool = False,
    checkpoint_states: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    _refuse_grad(q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, checkpoint_states)
    out, final_state = _allocate(v, out, final_state, cu_seqlens, output_final_state)
    torch.ops.flash_kda.fwd(
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        None,
        A_log,
        dt_bias,
        lower_bound,
        initial_state,
        final_state,
        cu_seqlens,
        checkpoint_states,
        checkpoint_offsets,
        **options,
    )
    return out, final_state


def fwd_cp(
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
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    auto_cp: bool = True,
    *,
    output_final_state: bool = False,
    checkpoint_states: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    eps: float = EXIT_EPS,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    certificate: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if certificate:
        raise NotImplementedError("certificate must be False where torch.compile traces, got True; call fwd_cp outside")
    _refuse_grad(q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, checkpoint_states)
    out, final_state = _allocate(v, out, final_state, cu_seqlens, output_final_state)
    if cu_seqlens_cpu is not None and not isinstance(cu_seqlens_cpu, Tensor):
        cu_seqlens_cpu = torch.tensor(cu_seqlens_cpu, dtype=torch.int64)
    torch.ops.flash_kda.fwd_cp(
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        initial_state,
        final_state,
        cu_seqlens,
        auto_cp,
        checkpoint_states,
        checkpoint_offsets,
        cu_seqlens_cpu=cu_seqlens_cpu,
        eps=eps,
        **options,
    )
    return out, final_state


def state_only(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    cu_seqlens: Tensor | None,
    num_warmup_chunks: Tensor | None = None,
    calc_mt: bool = False,
    *,
    eps: float = EXIT_EPS,
    return_info: bool = False,
    **options: Any,
) -> Any:
    from .api import SummaryInfo

    _refuse_grad(k, v, g, beta, A_log, dt_bias)
    ht, mt, *info = torch.ops.flash_kda.state_only(
        k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens, num_warmup_chunks, calc_mt, eps=eps, **options
    )
    if not (calc_mt or return_info):
        return ht
    return (ht, *((mt,) if calc_mt else ()), *((SummaryInfo(*info),) if return_info else ()))


def get_warmup_chunks(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    cu_seqlens: Tensor | None,
    *,
    eps: float = EXIT_EPS,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    _refuse_grad(g, A_log, dt_bias)
    num_warmup, fallback = torch.ops.flash_kda.get_warmup_chunks(g, A_log, dt_bias, lower_bound, cu_seqlens, eps=eps, impl=impl)
    return num_warmup, fallback


def correct_initial_states(
    initial_state: Tensor | None, ht: Tensor, mt: Tensor | None, fallback: Tensor | None, seq_map: Tensor
) -> Tensor:
    _refuse_grad(initial_state, ht, mt)
    states: Tensor = torch.ops.flash_kda.correct_initial_states(initial_state, ht, mt, fallback, seq_map)
    return states


def _allocate(
    v: Tensor, out: Tensor | None, final_state: Tensor | None, cu_seqlens: Tensor | None, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    if out is None:
        out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    if final_state is None and output_final_state:
        shape = (_sequences(v, cu_seqlens), v.shape[2], HEAD_DIM, HEAD_DIM)
        final_state = torch.empty(shape, dtype=torch.float32, device=v.device)
    return out, final_state


def _refuse_grad(*tensors: Tensor | None) -> None:
    """The operators have no derivative; without this their results would be detached in silence."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise RuntimeError("inputs must not require grad, got one that does with grad mode on; call under torch.no_grad()")
