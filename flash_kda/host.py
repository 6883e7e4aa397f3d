"""What the host may look at. One rule, so that planning and the stages cannot disagree about it."""

from __future__ import annotations

from torch import Tensor


def readable(x: Tensor) -> bool:
    """Whether reading the contents of ``x`` on the host is free. Elsewhere it would wait for the device."""
    return x.device.type == "cpu"
