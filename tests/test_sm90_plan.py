"""Where Hopper cuts: the host's choice, and the slots that the kernels find from the offsets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_kda.sm90 import plan

SMS = 132
LENGTHS = st.lists(st.one_of(st.integers(0, 400), st.integers(0, 40000)), min_size=1, max_size=12).map(tuple)


def test_one_long_sequence_fills_the_processors_once():
    for heads in (1, 4, 8, 12, 16, 32):
        cut = plan.choose(65536, 1, heads, SMS, None)
        pieces = -(-65536 // cut.segment_len)
        assert pieces * heads <= SMS
        assert cut.num_slots == pieces - 1
        assert cut.only_if_longer == 0


@pytest.mark.parametrize("heads", [64, 96, 200])
def test_heads_that_fill_the_processors_are_not_cut(heads):
    assert plan.choose(65536, 1, heads, SMS, None) is None
    assert plan.choose(65536, 9, heads, SMS, (57344,) + (1024,) * 8) is None or heads < 66


def test_short_and_equal_sequences_are_not_cut():
    assert plan.choose(512, 1, 16, SMS, None) is None
    assert plan.choose(0, 1, 16, SMS, None) is None
    assert plan.choose(0, 0, 16, SMS, ()) is None
    assert plan.choose(8 * 8192, 8, 16, SMS, (8192,) * 8) is None
    assert plan.choose(4096 * 33, 4096, 12, SMS, (33,) * 4096) is None


@given(LENGTHS, st.sampled_from([1, 3, 4, 8, 12, 16, 32, 64, 96]))
def test_a_cut_is_estimated_to_pay_for_its_summary(lengths, heads):
    cut = plan.choose(sum(lengths), len(lengths), heads, SMS, lengths)
    if cut is not None:
        assert cut.segment_len % 32 == 0
        assert max(lengths) > cut.segment_len
        assert plan.cut_us(lengths, cut.segment_len, heads, SMS) < plan.serial_us(lengths, heads, SMS)


@given(LENGTHS, st.sampled_from([1, 4, 8, 12, 16, 32]))
def test_unseen_lengths_are_cut_only_where_every_batch_can_afford_it(lengths, heads):
    total = sum(lengths)
    cut = plan.choose(total, len(lengths), heads, SMS, None)
    if cut is None or cut.only_if_longer >= max(lengths):
        return
    assert max(lengths) >= plan.UNSEEN_LONGEST * cut.segment_len - 1 or len(lengths) == 1


def test_padding_changes_nothing_where_lengths_are_known():
    for heads in (4, 8, 16):
        packed = plan.choose(8192, 1, heads, SMS, (8192,))
        padded = plan.choose(8192 * 4, 1, heads, SMS, (8192,))
        assert padded.segment_len == packed.segment_len
        assert padded.num_slots == (4 * 8192 - 1) // padded.segment_len


def test_one_long_sequence_among_short_ones_is_cut():
    for longest, heads in ((65536, 16), (262144, 16), (262144, 12)):
        lengths = (longest,) + (1024,) * 5
        seen = plan.choose(sum(lengths), len(lengths), heads, SMS, lengths)
        assert seen.num_slots >= 7
        unseen = plan.choose(sum(lengths), len(lengths), heads, SMS, None)
        # not looked at where a look costs more than 3 % of the shortest time that these tokens can take
        assert (unseen is None) == (longest == 65536)
        if unseen is not None:
            assert seen.segment_len == unseen.segment_len
            assert 0 < unseen.only_if_longer < longest


def test_a_look_must_pay_for_one_sequence_more_on_a_processor():
    """Five shapes that were 4 to 6 % slower than serial for a look (benchmarks/results, commit 6f2bdb6), and larger ones."""
    for heads, pairs in ((8, 128), (32, 32), (12, 64), (4, 256), (12, 128)):
        assert plan.choose(2048 * pairs, 2 * pairs, heads, SMS, None) is None
    for heads, pairs in ((8, 1024), (12, 512), (16, 512)):
        assert plan.choose(2048 * pairs, 2 * pairs, heads, SMS, None).only_if_longer > 0


@given(LENGTHS, st.sampled_from([16, 32, 96, 256, 4096]))
def test_every_piece_with_a_successor_has_a_slot_of_its_own(lengths, segment_len):
    cut = plan.Cut.every(segment_len, sum(lengths))
    want = [(n, j) for n, length in enumerate(lengths) for j in range(max(length - 1, 0) // segment_len)]
    if cut is None:
        assert not want
        return
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    sequence, piece, used = plan.slot_pieces(offsets, cut)
    assert list(zip(sequence[used].tolist(), piece[used].tolist(), strict=True)) == want
    # a sequence's slots are neighbours, in order, from c(n) // segment_len
    for n, j in want:
        at = int(offsets[n]) // segment_len + j
        assert (int(sequence[at]), int(piece[at])) == (n, j)
