"""Chooses who computes the stages: the PyTorch reference or the Hopper kernels, and says why.

An explicit ``impl`` runs or raises. ``auto`` takes the kernels where they can run and the reference elsewhere; the reason
is logged once and :func:`last_path` tells what the latest call of this thread used.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable

import torch

from . import settings

logger = logging.getLogger("flash_kda")
_local = threading.local()
_lock = threading.Lock()
_logged: set[str] = set()


def choose(impl: str | None, device: torch.device, refusal: Callable[[], str | None] | None = None) -> str:
    """``"reference"`` or ``"sm90"`` for tensors on ``device``.

    Args:
        impl: what the caller asked for; FLASH_KDA_IMPL if None.
        device: of the tensors.
        refusal: tells why the kernels cannot take these tensors, or None; only asked where they could run.

    Raises:
        ValueError: no such implementation.
        NotImplementedError: an explicit ``impl`` cannot run here.
    """
    asked = settings.impl() if impl is None else impl
    if asked not in settings.IMPLS:
        raise ValueError(f"impl must be one of {', '.join(settings.IMPLS)}, got {asked!r}")
    chosen = "reference"
    if asked != "reference":
        reason = why_not_sm90(device)
        if reason is None and refusal is not None:
            reason = refusal()
        if reason is None:
            chosen = "sm90"
        elif asked == "sm90":
            raise NotImplementedError(
                f"impl='sm90' must be able to run, got tensors on {device}: {reason}; use impl='reference'"
            )
        elif device.type == "cuda":
            _log_once(device, reason)
    took(chosen)
    return chosen


def took(path: str) -> None:
    """Makes ``path`` what :func:`last_path` tells."""
    _local.path = path


def _log_once(device: torch.device, reason: str) -> None:
    """Once for each kind of reason: addresses and lengths in it differ from call to call."""
    kind = re.sub(r"0x[0-9a-f]+|[0-9]+", "#", reason)
    with _lock:
        if kind in _logged:
            return
        _logged.add(kind)
    logger.warning("flash_kda runs the PyTorch reference on %s: %s", device, reason)


def why_not_sm90(device: torch.device) -> str | None:
    """The reason why the Hopper kernels cannot run on ``device``, or None."""
    if device.type != "cuda":
        return f"tensors are on {device.type}, the kernels need an NVIDIA Hopper GPU (sm_90)"
    from .sm90 import launch

    return launch.available(device)


def last_path() -> str | None:
    """What the latest call of this thread ran on: ``"reference"``, ``"sm90"``, or None before the first call."""
    return getattr(_local, "path", None)
