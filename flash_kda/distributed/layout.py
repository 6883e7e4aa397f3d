"""Who holds what: arithmetic on global offsets and shard lengths, on the host. No tensors, no communication.

The packed tokens of all sequences lie one after the other. Rank r holds a contiguous run of them, its *shard*; what a
sequence has on a rank is a *part*. At most one sequence crosses the boundary between two ranks, so a rank hands on at most
one state and is given at most one. The ranks that hold tokens of a crossing sequence, in order, are its *chain*.
"""

from __future__ import annotations

import itertools
import numbers
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Tokens ``[start, end)`` of a shard, all of one sequence.

    Attributes:
        sequence: its number in the global batch.
        start, end: local tokens.
        first, last: the sequence starts, ends here.
    """

    sequence: int
    start: int
    end: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Layout:
    """Sequences and shards on the packed axis.

    Attributes:
        offsets: ``[N + 1]``, sequence n is the tokens ``[offsets[n], offsets[n + 1])``.
        shards: ``[R + 1]``, rank r holds the tokens ``[shards[r], shards[r + 1])``. The last may end after all sequences:
            such tokens are padding.
        chains: the ranks that hold tokens of each sequence that is on more than one, in order.
    """

    offsets: tuple[int, ...]
    shards: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(cu_seqlens: Tensor | Sequence[int], shard_lens: Tensor | Sequence[int] | None, ranks: int) -> Layout:
        """Checks and completes what a caller gave.

        Args:
            cu_seqlens: ``[N + 1]`` global offsets on the host: first 0, non-decreasing.
            shard_lens: ``[R]`` tokens of each rank, together at least ``cu_seqlens[-1]``; :func:`even_shards` if None.
            ranks: R.

        Raises:
            ValueError, TypeError: they are not that.
        """
        offsets = _integers("cu_seqlens", cu_seqlens)
        if not offsets or offsets[0] != 0:
            raise ValueError(f"cu_seqlens must start with 0, got {offsets[0] if offsets else 'nothing'}")
        for i, (a, b) in enumerate(itertools.pairwise(offsets)):
            if b < a:
                raise ValueError(f"cu_seqlens must be non-decreasing, got {a} then {b} at positions {i} and {i + 1}")
        lengths = even_shards(offsets[-1], ranks) if shard_lens is None else _integers("shard_lens", shard_lens)
        if len(lengths) != ranks:
            raise ValueError(f"shard_lens must have one length for each of the {ranks} ranks, got {len(lengths)}")
        if min(lengths) < 0:
            raise ValueError(f"shard_lens must be >= 0, got {min(lengths)} for rank {lengths.index(min(lengths))}")
        shards = tuple(itertools.accumulate(lengths, initial=0))
        if shards[-1] < offsets[-1]:
            raise ValueError(f"shard_lens must cover the {offsets[-1]} tokens of cu_seqlens, got {shards[-1]} in all")
        crossing = {}
        for boundary in shards[1:-1]:
            sequence = bisect_right(offsets, boundary) - 1
            if sequence < len(offsets) - 1 and offsets[sequence] < boundary:
                crossing[sequence] = (offsets[sequence], offsets[sequence + 1])
        chains = (tuple(r for r in range(ranks) if max(shards[r], a) < min(shards[r + 1], b)) for a, b in crossing.values())
        return Layout(tuple(offsets), shards, tuple(chain for chain in chains if len(chain) > 1))

    @property
    def ranks(self) -> int:
        return len(self.shards) - 1

    def tokens(self, rank: int) -> int:
        return self.shards[rank + 1] - self.shards[rank]

    def owner(self, token: int) -> int:
        """The rank that holds a token; the last one for those after the end."""
        return min(bisect_right(self.shards, token), self.ranks) - 1

    def parts(self, rank: int) -> tuple[Part, ...]:
        """The parts on a rank, in order. An empty sequence is one where the token that follows it is."""
        low, high = self.shards[rank], self.shards[rank + 1]
        found = []
        # Sequences that end before the shard do not count, nor those that start after it.
        for n in range(max(bisect_left(self.offsets, low) - 1, 0), len(self.offsets) - 1):
            start, end = self.offsets[n], self.offsets[n + 1]
            if start > high:
                break
            here = self.owner(start) == rank if start == end else max(start, low) < min(end, high)
            if here:
                found.append(Part(n, max(start, low) - low, min(end, high) - low, start >= low, end <= high))
        return tuple(found)

    def hands_on(self, rank: int) -> tuple[int, ...]:
        """The chain in which the rank has a successor; empty if none."""
        return next((chain for chain in self.chains if rank in chain[:-1]), ())

    def is_given(self, rank: int) -> tuple[int, ...]:
        """The chain in which the rank has a predecessor; empty if none."""
        return next((chain for chain in self.chains if rank in chain[1:]), ())


def even_shards(total_tokens: int, ranks: int, multiple: int = 1) -> list[int]:
    """Tokens of each rank, as equal as multiples of ``multiple`` allow; what is left over goes to the first ranks.

    Raises:
        ValueError: a negative number of tokens, or no ranks.
    """
    if total_tokens < 0 or ranks < 1 or multiple < 1:
        raise ValueError(f"total_tokens must be >= 0, ranks and multiple >= 1, got {total_tokens}, {ranks} and {multiple}")
    whole = -(-total_tokens // multiple)
    units = [whole // ranks + (r < whole % ranks) for r in range(ranks)]
    ends = [min(end * multiple, total_tokens) for end in itertools.accumulate(units)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def _integers(name: str, values: Tensor | Sequence[int]) -> list[int]:
    if isinstance(values, Tensor):
        if values.device.type != "cpu" or values.is_floating_point() or values.dim() != 1:
            raise TypeError(
                f"{name} must be integers on the host, got a tensor of shape {tuple(values.shape)}, {values.dtype} on "
                f"{values.device}; the host plans with it and does not wait for a device"
            )
        return [int(x) for x in values.tolist()]
    if not isinstance(values, Sequence) or not all(isinstance(x, numbers.Integral) for x in values):
        raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__}")
    return [int(x) for x in values]
