"""Tensors to the arguments of the small kernels, without a GPU."""

import math

import cases
import pytest
import torch
from cases import D, packed_offsets
from kernel_double import Recorder

import flash_kda
from flash_kda import dispatch
from flash_kda.constants import EXIT_EPS
from flash_kda.sm90 import launch, small
from flash_kda.sm90.kernels import flags
from flash_kda.sm90.variants import VARIANTS


def test_rows_are_those_of_the_kernel():
    (chain,) = (v for v in VARIANTS if v.name == "chain")
    assert chain.constexprs["ROWS"] == small.ROWS


@pytest.fixture
def launches(monkeypatch):
    """The launches of the test, as dicts of arguments by name, with ``kernel`` and ``grid``."""
    seen = []

    monkeypatch.setattr(launch, "kernel", lambda name: Recorder(name, seen))
    monkeypatch.setattr(small, "_multiprocessors", lambda _device: 132)
    monkeypatch.setattr(dispatch, "why_not_sm90", lambda _device: None)
    return seen


def has(call, **expected):
    assert {name: call[name] for name in expected} == expected


def address(x):
    return 0 if x is None else x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bound_of_packed_segments(launches, dtype):
    case = cases.random(300, 200, lower_bound=-0.5)
    offsets = packed_offsets(100, 0, 200, dtype=dtype)
    num, fallback = flash_kda.get_warmup_chunks(**case.gates(cu_seqlens=offsets), impl="sm90")
    assert flash_kda.last_path() == "sm90"
    assert (num.shape, num.dtype, fallback.shape, fallback.dtype) == ((3, 200), torch.int32, (3, 200), torch.bool)
    (call,) = launches
    has(call, kernel="warmup", grid=(600, 1, 1), heads=200, total=300, seq_len=-1, map_words=dtype.itemsize // 4)
    has(call, g_t=200 * D, g_h=D, lower_bound=-0.5, flags=flags.HAS_A_LOG | flags.HAS_DT_BIAS)
    has(call, g_ptr=address(case.g), a_log_ptr=address(case.A_log), dt_ptr=address(case.dt_bias), map_ptr=address(offsets))
    has(call, num_ptr=address(num), fallback_ptr=address(fallback))
    assert call["target"] == math.log(EXIT_EPS) - 0.5 * math.log(128)


def test_bound_of_dense_rows_without_parameters(launches):
    g = torch.zeros(3, 40, 2, 4 * D, dtype=torch.bfloat16)[..., D : 2 * D]
    flash_kda.get_warmup_chunks(g, None, None, -5.0, None, eps=0.0, impl="sm90")
    (call,) = launches
    has(call, kernel="warmup_16", grid=(6, 1, 1), heads=2, total=120, seq_len=40, map_ptr=0, a_log_ptr=0, dt_ptr=0, flags=0)
    has(call, g_t=8 * D, g_h=4 * D, target=-math.inf)


@pytest.mark.parametrize(("heads", "kernel"), [(2, "warmup_16_g32"), (200, "warmup_g32")])
def test_bound_of_fp32_gates(launches, heads, kernel):
    g = torch.zeros(3, 40, heads, D + 4)[..., 4:]
    flash_kda.get_warmup_chunks(g, None, None, -5.0, None, impl="sm90")
    (call,) = launches
    has(call, kernel=kernel, g_ptr=address(g), g_t=heads * (D + 4), g_h=D + 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda g: torch.zeros(2, 64, 2, D + 2)[..., :D], "g has strides .* multiples of 4 elements"),
        (lambda g: torch.zeros(2, 64, 2, 2 * D, dtype=torch.bfloat16)[..., ::2], "g has strides"),
        (lambda g: torch.zeros(2, 64, 2, D + 1, dtype=torch.bfloat16)[..., 1:], "g has strides"),
        (lambda g: torch.zeros(2, 80, 2, D, dtype=torch.bfloat16)[:, :64], "g has batch stride"),
        (lambda g: torch.zeros(2 * 64 * 2 * D + 1, dtype=torch.bfloat16)[1:].view(2, 64, 2, D), "g starts at"),
    ],
)
def test_gates_that_do_not_fit_are_refused_by_name(launches, change, reason):
    g = change(torch.zeros(2, 64, 2, D, dtype=torch.bfloat16))
    with pytest.raises(NotImplementedError, match=reason):
        flash_kda.get_warmup_chunks(g, None, None, -5.0, None, impl="sm90")
    flash_kda.get_warmup_chunks(g, None, None, -5.0, None)
    assert flash_kda.last_path() == "reference"
    assert not launches


def test_no_segments_launch_nothing(launches):
    num, fallback = flash_kda.get_warmup_chunks(
        torch.zeros(1, 0, 2, D, dtype=torch.bfloat16), None, None, -5.0, torch.tensor([0]), impl="sm90"
    )
    assert num.shape == fallback.shape == (0, 2)
    assert not launches


