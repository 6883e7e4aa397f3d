"""Every kernel variant that ships: which function, which argument types, which constants, which limits.

This is the one list that the build compiles, the launcher accepts and the tests hold to its limits. Importing it costs
nothing (no torch, no triton), so that the build can read it where there is no torch and the launcher where there is no
triton.

To add a kernel, append a `Variant` to `VARIANTS`. Argument types are Triton's signature strings; a placeholder in
braces is filled at build time from the variant's constexprs or, failing that, from the kernel module's constants, so
that a layout or block shape is written once, in the kernel: `tensordesc<bf16[{ROWS},1,{LANES}],{TILE_LAYOUT!r}>`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TRITON_VERSION = "3.6.0"
"""The compiler that makes the cubins. pyproject.toml repeats it in `build-system.requires`; a test compares them."""

ARCH = "sm_90a"
"""The only architecture compiled for: Hopper with its wgmma and setmaxnreg, hence no forward compatibility."""

CAPABILITY = (9, 0)
"""Compute capability of the devices that can run `ARCH`."""

HARMLESS_WARNINGS = ("C7517",)
"""ptxas says C7517 when it puts a wgmma wait before a read that would have needed one anyway; measured: no cost."""


CUBINS = Path(__file__).resolve().parent / "cubins"
"""Where the cubins and the manifest of this tree or installation lie."""

MANIFEST = "manifest.json"
"""The file beside the cubins that says what they are and how to launch them."""

SCHEMA = 1
"""Version of the manifest's layout; the launcher refuses another."""


@dataclass(frozen=True)
class Limits:
    """What ptxas may report for a variant before a test fails.

    Attributes:
        registers: most registers a thread at launch (with warp specialisation: before setmaxnreg moves them).
        spill_bytes: most bytes of spill stores plus spill loads, summed over the kernel and the functions it calls.
        warnings: ptxas codes C7510-C7519 that may appear; the others mean serialised wgmma or a dropped setmaxnreg.
    """

    registers: int
    spill_bytes: int = 0
    warnings: tuple[str, ...] = HARMLESS_WARNINGS


@dataclass(frozen=True)
class Variant:
    """One cubin: a kernel function with its argument types and constants fixed.

    Attributes:
        name: unique; the cubin's file stem and what the launcher is asked for.
        module: dotted name of the kernel's module, e.g. "flash_kda.sm90.kernels.forward".
        function: name of the `gluon.jit` function in it.
        signature: argument name -> Triton type, in the function's order without its constexprs; descriptors first.
        constexprs: constexpr argument name -> value.
        limits: what ptxas may report.
        num_warps: warps of the default partition (warp specialisation adds the others).
        aligned: arguments promised to be multiples of 16 (pointers: 16-byte aligned), for wide loads and stores; the
            launcher checks the promise at each launch.
    """

    name: str
    module: str
    function: str
    signature: Mapping[str, str]
    limits: Limits
    constexprs: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    num_warps: int = 4
    aligned: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """SHA-256 over everything above that shapes the code (limits do not)."""
        spec = dataclasses.asdict(self)
        del spec["limits"]
        spec["signature"] = list(self.signature.items())  # the order is part of the launch ABI
        return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()


VARIANTS: tuple[Variant, ...] = ()
"""The variants that ship."""
