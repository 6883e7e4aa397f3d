"""Runs the FlashKDA operator that vLLM ships (``torch.ops._flashkda_C.fwd``) by this package.

vLLM's KDA layers call that operator with positional arguments: those of :func:`flash_kda.fwd` with a workspace after ``out``,
which is left alone, and then ``checkpoint_state`` and ``checkpoint_offsets`` (https://github.com/vllm-project/FlashKDA,
https://github.com/vllm-project/vllm, vllm/models/kimi_k3/nvidia/kda.py). ``enable`` puts an implementation in front of vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import fwd

NAMESPACE = "_flashkda_C"

_library: Any = None


def enable(device: str = "cuda") -> None:
    """vLLM's operator runs :func:`flash_kda.fwd` from now on, in this process. Twice is once.

    Args:
        device: type of the tensors that it is called with.

    Raises:
        RuntimeError: vLLM's operator is not there; import ``vllm._flashkda_C`` first.
    """
    global _library
    if _library is not None:
        return
    if not hasattr(getattr(torch.ops, NAMESPACE), "fwd"):
        raise RuntimeError(f"torch.ops.{NAMESPACE}.fwd must be registered, got nothing; import vllm._flashkda_C first")
    library = torch.library.Library(NAMESPACE, "IMPL")
    library.impl("fwd", _fwd, device.upper())
    _library = library


def disable() -> None:
    """Undoes :func:`enable`."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    workspace: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> None:
    fwd(
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
        checkpoint_states=checkpoint_state,
        checkpoint_offsets=checkpoint_offsets,
    )
