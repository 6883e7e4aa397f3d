"""Shards on several ranks give the answer of one process: within its bound everywhere, bit for bit where that is promised."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from budget import judge
from cases import Case, make, out_error, packed_offsets, random, same_bits, state, state_error
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded import arguments, sharded, shares, work

import flash_kda
from flash_kda import distributed
from flash_kda.distributed import even_shards, local
from flash_kda.distributed import exchange as ways
from flash_kda.reference.gate import sigmoid

SEGMENT = 32
LENGTHS = (90, 0, 230, 40)
RAGGED = {
    1: [360],
    2: [160, 200],
    3: [64, 225, 71],
    4: [50, 0, 100, 210],
    5: [100, 60, 0, 60, 140],
    6: [91, 33, 17, 100, 15, 104],
    7: [1, 119, 40, 0, 40, 160, 0],
    8: [45] * 8,
}
"""Unequal and empty shards; boundaries on and off multiples of 16, in and between sequences."""


def one_process(case: Case, lengths, h0, **options):
    """``fwd_cp`` on everything, with the bound of what its exits drop."""
    out, final, certificate = flash_kda.fwd_cp(
        **case.fwd(initial_state=h0, cu_seqlens=packed_offsets(*lengths)),
        output_final_state=True,
        certificate=True,
        **({"segment_len": SEGMENT} | options),
    )
    return out, final, 0.0 if certificate is None else certificate.dropped.amax(0)


@functools.cache
def bound(name, lengths, heads, with_state):
    """A case, its initial state, the oracle's judgement and what one process may drop."""
    case = make(name, max(sum(lengths), 1), heads).cut(0, sum(lengths))
    h0 = state(len(lengths), heads) if with_state else None
    return case, h0, judge(case, h0, packed_offsets(*lengths)), one_process(case, lengths, h0)[2]


def judged(pool, name, lengths, shard_lens, *, heads=2, with_state=True, **options):
    """The ranks' answer, held to the bound of one process."""
    case, h0, told, dropped = bound(name, tuple(lengths), heads, with_state)
    out, final = sharded(pool, case, lengths, shard_lens, initial_state=h0, options={"segment_len": SEGMENT}, **options)
    told.out(out, dropped)
    told.state(final, dropped)


@pytest.mark.parametrize("exchange", ["all_gather", "scan"])
@pytest.mark.parametrize("name", ["random_1", "slow_eighth", "no_decay", "rotating_keys", "collinear_keys", "real"])
def test_ranks_equal_the_oracle(pool, name, exchange):
    judged(pool, name, LENGTHS, RAGGED[5], context={"exchange": exchange})


@pytest.mark.parametrize(("name", "with_state"), [("no_decay", True), ("log_uniform", False)])
def test_the_number_of_ranks_does_not_matter(pool, name, with_state):
    for ranks, shard_lens in RAGGED.items():
        for exchange in ("all_gather", "scan") if ranks > 2 else ("auto",):
            judged(pool, name, LENGTHS, shard_lens, with_state=with_state, context={"exchange": exchange})


def test_one_sequence_over_eight_ranks_with_the_automatic_plan(pool):
    case, h0 = make("real", 1024), state(1, 2)
    told = judge(case, h0)
    for options in ({}, {"fixed_plan": True}):
        out, final = sharded(pool, case, [1024], even_shards(1024, 8, 32), initial_state=h0, options=options)
        told.out(out)
        told.state(final)


@st.composite
def packed(draw):
    lengths = draw(st.lists(st.sampled_from((0, 1, 15, 16, 17, 33, 64, 90)), min_size=1, max_size=5))
    ranks = draw(st.integers(2, 8))
    total = sum(lengths)
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    return lengths, [b - a for a, b in itertools.pairwise([0, *cuts, total])], draw(st.sampled_from(("all_gather", "scan")))


