"""Public functions: signatures, in-place semantics, parts that compose, and fwd_cp against fwd and the oracle."""

import inspect
from dataclasses import replace

import pytest
import torch
from budget import judge, judge_named
from cases import NAMES, D, make, nan_like, nan_state, packed_offsets, plain, random, same_bits, state

import flash_kda
from flash_kda.reference import stages

FLASH_KDA = "q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None, cu_seqlens=None"
SIGNATURES = {
    "fwd": FLASH_KDA,
    "fwd_cp": FLASH_KDA + ", auto_cp=True",
    "state_only": "k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens, num_warmup_chunks=None, calc_mt=False",
    "get_warmup_chunks": "g, A_log, dt_bias, lower_bound, cu_seqlens",
    "correct_initial_states": "initial_state, ht, mt, fallback, seq_map",
}
T = 520
BOTH = pytest.mark.parametrize("function", [flash_kda.fwd, flash_kda.fwd_cp])


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(flash_kda, name)).parameters.values()
    published = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in published]
    assert ", ".join(shown) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in published)
    assert all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)


def cp(case, judge_=None, segment_len=64, **options):
    """fwd_cp into poisoned buffers; returns out, final state and the largest certified drop."""
    h0 = options.get("initial_state")
    final = nan_state(1 if h0 is None else h0.shape[0], case.heads)
    out, final, certificate = flash_kda.fwd_cp(
        **case.fwd(final_state=final, **options), segment_len=segment_len, certificate=True
    )
    dropped = 0.0 if certificate is None else certificate.dropped.max(0).values
    if judge_ is not None:
        judge_.out(out, dropped)
        judge_.state(final, dropped)
    return out, final


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_fwd_equals_the_oracle(name, with_state):
    case, judged = make(name, T), judge_named(name, T, 2, with_state)
    final = nan_state(1, 2)
    out, _ = flash_kda.fwd(**case.fwd(initial_state=state(1, 2) if with_state else None, final_state=final))
    judged.out(out)
    judged.state(final)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_fwd_cp_equals_the_oracle(name, with_state):
    case, judged = make(name, T), judge_named(name, T, 2, with_state)
    for segment_len in (16, 48, 272):  # 33, 11 and 2 segments
        cp(case, judged, segment_len, initial_state=state(1, 2) if with_state else None)


@pytest.mark.parametrize("name", ["no_decay", "log_uniform", "collinear_keys", "real"])
def test_fwd_cp_over_64_segments(name):
    cp(make(name, 1024), judge_named(name, 1024), 16, initial_state=state(1, 2))


@pytest.mark.parametrize("lower_bound", [-0.1, -0.5, -1.0, -2.0, -2.5, -3.0, -4.0, -5.0])
@pytest.mark.parametrize("mean_gate", [-8, -2, 0, 2, 8])
def test_accuracy_over_a_sweep_of_decay_strengths(lower_bound, mean_gate):
    case = random(100, 2, lower_bound=lower_bound)
    case = replace(case, g=case.g + mean_gate)
    cp(case, judge(case), 32)


def test_decay_of_one_in_ten_thousand_does_not_drift():
    case = random(4096, 1)
    case = replace(plain(case), g=torch.full_like(case.g, -10.8), beta=torch.full_like(case.beta, -4))
    cp(case, judge(case), 256)


# Mutations: the assertions above must fail when a stage is wrong.


def judged_slow():
    return make("slow_eighth", T), judge_named("slow_eighth", T)


def test_a_lost_transition_is_seen(monkeypatch):
    case, judged = judged_slow()
    monkeypatch.setattr(stages, "chain", lambda h0, ht, *_args, **_options: ht)
    with pytest.raises(AssertionError, match="exceeds"):
        cp(case, judged, 272, initial_state=state(1, 2))


def test_a_transposed_transition_is_seen(monkeypatch):
    case, judged = judged_slow()
    right = stages.chain
    monkeypatch.setattr(stages, "chain", lambda h0, ht, mt, *rest, **options: right(h0, ht, mt.mT, *rest, **options))
    with pytest.raises(AssertionError, match="exceeds"):
        cp(case, judged, 272, initial_state=state(1, 2))


