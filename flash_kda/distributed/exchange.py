"""The exchange of a call: every rank that is given a state gets it from the summaries of the parts before it.

A rank that hands on sends ``(ht, mt)`` of its whole part in fp32, ``S_out = mt S_in + ht``. The first of a chain knows its
S_in and sends ``S_out`` alone. Three ways, all with sizes that every host knows beforehand:

all_gather  every rank gets every summary and composes those of its chain: one collective, R - 1 hops of one summary
scan        each rank gets its predecessor's summary, then in rounds d = 1, 2, 4, .. what the one d places before it has
            composed: about 1 + log2(chain) rounds of one summary
neighbour   each rank gets its predecessor's ht, and that is all: right where the scan of every part has exited

:func:`choose` takes the faster of the first two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..constants import HEAD_DIM
from .layout import Layout
from .local import Effect, compose, entering
from .ranks import Ranks, Work
from .streams import Aside

EXCHANGES = ("auto", "all_gather", "scan")


@dataclass(frozen=True)
class Link:
    """How ranks are connected.

    Attributes:
        gbytes: GB/s that one rank receives.
        start_us: microseconds of a transfer or collective beside its bytes.
        hop_us: of one more hop of a collective.
    """

    gbytes: float
    start_us: float
    hop_us: float


NVLINK, NETWORK = Link(360, 15, 2), Link(45, 25, 5)
"""Ranks on one host, and not. Assumptions, not measured: 80 % of the 450 GB/s of an H200, 90 % of a 400 Gb/s port a GPU. They
decide between two ways to the same answer, and are those of the model in docs/distributed.md."""

COMPOSE_US = 20
"""One composition in a scan, a few small launches; assumed as well."""

WHAT = "the exchange of states"


def state_bytes(heads: int) -> int:
    """Bytes of one fp32 state or transition matrix for all heads."""
    return heads * HEAD_DIM * HEAD_DIM * 4


def gather_planes(layout: Layout) -> int:
    """Matrices per head that each rank contributes to an all-gather: ht, and mt if a part has neighbours on both sides."""
    return 2 if any(len(chain) > 2 for chain in layout.chains) else 1


def scan_rounds(layout: Layout) -> list[int]:
    """Matrices per head in the largest message of each round of a scan."""
    longest = max((len(chain) for chain in layout.chains), default=1) - 1
    if longest < 1:
        return []
    rounds, distance = [2 if longest > 1 else 1], 1
    while distance < longest:
        rounds.append(2 if longest > 2 * distance else 1)
        distance *= 2
    return rounds


def time_us(layout: Layout, heads: int, way: str, link: Link) -> float:
    """Microseconds of an exchange that all ranks begin together, as far as the model knows."""
    matrix = state_bytes(heads) / link.gbytes / 1e3
    if way == "all_gather":
        return link.start_us + (layout.ranks - 1) * (link.hop_us + gather_planes(layout) * matrix)
    rounds = [1] if way == "neighbour" else scan_rounds(layout)
    return sum(link.start_us + planes * matrix for planes in rounds) + COMPOSE_US * (len(rounds) - 1)


def choose(layout: Layout, heads: int, asked: str, send_mt: bool, link: Link) -> str:
    """``"none"``, ``"neighbour"``, ``"all_gather"`` or ``"scan"``."""
    if not layout.chains:
        return "none"
    if not send_mt:
        return "neighbour"
    if asked != "auto":
        return asked
    return min(("scan", "all_gather"), key=lambda way: time_us(layout, heads, way, link))


class Exchange(Protocol):
    """One call's exchange. Every rank must call both, also one that has failed and has nothing to say."""

    def start(self, mine: Effect) -> None:
        """Starts sending this rank's effect; NaN from one that failed. Nothing of it is written to afterwards."""

    def finish(self) -> Tensor | None:
        """``[H, V, K]`` fp32, the state that enters this rank's first part, or None if that is its own affair."""


class NoExchange:
    """Nothing crosses."""

    def start(self, mine: Effect) -> None:
        pass

    def finish(self) -> Tensor | None:
        return None