@settings(max_examples=15)
@given(drawn=packed())
def test_any_layout(pool, drawn):
    lengths, shard_lens, exchange = drawn
    judged(pool, "log_uniform", lengths, shard_lens, heads=1, context={"exchange": exchange})


# States.


def test_final_states_on_every_rank(pool):
    case, h0 = make("slow_eighth", 360), state(4, 2)
    at_end = sharded(pool, case, LENGTHS, RAGGED[5], initial_state=h0)
    everywhere = sharded(pool, case, LENGTHS, RAGGED[5], initial_state=h0, context={"final_state": "all"})
    assert same_bits(at_end[0], everywhere[0])
    assert same_bits(at_end[1], everywhere[1])


def test_bf16_states_are_rounded_once(pool):
    case = make("slow_eighth", 360)
    want = sharded(pool, case, LENGTHS, RAGGED[3], initial_state=state(4, 2))
    for context in ({}, {"final_state": "all"}):
        got = sharded(
            pool,
            case,
            LENGTHS,
            RAGGED[3],
            initial_state=state(4, 2, torch.bfloat16),
            final_dtype=torch.bfloat16,
            context=context,
        )
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1].bfloat16())


def test_activated_beta_takes_the_place_of_the_sigmoid(pool):
    """In a summary, in what waits for it and in whole sequences alike."""
    case, h0 = make("no_decay", 360), state(4, 2)
    activated = replace(case, beta=sigmoid(case.beta.float()), beta_is_activated=True)
    options = {"initial_state": h0, "options": {"segment_len": SEGMENT}}
    want = sharded(pool, case, LENGTHS, RAGGED[3], **options)
    got = sharded(pool, activated, LENGTHS, RAGGED[3], **options)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    other = sharded(pool, replace(activated, beta_is_activated=False), LENGTHS, RAGGED[3], **options)
    assert not any(same_bits(a, b) for a, b in zip(other, want, strict=True))


def test_each_rank_decides_about_its_states(pool):
    """No initial state on rank 0, none kept on rank 1; all other states as ever."""
    case, h0 = make("no_decay", 360), state(4, 2)
    told = shares(case, LENGTHS, RAGGED[3], initial_state=h0)
    told[0] = replace(told[0], initial_state=None)
    told[1] = replace(told[1], final_state=None)
    results = pool.run(work, [(share,) for share in told])
    assert results[1][1] is None
    h0 = h0.clone()
    h0[:1] = 0  # the sequence that starts on rank 0
    out, final, _ = one_process(case, LENGTHS, h0)
    assert out_error(torch.cat([x for x, _ in results], 1), out).max() < 1e-3
    assert state_error(results[2][1], final[2:]).max() < 1e-5


def allocated(group, share):
    context = distributed.ContextParallel(group, **share.context)
    call = arguments(share.case, out=None, initial_state=share.initial_state)
    out, nothing = distributed.fwd_cp(**call, context=context)
    _, final = distributed.fwd_cp(**call, context=context, output_final_state=True)
    return out, nothing, final


def test_outputs_are_allocated_and_padding_is_left_alone(pool):
    case = make("no_decay", 370)
    case = case.map(lambda x: torch.cat([x[:, :360], torch.full_like(x[:, 360:], torch.nan)], 1))
    told = shares(case, LENGTHS, [128, 128, 114], initial_state=state(4, 2))
    results = pool.run(allocated, [(share,) for share in told])
    written = pool.run(work, [(share,) for share in told])
    for (out, nothing, final), (out_given, final_given) in zip(results, written, strict=True):
        assert nothing is None
        assert same_bits(final, final_given)
        assert same_bits(out[:, :104], out_given[:, :104])
    assert results[2][0][:, 104:].eq(0).all()
    assert written[2][0][:, 104:].isnan().all()
    assert torch.cat([out for out, _, _ in results], 1).isfinite().all()


# Bits (docs/distributed.md, "What is bitwise").