def test_a_lost_initial_state_is_seen(monkeypatch):
    case, judged = judged_slow()
    right = stages.chain
    monkeypatch.setattr(stages, "chain", lambda _h0, *rest, **options: right(None, *rest, **options))
    with pytest.raises(AssertionError, match="exceeds"):
        cp(case, judged, 272, initial_state=state(1, 2))


def test_a_wrong_plan_is_seen(monkeypatch):
    case, judged = judged_slow()
    right = flash_kda.plan_segments

    def shifted(*arguments, **options):
        made = right(*arguments, **options)
        return replace(made, cu_seqlens=made.cu_seqlens.clone().index_add_(0, torch.tensor([1]), torch.tensor([16])))

    monkeypatch.setattr(flash_kda.api, "plan_segments", shifted)
    cp(case, judged, 272, initial_state=state(1, 2))  # another boundary is still a right plan
    summary = stages.state_summary
    plan_for_summary = torch.tensor([0, 272, T])
    monkeypatch.setattr(stages, "state_summary", lambda x, _cu, **options: summary(x, plan_for_summary, **options))
    with pytest.raises(AssertionError, match="exceeds"):
        cp(case, judged, 272, initial_state=state(1, 2))


def test_a_recipe_that_replays_one_chunk_is_seen(monkeypatch):
    case, judged = judged_slow()
    summary = stages.state_summary

    def one_chunk(x, offsets, **options):
        chunks = torch.ones(offsets.numel() - 1, x.heads, dtype=torch.int64)
        return summary(x, offsets, **(options | {"num_chunks": chunks}))

    monkeypatch.setattr(stages, "state_summary", one_chunk)
    out, _ = cp(case, None, 272)
    with pytest.raises(AssertionError, match="exceeds"):
        judged.out(out)


# In place, or allocated.


@BOTH
def test_positional_call_of_existing_callers(function):
    case, offsets = make("random_5", 300), packed_offsets(100, 200)
    out, h0, final = nan_like(case.q), state(2, 2), nan_state(2, 2)
    a = vars(case)
    tokens = (a["q"], a["k"], a["v"], a["g"], a["beta"])
    got = function(*tokens, a["scale"], out, a["A_log"], a["dt_bias"], a["lower_bound"], h0, final, offsets)
    assert got[0] is out
    assert got[1] is final
    assert out.isfinite().all()
    assert final.isfinite().all()
    fresh, fresh_final = function(**case.fwd(out=None, initial_state=h0, cu_seqlens=offsets), output_final_state=True)
    assert same_bits(out, fresh)
    assert same_bits(final, fresh_final)
    assert fresh_final.dtype == torch.float32


@BOTH
def test_no_state_is_returned_that_nobody_asked_for(function):
    case = make("random_5", 40)
    out, final = function(**case.fwd(out=None, initial_state=state(1, 2)))
    assert final is None
    assert out.dtype == torch.bfloat16


@BOTH
def test_inputs_are_left_alone(function):
    case, h0 = make("random_1", 600), state(1, 2)
    tensors = [x for x in (*vars(case).values(), h0) if torch.is_tensor(x)]
    before = [x.clone() for x in tensors]
    function(**case.fwd(initial_state=h0, final_state=nan_state(1, 2)))
    assert all(same_bits(x, y) for x, y in zip(tensors, before, strict=True))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_may_be_updated_in_place(function, dtype):
    case, h0 = make("random_1", 600, 40), state(1, 40, dtype)
    final = nan_state(1, 40, dtype)
    out, _ = function(**case.fwd(initial_state=h0, final_state=final))
    same = h0.clone()
    out_in_place, returned = function(**case.fwd(initial_state=same, final_state=same))
    assert returned is same
    assert same_bits(out, out_in_place)
    assert same_bits(final, same)


