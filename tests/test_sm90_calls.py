"""Public calls through the Hopper stage with a double for the kernel: the same bits as through the reference."""

from dataclasses import replace

import cases
import pytest
import torch
from cases import D, packed_offsets, same_bits
from kernel_double import ForwardDouble

import flash_kda
from flash_kda import checkpoints, dispatch, validation
from flash_kda.sm90 import launch, stages

LENGTHS = (40, 0, 130, 33, 64)
OFFSETS = packed_offsets(*LENGTHS)


@pytest.fixture
def launches(monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "kernel", lambda name: ForwardDouble(name, seen))
    monkeypatch.setattr(stages, "_multiprocessors", lambda _device: 132)
    monkeypatch.setattr(dispatch, "why_not_sm90", lambda _device: None)
    return seen


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def slot_pool(slots, heads, dtype=torch.float32):
    """Slots some bytes apart, all NaN but for what is put there."""
    wide = torch.full((slots, heads * D * D + 64), torch.nan, dtype=dtype)
    pool = wide[:, : heads * D * D].view(slots, heads, D, D)
    pool.copy_(cases.state(slots, heads))
    return wide, pool


def run(impl, function, case, offsets, options, make_states):
    """Everything that a call writes, under one implementation."""
    written = make_states()
    out = torch.full(case.v.shape, torch.nan).bfloat16()
    function(**{**vars(case), "out": out, "cu_seqlens": offsets, **written, **options}, impl=impl)
    assert flash_kda.last_path() == impl
    return [out, *written.values()]


def compare(function, case, offsets=OFFSETS, make_states=dict, **options):
    kernel = run("sm90", function, case, offsets, options, make_states)
    reference = run("reference", function, case, offsets, options, make_states)
    assert all(same_bits(a, b) for a, b in zip(kernel, reference, strict=True))
    return kernel


BOTH = pytest.mark.parametrize("function", [flash_kda.fwd, flash_kda.fwd_cp])


@BOTH
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pools(launches, function, group, dtype):
    case = cases.grouped(cases.random(int(OFFSETS[-1]), 4), group)
    slots = int32(3, -1, 8, 0, 99)

    def states():
        return {"initial_state": slot_pool(9, 4)[1], "final_state": slot_pool(7, 4, torch.bfloat16)[1]}

    written = int32(6, 2, -1, -5, 0)
    compare(function, case, OFFSETS.to(dtype), states, initial_state_indices=slots, final_state_indices=written)
    assert len(launches) == 1


@BOTH
def test_pools_in_place(launches, function):
    case = cases.random(int(OFFSETS[-1]), 2)
    slots = int32(3, 5, 8, -1, 1)
    made = []

    def states():
        pool = slot_pool(9, 2)[1]
        made.append(pool)
        return {"initial_state": pool, "final_state": pool}

    compare(function, case, OFFSETS, states, initial_state_indices=slots, final_state_indices=slots)
    assert made[0].isfinite().all()


@BOTH
def test_strided_views_of_a_fused_projection(launches, function):
    tokens, heads = 90, 4
    case = cases.grouped(cases.random(tokens, heads), 2)
    widths = [2 * D, 2 * D, 4 * D, 4 * D, heads]
    fused = torch.full((1, tokens, sum(widths) + 20), torch.nan, dtype=torch.bfloat16)
    parts = fused[..., : sum(widths)].split(widths, -1)
    views = {
        name: part if name == "beta" else part.unflatten(-1, (-1, D))
        for name, part in zip(cases.TOKEN_INPUTS, parts, strict=True)
    }
    for name, view in views.items():
        view.copy_(getattr(case, name))
    assert views["q"].stride(1) % 8 == 0
    (out,) = compare(function, replace(case, **views), packed_offsets(50, 40))
    want, _ = flash_kda.fwd(**case.fwd(cu_seqlens=packed_offsets(50, 40)), impl="reference")
    assert same_bits(out, want)