class AllGather:
    def __init__(self, ranks: Ranks, layout: Layout) -> None:
        self._ranks = ranks
        self._planes = gather_planes(layout)
        chain = layout.is_given(ranks.rank)
        self._before = chain[: chain.index(ranks.rank)] if chain else ()
        self._every: Tensor | None = None
        self._work: Work | None = None

    def start(self, mine: Effect) -> None:
        ht = mine.ht
        if self._planes == 2:
            # No transition counts as an exit: what came before does not matter.
            ht = torch.stack([ht, torch.zeros_like(ht) if mine.mt is None else mine.mt])
        self._every, self._work = self._ranks.all_gather(ht.view(self._planes, *mine.ht.shape), WHAT)

    def finish(self) -> Tensor | None:
        if self._work is None or self._every is None:
            raise RuntimeError("finish must follow start")
        self._work.wait()
        if not self._before:
            return None
        effects = [Effect(x[0], x[1] if self._planes == 2 else None) for x in (self._every[r] for r in self._before)]
        return entering(None, effects)[-1]


class Scan:
    """Neighbours first, then doubling distances. With ``far=False`` the neighbours are all."""

    def __init__(self, ranks: Ranks, layout: Layout, *, far: bool = True) -> None:
        self._ranks, self._far = ranks, far
        self._into, self._out = layout.is_given(ranks.rank), layout.hands_on(ranks.rank)
        self._place = self._into.index(ranks.rank) if self._into else 0
        self._aside: Aside | None = None
        self._state: Tensor | None = None

    def start(self, mine: Effect) -> None:
        self._aside = Aside(mine.ht.device)
        with self._aside:
            sends, receives, got = [], [], None
            if self._out:
                at = self._out.index(self._ranks.rank)
                sends.append((_message(mine, self._with_mt(at)), self._out[at + 1]))
            if self._place:
                got = self._buffer(mine.ht, self._with_mt(self._place - 1))
                receives.append((got, self._into[self._place - 1]))
            self._kept = sends, mine, got
            self._work = self._ranks.swap(sends, receives, WHAT)
            if self._aside.concurrent:
                self._state = self._rounds()

    def finish(self) -> Tensor | None:
        if self._aside is None:
            raise RuntimeError("finish must follow start")
        if not self._aside.concurrent:
            return self._rounds()
        self._aside.join(self._state)
        return self._state

    def _rounds(self) -> Tensor | None:
        """Composes what is before this rank; x covers the ``distance`` parts before it, or all there are."""
        self._work.wait()
        got = self._kept[2]
        if got is None:
            return None
        x, last, distance = _effect(got), len(self._into) - 1, 1
        while self._far and distance < last:
            sends, receives, got = [], [], None
            if self._place + distance <= last:
                sends.append((_message(x, self._place > distance), self._into[self._place + distance]))
            if self._place > distance:
                got = self._buffer(x.ht, self._place - distance > distance)
                receives.append((got, self._into[self._place - distance]))
            self._ranks.swap(sends, receives, WHAT).wait()
            if got is not None:
                x = compose(x, _effect(got))
            distance *= 2
        return x.ht

    def _with_mt(self, place: int) -> bool:
        """Whether the part at a place of its chain sends mt: only where something comes before it that could matter."""
        return self._far and place > 0

    @staticmethod
    def _buffer(like: Tensor, with_mt: bool) -> Tensor:
        return like.new_empty(2 if with_mt else 1, *like.shape)


def _message(x: Effect, with_mt: bool) -> Tensor:
    if not with_mt:
        return x.ht[None].contiguous()
    return torch.stack([x.ht, torch.zeros_like(x.ht) if x.mt is None else x.mt])


def _effect(message: Tensor) -> Effect:
    return Effect(message[0], message[1] if message.shape[0] == 2 else None)


def make(way: str, ranks: Ranks, layout: Layout) -> Exchange:
    if way == "none":
        return NoExchange()
    if way == "all_gather":
        return AllGather(ranks, layout)
    return Scan(ranks, layout, far=way == "scan")