def test_twice_the_same_bits_whoever_is_late(pool):
    case = make("log_uniform", 360)
    told = shares(case, LENGTHS, RAGGED[4], initial_state=state(4, 2))
    first = pool.run(work, [(share,) for share in told])
    told[2] = replace(told[2], sleep=0.5)
    late = pool.run(work, [(share,) for share in told])
    for (out, final), (late_out, late_final) in zip(first, late, strict=True):
        assert same_bits(out, late_out)
        assert same_bits(final, late_final)


@pytest.mark.parametrize("name", ["no_decay", "slow_eighth", "random_1"])
def test_two_ranks_cut_at_a_segment_boundary_give_the_bits_of_one_process(pool, name):
    case, h0 = make(name, 360), state(4, 2)
    out, final, _ = one_process(case, LENGTHS, h0)
    # Sequence 2 starts at token 90: five segments on the first rank.
    got = sharded(
        pool, case, LENGTHS, [90 + 5 * SEGMENT, 360 - 90 - 5 * SEGMENT], initial_state=h0, options={"segment_len": SEGMENT}
    )
    assert same_bits(got[0], out)
    assert same_bits(got[1], final)


@pytest.mark.parametrize("exchange", ["all_gather", "scan"])
def test_many_ranks_give_the_bits_of_one_process_where_history_is_forgotten(pool, exchange):
    case, h0 = make("full_decay", 256), state(1, 2)
    out, final, _ = one_process(case, [256], h0)
    got = sharded(
        pool,
        case,
        [256],
        [64] * 4,
        initial_state=h0,
        options={"segment_len": SEGMENT},
        context={"exchange": exchange},
    )
    assert same_bits(got[0], out)
    assert same_bits(got[1], final)


def test_what_precedes_the_first_boundary_of_a_sequence_has_the_bits_of_one_process(pool):
    case, h0 = make("no_decay", 360), state(4, 2)
    out, final, _ = one_process(case, LENGTHS, h0)
    # Boundaries inside sequence 2, at no multiple of anything; sequences 0, 1 and 3 are whole.
    got = sharded(pool, case, LENGTHS, [167, 73, 120], initial_state=h0, options={"segment_len": SEGMENT})
    assert same_bits(got[0][:, :167], out[:, :167])
    assert same_bits(got[0][:, 320:], out[:, 320:])
    assert same_bits(got[1][[0, 1, 3]], final[[0, 1, 3]])
    assert out_error(got[0][:, 167:320], out[:, 167:320]).max() < 1e-3


@pytest.mark.parametrize("exchange", ["all_gather", "scan"])
def test_outputs_do_not_depend_on_later_tokens(pool, exchange):
    case = make("no_decay", 200)
    later = case.map(lambda x: torch.cat([x[:, :131], -x[:, 131:]], 1))
    options = {"options": {"segment_len": SEGMENT}, "context": {"exchange": exchange}}
    a = sharded(pool, case, [200], [50] * 4, **options)[0]
    b = sharded(pool, later, [200], [50] * 4, **options)[0]
    assert same_bits(a[:, :131], b[:, :131])
    assert not same_bits(a[:, 131:], b[:, 131:])


def test_nan_stays_in_its_sequence_and_does_not_cross_an_exit(pool):
    case = make("full_decay", 200)
    v = case.v.clone()
    v[:, 20] = torch.nan
    for lengths, clean in (([60, 140], 60), ([200], 100)):
        for exchange in ("all_gather", "scan"):
            options = {"options": {"segment_len": SEGMENT}, "context": {"exchange": exchange}}
            want, _ = sharded(pool, case, lengths, [50] * 4, **options)
            got, _ = sharded(pool, replace(case, v=v), lengths, [50] * 4, **options)
            assert got[:, 20:50].isnan().all()
            # Of one sequence: the second rank's part has exited, but is itself entered by the NaN.
            assert same_bits(got[:, clean:], want[:, clean:])


