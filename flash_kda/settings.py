"""Every environment variable this package reads, parsed in one place and at the time of the call.

FLASH_KDA_IMPL   ``auto`` (default), ``reference`` or ``sm90``: the implementation that calls without ``impl`` use.
FLASH_KDA_DEBUG  what to look for in the contents of device tensors, which waits for the device: ``bounds`` (offsets, slot
                 indices, checkpoint offsets, write strengths), ``finite`` (NaN and inf in inputs and results), ``1`` (both).
"""

from __future__ import annotations

import os

IMPLS = ("auto", "reference", "sm90")
DEBUG = {"": (), "0": (), "bounds": ("bounds",), "finite": ("finite",), "1": ("bounds", "finite")}


def impl() -> str:
    value = os.environ.get("FLASH_KDA_IMPL", "auto")
    if value not in IMPLS:
        raise ValueError(f"FLASH_KDA_IMPL must be one of {', '.join(IMPLS)}, got {value!r}")
    return value


def debug() -> tuple[str, ...]:
    """What is looked for: ``"bounds"``, ``"finite"``, both or nothing."""
    value = os.environ.get("FLASH_KDA_DEBUG", "0")
    if value not in DEBUG:
        raise ValueError(f"FLASH_KDA_DEBUG must be 0, 1, bounds or finite, got {value!r}")
    return DEBUG[value]
