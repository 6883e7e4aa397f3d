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


_FORWARD: dict[str, str] = {
    **dict.fromkeys(("q_desc", "k_desc", "v_desc", "g_desc", "out_desc"), "tensordesc<bf16[{STEP},1,{BOX_CHANNELS}],{BOX!r}>"),
    **{"beta_ptr": "*bf16", "out_ptr": "*bf16", "a_log_ptr": "*fp32", "dt_ptr": "*fp32", "cu_ptr": "*i32"},
    **{
        "h0_ptr": "*fp32",
        "ht_ptr": "*fp32",
        "slots_ptr": "*fp32",
        "taken_ptr": "*i32",
        "chunks_ptr": "*i32",
        "entering_ptr": "*fp32",
        "cut_ptr": "*i32",
        "in_index_ptr": "*i32",
        "out_index_ptr": "*i32",
        "saved_ptr": "*fp32",
        "saved_at_ptr": "*i32",
    },
    **dict.fromkeys(("heads", "qk_group", "n_items", "t_total", "seq_len", "cu_words", "n_seqs", "n_slots", "seg_len"), "i32"),
    **dict.fromkeys(("flags", "in_slots", "out_slots", "in_words", "out_words"), "i32"),
    **dict.fromkeys(("beta_t", "beta_h", "out_t", "out_h", "h0_stride", "ht_stride"), "i64"),
    **{"every": "i32", "columns": "i32", "saved_rows": "i32", "saved_stride": "i64", "saved_at_n": "i64", "saved_at_c": "i64"},
    **{"lower_bound": "fp32", "scale": "fp32"},
}


_FP32_GATE = {"g_desc": "tensordesc<fp32[{STEP},1,{BOX_CHANNELS_FP32}],{BOX_FP32!r}>"}


def _forward(name: str, num_warps: int, **constexprs: int) -> Variant:
    return Variant(
        name=name,
        module="flash_kda.sm90.kernels.forward",
        function="kda_forward",
        signature=_FORWARD | (_FP32_GATE if constexprs["G32"] else {}),
        # with checkpoints: eight values of a step, and what the last step or a store of states needs; mostly around the loop
        limits=Limits(registers=128, spill_bytes=(256, 512)[constexprs["PROBE"]] if constexprs["CHECKPOINTS"] else 0),
        constexprs=constexprs,
        num_warps=num_warps,
        aligned=("h0_ptr", "ht_ptr", "slots_ptr", "saved_ptr"),
    )


_SUMMARY: dict[str, str] = {
    **dict.fromkeys(("k_desc", "v_desc", "g_desc"), "tensordesc<bf16[{STEP},1,{BOX_CHANNELS}],{BOX!r}>"),
    **{
        "beta_ptr": "*bf16",
        "a_log_ptr": "*fp32",
        "dt_ptr": "*fp32",
        "cu_ptr": "*i32",
        "cut_ptr": "*i32",
        "num_chunks_ptr": "*i32",
    },
    **dict.fromkeys(("ht_ptr", "mt_ptr", "effects_ptr"), "*fp32"),
    **{"needs_mt_ptr": "*i32", "chunks_ptr": "*i32", "norm_ptr": "*fp32"},
    **dict.fromkeys(("heads", "qk_group", "t_total", "seq_len", "cu_words", "n_seqs", "n_slots", "seg_len", "flags"), "i32"),
    **{"beta_t": "i64", "beta_h": "i64", "lower_bound": "fp32", "eps": "fp32"},
}


def _summary(name: str, **constexprs: int) -> Variant:
    return Variant(
        name=name,
        module="flash_kda.sm90.kernels.summary",
        function="kda_summary",
        signature=_SUMMARY | (_FP32_GATE if constexprs["G32"] else {}),
        limits=Limits(registers=128),
        constexprs=constexprs,
        num_warps=8,
        aligned=("ht_ptr", "mt_ptr", "effects_ptr"),
    )


_CHAIN: dict[str, str] = {
    "mt_desc": "tensordesc<fp32[128,{PANEL_COLUMNS}],{PANEL!r}>",
    **{
        "ht_ptr": "*fp32",
        "out_ptr": "*fp32",
        "effects_ptr": "*fp32",
        "needs_ptr": "*i8",
        "norm_ptr": "*fp32",
        "map_ptr": "*i32",
        "cut_ptr": "*i32",
        "h0_ptr": "*fp32",
        "index_ptr": "*i32",
    },
    **dict.fromkeys(("heads", "seq_len", "map_words", "total", "n_seqs", "n_slots", "seg_len"), "i32"),
    **dict.fromkeys(("flags", "in_slots", "index_words", "needs_slot", "needs_head"), "i32"),
    "h0_stride": "i64",
    "eps": "fp32",
}