def test_entering_states(launches):
    ht, mt = torch.zeros(5, 2, D, D), torch.zeros(5, 2, D, D)
    seq_map = torch.tensor([0, 2, 5])
    start = torch.zeros(2, 4, D, D, dtype=torch.bfloat16)[:, :2]
    fallback = torch.ones(5, dtype=torch.bool)
    out = flash_kda.correct_initial_states(start, ht, mt, fallback, seq_map, impl="sm90")
    (call,) = launches
    has(call, mt_desc=(address(mt), (5 * 2 * D, D), (D, 1)), ht_ptr=address(ht), out_ptr=address(out), map_ptr=address(seq_map))
    has(call, needs_ptr=address(fallback), needs_slot=1, needs_head=0)
    has(call, h0_ptr=address(start), h0_stride=4 * D * D, in_slots=2, index_ptr=0)
    has(call, heads=2, seq_len=-1, map_words=2, total=5, n_seqs=2, n_slots=5, seg_len=1)
    has(call, flags=flags.ENTERING | flags.HAS_MT | flags.HAS_NEEDS | flags.HAS_INITIAL | flags.INITIAL_BF16)
    assert out.shape == ht.shape
    assert out.data_ptr() != ht.data_ptr()


def test_strided_offsets(launches):
    offsets = torch.tensor([0, 9, 2, 9, 5])[::2]
    flash_kda.correct_initial_states(None, torch.zeros(5, 2, D, D), None, None, offsets, impl="sm90")
    flash_kda.get_warmup_chunks(**cases.random(5, 2).gates(cu_seqlens=offsets), impl="sm90")
    for call in launches:
        has(call, map_ptr=address(offsets), map_words=4)
    assert len(launches) == 2


def test_entering_states_without_mt_ignore_fallback(launches):
    ht = torch.zeros(5, 2, D, D)
    seq_map = torch.tensor([0, 2, 5], dtype=torch.int32)
    flash_kda.correct_initial_states(None, ht, None, torch.zeros(5, dtype=torch.bool), seq_map, impl="sm90")
    (call,) = launches
    has(call, flags=flags.ENTERING, map_words=1, h0_ptr=0, in_slots=0)


def test_entering_states_of_no_sequence_are_zeros(launches):
    got = flash_kda.correct_initial_states(None, torch.ones(3, 2, D, D), None, None, torch.tensor([0]), impl="sm90")
    assert not got.any()
    assert not launches


def test_slots_in_place(launches):
    slots, mt = torch.zeros(7, 4, D, D), torch.zeros(7, 4, D, D)
    needs = torch.ones(7, 4, dtype=torch.int32)
    offsets = packed_offsets(100, 200, dtype=torch.int32)
    pool, index = torch.zeros(9, 4, D, D), torch.zeros(2, dtype=torch.int32)
    options = {"tokens": 300, "max_len": 300, "segment_len": 32, "initial_state": pool, "in_index": index}
    small.chain(slots, mt, needs, offsets, **options)
    small.chain(slots, mt, None, None, tokens=300, max_len=100, segment_len=32)
    small.chain(slots, None, None, offsets, **options)  # every ht already is the state
    call, dense = launches
    has(call, ht_ptr=address(slots), out_ptr=address(slots), needs_ptr=address(needs), needs_slot=16, needs_head=4)
    has(call, total=300, n_seqs=2, n_slots=7, seg_len=32, seq_len=-1, map_words=1, in_slots=9, index_ptr=address(index))
    has(call, flags=flags.HAS_MT | flags.HAS_NEEDS | flags.HAS_INITIAL | flags.HAS_IN_INDEX)
    has(dense, seq_len=100, n_seqs=3, map_ptr=0, needs_ptr=0, flags=flags.HAS_MT)


@pytest.mark.parametrize(("slots", "heads", "ctas"), [(1, 1, 8), (7, 16, 128), (2, 3, 48)])
def test_grid(launches, slots, heads, ctas):
    states = torch.zeros(slots, heads, D, D)
    small.chain(states, states.clone(), None, packed_offsets(1000), tokens=1000, max_len=0, segment_len=64)
    assert launches[0]["grid"] == (ctas, 1, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ht": torch.zeros(5, 2, D, 2 * D)[..., :D]}, "ht has strides"),
        ({"mt": torch.zeros(5, 2, D, D).mT}, "mt has strides"),
        ({"ht": torch.zeros(5 * 2 * D * D + 1)[1:].view(5, 2, D, D)}, "ht starts at"),
        ({"initial_state": torch.zeros(2, 2, D, D).mT}, "initial_state has strides"),
    ],
)
def test_states_that_do_not_fit_are_refused_by_name(launches, change, reason):
    arguments = {
        "initial_state": None, "ht": torch.zeros(5, 2, D, D), "mt": None, "fallback": None, "seq_map": torch.tensor([0, 2, 5])
    } | change  # fmt: skip
    with pytest.raises(NotImplementedError, match=reason):
        flash_kda.correct_initial_states(**arguments, impl="sm90")
    assert not launches
    assert flash_kda.correct_initial_states(**arguments).isfinite().all()