@BOTH
@pytest.mark.parametrize("given", [{"A_log": None}, {"dt_bias": None}, {"A_log": None, "dt_bias": None}])
def test_missing_and_flat_parameters(launches, function, given):
    case = cases.random(100, 3)
    compare(function, replace(case, **given), packed_offsets(60, 40))
    compare(function, replace(case, dt_bias=case.dt_bias.flatten()), packed_offsets(60, 40))


@BOTH
@pytest.mark.parametrize("batch", [1, 3])
def test_chosen_checkpoints(launches, function, batch):
    case = cases.random(100, 2, batch=batch)
    chosen = torch.tensor([[64, 96], [-1, 32], [80, 0]])[:batch]

    def states():
        return {
            "initial_state": cases.state(batch, 2),
            "final_state": cases.nan_state(batch, 2),
            "checkpoint_states": torch.full((batch, 2, 2, D, D), torch.nan),
        }

    kernel = compare(function, case, None, states, checkpoint_offsets=chosen)
    assert len(launches) == 1
    for n in range(batch):
        for c in range(2):
            assert bool(kernel[3][n, c].isfinite().all()) == bool(chosen[n, c] > 0)


@BOTH
def test_checkpoints_every_so_many_tokens(launches, function):
    case = cases.random(int(OFFSETS[-1]), 2)
    rows = int(OFFSETS[-1]) // 32
    slots = int32(3, -1, 8, 0, 5)

    def states():
        pool = slot_pool(9, 2)[1]
        return {"initial_state": pool, "final_state": pool, "checkpoint_states": cases.nan_state(rows, 2, torch.bfloat16)}

    compare(function, case, OFFSETS, states, checkpoint_every=32, initial_state_indices=slots, final_state_indices=slots)
    assert len(launches) == 1


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activated", [False, True])
def test_beta_as_it_is(launches, function, dtype, activated):
    case = cases.random(int(OFFSETS[-1]), 2)
    beta = 2 * torch.sigmoid(case.beta.float()) if activated else case.beta.float() + 1e-3
    wide = torch.full((1, case.tokens, 3, 2), torch.nan, dtype=dtype)
    wide[:, :, :2, 1] = beta.to(dtype)
    compare(function, replace(case, beta=wide[:, :, :2, 1], beta_is_activated=activated))
    assert len(launches) == 1


@BOTH
@pytest.mark.parametrize("heads", [2, 40])
def test_gates_in_fp32(launches, function, heads):
    case = cases.random(int(OFFSETS[-1]), heads)
    wide = torch.full((1, case.tokens, heads, D + 4), torch.nan)
    wide[..., 4:] = case.g.float() * (1 + 2**-10)
    compare(function, replace(case, g=wide[..., 4:]))
    assert len(launches) == 1


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_columns_of_tables(launches, function, dtype):
    table = torch.stack([int32(3, -1, 8, 0, 99), int32(6, 2, -1, -5, 0), int32(1, 1, 1, 1, 1)], 1)
    offsets = torch.stack([OFFSETS, OFFSETS + 3], 1).to(dtype)

    def states():
        return {"initial_state": slot_pool(9, 2)[1], "final_state": slot_pool(7, 2)[1]}

    case = cases.random(int(OFFSETS[-1]), 2)
    indices = {"initial_state_indices": table[:, 0], "final_state_indices": table[:, 1]}
    compare(function, case, offsets[:, 0], states, **indices)


@BOTH
def test_expanded_strengths_and_states(launches, function):
    case = cases.random(int(OFFSETS[-1]), 2)
    case = replace(case, beta=case.beta[:, :1].expand_as(case.beta))

    def states():
        return {"initial_state": cases.state(1, 2).expand(5, 2, D, D), "final_state": cases.nan_state(5, 2)}

    compare(function, case, OFFSETS, states)
    assert (launches[0]["beta_t"], launches[0]["h0_stride"]) == (0, 0)


