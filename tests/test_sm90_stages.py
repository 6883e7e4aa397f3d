"""Tensors to kernel arguments, without a GPU: what reaches the launcher for each kind of call."""

import re
from dataclasses import replace

import cases
import pytest
import torch
from cases import D, packed_offsets
from kernel_double import SIGNATURES, Recorder

import flash_kda
from flash_kda import api, dispatch, validation
from flash_kda.constants import EXIT_EPS
from flash_kda.reference import Inputs
from flash_kda.sm90 import cp, launch, plan, small, stages
from flash_kda.sm90.kernels import flags
from flash_kda.sm90.variants import VARIANTS


@pytest.fixture
def launches(monkeypatch):
    """The launches of the test, as dicts of arguments by name, with ``kernel`` and ``grid``."""
    seen = []

    monkeypatch.setattr(launch, "kernel", lambda name: Recorder(name, seen))
    monkeypatch.setattr(stages, "_multiprocessors", lambda _device: 132)
    monkeypatch.setattr(small, "_multiprocessors", lambda _device: 132)
    monkeypatch.setattr(api, "processor_count", lambda _device: 132)
    monkeypatch.setattr(dispatch, "why_not_sm90", lambda _device: None)
    return seen


def fwd(case, **options):
    arguments = {**vars(case), "out": torch.zeros_like(case.v), **options}
    return flash_kda.fwd(**arguments, impl="sm90")


def test_forward_variants_share_one_signature():
    for name, signature in SIGNATURES.items():
        if name.startswith("forward") and not name.endswith(stages.FP32_GATE):
            assert list(signature.items()) == list(SIGNATURES["forward"].items())


