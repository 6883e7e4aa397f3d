"""Reference stages against the token recurrence, on every named case."""

import itertools
import math

import pytest
import torch
from budget import judge_named
from cases import NAMES, D, make, nan_state, packed_offsets, plain, random, real, rel, same_bits, state, state_error
from hypothesis import given
from hypothesis import strategies as st

from flash_kda.constants import CHUNK, EXIT_EPS
from flash_kda.reference import chain, forward, state_summary, warmup_bound

T = 130
F64 = torch.float64


def summarise(case, cu_seqlens=None, dtype=None, **options):
    cu_seqlens = torch.tensor([0, case.tokens]) if cu_seqlens is None else cu_seqlens
    return state_summary(case.inputs(dtype), cu_seqlens, max_len=case.tokens, **options)


def apply(summary, h, row=0):
    """S_out of one segment, V-first."""
    return h @ summary.mt[row].mT + summary.ht[row]


def bound(case, **options):
    cu_seqlens = torch.tensor([0, case.tokens])
    return warmup_bound(
        case.g[0], case.A_log, case.dt_bias, case.lower_bound, cu_seqlens, max_len=case.tokens, **({"eps": EXIT_EPS} | options)
    )


def largest_log_alpha(case):
    """Per token and head the largest channel log decay, fp64 ``[T, H]``."""
    slope = case.A_log.double().exp()[:, None]
    return (case.lower_bound * torch.sigmoid(slope * (case.g[0].double() + case.dt_bias.double()))).amax(-1)


@pytest.mark.parametrize("name", NAMES)
def test_forward_equals_the_oracle(name):
    case, judge = make(name, T), judge_named(name, T)
    out, final = torch.full((T, 2, D), torch.nan), nan_state(1, 2)
    offsets = torch.tensor([0, T])
    forward(case.inputs(), offsets, out, max_len=T, initial_state=state(1, 2), final_state=final)
    judge.fp32_out(out[None])
    judge.state(final)


@pytest.mark.parametrize("name", NAMES)
def test_summary_is_the_affine_map_of_the_segment(name):
    judge = judge_named(name, T)
    summary = summarise(make(name, T), eps=0)
    judge.state(apply(summary, state(1, 2)))


@pytest.mark.parametrize("name", NAMES)
def test_stages_in_fp64_equal_the_oracle_to_fp64(name):
    case, judge, h0 = make(name, T), judge_named(name, T), state(1, 2)
    out, final = torch.full((T, 2, D), torch.nan, dtype=F64), nan_state(1, 2, F64)
    forward(case.inputs(F64), torch.tensor([0, T]), out, max_len=T, initial_state=h0, final_state=final)
    assert rel(out[None], judge.o, 2).max() < 1e-10
    assert state_error(final, judge.final_state).max() < 1e-10
    backward = apply(summarise(case, dtype=F64, eps=0), h0.double())
    assert state_error(backward, judge.final_state).max() < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_chained_summaries_give_the_state_at_every_boundary(name):
    case, h0 = make(name, T), state(1, 2)
    boundaries = [0, 48, 64, 112, 128, T]
    offsets = torch.tensor(boundaries)
    want, wants = h0, []
    for start, end in itertools.pairwise(boundaries):
        want = case.cut(start, end).oracle(want)[1]
        wants.append(want)
    for eps in (0.0, EXIT_EPS):
        summary = summarise(case, offsets, dtype=F64, eps=eps)
        ends = chain(h0, summary.ht, summary.mt, ~summary.exited, torch.tensor([0, 5]), max_slots=5)
        # Each exit drops at most ||M|| ||S_c||, and these states stay within a factor 4 of each other.
        assert state_error(ends, torch.cat(wants)).max() <= 1e-10 + 4 * eps