def _chain(name: str, **constexprs: int) -> Variant:
    return Variant(
        name=name,
        module="flash_kda.sm90.kernels.chain",
        function="kda_chain",
        signature=_CHAIN,
        limits=Limits(registers=128, spill_bytes=192),
        constexprs=constexprs,
        num_warps=8,
        aligned=("ht_ptr", "out_ptr", "effects_ptr", "h0_ptr"),
    )


_WARMUP: dict[str, str] = {
    **{"g_ptr": "*bf16", "a_log_ptr": "*fp32", "dt_ptr": "*fp32", "map_ptr": "*i32", "num_ptr": "*i32", "fallback_ptr": "*i8"},
    **dict.fromkeys(("heads", "total", "seq_len", "map_words", "flags"), "i32"),
    **{"g_t": "i64", "g_h": "i64", "lower_bound": "fp32", "target": "fp32"},
}


def _warmup(name: str, chunks: int, num_warps: int, gate: str = "*bf16") -> Variant:
    return Variant(
        name=name,
        module="flash_kda.sm90.kernels.warmup",
        function="kda_warmup",
        signature=_WARMUP | {"g_ptr": gate},
        limits=Limits(registers=128),
        constexprs={"CHUNKS": chunks},
        num_warps=num_warps,
        aligned=("g_ptr",),
    )


VARIANTS: tuple[Variant, ...] = (
    _forward("forward", 8, CR=168, PR=88, NP=7, SP=6, VSPLIT=1, LAG=0, PROBE=0, G32=0, CHECKPOINTS=0),
    _forward("forward_probe", 8, CR=168, PR=88, NP=7, SP=6, VSPLIT=1, LAG=0, PROBE=1, G32=0, CHECKPOINTS=0),
    _forward("forward_split_v", 4, CR=200, PR=104, NP=11, SP=6, VSPLIT=2, LAG=0, PROBE=0, G32=0, CHECKPOINTS=0),
    _forward("forward_g32", 8, CR=168, PR=88, NP=7, SP=5, VSPLIT=1, LAG=0, PROBE=0, G32=1, CHECKPOINTS=0),
    _forward("forward_probe_g32", 8, CR=168, PR=88, NP=7, SP=5, VSPLIT=1, LAG=0, PROBE=1, G32=1, CHECKPOINTS=0),
    _forward("forward_split_v_g32", 4, CR=200, PR=104, NP=9, SP=5, VSPLIT=2, LAG=0, PROBE=0, G32=1, CHECKPOINTS=0),
    _forward("forward_checkpoints", 8, CR=168, PR=88, NP=7, SP=6, VSPLIT=1, LAG=0, PROBE=0, G32=0, CHECKPOINTS=1),
    _forward("forward_checkpoints_probe", 8, CR=168, PR=88, NP=7, SP=6, VSPLIT=1, LAG=0, PROBE=1, G32=0, CHECKPOINTS=1),
    _forward("forward_checkpoints_split_v", 4, CR=200, PR=104, NP=11, SP=6, VSPLIT=2, LAG=0, PROBE=0, G32=0, CHECKPOINTS=1),
    _forward("forward_checkpoints_g32", 8, CR=168, PR=88, NP=7, SP=5, VSPLIT=1, LAG=0, PROBE=0, G32=1, CHECKPOINTS=1),
    _forward("forward_checkpoints_probe_g32", 8, CR=168, PR=88, NP=7, SP=5, VSPLIT=1, LAG=0, PROBE=1, G32=1, CHECKPOINTS=1),
    _forward("forward_checkpoints_split_v_g32", 4, CR=200, PR=104, NP=9, SP=5, VSPLIT=2, LAG=0, PROBE=0, G32=1, CHECKPOINTS=1),
    Variant(
        name="decide",
        module="flash_kda.sm90.kernels.decide",
        function="kda_decide",
        signature={
            **dict.fromkeys(("cu_ptr", "cut_ptr"), "*i32"),
            **dict.fromkeys(("cu_words", "t_total", "n_seqs", "seg_len", "only_if_longer"), "i32"),
        },
        limits=Limits(registers=64),
    ),
    _summary("summary", CR=192, PR=64, NP=7, SP=8, LAG=1, G32=0),
    _summary("summary_g32", CR=192, PR=64, NP=7, SP=6, LAG=1, G32=1),
    _chain("chain", ROWS=16, STAGES=3),
    _warmup("warmup", 4, 4),
    _warmup("warmup_16", 16, 16),
    _warmup("warmup_g32", 4, 4, "*fp32"),
    _warmup("warmup_16_g32", 16, 16, "*fp32"),
)
"""The variants that ship: the forward kernel with one CTA an item, the same with norms of states on the way, and with two CTAs
that have half of V each; the three with states on the way; all six for g in fp32 (_g32), with fewer stages, and, for half of V,
as many prep warps as those allow; whether to cut; the state summary, for either g; states along pieces; the a-priori bound,
with more tokens in flight a CTA where there are few CTAs, for either g."""