def test_grouped_heads_are_not_repeated(launches):
    case = cases.grouped(cases.random(40, 6), 3)
    fwd(case, output_final_state=True)
    (call,) = launches
    for name, heads in (("q", 2), ("k", 2), ("v", 6), ("g", 6)):
        x = getattr(case, name)
        assert call[f"{name}_desc"] == (x.data_ptr(), (40, heads, D), x.stride()[1:])
    assert (call["heads"], call["qk_group"], call["n_items"]) == (6, 3, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activated", [False, True])
def test_what_beta_is_goes_with_it(launches, dtype, activated):
    case = cases.random(64, 2)
    wide = torch.zeros(1, 64, 3, 7, dtype=dtype)
    case = replace(case, beta=wide[:, :, :2, 3], beta_is_activated=activated)
    fwd(case)
    fwd_cp(case, segment_len=32)
    flash_kda.state_only(**case.summary(), impl="sm90")
    wanted = (flags.BETA_FP32 if dtype == torch.float32 else 0) | (flags.BETA_ACTIVATED if activated else 0)
    readers = [call for call in launches if "beta_ptr" in call]
    assert [call["kernel"] for call in readers] == ["forward_split_v", "summary", "forward_split_v", "summary"]
    for call in readers:
        assert (call["beta_ptr"], call["beta_t"], call["beta_h"]) == (case.beta.data_ptr(), 21, 7)
        assert call["flags"] & (flags.BETA_FP32 | flags.BETA_ACTIVATED) == wanted


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


def test_columns_of_tables_keep_their_strides(launches):
    table = torch.zeros(3, 9, dtype=torch.int32)
    indices = {"initial_state_indices": table[:, 4], "final_state_indices": torch.zeros(3, 5, dtype=torch.int32)[:, 0]}
    states = {"initial_state": cases.state(2, 2), "final_state": cases.state(2, 2)}
    for dtype in (torch.int32, torch.int64):
        launches.clear()
        offsets = torch.stack([packed_offsets(60, 0, 40, dtype=dtype)] * 3, 1)[:, 1]
        fwd_cp(cases.random(100, 2), cu_seqlens=offsets, **states, **indices, segment_len=32)
        summary, chain, forward = launches
        assert (forward["in_index_ptr"], forward["in_words"], forward["out_words"]) == (table[:, 4].data_ptr(), 9, 5)
        assert (chain["index_ptr"], chain["index_words"]) == (table[:, 4].data_ptr(), 9)
        assert summary["cu_words"] == forward["cu_words"] == chain["map_words"] == 3 * dtype.itemsize // 4


@pytest.mark.parametrize("heads", [2, 80])
def test_fp32_g_has_kernels_of_its_own(launches, heads):
    case = cases.random(200, heads)
    wide = torch.zeros(1, 200, heads, D + 4)
    case = replace(case, g=wide[..., 4:])
    fwd(case)
    fwd_cp(case, segment_len=64)
    flash_kda.state_only(**case.summary(), impl="sm90")
    fwd_cp(case, segment_len=64, certificate=True)
    serial = "forward_split_v_g32" if heads == 2 else "forward_g32"
    pieces = "forward_split_v_g32" if 2 * heads * 4 <= 132 else "forward_g32"
    cut = ["summary_g32", "chain"]
    assert [call["kernel"] for call in launches] == [serial, *cut, pieces, "summary_g32", *cut, "forward_probe_g32"]
    for call in launches:
        if "g_desc" in call:
            assert call["g_desc"] == (case.g.data_ptr(), (200, heads, D), (heads * (D + 4), D + 4, 1))


def test_variants_of_fp32_g_differ_in_its_descriptor_alone():
    for variant in VARIANTS:
        if variant.name.endswith(stages.FP32_GATE) and "g_desc" in variant.signature:
            plain = SIGNATURES[variant.name.removesuffix(stages.FP32_GATE)]
            assert list(plain) == list(variant.signature)
            assert {name for name in plain if plain[name] != variant.signature[name]} == {"g_desc"}


def test_vectors_beyond_32_bit_arithmetic_are_refused():
    far = torch.empty_strided((3,), (2**30,), dtype=torch.int32, device="meta")
    assert "initial_state_indices has stride" in stages.far_apart({"cu_seqlens": None, "initial_state_indices": far})
    assert stages.far_apart({"cu_seqlens": far[:1]}) is None


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


def fwd_cp(case, **options):
    return flash_kda.fwd_cp(**{**vars(case), "out": torch.zeros_like(case.q), **options}, impl="sm90")


def test_a_cut_call_is_summary_chain_and_forward(launches):
    case = cases.random(200, 1)
    start, final = cases.state(1, 1), cases.nan_state(1, 1)
    fwd_cp(case, initial_state=start, final_state=final, segment_len=64, eps=0.5)
    summary, chain, forward = launches
    assert [call["kernel"] for call in launches] == ["summary", "chain", "forward_split_v"]
    assert [call["overlap"] for call in launches] == [False, True, True]
    for call in launches:
        assert (call["n_slots"], call["seg_len"], call["n_seqs"]) == (3, 64, 1)
        assert not call["flags"] & flags.CUT_ON_DEVICE
    assert summary["ht_ptr"] == chain["ht_ptr"] == chain["out_ptr"] == forward["slots_ptr"]
    assert summary["mt_ptr"] == chain["mt_desc"][0]
    assert summary["needs_mt_ptr"] == chain["needs_ptr"]
    assert summary["eps"] == 0.5
    assert chain["h0_ptr"] == forward["h0_ptr"] == start.data_ptr()
    assert forward["ht_ptr"] == final.data_ptr()
    assert forward["n_items"] == 4
    assert not summary["flags"] & flags.FILL


def test_one_long_sequence_is_cut_by_itself(launches):
    fwd_cp(cases.random(4096, 12))
    assert [call["kernel"] for call in launches] == ["summary", "chain", "forward"]
    assert launches[2]["n_slots"] == (4096 - 1) // launches[2]["seg_len"]


@pytest.mark.parametrize("g", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("certificate", [False, True])
def test_checkpoints_in_cut_sequences(launches, g, certificate):
    case = cases.random(200, 1)
    case = replace(case, g=case.g.to(g))
    chosen, saved = torch.full((1, 9), 64), cases.state(9, 1, torch.bfloat16)[None]
    options = {"checkpoint_states": saved, "checkpoint_offsets": chosen[:, ::3]}
    fwd_cp(case, **options | {"checkpoint_states": saved[:, 3:6]}, segment_len=64, certificate=certificate)
    forward = launches[2]
    suffix = ("_probe" if certificate else "_split_v") + ("" if g == torch.bfloat16 else stages.FP32_GATE)
    assert [call["kernel"].removesuffix(stages.FP32_GATE) for call in launches[:2]] == ["summary", "chain"]
    assert forward["kernel"] == "forward_checkpoints" + suffix
    assert forward["n_slots"] == 3
    assert (forward["saved_ptr"], forward["saved_stride"], forward["saved_rows"]) == (saved[:, 3:].data_ptr(), D * D, 3)
    assert (forward["saved_at_ptr"], forward["every"], forward["columns"]) == (chosen.data_ptr(), 0, 3)
    assert (forward["saved_at_n"], forward["saved_at_c"]) == (18, 6)
    assert forward["flags"] & (flags.SAVED_BF16 | flags.SAVED_AT_INT64) == flags.SAVED_BF16 | flags.SAVED_AT_INT64
    launches.clear()
    fwd_cp(case, checkpoint_states=cases.state(12, 1), checkpoint_every=16, segment_len=64)
    assert launches[2]["kernel"].startswith("forward_checkpoints_split_v")
    assert (launches[2]["every"], launches[2]["columns"], launches[2]["saved_rows"]) == (16, 1, 12)
    assert launches[2]["saved_at_ptr"] == 0
    assert not launches[2]["flags"] & (flags.SAVED_BF16 | flags.SAVED_AT_INT64)


def test_rows_that_do_not_exist_need_no_checkpoints(launches):
    fwd(cases.random(40, 1), checkpoint_states=cases.state(0, 1), checkpoint_every=64)
    assert launches[0]["kernel"] == "forward_split_v"


def test_short_sequences_are_not_cut(launches):
    fwd_cp(cases.random(64, 2))
    fwd_cp(cases.random(128, 2), cu_seqlens=torch.tensor([0, 64, 128]))
    fwd_cp(cases.random(4096, 2), auto_cp=False)
    fwd_cp(cases.random(128, 2), segment_len=128)
    assert [call["kernel"] for call in launches] == ["forward_split_v"] * 4
    assert not any(call["overlap"] for call in launches)


@pytest.mark.parametrize("alias", ["same", "view", "dlpack", "none"])
def test_states_in_place_wait_for_each_other(launches, alias):
    """One CTA an item then, and zeroed marks: the last piece of a sequence stores where the first loads."""
    case = cases.random(40 * 60, 8)
    pool = cases.state(41, 8)
    start = pool[:40]
    others = {"same": start, "view": pool[:40], "dlpack": torch.from_dlpack(start), "none": cases.nan_state(40, 8)}
    fwd_cp(
        case,
        cu_seqlens=torch.arange(41) * 60,
        initial_state=start,
        final_state=others[alias],
        segment_len=32,
    )
    forward = launches[-1]
    assert bool(forward["flags"] & flags.IN_PLACE) == (alias != "none")
    assert (forward["taken_ptr"] != 0) == (alias != "none")
    assert forward["n_items"] == (40 + 74) * 8
    assert forward["grid"][0] == (forward["n_items"] if alias != "none" else 132)


def test_forced_chunks_beyond_int32_are_all(launches):
    case = cases.random(100, 1)
    arguments = {name: getattr(case, name) for name in ("k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound")}
    kept = []
    summary = stages.state_summary

    def seen(*positional, num_chunks, **options):
        kept.append(num_chunks)
        summary(*positional, num_chunks=num_chunks, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "state_summary", seen)
        flash_kda.state_only(**arguments, cu_seqlens=None, num_warmup_chunks=torch.tensor([[2**40]]), impl="sm90")
    assert kept[0].item() == 2**31 - 1


def test_an_empty_batch_needs_no_strides(launches):
    case = cases.random(0, 2)
    odd = torch.zeros(1, 0, 2, D + 2, dtype=torch.bfloat16)[..., :D]
    bias = torch.zeros(D).expand(2, D)
    fwd(replace(case, q=odd, dt_bias=bias), final_state=cases.nan_state(1, 2))
    (call,) = launches
    assert call["q_desc"][2] == (2 * D, D, 1)
    assert call["dt_ptr"] == 0
    assert not call["flags"] & flags.HAS_DT_BIAS


def test_many_cuts_of_one_kind_of_call_are_forgotten_in_time(launches, monkeypatch):
    monkeypatch.setattr(cp, "CUTS_KEPT", 3)
    case = cases.random(400, 1)
    for _ in range(2):
        for segment_len in (48, 64, 80, 96, 112, 128):
            launches.clear()
            fwd_cp(case, segment_len=segment_len)
            assert [call["seg_len"] for call in launches] == [segment_len] * 3
            assert launches[0]["n_slots"] == 399 // segment_len


def test_no_sequence_is_not_cut(launches, monkeypatch):
    monkeypatch.setattr(validation, "readable", lambda _x: False)
    fwd_cp(cases.random(64, 2), cu_seqlens=torch.tensor([0]), segment_len=16)
    assert not launches


def test_unseen_lengths_are_looked_at_on_the_device(launches, monkeypatch):
    monkeypatch.setattr(validation, "readable", lambda _x: False)
    monkeypatch.setattr(plan, "LOOK_SHARE", 1e6)  # a look pays for itself only in larger calls than a test wants
    plan._remembered.cache_clear()
    case = cases.random(8192, 8)
    offsets = torch.tensor([0, 8000, *range(8008, 8192, 8), 8192])
    fwd_cp(case, cu_seqlens=offsets)
    assert [call["kernel"] for call in launches] == ["decide", "summary", "chain", "forward"]
    decide, *others = launches
    assert decide["only_if_longer"] > 2 * decide["seg_len"]
    assert all(call["flags"] & flags.CUT_ON_DEVICE for call in others)
    assert all(call["cut_ptr"] == decide["cut_ptr"] for call in others)
    launches.clear()
    fwd_cp(case, cu_seqlens=torch.stack([offsets] * 3, 1)[:, 0])
    assert [call.get("cu_words", call.get("map_words")) for call in launches] == [6] * 4
    launches.clear()
    fwd_cp(case, cu_seqlens=offsets, cu_seqlens_cpu=offsets)
    assert [call["kernel"] for call in launches] == ["summary", "chain", "forward"]
    plan._remembered.cache_clear()


def test_state_only_is_one_launch(launches):
    case = cases.random(100, 2)
    offsets = torch.tensor([0, 40, 100])
    arguments = {name: getattr(case, name) for name in ("k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound")}
    forced = torch.tensor([1, 2])
    ht, mt, info = flash_kda.state_only(
        **arguments, cu_seqlens=offsets, calc_mt=True, num_warmup_chunks=forced, return_info=True, impl="sm90"
    )
    (call,) = launches
    assert call["kernel"] == "summary"
    assert call["grid"] == (4, 1, 1)
    assert call["flags"] & flags.FILL
    assert call["flags"] & flags.HAS_NUM_CHUNKS
    assert (call["ht_ptr"], call["mt_ptr"]) == (ht.data_ptr(), mt.data_ptr())
    assert call["chunks_ptr"] == info.chunks.data_ptr()
    assert info.fallback.dtype == torch.bool
    launches.clear()
    flash_kda.state_only(**arguments, cu_seqlens=offsets, impl="sm90")
    assert launches[0]["mt_ptr"] == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: replace(c, g=torch.zeros(1, 64, 2, D + 2)[..., :D]), "g has strides .* multiples of 4 elements"),
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


def outputs(rows, heads):
    count = torch.zeros(2, rows, heads, dtype=torch.int32)
    state = torch.full((2, rows, heads, D, D), torch.nan)
    return {"ht": state[0], "mt": state[1], "needs_mt": count[0], "chunks": count[1], "norm": torch.zeros(rows, heads)}


def summarise(case, cu_seqlens=None, **options):
    inputs = Inputs(None, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.lower_bound)
    assert stages.summary_refusal(inputs, cu_seqlens, {}) is None
    stages.state_summary(inputs, cu_seqlens, max_len=case.tokens, **options)


def test_summary_of_a_dense_batch(launches):
    case = cases.random(40, 6, batch=2)
    case = replace(case, k=case.k[:, :, :2].contiguous())
    into = outputs(2, 6)
    summarise(case, **into, eps=0.25)
    (call,) = launches
    assert (call["kernel"], call["grid"]) == ("summary", (12, 1, 1))
    assert call["k_desc"] == (case.k.data_ptr(), (80, 2, D), (2 * D, D, 1))
    for name in "vg":
        x = getattr(case, name)
        assert call[f"{name}_desc"] == (x.data_ptr(), (80, 6, D), (6 * D, D, 1))
    pointers = {"beta": case.beta, "a_log": case.A_log, "dt": case.dt_bias, "cu": None, "num_chunks": None, **into}
    assert {n: call[f"{n}_ptr"] for n in pointers} == {n: 0 if x is None else x.data_ptr() for n, x in pointers.items()}
    scalars = {
        "heads": 6, "qk_group": 3, "t_total": 80, "seq_len": 40, "cu_words": 1, "n_seqs": 2, "n_slots": 0,
        "seg_len": stages.WHOLE, "beta_t": 6, "beta_h": 1, "lower_bound": case.lower_bound, "eps": 0.25,
        "flags": flags.HAS_A_LOG | flags.HAS_DT_BIAS | flags.HAS_MT | flags.FILL,
    }  # fmt: skip
    assert {name: call[name] for name in scalars} == scalars


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_summary_of_slots(launches, dtype):
    case = replace(cases.random(300, 2), A_log=None, dt_bias=None)
    offsets = packed_offsets(100, 0, 200, dtype=dtype)
    wanted = torch.ones(4, 2, dtype=torch.int32)
    into = outputs(4, 2) | {"mt": None}
    summarise(case, offsets, **into, num_slots=4, segment_len=64, num_chunks=wanted, fill=False)
    (call,) = launches
    assert call["grid"] == (8, 1, 1)
    assert (call["cu_ptr"], call["cu_words"], call["seq_len"]) == (offsets.data_ptr(), dtype.itemsize // 4, -1)
    assert (call["n_seqs"], call["n_slots"], call["seg_len"], call["t_total"]) == (3, 4, 64, 300)
    assert (call["mt_ptr"], call["num_chunks_ptr"], call["a_log_ptr"]) == (0, wanted.data_ptr(), 0)
    assert call["flags"] == flags.HAS_NUM_CHUNKS
    assert call["eps"] == EXIT_EPS


def test_summary_memo_keeps_no_address_and_no_eps(launches):
    memo = {}
    for seed in (1, 2):
        case = cases.random(40, 2, seed=seed)
        summarise(case, **outputs(1, 2), eps=0.5**seed, memo=memo)
        assert launches[-1]["k_desc"][0] == case.k.data_ptr()
        assert launches[-1]["eps"] == 0.5**seed


def test_summary_of_no_tokens_launches_nothing(launches):
    into = outputs(2, 1)
    summarise(cases.random(0, 1), packed_offsets(0, 0), **into)
    assert not launches
    assert not into["ht"].any()
    assert torch.equal(into["mt"], torch.eye(D).expand(2, 1, D, D))
    assert torch.equal(into["norm"], torch.full((2, 1), D**0.5))
    assert (into["needs_mt"] == 1).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: replace(c, g=torch.zeros(1, 64, 2, D + 2)[..., :D]), "g has strides .* multiples of 4 elements"),
        (lambda c: replace(c, k=torch.zeros(1, 64, 2, D + 1, dtype=torch.bfloat16)[..., 1:]), "k has strides"),
        (lambda c: replace(c, v=torch.zeros(64 * 2 * D + 1, dtype=torch.bfloat16)[1:].view(1, 64, 2, D)), "v starts at"),
        (lambda c: replace(c, dt_bias=torch.zeros(2, 2 * D)[:, ::2]), "dt_bias has strides"),
    ],
)
def test_summary_refuses_by_name(change, reason):
    c = change(cases.random(64, 2))
    inputs = Inputs(None, c.k, c.v, c.g, c.beta, c.A_log, c.dt_bias, c.lower_bound)
    assert re.search(reason, stages.summary_refusal(inputs, None, {}))


def test_summary_takes_strided_offsets(launches):
    offsets = torch.tensor([[0, 9], [64, 9]])[:, 0]
    flash_kda.state_only(**cases.random(64, 2).summary(cu_seqlens=offsets), impl="sm90")
    assert (launches[0]["cu_ptr"], launches[0]["cu_words"]) == (offsets.data_ptr(), 4)