def test_an_empty_batch(launches):
    case = cases.random(0, 2, batch=3)

    def states():
        return {"initial_state": cases.state(5, 2), "final_state": cases.nan_state(5, 2)}

    options = {"initial_state_indices": int32(4, -1, 0), "final_state_indices": int32(1, 0, 7)}
    compare(flash_kda.fwd, case, None, states, **options)
    compare(flash_kda.fwd, cases.random(0, 2), torch.zeros(4, dtype=torch.int32), states, **options)


def test_checkpoints_in_sequences_that_a_plan_leaves_whole_are_taken(launches):
    saved = cases.nan_state(2, 2)
    arguments = cases.random(64, 2).fwd(checkpoint_states=saved, checkpoint_every=32)
    flash_kda.fwd_cp(**arguments, segment_len=1024, impl="sm90")
    assert launches


@BOTH
def test_checkpoints_in_strided_places(launches, function):
    """A table's columns of offsets in either width, states some elements apart, and all that cannot be served."""
    case = cases.random(int(OFFSETS[-1]), 2)
    for dtype in (torch.int32, torch.int64):
        table = torch.full((5, 7), -9, dtype=dtype)
        table[:, 1::3] = torch.tensor([[32, 48], [0, -16], [128, 16], [32, 16], [64, 64]], dtype=dtype)

        def states(dtype=dtype):
            wide = torch.full((10, 2 * D * D + 8), torch.nan, dtype=torch.bfloat16 if dtype == torch.int32 else torch.float32)
            return {"checkpoint_states": wide[:, : 2 * D * D].view(5, 2, 2, D, D)}

        chosen = table[:, 1::3]
        chosen[0, 1] = 16
        kernel = compare(function, case, OFFSETS, states, checkpoint_offsets=chosen)
        assert kernel[1].isfinite().flatten(2).all(2).tolist() == (chosen > 0).tolist()
    assert len(launches) == 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_that_cannot_be_served(launches, monkeypatch, dtype):
    """On a device nobody reads them before the kernel does."""
    monkeypatch.setattr(validation, "readable", lambda _x: False)
    monkeypatch.setattr(checkpoints, "readable", lambda _x: False)
    chosen = torch.tensor([[64, 24, 128, 2**31 - 16, -(2**31)]], dtype=dtype)
    if dtype == torch.int64:
        chosen[0, 3:] = torch.tensor([2**32 + 32, -(2**32) + 32])

    def states():
        return {"checkpoint_states": torch.zeros(1, 5, 2, D, D)}

    _, saved = compare(flash_kda.fwd, cases.random(100, 2), None, states, checkpoint_offsets=chosen)
    assert saved[0, 0].isfinite().all()
    assert saved[0, 1:4].isnan().all()
    assert not saved[0, 4].any()


@BOTH
def test_checkpoints_that_the_kernel_cannot_store_go_in_rounds(launches, function):
    case = cases.random(100, 2)

    def states():
        return {"checkpoint_states": torch.full((1, 2, 2, D, 2 * D), torch.nan)[..., :D]}

    compare(function, case, None, states, checkpoint_offsets=torch.tensor([[64, 96]]))
    assert len(launches) == 3


def test_such_checkpoints_in_cut_sequences_are_refused(launches):
    arguments = cases.random(100, 2).fwd(checkpoint_states=torch.zeros(3, 2, D, 2 * D)[..., :D], checkpoint_every=32)
    with pytest.raises(NotImplementedError, match="checkpoint_states has strides"):
        flash_kda.fwd_cp(**arguments, segment_len=32, impl="sm90")
    assert not launches


def test_no_tokens_and_checkpoints(launches):
    saved = torch.zeros(2, 1, 2, D, D)
    compare(
        flash_kda.fwd,
        cases.random(0, 2),
        torch.zeros(3, dtype=torch.int64),
        lambda: {"initial_state": cases.state(2, 2), "final_state": cases.nan_state(2, 2), "checkpoint_states": saved},
        checkpoint_offsets=torch.tensor([[0], [-1]]),
    )
    assert not saved.any()
