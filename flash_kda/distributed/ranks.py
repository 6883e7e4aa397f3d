"""The few things this package asks of ``torch.distributed``, and errors that say so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# The name it has had since PyTorch 2.13, or the one before.
_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class RankError(RuntimeError):
    """The call cannot be completed by all ranks: one of them refused its arguments, failed, died or came too late."""


class Work(Protocol):
    def wait(self) -> object: ...


class Ranks:
    """The processes of a group, by their ranks in it. After a failed transfer nobody knows who has got what: it is over.

    Attributes:
        group: as given; None is the default group.
        rank, size: of this process, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_available():
            raise NotImplementedError("group must be a process group, got a PyTorch that was built without torch.distributed")
        if not dist.is_initialized():
            raise ValueError("group must be initialised, got no process group; call torch.distributed.init_process_group")
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group must contain this process, got one that does not")
        self._broken: str | None = None

    def all_gather(self, mine: Tensor, what: str) -> tuple[Tensor, Work]:
        """``[R, ...]`` of every rank's tensor, valid after ``wait``. On a GPU waiting holds up the stream, not the host."""
        every = mine.new_empty(self.size, *mine.shape)
        with self._transfer(what):
            work = _gather(every.view(-1), mine.reshape(-1), group=self.group, async_op=True)
        return every, _Checked(self, [work], what)

    def swap(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], what: str) -> Work:
        """Starts sending tensors to ranks and filling others from ranks; contiguous tensors, at most one of each a pair."""
        operations = [dist.P2POp(dist.isend, x, self._peer(to), self.group) for x, to in sends]
        operations += [dist.P2POp(dist.irecv, x, self._peer(source), self.group) for x, source in receives]
        with self._transfer(what):
            works = dist.batch_isend_irecv(operations) if operations else []
        return _Checked(self, works, what)

    def all_gather_objects(self, mine: object, what: str) -> list[object]:
        """Every rank's object. Waits."""
        every: list[object] = [None] * self.size
        with self._transfer(what):
            dist.all_gather_object(every, mine, group=self.group)
        return every

    def _peer(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    @contextmanager
    def _transfer(self, what: str) -> Iterator[None]:
        if self._broken is not None:
            raise RankError(f"the ranks must be in step, got an earlier failure: {self._broken}; start the processes again")
        try:
            yield
        except RuntimeError as error:
            said = (str(error).splitlines() or [""])[0].encode("ascii", "ignore").decode().strip()
            self._broken = f"{what} of rank {self.rank} failed"
            raise RankError(
                f"{what} must be completed by all {self.size} ranks, got on rank {self.rank}: {said}; another rank has died, "
                "has made another call, or did not come within the timeout of the process group"
            ) from error


class _Checked:
    """Work whose failure is told like any other."""

    def __init__(self, ranks: Ranks, works: Sequence[Work], what: str) -> None:
        self.ranks, self.works, self.what = ranks, works, what

    def wait(self) -> None:
        with self.ranks._transfer(self.what):
            for work in self.works:
                work.wait()


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """The current GPU where the group's backend is NCCL, else the CPU."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