def test_chain_follows_several_sequences_and_selects():
    heads = 2
    ht, mt, h0 = torch.randn(5, heads, D, D), torch.randn(5, heads, D, D) / D, torch.randn(3, heads, D, D)
    needs = torch.tensor([[True, True], [True, False], [True, True], [True, True], [True, True]])
    mt[1, 1] = torch.nan
    ends = chain(h0, ht, mt, needs, torch.tensor([0, 3, 3, 4]), max_slots=3)
    h = h0[0]
    for s in range(3):
        h = torch.where(needs[s][:, None, None], h @ mt[s].mT + ht[s], ht[s])
        torch.testing.assert_close(ends[s], h)
    torch.testing.assert_close(ends[3], h0[2] @ mt[3].mT + ht[3])
    assert not ends[4].any()


@pytest.mark.parametrize("name", NAMES)
def test_scan_stops_at_the_first_chunk_within_eps(name):
    case = make(name, 320)
    summary = summarise(case)
    total = -(-case.tokens // CHUNK)
    for head in range(case.heads):
        used = int(summary.chunks[0, head])
        if summary.exited[0, head]:
            assert used < total
            assert summary.norm[0, head] <= EXIT_EPS
            assert not summary.mt[0, head].any()
        else:
            assert used == total
            torch.testing.assert_close(summary.norm[0, head], summary.mt[0, head].norm())
        before = summarise(case, num_chunks=torch.full((1, case.heads), used - 1))
        assert before.norm[0, head] > EXIT_EPS


def test_each_head_exits_for_itself():
    case = make("one_weak_head", 320, 3)
    summary = summarise(case)
    assert summary.exited[0].tolist() == [True, False, True]
    assert summary.chunks[0].tolist() == [1, 20, 1]
    for head in range(3):
        alone = case.map(lambda x, h=head: x[:, :, h : h + 1])
        alone = summarise(type(alone)(**(vars(alone) | {"A_log": case.A_log[:1], "dt_bias": case.dt_bias[:1]})))
        assert same_bits(alone.ht[:, 0], summary.ht[:, head])
        assert same_bits(alone.mt[:, 0], summary.mt[:, head])


def test_a_given_number_of_chunks_is_replayed_exactly():
    case = make("random_half", 100)
    asked = torch.tensor([[0, 1], [3, 99]])
    summary = summarise(case, torch.tensor([0, 60, 100]), num_chunks=asked)
    assert summary.chunks.tolist() == [[0, 1], [3, 3]]
    assert summary.exited.tolist() == [[True, True], [False, False]]
    suffix = summarise(case.cut(48, 60), eps=0)
    assert same_bits(summary.ht[0, 1], suffix.ht[0, 1])


def test_unused_and_empty_segments_leave_the_state_alone():
    case = make("random_5", 64)
    offsets = torch.tensor([0, 32, 32, 64])
    summary = summarise(case, offsets, segments=torch.tensor([1, 0, 3, 2]))
    identity = torch.eye(D).expand(2, D, D)
    for row in (0, 2):
        assert not summary.ht[row].any()
        assert same_bits(summary.mt[row], identity)
        assert summary.chunks[row].tolist() == [0, 0]
        assert not summary.exited[row].any()
    everything = summarise(case, offsets)
    assert same_bits(summary.ht[[1, 3]], everything.ht[[0, 2]])


def test_nan_before_the_replayed_suffix_leaves_no_trace():
    case = make("random_5", 320)
    clean = summarise(case)
    dirty = case.map(torch.clone)
    for name in ("k", "v", "g", "beta"):
        getattr(dirty, name)[:, : 320 - CHUNK * int(clean.chunks.max())] = torch.nan
    poisoned = summarise(dirty)
    assert clean.exited.all()
    assert same_bits(clean.ht, poisoned.ht)
    assert same_bits(clean.norm, poisoned.norm)


# Chunks until ||M||_F <= 2^-16 (specification, section 4): the mean over heads of random gates, every head of the rest.
REMEMBERED = {
    "random_5": (2, 3),
    "random_1": (6, 8),
    "random_half": (11, 14),
    "slow_eighth": (105, 143),
    "real_tiled": (116, 145),
}


@pytest.mark.parametrize("name", REMEMBERED)
def test_memory_is_as_long_as_the_specification_says(name):
    low, high = REMEMBERED[name]
    is_random = name.startswith("random")
    case = make(name, 1024 if is_random else 2560, 16 if is_random else 2)
    chunks = summarise(case, eps=2.0**-16).chunks[0].double()
    if is_random:
        chunks = chunks.mean()
    assert (chunks >= low).all(), chunks
    assert (chunks <= high).all(), chunks


def test_rotating_keys_keep_more_than_half_of_the_state():
    case = make("rotating_keys", 256, 1)
    slope = case.A_log.double().exp()[:, None]
    channel_sums = (case.lower_bound * torch.sigmoid(slope * case.g[0].double())).sum(0)
    assert channel_sums.max() < -319
    summary = summarise(case)
    assert not summary.exited.any()
    assert summary.norm.item() == pytest.approx(0.54, abs=0.005)


@pytest.mark.parametrize("name", NAMES)
def test_the_measured_norm_never_exceeds_the_sound_bound(name):
    case = make(name, 160)
    sums = largest_log_alpha(case).flip(0).cumsum(0)
    for chunks in (1, 2, 5, 10):
        summary = summarise(case, dtype=F64, num_chunks=torch.full((1, 2), chunks))
        limit = math.sqrt(D) * sums[CHUNK * chunks - 1].exp()
        assert (summary.norm[0] <= limit * (1 + 1e-9)).all()


@given(
    seed=st.integers(0, 2**31),
    lower_bound=st.floats(-5, 0),
    tokens=st.integers(1, 40),
    scales=st.tuples(*[st.sampled_from([0.0, 1e-3, 1.0, 30.0])] * 3),
)
def test_the_sound_bound_holds_for_any_gate(seed, lower_bound, tokens, scales):
    gate, key, strength = scales
    case = random(tokens, 1, lower_bound=lower_bound, seed=seed)
    case = type(case)(**(vars(case) | {"g": gate * case.g, "k": key * case.k, "beta": strength * case.beta}))
    limit = math.sqrt(D) * largest_log_alpha(case).sum(0).exp()
    norm = summarise(case, dtype=F64, eps=0).mt.norm(dim=(-2, -1))[0]
    assert (norm <= limit * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_counts_chunks_as_it_says(name):
    case = make(name, 205)
    chunks, fallback = bound(case)
    sums = largest_log_alpha(case).flip(0)
    tail = case.tokens % CHUNK
    for head in range(case.heads):
        ends = [tail + CHUNK * j for j in range(13)]
        met = [math.sqrt(D) * sums[:end, head].sum().exp() <= EXIT_EPS for end in ends]
        assert int(chunks[0, head]) == (met.index(True) + 1 if any(met) else 13)
        assert bool(fallback[0, head]) == (not any(met))


@pytest.mark.parametrize("name", ["random_5", "random_1", "full_decay", "strong_every_16th", "distinct_a_log", "real"])
def test_after_the_bound_nothing_is_left(name):
    case = make(name, 640)
    chunks, fallback = bound(case)
    measured = summarise(case)
    assert (measured.chunks <= chunks)[~fallback].all()
    replayed = summarise(case, num_chunks=chunks)
    assert (replayed.norm <= EXIT_EPS)[~fallback].all()


def test_bound_of_ragged_segments_is_that_of_each_alone():
    case = plain(random(100, 2, lower_bound=-1))
    offsets = packed_offsets(37, 0, 63)
    chunks, fallback = warmup_bound(case.g[0], case.A_log, case.dt_bias, -1.0, offsets, max_len=63, eps=1e-3)
    assert chunks[1].tolist() == [0, 0]
    assert fallback[1].all()
    for row, (start, end) in {0: (0, 37), 2: (37, 100)}.items():
        alone, alone_fallback = bound(case.cut(start, end), eps=1e-3)
        assert torch.equal(chunks[row], alone[0])
        assert torch.equal(fallback[row], alone_fallback[0])


def test_real_activations_remember_past_the_recipes_single_chunk():
    case = real(1024, 4)
    norm = summarise(case, num_chunks=torch.ones(1, 4, dtype=torch.int64)).norm
    assert (norm > 5).all()
