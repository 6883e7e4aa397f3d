"""Lengths, empty and ragged sequences, padding, and what must stay untouched."""

import math
from dataclasses import replace

import cases
import pytest
import torch
from budget import judge
from cases import TOKEN_INPUTS, D, gate, make, nan_like, nan_state, packed_offsets, random, same_bits, state

import flash_kda

FUNCTIONS = {"fwd": (flash_kda.fwd, {}), "fwd_cp": (flash_kda.fwd_cp, {"segment_len": 32})}
BOTH = pytest.mark.parametrize("name", FUNCTIONS)
STATE_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SENTINEL = 12345.0


def call(name, case, *, sequences, dtype=torch.float32, **arguments):
    function, options = FUNCTIONS[name]
    final = nan_state(sequences, case.heads, dtype)
    return function(**case.fwd(final_state=final, **arguments), **options)


@BOTH
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127])
def test_every_length(name, batch, tokens):
    case, h0 = random(tokens, 2, batch=batch, seed=tokens), state(batch, 2)
    out, final = call(name, case, sequences=batch, initial_state=h0)
    if tokens == 0:
        assert out.shape == (batch, 0, 2, D)
        assert same_bits(final, h0)
        return
    judged = judge(case, h0)
    judged.out(out)
    judged.state(final, extra=2.0**-20)


@BOTH
def test_a_long_sequence(name):
    case = random(1500, 1, lower_bound=-0.5)
    judged = judge(case)
    out, final = call(name, case, sequences=1)
    judged.out(out)
    judged.state(final, extra=2.0**-20)


@BOTH
@STATE_DTYPES
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("lengths", [(0,), (0, 0), (0, 17), (17, 0), (5, 0, 0, 32), (33, 64, 0, 100, 7)])
def test_empty_sequences(name, dtype, with_state, lengths):
    offsets, case = packed_offsets(*lengths), random(sum(lengths), 2)
    h0 = state(len(lengths), 2, dtype) if with_state else None
    out, final = call(name, case, sequences=len(lengths), dtype=dtype, initial_state=h0, cu_seqlens=offsets)
    assert out.isfinite().all()
    for n, length in enumerate(lengths):
        if length == 0:
            want = torch.zeros(2, D, D, dtype=dtype) if h0 is None else h0[n]
            assert same_bits(final[n], want)
            continue
        alone = case.cut(int(offsets[n]), int(offsets[n + 1]))
        out_alone, final_alone = call(
            name, alone, sequences=1, dtype=dtype, initial_state=None if h0 is None else h0[n : n + 1]
        )
        assert same_bits(out[:, offsets[n] : offsets[n + 1]], out_alone)
        assert same_bits(final[n : n + 1], final_alone)


@BOTH
@pytest.mark.parametrize("tokens", [0, 40])
def test_no_sequences(name, tokens):
    case = random(tokens, 2)
    out, final = call(name, case, sequences=0, cu_seqlens=torch.zeros(1, dtype=torch.int32))
    assert out.isnan().all()
    assert final.shape == (0, 2, D, D)
    fresh, _ = FUNCTIONS[name][0](**case.fwd(out=None, cu_seqlens=torch.zeros(1, dtype=torch.int64)))
    assert not fresh.any()


@BOTH
def test_no_batch_rows(name):
    out, final = call(name, random(20, 2, batch=0), sequences=0)
    assert out.shape == (0, 20, 2, D)
    assert final.shape == (0, 2, D, D)


def test_parts_on_nothing():
    case = random(0, 2)
    for offsets, segments in ((torch.zeros(1, dtype=torch.int64), 0), (torch.zeros(3, dtype=torch.int64), 2)):
        ht, mt, info = flash_kda.state_only(**case.summary(cu_seqlens=offsets), calc_mt=True, return_info=True)
        assert ht.shape == (segments, 2, D, D)
        assert same_bits(mt, torch.eye(D).expand(segments, 2, D, D))
        assert not info.chunks.any()
        chunks, fallback = flash_kda.get_warmup_chunks(**case.gates(cu_seqlens=offsets))
        assert chunks.shape == fallback.shape == (segments, 2)
        entering = flash_kda.correct_initial_states(None, ht, mt, None, torch.tensor([0, segments]))
        assert entering.shape == ht.shape
        assert not entering.any()


