"""What an early exit drops: within its certificate, and below bf16 rounding even under a history 10,000 times larger."""

from dataclasses import replace

import pytest
import torch
from budget import judge
from cases import make, random, state, state_error

import flash_kda
from flash_kda.constants import CHUNK, EXIT_EPS

EXITING = ("random_5", "random_1", "random_half", "weak_every_16th", "full_decay")
HUGE = 1e4


def case_with_suffix(name, extra_chunks):
    """One head whose first segment is ``extra_chunks`` longer than its replayed suffix, and one more segment after it."""
    case = make(name, 1024, 1)
    end = 768
    _, info = flash_kda.state_only(**case.cut(0, end).summary(), return_info=True)
    assert not info.fallback.any()
    segment_len = CHUNK * (int(info.chunks) + extra_chunks)
    return case.cut(end - segment_len, min(end + segment_len, case.tokens)), segment_len


def assert_within_certificate(case, segment_len, initial_state):
    judged = judge(case, initial_state)
    final = torch.full((1, 1, 128, 128), torch.nan)
    out, _, certificate = flash_kda.fwd_cp(
        **case.fwd(initial_state=initial_state, final_state=final), segment_len=segment_len, certificate=True
    )
    assert not certificate.fallback.any()
    assert (certificate.dropped < HUGE * EXIT_EPS).all()
    judged.out(out, extra=0.5 * judged.out_unit)
    # The state handed to the second segment, against the oracle's.
    ht, mt, info = flash_kda.state_only(**case.summary(cu_seqlens=certificate.plan.cu_seqlens), calc_mt=True, return_info=True)
    entering = flash_kda.correct_initial_states(initial_state, ht, mt, info.fallback, certificate.plan.seq_map)
    first = case.cut(0, segment_len)
    error = state_error(entering[1:2], first.oracle(initial_state)[1])
    honest = judge(first, initial_state).state_unit
    assert (error <= certificate.dropped[0] + 4 * honest).all(), (error, certificate.dropped, honest)


@pytest.mark.parametrize("name", EXITING)
def test_huge_values_before_the_suffix(name):
    case, segment_len = case_with_suffix(name, extra_chunks=2)
    v = case.v.clone()
    v[:, : 2 * CHUNK] *= HUGE
    assert_within_certificate(replace(case, v=v), segment_len, None)


@pytest.mark.parametrize("name", EXITING)
def test_huge_initial_state_before_the_suffix(name):
    case, segment_len = case_with_suffix(name, extra_chunks=1)
    assert_within_certificate(case, segment_len, HUGE * state(1, 1))


def test_certificate_bounds_a_drop_that_is_seen():
    """With a coarse eps the drop stands out of rounding: the certificate must cover it, and is not idle."""
    case = random(640, 2, lower_bound=-0.5)
    v = case.v.clone()
    v[:, :320] *= HUGE
    case = replace(case, v=v)
    _, _, certificate = flash_kda.fwd_cp(**case.fwd(), segment_len=320, eps=1e-2, certificate=True)
    ht = flash_kda.state_only(**case.summary(cu_seqlens=certificate.plan.cu_seqlens), eps=1e-2)
    error = state_error(ht[:1], case.cut(0, 320).oracle()[1])
    assert (error > 1e-4).any()
    assert (error <= certificate.dropped[0]).all()


def test_without_an_exit_nothing_is_dropped():
    case = make("no_decay", 200)
    _, _, certificate = flash_kda.fwd_cp(**case.fwd(), segment_len=64, certificate=True)
    assert certificate.fallback.all()
    assert not certificate.dropped.any()
    assert certificate.segment.tolist() == [0, 1, 2]
    assert certificate.chunks.tolist() == [[4, 4]] * 3


def test_no_certificate_where_nothing_was_cut():
    case = make("random_5", 64)
    assert flash_kda.fwd_cp(**case.fwd(), segment_len=64, certificate=True)[2] is None
    assert flash_kda.fwd_cp(**case.fwd(), auto_cp=False, certificate=True)[2] is None
