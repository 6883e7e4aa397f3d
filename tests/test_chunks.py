"""Chunk factors against their definition; gates; windows and masks."""

import pytest
import torch
from cases import NAMES, make, random, rel, same_bits

from flash_kda.constants import CHUNK
from flash_kda.reference.chunks import Items, prepare, window
from flash_kda.reference.gate import log_decay, sigmoid

FACTORS = ("w", "u", "kg", "gamma", "qd", "aqk")


def items(*spans: tuple[int, int], heads: int = 1) -> Items:
    rows = [(s, h, start, end) for s, (start, end) in enumerate(spans) for h in range(heads)]
    return Items(*torch.tensor(rows).T)


def chunk_factors(inputs, spans, chunks, first=0, step=1, dtype=torch.float64, finite=True):
    batch = items(*spans, heads=inputs.heads)
    return prepare(inputs, window(batch, first, chunks, step, inputs), dtype, finite=finite)


def define(case, head, start, end):
    """The factors of one chunk of one head, written as in the specification, in fp64."""
    q, k, v, g, beta = (getattr(case, x)[0, start:end, head].double() for x in ("q", "k", "v", "g", "beta"))
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    slope = case.A_log[head].double().exp()
    log_alpha = case.lower_bound * torch.sigmoid(slope * (g + case.dt_bias[head].double()))
    beta = torch.diag(torch.sigmoid(beta))
    G = log_alpha.cumsum(0)
    kd, ki, qd = k * G.exp(), k * (-G).exp(), case.scale * q * G.exp()
    inverse = torch.linalg.inv(torch.eye(len(k), dtype=torch.float64) + (beta @ kd @ ki.T).tril(-1))
    return {
        "w": inverse @ beta @ kd,
        "u": inverse @ beta @ v,
        "kg": k * (G[-1] - G).exp(),
        "gamma": G[-1].exp(),
        "qd": qd,
        "aqk": (qd @ ki.T).tril(),
    }


@pytest.mark.parametrize("name", NAMES)
def test_factors_equal_their_definition(name):
    case = make(name, 37)
    factors = chunk_factors(case.inputs(), [(0, 37)], 3)
    for head in range(case.heads):
        for chunk, (start, end) in enumerate([(0, 16), (16, 32), (32, 37)]):
            for factor, want in define(case, head, start, end).items():
                got = getattr(factors, factor)[head, chunk]
                got = got if factor == "gamma" else got[: end - start, : want.shape[-1]]
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=lambda m, f=factor: f"{f}: {m}")


@pytest.mark.parametrize("name", ["random_5", "no_decay", "collinear_keys", "real"])
def test_a_chunk_maps_the_state_as_its_tokens_do(name):
    case = make(name, 16)
    factors = chunk_factors(case.inputs(), [(0, 16)], 1)
    h0 = torch.randn(1, 2, 128, 128, dtype=torch.float64)
    want_o, want_state = case.oracle(h0)
    S = h0[0].mT
    write = factors.u[:, 0] - factors.w[:, 0] @ S
    S_next = factors.gamma[:, 0, :, None] * S + factors.kg[:, 0].mT @ write
    o = factors.qd[:, 0] @ S + factors.aqk[:, 0] @ write
    assert rel(S_next.mT, want_state[0], 0).max() < 1e-12
    assert rel(o, want_o[0].transpose(0, 1), 0).max() < 1e-12


def test_rows_past_the_end_change_nothing():
    inputs = make("random_5", 16).inputs()
    whole = chunk_factors(inputs, [(0, 16)], 1, dtype=torch.float32)
    for end in range(1, 16):
        part = chunk_factors(inputs, [(0, end)], 1, dtype=torch.float32)
        for name in ("w", "u", "qd", "aqk"):
            assert same_bits(getattr(part, name)[:, :, :end], getattr(whole, name)[:, :, :end]), (name, end)
        for name in ("w", "u", "kg"):
            assert not getattr(part, name)[:, :, end:].any(), (name, end)


def test_a_window_never_reads_outside_its_item():
    case = random(40, 2)
    poisoned = case.map(torch.clone)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(poisoned, name)[:, :5] = torch.nan
        getattr(poisoned, name)[:, 25:] = torch.nan
    clean = chunk_factors(case.inputs(), [(5, 25)], 2)
    dirty = chunk_factors(poisoned.inputs(), [(5, 25)], 2)
    assert all(same_bits(getattr(clean, name), getattr(dirty, name)) for name in FACTORS)


def test_windows_walk_backward_and_mark_what_is_out_of_range():
    inputs = random(40, 3).inputs()
    batch = items((0, 20), (20, 40), heads=3)
    back = window(batch, batch.chunks - 1, 3, -1, inputs)
    ahead = window(batch, 0, 2, 1, inputs)
    assert torch.equal(back.rows[:, :2].flip(1), ahead.rows)
    assert not back.valid[:, 2].any()
    assert ahead.valid.sum((1, 2)).tolist() == [20] * 6
    token, head = ahead.rows[4] // 3, ahead.rows[4] % 3
    assert torch.equal(token[0], torch.arange(20, 20 + CHUNK))
    assert (head[ahead.valid[4]] == 1).all()


@pytest.mark.parametrize("what", ["q", "k", "v", "g", "beta"])
def test_poison_reaches_only_this_token_and_later(what):
    case = random(16, 1).map(torch.clone)
    getattr(case, what)[0, 6] = torch.nan
    factors = chunk_factors(case.inputs(), [(0, 16)], 1, finite=False)
    bad = factors.out_poison[0, 0].isnan().all(-1)
    assert bad.tolist() == [t == 6 if what == "q" else t >= 6 for t in range(16)]
    assert bool(factors.state_poison.isnan().any()) == (what != "q")
    assert all(getattr(factors, name).isfinite().all() for name in FACTORS)


def test_gate_stays_in_its_range_and_saturates():
    g = torch.tensor([-1e38, -100.0, -1.0, 0.0, 1.0, 100.0, 1e38])
    for a_log in (-100.0, 0.0, 20.0, 1000.0):
        decay = log_decay(g, torch.tensor(a_log), torch.zeros(7), -5.0)
        assert ((decay >= -5) & (decay <= 0)).all()
        assert (decay.diff() <= 0).all()
        assert decay[3] == -2.5
    assert (log_decay(g, None, None, 0.0) == 0).all()
    assert same_bits(log_decay(g, None, None, -5.0), log_decay(g, torch.zeros(()), torch.zeros(7), -5.0))


def test_gate_matches_the_sigmoid_of_fp64():
    x = torch.linspace(-60, 60, 10_001)
    want = torch.sigmoid(x.double())
    assert ((sigmoid(x).double() - want).abs() / want).max() < 8 * torch.finfo(torch.float32).eps


def test_gate_bits_do_not_depend_on_the_place_in_the_batch():
    x = torch.randn(4099)
    assert same_bits(torch.cat([sigmoid(part) for part in x.split(13)]), sigmoid(x))