@BOTH
@pytest.mark.parametrize("padding", [torch.nan, torch.inf, 1e30])
def test_tokens_after_the_last_offset_are_neither_read_nor_written(name, padding):
    offsets = packed_offsets(50, 0, 50)
    case = random(128, 2).map(torch.clone)
    clean, clean_final = call(name, case.cut(0, 100), sequences=3, cu_seqlens=offsets)
    for what in TOKEN_INPUTS:
        getattr(case, what)[:, 100:] = padding
    for before in (torch.nan, SENTINEL):
        given = torch.full_like(case.q, before)
        out, final = call(name, case, sequences=3, cu_seqlens=offsets, out=given)
        assert same_bits(out[:, :100], clean)
        assert same_bits(out[:, 100:], torch.full_like(out[:, 100:], before))
        assert same_bits(final, clean_final)
    fresh, _ = call(name, case, sequences=3, cu_seqlens=offsets, out=None)
    assert not fresh[:, 100:].any()


@BOTH
def test_a_strided_out_keeps_its_padding(name):
    case = random(70, 2)
    offsets = packed_offsets(20, 30)
    want, _ = call(name, case, sequences=2, cu_seqlens=offsets)
    wide = torch.full((1, 70, 2, D + 8), SENTINEL).bfloat16()
    call(name, case, sequences=2, cu_seqlens=offsets, out=wide[..., :D])
    assert same_bits(wide[:, :50, :, :D], want[:, :50])
    assert (wide[:, 50:] == wide.new_tensor(SENTINEL)).all()
    assert (wide[..., D:] == wide.new_tensor(SENTINEL)).all()


@BOTH
def test_every_split_of_two_sequences(name):
    """A strong gate near the boundary must not overflow into the other sequence."""
    whole = gate(random(128, 2), 6)
    for s in (0, 1, 2, 15, 16, 17, 31, 33, 47, 63, 64, 65, 79, 95, 96, 111, 112, 126, 127, 128):
        out, final = call(name, whole, sequences=2, cu_seqlens=packed_offsets(s, 128 - s))
        for n, (start, end) in enumerate(((0, s), (s, 128))):
            alone, alone_final = call(name, whole.cut(start, end), sequences=1, out=nan_like(whole.q[:, start:end]))
            assert same_bits(out[:, start:end], alone), s
            assert same_bits(final[n : n + 1], alone_final), s


@BOTH
def test_many_sequences_of_one_token(name):
    case = random(2000, 1)
    out, final = call(name, case, sequences=2000, dtype=torch.bfloat16, cu_seqlens=torch.arange(2001))
    # From a zero state one token leaves beta k v^T.
    k = torch.nn.functional.normalize(case.k[0, :, 0].double(), dim=-1)
    write = torch.sigmoid(case.beta[0, :, 0].double())[:, None] * case.v[0, :, 0].double()
    want = write[:, :, None] * k[:, None, :]
    assert (final[:, 0].double() - want).norm() <= 2.0**-8 * want.norm()
    q = torch.nn.functional.normalize(case.q[0, :, 0].double(), dim=-1)
    o = case.scale * (q * k).sum(-1, keepdim=True) * write
    assert (out[0, :, 0].double() - o).norm() <= 2.0**-8 * o.norm()


@BOTH
@pytest.mark.parametrize("what", TOKEN_INPUTS)
def test_a_nan_stays_in_its_sequence(name, what):
    offsets = packed_offsets(33, 64, 100, 7)
    case = random(204, 2)
    clean, clean_final = call(name, case, sequences=4, cu_seqlens=offsets)
    dirty = case.map(torch.clone)
    getattr(dirty, what)[:, 97] = torch.nan
    out, final = call(name, dirty, sequences=4, cu_seqlens=offsets)
    healthy = [0, 1, 3]
    assert out[:, 97].isnan().all()
    assert same_bits(out[:, :97], clean[:, :97])
    assert same_bits(out[:, 197:], clean[:, 197:])
    assert same_bits(final[healthy], clean_final[healthy])


