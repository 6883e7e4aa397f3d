"""Bitwise promises (docs/numerics.md): what must not change a single bit."""

import itertools
import random as python_random
from dataclasses import replace

import pytest
import torch
from budget import judge_named
from cases import NAMES, TOKEN_INPUTS, make, nan_state, packed_offsets, random, same_bits, state

import flash_kda
from flash_kda.constants import EXIT_EPS

MODES = {
    "fwd": (flash_kda.fwd, {}),
    "segments": (flash_kda.fwd_cp, {"segment_len": 32}),
    "fixed_plan": (flash_kda.fwd_cp, {"fixed_plan": True}),
}


@pytest.fixture(params=MODES)
def mode(request, monkeypatch):
    """A call with a plan that does not depend on the batch; the fixed plan is shortened so that it cuts."""
    monkeypatch.setattr(flash_kda.plan, "FIXED_SEGMENT_LEN", 48)
    return request.param


def run(mode, case, initial_state=None, cu_seqlens=None):
    function, options = MODES[mode]
    sequences = case.q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    final = nan_state(sequences, case.heads)
    out, _ = function(**case.fwd(initial_state=initial_state, final_state=final, cu_seqlens=cu_seqlens), **options)
    return out, final


def take(case, spans):
    """The tokens of several spans, one after the other."""
    return case.map(lambda x: torch.cat([x[:, start:end] for start, end in spans], 1))


def last_token_changed(case, how):
    def change(x):
        x = x.clone()
        x[:, -1] = {"other": lambda: -2 * x[:, -1] + 1, "nan": lambda: torch.nan, "inf": lambda: -torch.inf}[how]()
        return x

    return case.map(change)


@pytest.mark.parametrize("name", NAMES)
def test_twice_the_same(mode, name):
    case = make(name, 100)
    assert all(same_bits(a, b) for a, b in zip(run(mode, case, state(1, 2)), run(mode, case, state(1, 2)), strict=True))


@pytest.mark.parametrize("how", ["other", "nan", "inf", "dropped"])
def test_a_later_token_changes_no_earlier_output(mode, how):
    for tokens in range(1, 41):
        case = random(tokens, 4, seed=tokens)
        changed = case.cut(0, tokens - 1) if how == "dropped" else last_token_changed(case, how)
        a, b = run(mode, case)[0], run(mode, changed)[0]
        assert same_bits(a[:, : tokens - 1], b[:, : tokens - 1]), tokens
        assert how == "dropped" or not same_bits(a[:, -1], b[:, -1])


@pytest.mark.parametrize("what", TOKEN_INPUTS)
def test_each_input_of_a_later_token_changes_no_earlier_output(mode, what):
    case = random(77, 2)
    for how in ("other", "nan"):
        changed = replace(case, **{what: getattr(last_token_changed(case, how), what)})
        assert same_bits(run(mode, case)[0][:, :-1], run(mode, changed)[0][:, :-1])


def test_a_nan_elsewhere_does_not_change_the_sign_of_zero(mode):
    """Without values a tiny negative state underflows to -0."""
    case = make("beta_ends", 49)
    case = replace(case, v=torch.zeros_like(case.v))
    h0 = -1e-30 * state(2, 2).abs()
    offsets = packed_offsets(48, 1)
    out, final = run(mode, case, h0, offsets)
    assert (final[0].eq(0) & final[0].signbit()).any() or mode != "fwd"
    dirty_out, dirty_final = run(mode, last_token_changed(case, "nan"), h0, offsets)
    assert same_bits(out[:, :48], dirty_out[:, :48])
    assert same_bits(final[0], dirty_final[0])


@pytest.mark.parametrize("poison", [None, torch.nan, torch.inf])
def test_neighbours_in_the_batch_change_nothing(mode, poison):
    lengths = [33, 64, 100, 7]
    offsets = packed_offsets(*lengths)
    spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    case, h0 = random(204, 2), state(4, 2)
    if poison is not None:
        case = case.map(torch.clone)
        for name in TOKEN_INPUTS:
            getattr(case, name)[:, 97:197] = poison
    out, final = run(mode, case, h0, offsets)
    for n, (start, end) in enumerate(spans):
        if poison is not None and n == 2:
            assert out[:, start:end].isnan().all()
            continue
        alone, alone_final = run(mode, case.cut(start, end), h0[n : n + 1])
        assert same_bits(out[:, start:end], alone)
        assert same_bits(final[n : n + 1], alone_final)


def test_a_sequence_keeps_its_bits_in_fifty_random_batches(mode):
    rng = python_random.Random(0)
    pool, mine = random(600, 3, seed=5), random(75, 3)
    h0 = state(1, 3)
    alone, alone_final = run(mode, mine, h0)
    for _ in range(50):
        lengths = [rng.choice([0, 1, 15, 16, 31, 48, 90]) for _ in range(rng.randint(1, 6))]
        place = rng.randint(0, len(lengths))
        others = pool.cut(0, sum(lengths))
        start = sum(lengths[:place])
        batch = mine.map(lambda x: x)
        names = {
            x: torch.cat([getattr(others, x)[:, :start], getattr(batch, x), getattr(others, x)[:, start:]], 1)
            for x in TOKEN_INPUTS
        }
        lengths.insert(place, 75)
        initial = torch.randn(len(lengths), 3, 128, 128)
        initial[place] = h0[0]
        out, final = run(mode, replace(mine, **names), initial, packed_offsets(*lengths))
        assert same_bits(out[:, start : start + 75], alone)
        assert same_bits(final[place : place + 1], alone_final)


@pytest.mark.parametrize("name", ["random_5", "no_decay", "real"])
def test_a_call_may_be_split_at_multiples_of_16(name):
    """The promise is for multiples of 32; the reference keeps it at every multiple of the chunk."""
    case = make(name, 200)
    out, final = run("fwd", case, state(1, 2))
    for step in (16, 32, 48, 96):
        pieces, h = [], state(1, 2)
        for start in range(0, 200, step):
            piece, h = run("fwd", case.cut(start, min(start + step, 200)), h)
            pieces.append(piece)
        assert same_bits(torch.cat(pieces, 1), out)
        assert same_bits(h, final)


@pytest.mark.parametrize("mode", ["fwd", "segments"])
@pytest.mark.parametrize("cuts", [(32, 128), (37, 41, 150)])
@pytest.mark.parametrize("name", NAMES)
def test_any_split_stays_within_the_budget(name, cuts, mode):
    case, judged = make(name, 200), judge_named(name, 200)
    pieces, h = [], state(1, 2)
    for start, end in itertools.pairwise((0, *cuts, 200)):
        piece, h = run(mode, case.cut(start, end), h)
        pieces.append(piece)
    judged.out(torch.cat(pieces, 1), extra=EXIT_EPS)
    judged.state(h, extra=EXIT_EPS)


def test_the_number_of_threads_changes_nothing(mode):
    lengths = [90, 16, 75, 160]
    case, h0 = random(sum(lengths), 8), state(4, 8)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out, final = run(mode, case, h0, packed_offsets(*lengths))
            alone, alone_final = run(mode, case.cut(106, 181), h0[2:3])
            results.append((out, final))
            assert same_bits(out[:, 106:181], alone), count
            assert same_bits(final[2:3], alone_final), count
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(results[0][0], out) and same_bits(results[0][1], final) for out, final in results)
