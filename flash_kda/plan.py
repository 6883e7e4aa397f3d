"""Segment plan: where sequences are cut, decided on the host without reading ``cu_seqlens`` from the device.

The host knows the number of tokens, sequences, heads and processors; that fixes the segment length and an upper bound
of the number of segments. Which segment belongs to which sequence is arithmetic on ``cu_seqlens``, done by tensor
operations on its own device, so that a plan is valid under CUDA graph capture and follows new offsets on replay.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .constants import CHUNK, FIXED_SEGMENT_LEN, MIN_SEGMENT_LEN, STEP
from .validation import check_plan

CPU_PROCESSORS = 8
"""(segment, head) pairs that the CPU reference gains from advancing together; more only add summaries."""


@dataclass(frozen=True)
class SegmentPlan:
    """Segments of a packed batch. Segment s is the tokens ``[cu_seqlens[s], cu_seqlens[s + 1])`` of one sequence.

    Attributes:
        cu_seqlens: ``[capacity + 1]``, dtype and device of the offsets it was made from. Segments lie in order and
            cover every sequence; those beyond the last one in use are empty (repeated last offset).
        seq_map: ``[N + 1]`` int32: sequence n owns segments ``seq_map[n] .. seq_map[n + 1] - 1``, at least one.
        segment_len: tokens in every segment that has a successor, a multiple of 16.
        capacity: upper bound of the number of segments, ``N + (T_total - 1) // segment_len``; host integer.
        num_slots: upper bound of the number of segments that have a successor, ``(T_total - 1) // segment_len``.
            Only these need a state summary.
        max_segment_len: no segment is longer (tokens); host integer.
    """

    cu_seqlens: Tensor
    seq_map: Tensor
    segment_len: int
    capacity: int
    num_slots: int
    max_segment_len: int

    @property
    def num_sequences(self) -> int:
        return self.seq_map.numel() - 1

    def slot_map(self) -> Tensor:
        """``[N + 1]`` int32: the summaries of sequence n lie in slots ``slot_map[n] .. slot_map[n + 1] - 1``.

        The last segment of a sequence has no slot, so each sequence has one slot fewer than segments.
        """
        return self.seq_map - torch.arange(self.num_sequences + 1, dtype=torch.int32, device=self.seq_map.device)

    def sequence_of_segment(self) -> Tensor:
        """``[capacity]`` int64: the sequence that each segment belongs to; N for unused segments."""
        segment = torch.arange(self.capacity, dtype=torch.int32, device=self.seq_map.device)
        return torch.searchsorted(self.seq_map, segment, right=True) - 1

    def segment_of_slot(self) -> Tensor:
        """``[num_slots]`` int64: the segment that each slot summarises; ``capacity`` for unused slots."""
        slot = torch.arange(self.num_slots, dtype=torch.int32, device=self.seq_map.device)
        sequence = torch.searchsorted(self.slot_map(), slot, right=True) - 1
        return torch.where(sequence < self.num_sequences, slot + sequence, self.capacity)


def choose_segment_len(
    total_tokens: int,
    num_heads: int,
    num_processors: int,
    *,
    fixed_plan: bool = False,
    lengths: Sequence[int] | None = None,
) -> int | None:
    """Segment length in tokens, or None where running every sequence serially is expected to be faster.

    ``processors // H`` segments of equal length give every processor one (segment, head) and none a second: equal sequences
    that fill the machine by themselves are then never cut, and one long sequence among short ones is.

    Args:
        total_tokens: T_total, tokens of the packed batch.
        num_heads: H.
        num_processors: SMs, or how many (segment, head) pairs run side by side.
        fixed_plan: use ``FIXED_SEGMENT_LEN`` whatever the batch is.
        lengths: the sequence lengths, if the host knows them; only used to notice that nothing would be cut.
    """
    if fixed_plan:
        segment_len = FIXED_SEGMENT_LEN
    else:
        segments = num_processors // max(num_heads, 1)
        if segments < 2:
            return None
        segment_len = max(-(-total_tokens // (segments * STEP)) * STEP, MIN_SEGMENT_LEN)
    longest = total_tokens if lengths is None else max(lengths, default=0)
    return segment_len if longest > segment_len else None


def plan_segments(
    cu_seqlens: Tensor,
    total_tokens: int,
    num_heads: int,
    *,
    segment_len: int | None = None,
    num_processors: int | None = None,
    fixed_plan: bool = False,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
) -> SegmentPlan:
    """Cuts packed sequences into segments of at most ``segment_len`` tokens; no segment crosses a sequence.

    Segments start at multiples of ``segment_len`` from their sequence's start, so all but the last of a sequence have
    exactly that length. Does not wait on the device: the contents of a CUDA ``cu_seqlens`` are never read on the host.

    Args:
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets, first 0, non-decreasing, last <= ``total_tokens``.
        total_tokens: T_total, length of the packed token axis.
        num_heads: H.
        segment_len: tokens, a positive multiple of 16; chosen from the other arguments if None
            (:func:`choose_segment_len`).
        num_processors: how many (segment, head) pairs run side by side; the SM count of the device if None.
        fixed_plan: cut every sequence at multiples of a constant, so that its bits do not depend on its batch.
        cu_seqlens_cpu: host copy of ``cu_seqlens``; optional, lets the planner see lengths on a GPU.

    Returns:
        SegmentPlan with fresh tensors on the device of ``cu_seqlens``.

    Raises:
        ValueError, TypeError: an argument breaks the contract.
    """
    offsets = check_plan(cu_seqlens, total_tokens, num_heads, segment_len, num_processors, fixed_plan, cu_seqlens_cpu)
    lengths = None if offsets is None else [end - start for start, end in itertools.pairwise(offsets)]
    if segment_len is None:
        processors = processor_count(cu_seqlens.device) if num_processors is None else num_processors
        segment_len = choose_segment_len(total_tokens, num_heads, processors, fixed_plan=fixed_plan, lengths=lengths)
    if segment_len is None:
        segment_len = max(-(-total_tokens // STEP) * STEP, STEP)
    num_sequences = cu_seqlens.numel() - 1
    device = cu_seqlens.device

    # Beyond T_total a longer segment changes nothing, and must not overflow int32 offsets.
    step = min(segment_len, max(-(-total_tokens // CHUNK) * CHUNK, CHUNK))
    segments = ((cu_seqlens.diff() + (step - 1)) // step).clamp(min=1).to(torch.int32)
    seq_map = torch.cat([segments.new_zeros(1), segments.cumsum(0, dtype=torch.int32)])
    longest = total_tokens if lengths is None else max(lengths, default=0)
    if num_sequences == 0:
        longest = 0
    num_slots = 0 if longest <= segment_len else max(total_tokens - 1, 0) // segment_len
    capacity = num_sequences + num_slots

    segment = torch.arange(capacity + 1, dtype=torch.int32, device=device)
    sequence = torch.searchsorted(seq_map, segment, right=True) - 1
    used = sequence < num_sequences
    sequence = sequence.clamp(max=max(num_sequences - 1, 0))
    if num_sequences == 0:
        boundaries = cu_seqlens.clone()
    else:
        offset = (segment - seq_map[sequence]).to(cu_seqlens.dtype) * step
        boundaries = torch.where(used, cu_seqlens[sequence] + offset, cu_seqlens[-1])
    return SegmentPlan(
        cu_seqlens=boundaries,
        seq_map=seq_map,
        segment_len=segment_len,
        capacity=capacity,
        num_slots=num_slots,
        max_segment_len=min(segment_len, longest),
    )


@functools.cache
def processor_count(device: torch.device) -> int:
    """SMs of a CUDA device; elsewhere how many (segment, head) pairs the reference advances together."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return CPU_PROCESSORS
