"""Every environment variable this package reads, parsed in one place and at the time of the call.

FLASH_KDA_IMPL   ``auto`` (default), ``reference`` or ``sm90``: the implementation that calls without ``impl`` use.
FLASH_KDA_DEBUG  ``1``: read the contents of device tensors to check offsets and look for NaN and inf. Waits on the device.
"""

from __future__ import annotations

import os

IMPLS = ("auto", "reference", "sm90")


def impl() -> str:
    value = os.environ.get("FLASH_KDA_IMPL", "auto")
    if value not in IMPLS:
        raise ValueError(f"FLASH_KDA_IMPL must be one of {', '.join(IMPLS)}, got {value!r}")
    return value


def debug() -> bool:
    value = os.environ.get("FLASH_KDA_DEBUG", "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"FLASH_KDA_DEBUG must be 0 or 1, got {value!r}")
    return value == "1"
