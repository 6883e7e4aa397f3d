"""Routes calls of flash-linear-attention's ``chunk_kda`` to this package.

With ``flash_kda`` importable, fla's own backend already sends here what FlashKDA takes (inference, bf16, equal head counts,
V-first states, the bounded gate). ``enable`` adds a backend ahead of it, for what FlashKDA refuses and this package does:
grouped value heads, K-first states, A_log or dt_bias of None, write strengths given as they are, and the schedule of
``fwd_cp``. What that backend does not take goes on as before: to FlashKDA's, and to fla's kernels.

fla 0.6 and the registries just before it are known; https://github.com/fla-org/flash-linear-attention.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from .. import validation as check
from ..chunk import chunk_kda, refusal
from ..sm90 import stages as sm90

NAME = "flash_kda_cp"
PRIORITY = 2
"""Ahead of fla's own FlashKDA backend, which has 3."""


def enable() -> None:
    """Calls of fla's ``chunk_kda`` that qualify come here from now on, in this process. Twice is once.

    Raises:
        ImportError: fla is not installed.
        RuntimeError: this fla has no registry that is known, or its dispatch is switched off.
    """
    registry, base = _registry()

    class Backend(base):  # type: ignore[misc, valid-type]
        """fla's adapter: a verifier and an implementation for each function it takes."""

        backend_type = NAME
        package_name = "flash_kda"
        env_var = "FLA_FLASH_KDA"
        default_enable = True
        priority = PRIORITY

        def chunk_kda_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            reason = why_not(*args, **kwargs)
            return reason is None, reason

        def chunk_kda(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            return chunk_kda(**_named(args, kwargs))

    registry.register(Backend())


def disable() -> None:
    """Undoes :func:`enable`."""
    _registry()[0]._backends.pop(NAME, None)


def is_enabled() -> bool:
    """Whether calls are routed here."""
    return NAME in _registry()[0]._backends


def why_not(*args: Any, **kwargs: Any) -> str | None:
    """Why a call of fla's ``chunk_kda`` with these arguments is left to fla, or None.

    A call qualifies if this package computes it, and on a GPU only if its kernels do: fla's are faster than the reference.
    """
    if torch.is_grad_enabled():
        return "there is no backward pass: call under torch.no_grad() or torch.inference_mode()"
    call = _named(args, kwargs)
    reason = refusal(**call)
    if reason is not None:
        return reason
    q, v = call["q"], call["v"]
    activated = call.get("allow_neg_eigval", False) or not call.get("use_beta_sigmoid_in_kernel", False)
    try:
        problem = check.check_forward(
            q,
            call["k"],
            v,
            call["g"],
            call["beta"],
            1.0,
            None,
            call.get("A_log"),
            call.get("dt_bias"),
            call.get("lower_bound"),  # type: ignore[arg-type]
            None,
            None,
            call.get("cu_seqlens"),
            beta_is_activated=activated,
        )
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    if q.device.type == "cpu":
        return None
    return dispatch.why_not_sm90(q.device) or sm90.refusal(problem.inputs, problem.cu_seqlens, v, None, None, None, None, {})


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call by names, without what only chooses among fla's kernels."""
    call = inspect.signature(chunk_kda).bind_partial(*args).arguments | kwargs
    call.pop("chunk_size", None)
    if "transpose_state_layout" in call:  # fla's former name
        call["state_v_first"] = call.pop("transpose_state_layout")
    return call


def _registry() -> tuple[Any, type]:
    """The registry behind fla's ``chunk_kda`` and the base class of its backends."""
    function = importlib.import_module("fla.ops.kda").chunk_kda
    for home in ("fla.backends", "fla.ops.backends"):
        try:
            backends = importlib.import_module(home)
        except ImportError:
            continue
        registry = getattr(backends, "_function_registries", {}).get(inspect.unwrap(function))
        if registry is None:
            registry = getattr(importlib.import_module("fla.ops.kda.backends"), "kda_registry", None)
        if hasattr(registry, "register") and hasattr(registry, "_backends") and hasattr(backends, "BaseBackend"):
            return registry, backends.BaseBackend
    raise RuntimeError(
        "fla must have a registry of backends for chunk_kda, got none that is known; "
        "unset FLA_DISABLE_BACKEND_DISPATCH, or install fla 0.6"
    )