# Without mt.


def test_without_mt_only_neighbours_talk(pool):
    case, h0 = make("full_decay", 256), state(1, 2)
    out, final, _ = one_process(case, [256], h0)
    got = sharded(pool, case, [256], [64] * 4, initial_state=h0, options={"segment_len": SEGMENT}, context={"send_mt": False})
    assert same_bits(got[0], out)
    assert same_bits(got[1], final)


def test_without_mt_parts_may_forget_that_are_longer_than_their_segments(pool):
    """No segment of 32 tokens exits; parts of 400 do. What is lost is what one process loses in segments of 400."""
    case = make("random_1", 1200, 1)
    _, info = flash_kda.state_only(**case.summary(cu_seqlens=torch.arange(0, 1201, SEGMENT).clamp(max=1200)), return_info=True)
    assert info.fallback.all()
    told = judge(case)
    dropped = one_process(case, [1200], None, segment_len=400)[2]
    options = {"options": {"segment_len": SEGMENT}, "context": {"send_mt": False}}
    out, final = sharded(pool, case, [1200], [400] * 3, **options)
    told.out(out, dropped)
    told.state(final, dropped)
    assert (dropped > 0).all()


# Mutations: the assertions above must fail when a step is wrong. Each runs in the ranks and puts back what it broke.


def broken(module, name, wrong):
    right = getattr(module, name)
    setattr(module, name, wrong(right))
    return lambda: setattr(module, name, right)


def drop_mt():
    """No transition is handed on."""
    return broken(local.PartRun, "map", lambda right: lambda self: local.Effect(right(self).ht))


def transpose_mt():
    def wrong(right):
        def made(self):
            effect = right(self)
            return local.Effect(effect.ht, effect.mt.mT.contiguous())

        return made

    return broken(local.PartRun, "map", wrong)


def lose_initial_state():
    """The first part of a sequence hands on what it would have made of zeros."""
    return broken(local.PartRun, "state", lambda right: lambda self, _state: right(self, None))


def lose_given_state():
    """What comes from the ranks before is received and not used."""
    return broken(ways.Scan, "finish", lambda right: lambda self: (right(self), None)[1])


def skip_a_rank():
    """The effects of all but the nearest part before this rank are lost."""
    return broken(ways, "compose", lambda right: lambda later, earlier: later)


@pytest.mark.parametrize("before", [drop_mt, transpose_mt, lose_initial_state, lose_given_state, skip_a_rank])
def test_a_broken_step_is_seen(pool, before):
    with pytest.raises(AssertionError, match="exceeds"):
        judged(pool, "slow_eighth", LENGTHS, RAGGED[7], context={"exchange": "scan"}, before=before)


# The schedule.


def order(group, share):
    """What a rank does, in order."""
    seen = []

    def told(what):
        def wrong(right):
            def called(*arguments, **options):
                seen.append(what)
                return right(*arguments, **options)

            return called

        return wrong

    undo = [broken(flash_kda.api, name, told(name)) for name in ("fwd", "fwd_cp", "state_only")]
    undo += [broken(ways.Scan, name, told(name)) for name in ("start", "finish")]
    try:
        work(group, share)
    finally:
        for each in undo:
            each()
    return seen


def test_the_exchange_starts_first_and_is_waited_for_last(pool):
    case = random(300, 1)
    told = shares(case, [150, 20, 130], [100, 130, 70], context={"exchange": "scan"}, options={"segment_len": SEGMENT})
    first, middle, last = pool.run(order, [(share,) for share in told])
    assert first == ["state_only", "start", "fwd", "finish"]
    # Part of a sequence begun before, one whole, part of one that goes on: only the first of them waits.
    assert middle == ["state_only", "start", "state_only", "fwd_cp", "fwd", "finish", "fwd"]
    assert last == ["start", "state_only", "finish", "fwd"]
