"""How the ranks tell each other at the end of a call whether it went well.

A rank that fails does not leave the others waiting: it goes on with NaN for what it owes them, and all exchange a short
message at the end. Where the host may look, every rank then raises. On a GPU nobody waits: the messages are copied to the
host beside the work, and looked at by the next call or by ``ContextParallel.check``.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from .. import settings
from ..host import readable
from .ranks import RankError, Ranks, Work
from .streams import Aside

BYTES = 1024
"""Of one message: its code, then UTF-8 text."""
FINE, FAILED, REMEMBERS = 0, 1, 2

FORGOTTEN = "send_mt must be True where a part remembers what came before it, got False and ||M||_F > eps over the part"


class Verdicts:
    """The messages of the calls on one context."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._fine = torch.zeros(BYTES, dtype=torch.uint8, device=device)
        self._open: deque[_News] = deque()

    def conclude(self, failure: Exception | None, remembers: Tensor | None, *, after_exchange: bool) -> None:
        """Exchanges how the call went.

        Args:
            failure: why this rank could not do its share.
            after_exchange: it failed on what it was given: then the failure of another rank, if there is one, is the reason.
            remembers: bool scalar on the device: with ``send_mt=False``, a part here needed mt.

        Raises:
            Exception: ``failure`` itself.
            RankError: another rank failed, and this is known.
        """
        mine = self._fine
        if failure is not None:
            mine = _message(failure).to(self._device)
        elif remembers is not None:
            mine = torch.where(torch.arange(BYTES, device=self._device) == 0, REMEMBERS * remembers, 0).to(torch.uint8)
        every, work = self._ranks.all_gather(mine, "the verdict on a call")
        if readable(every) or settings.debug():
            work.wait()
            if failure is None:
                self._judge(every)
            elif after_exchange:
                every[self._ranks.rank] = FINE
                self._judge(every, failure)
        else:
            self._open.append(_News(every, work))
        if failure is not None:
            raise failure

    def look(self, *, wait: bool) -> None:
        """Raises RankError if an earlier call has failed on a rank, as far as is known, or of all calls with ``wait``."""
        while self._open and (wait or self._open[0].is_there()):
            self._judge(self._open.popleft().read())

    def _judge(self, every: Tensor, consequence: Exception | None = None) -> None:
        failures = []
        for rank, message in enumerate(every.cpu().numpy()):
            code = int(message[0])
            if code == FAILED:
                failures.append(f"rank {rank}: {message[1:].tobytes().rstrip(bytes(1)).decode(errors='replace')}")
            elif code == REMEMBERS:
                failures.append(f"rank {rank}: {FORGOTTEN}")
        if failures:
            raise RankError(f"every rank must be able to do its share, got {'; '.join(failures)}") from consequence


class _News:
    """Messages on their way to the host, beside the work of the device."""

    def __init__(self, every: Tensor, work: Work) -> None:
        self._every, self._work = every, work
        self._done: torch.cuda.Event | None = None
        if every.is_cuda:
            with Aside(every.device):
                work.wait()
                self._host = torch.empty(every.shape, dtype=every.dtype, pin_memory=True)
                self._host.copy_(every, non_blocking=True)
                self._done = torch.cuda.Event()
                self._done.record()

    def is_there(self) -> bool:
        return self._done is None or self._done.query()

    def read(self) -> Tensor:
        if self._done is None:
            self._work.wait()
            return self._every
        self._done.synchronize()
        return self._host


def _message(failure: Exception) -> Tensor:
    text = f"{type(failure).__name__}: {failure}".encode()[: BYTES - 1]
    return torch.frombuffer(bytearray([FAILED, *text.ljust(BYTES - 1, bytes(1))]), dtype=torch.uint8)