@BOTH
def test_a_nan_state_stays_in_its_sequence_and_head(name):
    offsets, case = packed_offsets(40, 40), make("no_decay", 80)
    h0 = state(2, 2)
    clean, clean_final = call(name, case, sequences=2, cu_seqlens=offsets, initial_state=h0)
    dirty = h0.clone()
    dirty[0, 1] = torch.nan
    out, final = call(name, case, sequences=2, cu_seqlens=offsets, initial_state=dirty)
    assert out[:, :40, 1].isnan().all()
    assert same_bits(out[:, :40, 0], clean[:, :40, 0])
    assert same_bits(out[:, 40:], clean[:, 40:])
    assert same_bits(final[1], clean_final[1])
    assert same_bits(final[0, 0], clean_final[0, 0])


@BOTH
@pytest.mark.parametrize("tokens", [1, 17, 100])
def test_nothing_is_written_around_the_buffers(name, tokens):
    case = random(tokens, 2)
    guard = 4096
    flat_out = torch.full((case.q.numel() + 2 * guard,), SENTINEL).bfloat16()
    flat_state = torch.full((2 * D * D + 2 * guard,), SENTINEL)
    out = flat_out[guard:-guard].view(case.q.shape)
    final = flat_state[guard:-guard].view(1, 2, D, D)
    function, options = FUNCTIONS[name]
    function(**case.fwd(out=out, final_state=final), **options)
    for flat in (flat_out, flat_state):
        untouched = torch.full_like(flat[:guard], SENTINEL)
        assert same_bits(flat[:guard], untouched)
        assert same_bits(flat[-guard:], untouched)
    assert not (out == out.new_tensor(SENTINEL)).any()
    assert not (final == SENTINEL).any()


@BOTH
def test_extreme_values_stay_finite(name):
    case = random(70, 2)
    for a_log, g, beta in ((20.0, 30.0, 30.0), (20.0, -30.0, -30.0), (200.0, 1e30, 1e30), (-200.0, -1e30, -30.0)):
        extreme = type(case)(
            **vars(case)
            | {
                "A_log": torch.full((2,), a_log),
                "g": torch.full_like(case.g, g) * case.g.sign(),
                "beta": torch.full_like(case.beta, beta),
            }
        )
        out, final = call(name, extreme, sequences=1)
        judged = judge(extreme)
        judged.out(out)
        judged.state(final, extra=2.0**-20)


@BOTH
def test_zero_keys_and_queries_are_allowed(name):
    case = random(40, 2).map(torch.clone)
    case.k[:, ::3] = 0
    case.q[:, ::5] = 0
    judged = judge(case)
    out, final = call(name, case, sequences=1)
    judged.out(out)
    judged.state(final, extra=2.0**-20)
    assert not out[:, ::5].any()


@BOTH
def test_scale_multiplies_the_outputs_only(name):
    case = random(40, 2)
    a, a_state = call(name, case, sequences=1)
    b, b_state = call(name, case, sequences=1, scale=4 * case.scale)
    assert same_bits(a * 4, b)
    assert same_bits(a_state, b_state)
    zero, _ = call(name, case, sequences=1, scale=0)
    assert not zero.any()
    assert math.isclose(case.scale, D**-0.5)


@pytest.mark.parametrize("name", ["g", "beta"])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_gate_or_logit_saturates(name, sign):
    case = cases.random(50, 2, seed=4)
    x = getattr(case, name).clone()
    x[:, 20] = sign * torch.inf
    case = replace(case, **{name: x})
    out, final = flash_kda.fwd(**case.fwd(), output_final_state=True)
    o, want = case.oracle()
    assert cases.out_error(out, o).max() <= 1.25 * cases.out_error(o.bfloat16(), o).max()
    assert cases.state_error(final, want).max() < 1e-5
