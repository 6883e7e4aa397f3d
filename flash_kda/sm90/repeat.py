"""Calls of a kind that was seen before: the launches of the first one, with the addresses of this one in their places.

    kind of call, options -> Program: launches, and which address goes where

What a call launches depends on shapes, strides, dtypes and options, which make its key, and on addresses, which are those of
its tensors or lie in its scratch memory. So nothing has to be chosen, checked or gathered again, except for what addresses
decide besides: whether tensors share memory, and whether they are aligned.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from .cp import Layout, Scratch
from .launch import MAPS_KEPT, Kernel, Launched

KEPT = 1024
"""Programs that are kept; past that all are forgotten."""

VECTOR = 16
"""Bytes: an address that was a multiple of it has to be one again."""

Addresses = tuple[int, ...]
Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class Program:
    """The launches of a kind of call.

    Args:
        launches: of one such call: all that it did, but for allocating scratch memory.
        addresses: of its tensors.
        layout, scratch: that memory, if it took any.

    Raises:
        LookupError: a launch was given an address that is none of these.
    """

    def __init__(
        self, launches: Sequence[Launched], addresses: Addresses, layout: Layout | None = None, scratch: Scratch | None = None
    ) -> None:
        self._layout = layout
        self._aligned = _pick([i for i, address in enumerate(addresses) if address % VECTOR == 0])
        # What the launches choose from: the addresses, that of the zeros, those in the work space, constants.
        places = {address: i for i, address in reversed([*enumerate(addresses)])}
        self._offsets: list[int] = []
        if scratch is not None and scratch.zeros is not None:
            places[scratch.zeros.data_ptr()] = len(addresses)

        def place(address: int) -> int:
            if address not in places:
                offset = -1 if scratch is None else address - scratch.work.data_ptr()
                if scratch is None or not 0 <= offset < scratch.work.nbytes:
                    raise LookupError(f"{address:#x} is no address of the call")
                places[address] = len(addresses) + 1 + len(self._offsets)
                self._offsets.append(offset)
            return places[address]

        found = [_Arguments.of(launched, place) for launched in launches]
        known = len(addresses) + (0 if scratch is None else 1 + len(self._offsets))
        self._steps = [_Step.of(launched, given, known) for launched, given in zip(launches, found, strict=True)]

    def allocate(self, device: torch.device) -> Scratch | None:
        """Scratch memory for one more call."""
        return None if self._layout is None else self._layout.allocate(device)

    def run(self, addresses: Addresses, scratch: Scratch | None) -> bool:
        """Launches on the stream that is current, and does not wait; False if an address is not aligned as it has to be."""
        if functools.reduce(operator.or_, self._aligned(addresses), 0) % VECTOR:
            return False
        if scratch is not None:
            base = scratch.work.data_ptr()
            zeros = 0 if scratch.zeros is None else scratch.zeros.data_ptr()
            addresses = (*addresses, zeros, *[base + offset for offset in self._offsets])
        for kernel, device, grid, overlap, maps, views, blocks, rest, constants in self._steps:
            at = maps(addresses)
            block = blocks.get(at)
            if block is None:
                if len(blocks) >= MAPS_KEPT:
                    blocks.clear()
                placed = tuple((address, *view) for address, view in zip(at, views, strict=True))
                block = blocks[at] = kernel.block(device, placed)
            kernel.repeat(device, grid, block, rest(addresses + constants), overlap)
        return True


class _Arguments(NamedTuple):
    """Of one launch: places of the descriptors' addresses, then of each other argument its place or its value."""

    maps: list[int]
    rest: list[tuple[int | None, Any]]

    @staticmethod
    def of(launched: Launched, place: Callable[[int], int]) -> _Arguments:
        kernel, arguments = launched.kernel, launched.arguments
        rest: list[tuple[int | None, Any]] = [
            (place(value), None) if i in kernel.pointers and value else (None, value)
            for i, value in enumerate(arguments)
            if i >= kernel.descriptors
        ]
        return _Arguments([place(view[0]) for view in arguments[: kernel.descriptors]], rest)


class _Step(NamedTuple):
    """One launch.

    Attributes:
        kernel, device, grid, overlap: as it was.
        maps: picks the descriptors' addresses.
        views: their shapes and strides.
        blocks: the descriptors' part of the parameters, by their addresses.
        rest: picks the other arguments from addresses and constants.
        constants: what of these is no address.
    """

    kernel: Kernel
    device: int
    grid: tuple[int, int, int]
    overlap: bool
    maps: Pick
    views: tuple[tuple[Sequence[int], Sequence[int]], ...]
    blocks: dict[Addresses, bytes]
    rest: Pick
    constants: tuple[Any, ...]

    @staticmethod
    def of(launched: Launched, given: _Arguments, known: int) -> _Step:
        kernel, device, grid, arguments, overlap = launched
        constants = [value for at, value in given.rest if at is None]
        ends = iter(range(known, known + len(constants)))
        rest = _pick([next(ends) if at is None else at for at, _ in given.rest])
        views = tuple((shape, strides) for _, shape, strides in arguments[: kernel.descriptors])
        return _Step(kernel, device, grid, overlap, _pick(given.maps), views, {}, rest, tuple(constants))


def _pick(places: list[int]) -> Pick:
    """``values -> (values[places[0]], ...)``"""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple([values[i] for i in places])


_kept: dict[Hashable, Program] = {}


def find(key: Hashable | None) -> Program | None:
    """What was kept under ``key``."""
    return _kept.get(key)


def keep(
    key: Hashable | None,
    launches: Sequence[Launched],
    addresses: Addresses,
    layout: Layout | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Keeps a call as a :class:`Program`; not if ``key`` is None, nothing was launched, or on memory that is not the call's."""
    if key is None or not launches:
        return
    try:
        program = Program(launches, addresses, layout, scratch)
    except LookupError:
        return
    if len(_kept) >= KEPT:
        _kept.clear()
    _kept[key] = program
