"""Tensors to kernel arguments, without a GPU: what reaches the launcher for each kind of call."""

from dataclasses import replace

import cases
import pytest
import torch
from cases import D, packed_offsets

import flash_kda
from flash_kda import dispatch
from flash_kda.sm90 import launch, stages
from flash_kda.sm90.kernels import flags
from flash_kda.sm90.variants import VARIANTS

FORWARD = [v for v in VARIANTS if v.name.startswith("forward")]
SIGNATURE = next(v.signature for v in VARIANTS if v.name == "forward")


@pytest.fixture
def launches(monkeypatch):
    """The launches of the test, as dicts of arguments by name, with ``kernel`` and ``grid``."""
    seen = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def launch(self, device, grid, *arguments):
            seen.append({"kernel": self.name, "grid": grid, **dict(zip(SIGNATURE, arguments, strict=True))})

    monkeypatch.setattr(launch, "kernel", Kernel)
    monkeypatch.setattr(stages, "_multiprocessors", lambda _device: 132)
    monkeypatch.setattr(dispatch, "why_not_sm90", lambda _device: None)
    return seen


def fwd(case, **options):
    arguments = {**vars(case), "out": torch.zeros_like(case.v), **options}
    return flash_kda.fwd(**arguments, impl="sm90")


def test_variants_share_one_signature():
    assert {v.name for v in FORWARD} == {"forward", "forward_split_v"}
    assert all(v.signature == SIGNATURE for v in FORWARD)


def test_grouped_heads_are_not_repeated(launches):
    case = cases.grouped(cases.random(40, 6), 3)
    fwd(case, output_final_state=True)
    (call,) = launches
    for name, heads in (("q", 2), ("k", 2), ("v", 6), ("g", 6)):
        x = getattr(case, name)
        assert call[f"{name}_desc"] == (x.data_ptr(), (40, heads, D), x.stride()[1:])
    assert (call["heads"], call["qk_group"], call["n_items"]) == (6, 3, 6)


def test_activated_beta_is_refused(launches):
    with pytest.raises(NotImplementedError, match="beta is activated"):
        fwd(cases.negative(cases.random(40, 2)))
    assert not launches


def test_slots_are_passed_on(launches):
    case, pool = cases.random(70, 2), cases.state(9, 2)
    slots = torch.tensor([3, -1, 8], dtype=torch.int32)
    offsets = packed_offsets(40, 0, 30)
    fwd(
        case,
        cu_seqlens=offsets,
        initial_state=pool,
        final_state=pool,
        initial_state_indices=slots,
        final_state_indices=slots,
    )
    (call,) = launches
    assert call["in_index_ptr"] == call["out_index_ptr"] == slots.data_ptr()
    assert call["in_slots"] == call["out_slots"] == 9
    assert call["h0_stride"] == call["ht_stride"] == 2 * D * D
    assert call["n_items"] == 6
    wanted = flags.HAS_INITIAL | flags.HAS_IN_INDEX | flags.HAS_FINAL | flags.HAS_OUT_INDEX
    assert call["flags"] == wanted | flags.HAS_A_LOG | flags.HAS_DT_BIAS


def test_padded_slots_keep_their_distance(launches):
    wide = torch.zeros(5, 2 * D * D + 128)
    pool = wide[:, : 2 * D * D].view(5, 2, D, D)
    slots = torch.tensor([4], dtype=torch.int32)
    fwd(cases.random(20, 2), initial_state=pool, initial_state_indices=slots)
    assert launches[0]["h0_stride"] == 2 * D * D + 128


def test_strided_indices_are_refused(launches):
    table = torch.zeros(3, 9, dtype=torch.int32)
    for name in ("initial_state", "final_state"):
        with pytest.raises(NotImplementedError, match=f"{name}_indices has stride 9"):
            fwd(
                cases.random(30, 2),
                cu_seqlens=packed_offsets(10, 10, 10),
                **{name: cases.state(2, 2), f"{name}_indices": table[:, 0]},
            )