@BOTH
def test_all_mixes_of_state_dtypes(function):
    case = make("random_1", 300)
    outs, finals = {}, {}
    for initial in (None, torch.bfloat16, torch.float32):
        for final in (None, torch.bfloat16, torch.float32):
            h0 = None if initial is None else state(1, 2, initial)
            stored = None if final is None else nan_state(1, 2, final)
            outs[initial, final], finals[initial, final] = function(**case.fwd(initial_state=h0, final_state=stored))
    for initial, final in outs:
        assert same_bits(outs[initial, final], outs[initial, None])
        assert same_bits(finals[initial, torch.bfloat16], finals[initial, torch.float32].bfloat16())
    assert same_bits(outs[torch.bfloat16, None], outs[torch.float32, None])
    assert not same_bits(outs[None, None], outs[torch.float32, None])


def test_without_auto_cp_it_is_fwd():
    case = make("slow_eighth", 800)
    a, b = nan_state(1, 2), nan_state(1, 2)
    out, _ = flash_kda.fwd(**case.fwd(initial_state=state(1, 2), final_state=a))
    same, _ = flash_kda.fwd_cp(**case.fwd(initial_state=state(1, 2), final_state=b), auto_cp=False, segment_len=64)
    assert same_bits(out, same)
    assert same_bits(a, b)


# The parts compose.


@pytest.mark.parametrize("name", ["random_5", "slow_eighth", "one_weak_head", "real"])
def test_composing_the_parts_is_fwd_cp(name):
    case, offsets, h0 = make(name, 520, 3), packed_offsets(300, 0, 17, 203), state(4, 3)
    want_final = nan_state(4, 3)
    want, _ = flash_kda.fwd_cp(**case.fwd(initial_state=h0, final_state=want_final, cu_seqlens=offsets), segment_len=64)
    plan = flash_kda.plan_segments(offsets, 520, 3, segment_len=64)
    ht, mt, info = flash_kda.state_only(**case.summary(cu_seqlens=plan.cu_seqlens), calc_mt=True, return_info=True)
    entering = flash_kda.correct_initial_states(h0, ht, mt, info.fallback, plan.seq_map)
    ends = nan_state(plan.capacity, 3)
    out, _ = flash_kda.fwd(**case.fwd(initial_state=entering, final_state=ends, cu_seqlens=plan.cu_seqlens))
    assert same_bits(out, want)
    assert same_bits(ends[plan.seq_map[1:].long() - 1], want_final)


def test_returned_forms_of_state_only():
    case = make("random_5", 64)
    ht = flash_kda.state_only(**case.summary())
    assert same_bits(ht, flash_kda.state_only(**case.summary(), return_info=True)[0])
    assert same_bits(ht, flash_kda.state_only(**case.summary(), calc_mt=True)[0])
    ht, mt, info = flash_kda.state_only(**case.summary(), calc_mt=True, return_info=True)
    assert ht.shape == mt.shape == (1, 2, D, D)
    assert ht.dtype == mt.dtype == info.norm.dtype == torch.float32
    assert (info.chunks.dtype, info.fallback.dtype) == (torch.int32, torch.bool)
    assert info.chunks.shape == info.fallback.shape == info.norm.shape == (1, 2)


def test_mt_is_the_derivative_of_the_final_state():
    case = make("slow_eighth", 50)
    ht, mt = flash_kda.state_only(**case.summary(), calc_mt=True, eps=0)
    h0 = state(1, 2)
    assert ((h0 @ mt.mT + ht) - case.oracle(h0)[1]).norm() < 1e-5 * h0.norm()


