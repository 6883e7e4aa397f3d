"""Where Hopper cuts sequences, or that it does not: a decision on the host from shapes and what is known of the lengths.

A cut costs a state summary of every piece that has a successor, at worst of all its tokens, and two launches. The estimates
below take that worst case, so that no gate makes a cut call slower than a serial one. Costs were measured on an H200
(docs/measured.md); on another Hopper only their ratios matter.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..constants import CHUNK, STEP

FORWARD_US = 1.0
"""Microseconds the forward kernel takes for a chunk of one item."""
SPLIT_US = 0.75
"""The same with V split over two CTAs."""
SUMMARY_US = 0.92
"""Microseconds the state summary takes for a chunk of one item."""
CHAIN_US = 1.2
"""Microseconds for one more piece in the chain of states."""
LAUNCH_US = 14.0
"""Microseconds that a cut call costs beyond a serial one however short and few the pieces are."""
ITEM_US = 0.15
"""The same for each item that starts at once."""
EMPTY_US = 3.0
"""The same for each round of items, one a processor, that turn out to be empty (a guess)."""
MARGIN = 0.97
"""A cut must be estimated to take less than this share of the serial time."""
UNSEEN_PIECES = 4
"""Cut unseen lengths if the mean sequence would have this many pieces; the longest then has no fewer."""
UNSEEN_LONGEST = 3.5
"""Or, decided on the device, if the longest sequence has this many."""
LOOK_US = 17.0
"""A decision on the device takes so many microseconds, with what then runs idle; and where sequences outnumber the processors,
one of them more on some, since the empty items come first."""
LOOK_SHARE = 0.03
"""The device looks where a decision against a cut costs no more than this share of the call."""
LENGTHS_KEPT = 64
"""Most sequences of which a choice is remembered by their lengths."""
DEVICE_SEQUENCES = 4096
"""Most sequences that the device looks through."""


@dataclass(frozen=True)
class Cut:
    """Sequences are cut every ``segment_len`` tokens.

    Attributes:
        segment_len: tokens, a multiple of 16.
        num_slots: upper bound of the pieces that have a successor.
        only_if_longer: on the device, leave all sequences whole unless one has more tokens than this; 0: always cut.
    """

    segment_len: int
    num_slots: int
    only_if_longer: int = 0

    @staticmethod
    def every(segment_len: int, total_tokens: int, only_if_longer: int = 0) -> Cut | None:
        """None if there is nothing to cut."""
        num_slots = max(total_tokens - 1, 0) // segment_len
        return Cut(segment_len, num_slots, only_if_longer) if num_slots else None


def choose(
    total_tokens: int, num_sequences: int, num_heads: int, num_processors: int, lengths: tuple[int, ...] | None
) -> Cut | None:
    """The cut that is expected to be fastest whatever the gates are, or None to run serially.

    Lengths that the host does not know are taken to add up to T_total: with padding behind the last sequence a cut may cost
    more than it gains.

    Args:
        total_tokens: T_total.
        num_sequences: N.
        num_heads: value heads.
        num_processors: SMs.
        lengths: of the sequences, if the host knows them.
    """
    remember = lengths is None or len(lengths) <= LENGTHS_KEPT
    return (_remembered if remember else _choose)(total_tokens, num_sequences, num_heads, num_processors, lengths)


def _choose(
    total_tokens: int, num_sequences: int, num_heads: int, num_processors: int, lengths: tuple[int, ...] | None
) -> Cut | None:
    room = num_processors // max(num_heads, 1)  # pieces that run side by side
    if room < 2 or not total_tokens or not num_sequences:
        return None
    if lengths is None and num_sequences == 1:
        lengths = (total_tokens,)
    if lengths is None:
        segment_len = max(_multiple(total_tokens / room), _shortest(total_tokens))
        if num_sequences * UNSEEN_PIECES * segment_len <= total_tokens:
            # equal lengths gain least from a cut
            equal = (-(-total_tokens // num_sequences),) * num_sequences
            pays = cut_us(equal, segment_len, num_heads, num_processors) < MARGIN * serial_us(equal, num_heads, num_processors)
            return Cut.every(segment_len, total_tokens) if pays else None
        balanced = FORWARD_US / CHUNK * total_tokens * num_heads / num_processors
        uneven = FORWARD_US / CHUNK * total_tokens / num_sequences if num_sequences * num_heads > num_processors else 0.0
        pays = balanced * LOOK_SHARE >= LOOK_US + uneven
        if 2 * num_sequences > room and num_sequences <= DEVICE_SEQUENCES and pays:
            return Cut.every(segment_len, total_tokens, int(UNSEEN_LONGEST * segment_len))
        return None
    covered = sum(lengths)
    if max(lengths) * num_processors <= covered * num_heads:  # no sequence outlasts the others' work
        return None
    best, best_us = None, MARGIN * serial_us(lengths, num_heads, num_processors)
    floor = _shortest(max(lengths))
    for segment_len in {max(_multiple(covered / room), floor), max(_fitting(lengths, room), floor)}:
        if max(lengths) > segment_len:
            # slots are counted by T_total, not by the hint, which a graph may outlive
            empty = (total_tokens - covered) / segment_len * num_heads / num_processors
            estimate = cut_us(lengths, segment_len, num_heads, num_processors) + EMPTY_US * empty
            if estimate < best_us:
                best, best_us = Cut.every(segment_len, total_tokens), estimate
    return best


_remembered = functools.lru_cache(maxsize=1024)(_choose)


def slot_pieces(cu_seqlens: Tensor, cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """``[num_slots]`` int64 sequence and piece of each slot, and whether it is used; what kernels/segments.py computes."""
    first = cu_seqlens[:-1].long() // cut.segment_len
    slot = torch.arange(cut.num_slots, device=cu_seqlens.device)
    sequence = torch.searchsorted(first, slot, right=True) - 1
    piece = slot - first[sequence]
    return sequence, piece, piece < (cu_seqlens.diff().long()[sequence] - 1).clamp(min=0) // cut.segment_len


def serial_us(lengths: tuple[int, ...], num_heads: int, num_processors: int) -> float:
    """Estimated microseconds of the forward kernel on whole sequences."""
    if 2 * len(lengths) * num_heads <= num_processors:
        return SPLIT_US / CHUNK * max(lengths)
    return FORWARD_US / CHUNK * _makespan(0, 0, lengths, num_heads, num_processors)


def cut_us(lengths: tuple[int, ...], segment_len: int, num_heads: int, num_processors: int) -> float:
    """Estimated microseconds of summary, chain and forward kernel, where no scan exits."""
    pieces = [max(length - 1, 0) // segment_len for length in lengths]
    rests = tuple(length - n * segment_len for length, n in zip(lengths, pieces, strict=True))
    forward = _makespan(sum(pieces), segment_len, rests, num_heads, num_processors)
    rounds = -(-sum(pieces) * num_heads // num_processors)
    begun = min((sum(pieces) + len(lengths)) * num_heads, num_processors)
    return (
        FORWARD_US / CHUNK * forward
        + SUMMARY_US / CHUNK * rounds * segment_len
        + CHAIN_US * max(pieces, default=0)
        + ITEM_US * begun
        + LAUNCH_US
    )


def _makespan(full: int, segment_len: int, rests: tuple[int, ...], num_heads: int, num_processors: int) -> float:
    """Tokens that the busiest processor walks: ``full`` pieces of every head first, then the rests in order."""
    rounds, begun = divmod(full * num_heads, num_processors)
    work, longest = sum(rests) * num_heads, max(rests, default=0)
    free = num_processors - begun
    started = rounds * segment_len
    if len(rests) * num_heads <= free:
        return max(started + longest, started + segment_len if begun else 0)
    # Greedy: the last to end begins once all are busy, on average half of the longest before the end.
    level = (full * num_heads * segment_len + work) / num_processors
    waves = -(-len(rests) * num_heads // free)
    return max(started + segment_len if begun else 0, min(level + longest / 2, started + waves * longest), level)


def _shortest(longest: int) -> int:
    """Pieces so short that one more costs the chain what it saves the others."""
    return _multiple(math.sqrt(longest * CHUNK * CHAIN_US / (FORWARD_US + SUMMARY_US)))


def _fitting(lengths: tuple[int, ...], room: int) -> int:
    """Shortest piece with which all pieces of one head run side by side; the longest sequence if there is none."""
    low, high = 1, -(-max(lengths) // STEP)
    while low < high:
        middle = (low + high) // 2
        if sum(max(-(-length // (middle * STEP)), 1) for length in lengths) <= room:
            high = middle
        else:
            low = middle + 1
    return low * STEP


def _multiple(tokens: float) -> int:
    return max(math.ceil(tokens / STEP), 1) * STEP
