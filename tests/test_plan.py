"""Segment plans: properties on any batch, and no read of the device's offsets."""

import itertools

import pytest
import torch
from cases import random
from hypothesis import example, given
from hypothesis import strategies as st

import flash_kda
from flash_kda import plan
from flash_kda.constants import CHUNK, FIXED_SEGMENT_LEN, MIN_SEGMENT_LEN
from flash_kda.plan import choose_segment_len, plan_segments

batches = st.lists(st.integers(0, 700), max_size=8)
segment_lengths = st.one_of(st.none(), st.integers(1, 40).map(lambda n: n * CHUNK))


@given(
    lengths=batches,
    slack=st.integers(0, 40),
    segment_len=segment_lengths,
    dtype=st.sampled_from([torch.int32, torch.int64]),
    heads=st.integers(0, 64),
    host_knows=st.booleans(),
)
@example(lengths=[], slack=500, segment_len=16, dtype=torch.int64, heads=4, host_knows=False)
def test_plan_properties(lengths, slack, segment_len, dtype, heads, host_knows):
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    total = sum(lengths) + slack
    with pytest.MonkeyPatch.context() as patch:
        if not host_knows:
            patch.setattr(plan, "check_plan", lambda *_: None)
        made = plan_segments(offsets, total, heads, segment_len=segment_len)
    assert segment_len in (None, made.segment_len)
    assert made.segment_len % CHUNK == 0
    assert made.cu_seqlens.dtype == dtype
    assert made.cu_seqlens.shape == (made.capacity + 1,)
    assert made.num_sequences == len(lengths)
    assert made.num_slots <= max(total - 1, 0) // made.segment_len
    assert made.capacity == len(lengths) + made.num_slots

    cuts, owners = made.cu_seqlens.tolist(), made.seq_map.tolist()
    assert owners[0] == 0
    assert owners[-1] <= made.capacity
    sequence_of, slots = made.sequence_of_segment().tolist(), made.slot_map().tolist()
    segment_of_slot = made.segment_of_slot().tolist()
    used_slots = []
    for n, length in enumerate(lengths):
        first, end = owners[n], owners[n + 1]
        start = sum(lengths[:n])
        # Cover, in order, without overlap, never across the sequence; full segments but for the last.
        assert cuts[first : end + 1] == [*range(start, start + max(length, 1), made.segment_len), start + length]
        assert sequence_of[first:end] == [n] * (end - first)
        assert slots[n + 1] - slots[n] == end - first - 1
        used_slots += range(first, end - 1)
        assert end == first + 1 or length <= 0 or made.max_segment_len == made.segment_len
    assert max([b - a for a, b in itertools.pairwise(cuts)], default=0) <= made.max_segment_len
    unused = made.capacity - owners[-1]
    assert cuts[owners[-1] :] == [sum(lengths)] * (unused + 1)
    assert sequence_of[owners[-1] :] == [len(lengths)] * unused
    assert segment_of_slot == used_slots + [made.capacity] * (made.num_slots - len(used_slots))


@given(lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=6), pick=st.integers(0, 5), heads=st.integers(1, 64))
def test_a_fixed_plan_cuts_a_sequence_the_same_in_any_batch(lengths, pick, heads):
    pick %= len(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    batch = plan_segments(offsets, sum(lengths), heads, fixed_plan=True)
    alone = plan_segments(torch.tensor([0, lengths[pick]]), lengths[pick], 1, fixed_plan=True)
    segments = slice(int(batch.seq_map[pick]), int(batch.seq_map[pick + 1]) + 1)
    assert torch.equal(batch.cu_seqlens[segments] - offsets[pick], alone.cu_seqlens[: int(alone.seq_map[1]) + 1])
    assert alone.cu_seqlens.diff().max() <= FIXED_SEGMENT_LEN


def test_automatic_lengths_fill_the_processors_once():
    assert choose_segment_len(65536, 16, 132) == 8192
    assert choose_segment_len(65536, 1, 132) == 512
    assert choose_segment_len(2048, 1, 132) == MIN_SEGMENT_LEN
    assert choose_segment_len(MIN_SEGMENT_LEN, 1, 132) is None
    assert choose_segment_len(65536, 67, 132) is None
    assert choose_segment_len(65536, 66, 132) == 32768
    assert choose_segment_len(8000, 16, 132, lengths=[1000] * 8) is None
    assert choose_segment_len(65536, 16, 132, lengths=[8193]) == 8192
    assert choose_segment_len(4096, 99, 1, fixed_plan=True) == FIXED_SEGMENT_LEN
    assert choose_segment_len(0, 1, 1) is None


def test_a_host_copy_stands_in_for_the_offsets():
    offsets = torch.tensor([0, 40, 100])
    for hint in ([0, 40, 100], torch.tensor([0, 40, 100]), (0, 40, 100)):
        assert plan_segments(offsets, 100, 1, segment_len=32, cu_seqlens_cpu=hint).num_slots == 3


def on_meta(case):
    """Tensors without contents take the device path: reading one on the host raises."""
    return type(case)(**{name: x.to("meta") if torch.is_tensor(x) else x for name, x in vars(case).items()})


@pytest.mark.parametrize("options", [{}, {"segment_len": 64}, {"fixed_plan": True}, {"certificate": True, "segment_len": 64}])
@pytest.mark.parametrize("packed", [True, False])
def test_the_device_path_never_reads_on_the_host(options, packed):
    case = on_meta(random(2100, 2))
    offsets = torch.tensor([0, 100, 100, 2090]).to("meta") if packed else None
    h0 = torch.zeros(3 if packed else 1, 2, 128, 128, device="meta")
    states = {"initial_state": h0, "final_state": torch.empty_like(h0), "cu_seqlens": offsets}
    flash_kda.fwd(**case.fwd(**states))
    assert flash_kda.fwd_cp(**case.fwd(**states), **options)[0].shape == case.q.shape


def test_no_part_reads_the_device_on_the_host():
    case = on_meta(random(2100, 2))
    made = plan_segments(torch.tensor([0, 100, 100, 2090]).to("meta"), 2100, 2, segment_len=64)
    h0 = torch.zeros(3, 2, 128, 128, device="meta")
    ht, mt, info = flash_kda.state_only(**case.summary(cu_seqlens=made.cu_seqlens), calc_mt=True, return_info=True)
    chunks, _ = flash_kda.get_warmup_chunks(**case.gates(cu_seqlens=made.cu_seqlens))
    flash_kda.state_only(**case.summary(cu_seqlens=made.cu_seqlens), num_warmup_chunks=chunks)
    entering = flash_kda.correct_initial_states(h0, ht, mt, info.fallback, made.seq_map)
    assert entering.shape == (made.capacity, 2, 128, 128)


def test_the_meta_device_catches_a_host_read():
    offsets = torch.tensor([0, 5]).to("meta")
    for read in (offsets.tolist, offsets.nonzero, lambda: bool(offsets[1] > 0), offsets.cpu):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()
