"""Who holds what, without processes: every token, start and end has one owner, and the chains are those of the boundaries."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_kda.distributed import even_shards
from flash_kda.distributed import exchange as ways
from flash_kda.distributed.layout import Layout, Part


def layout(lengths, shard_lens):
    return Layout.of([0, *itertools.accumulate(lengths)], shard_lens, len(shard_lens))


@st.composite
def layouts(draw):
    lengths = draw(st.lists(st.integers(0, 9), max_size=7))
    ranks = draw(st.integers(1, 6))
    total = sum(lengths)
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    ends = [*cuts, total + draw(st.sampled_from((0, 0, 3)))]
    return lengths, [b - a for a, b in itertools.pairwise([0, *ends])]


@given(layouts())
def test_every_token_start_and_end_is_on_one_rank(drawn):
    lengths, shard_lens = drawn
    made = layout(lengths, shard_lens)
    tokens, starts, ends = [], [], []
    for rank in range(len(shard_lens)):
        at = 0
        for part in made.parts(rank):
            assert 0 <= part.start <= part.end <= shard_lens[rank]
            assert part.start == at, "parts of a rank follow each other"
            at = part.end
            tokens += [(part.sequence, made.shards[rank] + t) for t in range(part.start, part.end)]
            starts += [part.sequence] * part.first
            ends += [part.sequence] * part.last
    offsets = made.offsets
    assert tokens == [(n, t) for n in range(len(lengths)) for t in range(offsets[n], offsets[n + 1])]
    assert starts == ends == list(range(len(lengths))), "and in order, which the collection of final states rests on"


@given(layouts())
def test_chains_are_the_ranks_of_crossing_sequences(drawn):
    lengths, shard_lens = drawn
    made = layout(lengths, shard_lens)
    ranks_of = [[] for _ in lengths]
    for rank in range(len(shard_lens)):
        parts = made.parts(rank)
        for part in parts:
            if part.end > part.start:
                ranks_of[part.sequence].append(rank)
        given_part = [p for p in parts if not p.first]
        handed_on = [p for p in parts if not p.last]
        assert given_part in ([], [parts[0]] if parts else [])
        assert handed_on in ([], [parts[-1]] if parts else [])
        assert bool(given_part) == bool(made.is_given(rank))
        assert bool(handed_on) == bool(made.hands_on(rank))
    assert list(made.chains) == [tuple(ranks) for ranks in ranks_of if len(ranks) > 1]


def test_an_example():
    made = layout([5, 0, 20, 3], [8, 8, 0, 6, 6])
    assert made.chains == ((0, 1, 3, 4),)
    assert made.parts(0) == (Part(0, 0, 5, True, True), Part(1, 5, 5, True, True), Part(2, 5, 8, True, False))
    assert made.parts(1) == (Part(2, 0, 8, False, False),)
    assert made.parts(2) == ()
    assert made.parts(4) == (Part(2, 0, 3, False, True), Part(3, 3, 6, True, True))


def test_empty_sequences_at_the_end_are_on_the_last_rank():
    assert layout([4, 0], [4, 0]).parts(1) == (Part(1, 0, 0, True, True),)
    assert layout([0, 0], [0, 0]).parts(1) == (Part(0, 0, 0, True, True), Part(1, 0, 0, True, True))


@pytest.mark.parametrize(
    ("cu_seqlens", "shard_lens", "error", "text"),
    [
        ([1, 4], None, ValueError, "cu_seqlens must start with 0, got 1"),
        ([], None, ValueError, "cu_seqlens must start with 0, got nothing"),
        ([0, 4, 3], None, ValueError, "non-decreasing, got 4 then 3"),
        ([0, 4], [4], ValueError, "one length for each of the 2 ranks, got 1"),
        ([0, 4], [5, -1], ValueError, "shard_lens must be >= 0, got -1 for rank 1"),
        ([0, 4], [1, 2], ValueError, "shard_lens must cover the 4 tokens of cu_seqlens, got 3 in all"),
        ([0, 4.0], None, TypeError, "cu_seqlens must be a sequence of integers"),
        (torch.zeros(2), None, TypeError, "cu_seqlens must be integers on the host"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), None, TypeError, "does not wait for a device"),
    ],
)
def test_what_is_refused(cu_seqlens, shard_lens, error, text):
    with pytest.raises(error, match=text):
        Layout.of(cu_seqlens, shard_lens, 2)


def test_tensors_are_taken():
    made = Layout.of(torch.tensor([0, 4], dtype=torch.int32), torch.tensor([1, 3]), 2)
    assert made == layout([4], [1, 3])


def test_even_shards():
    assert even_shards(10, 4) == [3, 3, 2, 2]
    assert even_shards(100, 4, 32) == [32, 32, 32, 4]
    assert even_shards(32, 4, 32) == [32, 0, 0, 0]
    assert even_shards(0, 3) == [0, 0, 0]
    with pytest.raises(ValueError, match="ranks and multiple >= 1, got 4, 0 and 1"):
        even_shards(4, 0)
    assert Layout.of([0, 10], None, 4).shards == (0, 3, 6, 8, 10)


def test_what_an_exchange_moves():
    pair, three = layout([8], [4, 4]), layout([12], [4, 4, 4])
    assert (ways.gather_planes(pair), ways.gather_planes(three)) == (1, 2), "mt only where a part has neighbours on both sides"
    assert ways.scan_rounds(pair) == [1]
    assert ways.scan_rounds(three) == [2, 1]
    assert ways.scan_rounds(layout([9], [1] * 9)) == [2, 2, 2, 1], "8 parts before the last rank: neighbours, then 1, 2, 4"
    assert ways.scan_rounds(layout([3, 3], [3, 3])) == []


def test_choice_by_size():
    alone, pair, many = layout([4, 4], [4, 4]), layout([8], [4, 4]), layout([64], [1] * 64)
    eight = layout([32], [4] * 8)
    for link in (ways.NVLINK, ways.NETWORK):
        assert ways.choose(alone, 16, "scan", True, link) == "none"
        assert ways.choose(many, 16, "all_gather", True, link) == "all_gather"
        assert ways.choose(many, 16, "auto", False, link) == "neighbour"
        for made in (pair, many):
            assert ways.choose(made, 16, "auto", True, link) == "scan"
        # Small states: one transfer is faster than several that move less.
        assert ways.choose(eight, 1, "auto", True, link) == "all_gather"
    # A fast link likewise.
    assert ways.choose(eight, 16, "auto", True, ways.NVLINK) == "all_gather"
    assert ways.choose(eight, 16, "auto", True, ways.NETWORK) == "scan"
    slow, planes = ways.NETWORK, ways.gather_planes(eight)
    assert ways.time_us(eight, 16, "all_gather", slow) > 7 * planes * ways.state_bytes(16) / slow.gbytes / 1e3