def test_three_published_paths_of_the_correction():
    rng = torch.Generator().manual_seed(0)
    ht, mt = torch.randn(5, 2, D, D, generator=rng), torch.randn(5, 2, D, D, generator=rng) / D
    h0, seq_map = state(2, 2), torch.tensor([0, 3, 4])
    correct = flash_kda.correct_initial_states
    zero = torch.zeros(2, D, D)
    without = correct(None, ht, None, None, seq_map)
    assert same_bits(without, torch.stack([zero, ht[0], ht[1], zero, zero]))
    with_h0 = correct(h0, ht, None, None, seq_map)
    assert same_bits(with_h0, torch.stack([h0[0], ht[0], ht[1], h0[1], zero]))
    full = correct(h0, ht, mt, None, seq_map)
    torch.testing.assert_close(full[1], h0[0] @ mt[0].mT + ht[0])
    torch.testing.assert_close(full[2], full[1] @ mt[1].mT + ht[1])
    assert same_bits(full[3], h0[1])
    assert not full[4].any()
    assert same_bits(correct(h0, ht, mt, torch.zeros(5, 2, dtype=torch.bool), seq_map), with_h0)
    assert same_bits(correct(h0.bfloat16(), ht, mt, None, seq_map.int()), full)


def test_per_segment_forms_equal_per_head_forms():
    case, offsets = make("random_half", 200), packed_offsets(96, 64, 40)
    chunks = torch.tensor([2, 1, 3])
    per_segment = flash_kda.state_only(**case.summary(cu_seqlens=offsets), num_warmup_chunks=chunks, calc_mt=True)
    per_head = flash_kda.state_only(
        **case.summary(cu_seqlens=offsets), num_warmup_chunks=chunks[:, None].repeat(1, 2).int(), calc_mt=True
    )
    assert all(same_bits(a, b) for a, b in zip(per_segment, per_head, strict=True))
    ht, mt = per_segment
    fallback, seq_map = torch.tensor([False, True, True]), torch.tensor([0, 3])
    a = flash_kda.correct_initial_states(state(1, 2), ht, mt, fallback, seq_map)
    b = flash_kda.correct_initial_states(state(1, 2), ht, mt, fallback[:, None].repeat(1, 2), seq_map)
    assert same_bits(a, b)


def test_warmup_chunks_serve_state_only():
    case = make("strong_every_16th", 640)
    offsets = packed_offsets(320, 320)
    chunks, fallback = flash_kda.get_warmup_chunks(**case.gates(cu_seqlens=offsets))
    assert not fallback.any()
    assert (chunks < 20).all()
    given = flash_kda.state_only(**case.summary(cu_seqlens=offsets), num_warmup_chunks=chunks)
    full = flash_kda.state_only(**case.summary(cu_seqlens=offsets), eps=0)
    assert (given - full).norm() < 1e-5 * full.norm()


# Equal inputs in other clothes.


def both(case, **options):
    final = nan_state(options.pop("sequences", 1), case.heads)
    out, _ = flash_kda.fwd(**case.fwd(final_state=final, **options))
    cp_out, cp_final = cp(case, None, 64, **options)
    return out, final, cp_out, cp_final


def assert_same(a, b):
    assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def test_dense_equals_packed():
    case = random(150, 2, batch=3)
    h0 = state(3, 2)
    for options in ({}, {"segment_len": 64}):
        function = flash_kda.fwd_cp if options else flash_kda.fwd
        dense_final, packed_final = nan_state(3, 2), nan_state(3, 2)
        dense, _ = function(**case.fwd(initial_state=h0, final_state=dense_final), **options)
        offsets = packed_offsets(150, 150, 150)
        packed, _ = function(**case.packed().fwd(initial_state=h0, final_state=packed_final, cu_seqlens=offsets), **options)
        assert same_bits(dense.flatten(0, 1), packed[0])
        assert same_bits(dense_final, packed_final)


def test_int32_offsets_equal_int64():
    case, h0 = make("random_1", 200), state(3, 2)
    wide, narrow = packed_offsets(70, 1, 129), packed_offsets(70, 1, 129, dtype=torch.int32)
    assert_same(
        both(case, initial_state=h0, cu_seqlens=wide, sequences=3), both(case, initial_state=h0, cu_seqlens=narrow, sequences=3)
    )


