"""The agreement of a group of ranks on who holds which tokens, made once for a batch and used by each of its calls."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..constants import HEAD_DIM
from ..plan import SegmentPlan
from . import exchange as ways
from .layout import Layout, Part
from .local import Effect, plan_part
from .ranks import RankError, Ranks, default_device
from .verdict import Verdicts

FINAL_STATES = ("end", "all")
SHOWN = 80
"""Characters of a value that the ranks disagree on."""


class ContextParallel:
    """Packed sequences spread over the ranks of a process group: rank r holds a contiguous run of tokens, its shard.

    Sequences may span many ranks, many may lie on one, ranks may hold nothing, and boundaries may be anywhere. Every rank
    makes the object at the same time with the same arguments, which are compared; it serves any number of calls.

    Args:
        group: process group, NCCL for GPUs or gloo for CPUs; None for the default group.
        cu_seqlens: ``[N + 1]`` offsets of all sequences on the host: a list or a CPU tensor. First 0, non-decreasing.
        heads: H, of v and of the states.
        shard_lens: ``[R]`` tokens of each rank, on the host; as equal as can be if None (:func:`even_shards`). What they hold
            beyond ``cu_seqlens[-1]`` is padding.
        final_state: ``"end"``: the rank that holds a sequence's last token gets its final state. ``"all"``: every rank gets
            every one.
        exchange: ``"all_gather"``, ``"scan"`` or ``"auto"``, which chooses by size, and by whether all ranks are on one host
            (docs/distributed.md).
        send_mt: False if it is known that every part forgets what came before it, ``||M||_F <= eps`` over the part. Then a rank
            sends only ht and only to the next one. That it is so is measured, and a call where it is not fails.
        device: where the shards are; the current GPU for NCCL, else the CPU.

    Attributes:
        rank, size: of this process in the group, and R.
        tokens: T of this rank's tensors.
        parts: what this rank holds of which sequence.
        starts, ends: the sequences that start, end on this rank, in order: rows of ``initial_state`` and ``final_state``. An
            empty sequence does both on the rank that holds the token after it, or on the last one.
        exchange: the way taken: ``"none"`` where no sequence crosses, ``"neighbour"``, ``"all_gather"`` or ``"scan"``.

    Raises:
        ValueError, TypeError: this rank's arguments are wrong, or differ from those of another.
        RankError: another rank's are wrong, or a rank did not come within the timeout of the group.
        NotImplementedError: torch.distributed is not there.

    Making it waits for all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        cu_seqlens: Tensor | Sequence[int],
        heads: int,
        *,
        shard_lens: Tensor | Sequence[int] | None = None,
        final_state: str = "end",
        exchange: str = "auto",
        send_mt: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        self.ranks = Ranks(group)
        self.rank, self.size = self.ranks.rank, self.ranks.size
        refusal: Exception | None = None
        described: dict[str, str] = {}
        try:
            self.layout = Layout.of(cu_seqlens, shard_lens, self.size)
            _check_options(heads, final_state, exchange, send_mt)
            self.device = default_device(group) if device is None else _with_index(torch.device(device))
            described = {
                "cu_seqlens": _digest(self.layout.offsets),
                "shard_lens": _digest(self.layout.tokens(r) for r in range(self.size)),
                "heads": str(heads),
                "final_state": final_state,
                "exchange": exchange,
                "send_mt": str(send_mt),
            }
        except (ValueError, TypeError, RuntimeError) as error:
            refusal = error
        one_host = _agree(self.ranks, described, refusal)
        self.heads, self.final_state, self.send_mt = heads, final_state, send_mt
        self.exchange = ways.choose(self.layout, heads, exchange, send_mt, ways.NVLINK if one_host else ways.NETWORK)
        self.tokens = self.layout.tokens(self.rank)
        self.parts: tuple[Part, ...] = self.layout.parts(self.rank)
        self.starts = tuple(part.sequence for part in self.parts if part.first)
        self.ends = tuple(part.sequence for part in self.parts if part.last)
        self.verdicts = Verdicts(self.ranks, self.device)
        # Not every rank takes part in every message between two, so the device's communicator is made by all of them here.
        self.verdicts.conclude(None, None, after_exchange=False)
        # What is done with the parts: begun elsewhere, going on elsewhere (maybe the same one), or neither.
        self.given = self.parts[0] if self.parts and not self.parts[0].first else None
        self.hands_on = self.parts[-1] if self.parts and not self.parts[-1].last else None
        self.whole = tuple(part for part in self.parts if part.first and part.last)
        self.ends_of_ranks = [sum(part.last for part in self.layout.parts(r)) for r in range(self.size)]
        self._memo: dict[Any, Any] = {}

    @property
    def num_sequences(self) -> int:
        return len(self.layout.offsets) - 1

    @property
    def most_ends(self) -> int:
        return max(self.ends_of_ranks)

    def check(self) -> None:
        """Waits until all calls so far are done and raises RankError if one of them failed on a rank.

        On a CPU each call has raised by itself. On a GPU the next call does, if the news has come by then.
        """
        self.verdicts.look(wait=True)

    def shard(self) -> dict[str, Any]:
        """What :func:`flash_kda.validation.check_shard` holds a call to."""
        ends = self.num_sequences if self.final_state == "all" else len(self.ends)
        return {
            "tokens": self.tokens,
            "heads": self.heads,
            "device": self.device,
            "starts": len(self.starts),
            "ends": ends,
        }

    def states(self, rows: int) -> Tensor:
        """``[rows, H, V, K]`` fp32, NaN until written."""
        return torch.full((rows, self.heads, HEAD_DIM, HEAD_DIM), torch.nan, device=self.device)

    def nothing(self) -> Effect:
        """What a rank sends that has nothing to hand on, or has failed."""
        if "nothing" not in self._memo:
            self._memo["nothing"] = Effect(self.states(1)[0])
        made: Effect = self._memo["nothing"]
        return made

    def plan(self, part: Part, segment_len: int | None, fixed_plan: bool) -> SegmentPlan:
        """The segments of a part of this rank; made once."""
        key = (part, segment_len, fixed_plan)
        if key not in self._memo:
            self._memo[key] = plan_part(part.end - part.start, self.heads, self.device, segment_len, fixed_plan)
        made: SegmentPlan = self._memo[key]
        return made

    def whole_offsets(self) -> tuple[list[int], Tensor]:
        """Offsets of the sequences that begin and end here, from the first one's start, on the host and on the device."""
        if "whole" not in self._memo:
            start = self.whole[0].start
            offsets = [part.start - start for part in self.whole] + [self.whole[-1].end - start]
            self._memo["whole"] = offsets, torch.tensor(offsets, device=self.device)
        made: tuple[list[int], Tensor] = self._memo["whole"]
        return made