@pytest.mark.parametrize("offsets", [None, torch.zeros(3, dtype=torch.int32)])
def test_no_tokens_still_move_states(launches, offsets):
    case = cases.random(0, 2, batch=2 if offsets is None else 1)
    start, final = cases.state(2, 2), cases.nan_state(2, 2)
    fwd(case, cu_seqlens=offsets, initial_state=start, final_state=final)
    (call,) = launches
    assert (call["n_items"], call["t_total"], call["n_seqs"]) == (4, 0, 2)
    assert call["seq_len"] == (0 if offsets is None else -1)
    for name in ("q", "k", "v", "g", "out"):
        address, shape, _ = call[f"{name}_desc"]
        assert (address, shape) == (final.data_ptr(), (1, 2, D))
    launches.clear()
    fwd(case, cu_seqlens=offsets, initial_state=start)
    assert not launches


def test_strides_of_single_axes_mean_nothing(launches):
    case = cases.random(1, 1)
    odd = {name: getattr(case, name).as_strided((1, 1, 1, D), (3, 5, 7, 1)) for name in "qkvg"}
    fwd(replace(case, **odd))
    assert launches


def test_dense_batch(launches):
    case = cases.random(40, 3, batch=2)
    out, final = fwd(case, output_final_state=True)
    (call,) = launches
    assert call["kernel"] == "forward_split_v"
    assert call["grid"] == (12, 1, 1)
    for name in "qkvg":
        x = getattr(case, name)
        assert call[f"{name}_desc"] == (x.data_ptr(), (80, 3, D), (3 * D, D, 1))
    assert call["out_desc"] == (out.data_ptr(), (80, 3, D), (3 * D, D, 1))
    pointers = {
        "beta_ptr": case.beta, "out_ptr": out, "a_log_ptr": case.A_log, "dt_ptr": case.dt_bias, "cu_ptr": None,
        "h0_ptr": None, "ht_ptr": final, "in_index_ptr": None, "out_index_ptr": None,
    }  # fmt: skip
    assert {name: call[name] for name in pointers} == {n: 0 if x is None else x.data_ptr() for n, x in pointers.items()}
    scalars = {
        "heads": 3, "qk_group": 1, "n_items": 6, "t_total": 80, "seq_len": 40, "cu_words": 1, "in_slots": 0, "out_slots": 2,
        "beta_t": 3, "beta_h": 1, "out_t": 3 * D, "out_h": D, "h0_stride": 0, "ht_stride": 3 * D * D,
        "lower_bound": case.lower_bound, "scale": case.scale,
        "flags": flags.HAS_A_LOG | flags.HAS_DT_BIAS | flags.HAS_FINAL,
    }  # fmt: skip
    assert {name: call[name] for name in scalars} == scalars


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_with_states(launches, dtype):
    case = cases.random(300, 2)
    offsets = packed_offsets(100, 0, 200, dtype=dtype)
    start = torch.zeros(3, 4, D, D, dtype=torch.bfloat16)[:, :2]
    final = torch.zeros(3, 2, D, D)
    fwd(replace(case, A_log=None, dt_bias=None), initial_state=start, final_state=final, cu_seqlens=offsets)
    (call,) = launches
    assert (call["cu_ptr"], call["cu_words"], call["seq_len"]) == (offsets.data_ptr(), dtype.itemsize // 4, -1)
    assert (call["n_items"], call["t_total"]) == (6, 300)
    assert (call["h0_ptr"], call["h0_stride"], call["in_slots"]) == (start.data_ptr(), 4 * D * D, 3)
    assert (call["ht_ptr"], call["ht_stride"], call["out_slots"]) == (final.data_ptr(), 2 * D * D, 3)
    assert (call["a_log_ptr"], call["dt_ptr"]) == (0, 0)
    assert call["flags"] == flags.HAS_INITIAL | flags.INITIAL_BF16 | flags.HAS_FINAL


def test_strided_views_keep_their_strides(launches):
    case = cases.random(64, 2)
    fused = torch.zeros(1, 64, 2, 4 * D + 64, dtype=torch.bfloat16)
    views = {name: fused[..., D * i : D * (i + 1)] for i, name in enumerate("qkvg")}
    narrow = torch.zeros(1, 64, 41, dtype=torch.bfloat16)
    wide = torch.zeros(1, 64, 2, 2 * D, dtype=torch.bfloat16)
    fwd(replace(case, **views, beta=narrow[..., 7:9]), out=wide[..., D:])
    (call,) = launches
    row = 4 * D + 64
    assert call["k_desc"] == (views["k"].data_ptr(), (64, 2, D), (2 * row, row, 1))
    assert call["out_desc"] == (wide[..., D:].data_ptr(), (64, 2, D), (4 * D, 2 * D, 1))
    assert (call["beta_ptr"], call["beta_t"], call["beta_h"]) == (narrow[..., 7:9].data_ptr(), 41, 1)
    assert (call["out_t"], call["out_h"]) == (4 * D, 2 * D)


@pytest.mark.parametrize(
    ("heads", "lengths", "kernel", "ctas"),
    [
        (66, [40], "forward_split_v", 132),
        (67, [40], "forward", 67),
        (96, [40] * 8, "forward", 132),  # short: as many CTAs as SMs
        (96, [1100] * 2, "forward", 192),  # long: a CTA an item
    ],
)
def test_grid(launches, heads, lengths, kernel, ctas):
    case = cases.random(1, heads).map(lambda x: x.expand(1, sum(lengths), *x.shape[2:]).contiguous())
    fwd(case, cu_seqlens=packed_offsets(*lengths))
    assert (launches[0]["kernel"], launches[0]["grid"]) == (kernel, (ctas, 1, 1))


def test_a_kind_of_call_is_remembered_but_not_its_addresses(launches):
    first, second = cases.random(40, 2, seed=1), cases.random(40, 2, seed=2)
    for case in (first, second):
        fwd(case)
        fwd(case, output_final_state=True)
    assert [call["q_desc"][0] for call in launches] == [x.q.data_ptr() for x in (first, first, second, second)]
    assert [bool(call["flags"] & flags.HAS_FINAL) for call in launches] == [False, True, False, True]


def test_segments_carry_indices(launches):
    case = cases.random(200, 1)
    start, final = cases.state(1, 1), cases.nan_state(1, 1)
    arguments = {**vars(case), "out": torch.zeros_like(case.q), "initial_state": start, "final_state": final}
    flash_kda.fwd_cp(**arguments, segment_len=64, impl="sm90")
    (call,) = launches
    assert call["n_items"] == 4
    assert (call["in_slots"], call["out_slots"]) == (4, 1)
    assert call["flags"] & flags.HAS_IN_INDEX
    assert call["flags"] & flags.HAS_OUT_INDEX


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: replace(c, g=c.g.float()), "g is torch.float32"),
        (lambda c: replace(c, beta=c.beta.float()), "beta is torch.float32"),
        (lambda c: replace(c, k=torch.zeros(1, 64, 2, D + 1, dtype=torch.bfloat16)[..., 1:]), "k has strides"),
        (lambda c: replace(c, v=c.v[:, :1].expand(1, 64, 2, D)), "v has strides"),
        (lambda c: replace(c, q=torch.zeros(64 * 2 * D + 1, dtype=torch.bfloat16)[1:].view(1, 64, 2, D)), "q starts at"),
        (lambda c: replace(c, dt_bias=torch.zeros(2, 2 * D)[:, ::2]), "dt_bias has strides"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(launches, change, reason):
    case = cases.random(64, 2)
    with pytest.raises(NotImplementedError, match=reason):
        fwd(change(case))
    assert not launches
    out, _ = flash_kda.fwd(**{**vars(change(case)), "out": None})
    assert flash_kda.last_path() == "reference"
    assert out.isfinite().all()