def test_strided_inputs_equal_contiguous():
    case = random(150, 2)
    fused = torch.cat([case.q, case.k, case.v, case.g], -1)
    q, k, v, g = fused.split(D, -1)
    wide = torch.randn(1, 150, 77).bfloat16()
    wide[:, :, 41:43] = case.beta
    pool = torch.randn(1, 2, D, 2 * D)
    pool[..., :D] = state(1, 2)
    bias = torch.randn(2 * D, 2)
    bias[:, 0] = case.dt_bias.flatten()
    strided = replace(case, q=q, k=k, v=v, g=g, beta=wide[:, :, 41:43], dt_bias=bias[:, 0])
    assert not strided.beta.is_contiguous()
    assert_same(both(case, initial_state=state(1, 2)), both(strided, initial_state=pool[..., :D]))


def test_expanded_and_transposed_inputs_equal_contiguous():
    case = random(150, 2)
    expanded = replace(case, k=case.k[:, :1].expand_as(case.k), v=case.v.transpose(1, 2).contiguous().transpose(1, 2))
    assert_same(both(expanded), both(expanded.map(torch.clone).map(torch.Tensor.contiguous)))


@BOTH
def test_strided_outputs_equal_contiguous(function):
    case = random(150, 2, batch=2)
    final = nan_state(2, 2)
    out, _ = function(**case.fwd(final_state=final))
    wide = torch.full((2, 150, 2, 2 * D), torch.nan).bfloat16()
    pool = torch.full((2, 2, D, D + 8), torch.nan)
    function(**case.fwd(out=wide[..., :D], final_state=pool[..., :D]))
    assert same_bits(wide[..., :D], out)
    assert same_bits(pool[..., :D], final)
    assert wide[..., D:].isnan().all()
    assert pool[..., D:].isnan().all()


def test_fp32_gates_equal_bf16_gates_of_the_same_value():
    case = random(150, 2)
    for change in ({"g": case.g.float()}, {"beta": case.beta.float()}, {"g": case.g.float(), "beta": case.beta.float()}):
        assert_same(both(case), both(replace(case, **change)))


def test_fp32_gates_are_not_rounded_to_bf16():
    case = random(150, 2)
    noise = torch.randn(case.g.shape) * 1e-3
    case = replace(case, g=case.g.float() + noise, beta=case.beta.float() + noise[..., 0])
    cp(case, judge(case))
    assert not same_bits(both(case)[1], both(replace(case, g=case.g.bfloat16()))[1])


def test_missing_gate_parameters_are_zero():
    case = plain(random(150, 2))
    want = both(case)
    assert_same(want, both(replace(case, A_log=None)))
    assert_same(want, both(replace(case, dt_bias=None)))


def test_flat_dt_bias_equals_two_axes():
    case = random(150, 2)
    assert_same(both(case), both(replace(case, dt_bias=case.dt_bias.flatten())))


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 12])
def test_any_number_of_heads(heads):
    case = random(70, heads)
    cp(case, judge(case), 32)


def test_beta_at_an_odd_element():
    case = random(70, 3)
    buffer = torch.zeros(1 + case.beta.numel()).bfloat16()
    view = buffer[1:].view(case.beta.shape)
    view.copy_(case.beta)
    assert_same(both(case), both(replace(case, beta=view)))


def test_lower_bound_zero_never_decays():
    case = random(100, 2, lower_bound=0.0)
    strong = replace(case, g=torch.full_like(case.g, 20))
    assert_same(both(case), both(strong))
    cp(case, judge(case), 32)


@BOTH
def test_autocast_and_inference_mode_change_nothing(function):
    case = make("random_1", 150)
    out, _ = function(**case.fwd())
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert same_bits(function(**case.fwd())[0], out)


def test_last_path_says_what_ran():
    flash_kda.fwd(**make("random_5", 16).fwd())
    assert flash_kda.last_path() == "reference"


def test_nan_reaches_exactly_what_the_recurrence_says():
    case = random(64, 2).map(torch.clone)
    case.v[0, 20, 0, 3] = torch.nan
    case.k[0, 40, 1, 5] = torch.inf
    final = state(1, 2)
    out, _ = flash_kda.fwd(**case.fwd(final_state=final))
    o, want = case.oracle()
    assert torch.equal(out.isnan(), o.isnan())
    assert torch.equal(final.isnan(), want.isnan())