def _check_options(heads: int, final_state: str, exchange: str, send_mt: bool) -> None:
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"heads must be a positive integer, got {heads!r}")
    if final_state not in FINAL_STATES:
        raise ValueError(f"final_state must be one of {', '.join(FINAL_STATES)}, got {final_state!r}")
    if exchange not in ways.EXCHANGES:
        raise ValueError(f"exchange must be one of {', '.join(ways.EXCHANGES)}, got {exchange!r}")
    if send_mt is not True and send_mt is not False:
        raise TypeError(f"send_mt must be True or False, got {send_mt!r}")


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _digest(numbers: Any) -> str:
    """The numbers if they are few; enough of them, and a hash, if not."""
    text = ",".join(map(str, numbers))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.. (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _agree(ranks: Ranks, described: dict[str, str], refusal: Exception | None) -> bool:
    """Whether all ranks are on one host. Raises on every rank if one has refused its arguments or they differ."""
    said = None if refusal is None else f"{type(refusal).__name__}: {refusal}"
    every: list[Any] = ranks.all_gather_objects((described, said, socket.gethostname()), "the agreement on a context")
    if refusal is not None:
        raise refusal
    refused = [f"rank {r}: {text}" for r, (_, text, _) in enumerate(every) if text is not None]
    if refused:
        raise RankError(f"every rank must be given a context that it can make, got {'; '.join(refused)}")
    for name, value in every[0][0].items():
        for r, (other, _, _) in enumerate(every):
            if other[name] != value:
                raise ValueError(f"{name} must be the same on every rank, got {value} on rank 0 and {other[name]} on rank {r}")
    return len({host for _, _, host in every}) == 1
