"""Ranks to test with: processes of one gloo group that live as long as the tests and run what they are sent.

Starting Python with torch costs seconds, so the processes are forked from one that has imported everything. Groups of fewer
ranks are made of the first ones. What a function returns or raises comes back by rank.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT = 60.0
"""Seconds before a test gives up on a rank; nothing here takes a tenth of it."""


@dataclass(frozen=True)
class Raised:
    """What a rank raised, by name and text, and its traceback to read."""

    kind: str
    text: str
    trace: str


class Pool:
    """``size`` ranks; ``timeout`` is that of their group, in seconds."""

    def __init__(self, size: int, folder: Path, timeout: float = 30.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "flash_kda.distributed", "flash_kda.samples"])
        self.size = size
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, str(folder / "store"), timeout, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], each: Sequence[tuple[Any, ...]]) -> None:
        """``function(group, *each[rank])`` on as many ranks as ``each`` is long."""
        for pipe, arguments in zip(self.pipes, each, strict=False):
            pipe.send_bytes(pickle.dumps((len(each), function, arguments)))

    def results(self, size: int) -> list[Any]:
        """By rank; of one that died, None."""
        return [self._result(rank) for rank in range(size)]

    def run(self, function: Callable[..., Any], each: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Results of all ranks, none of which may raise."""
        self.start(function, each)
        results = self.results(len(each))
        for rank, result in enumerate(results):
            assert not isinstance(result, Raised), f"rank {rank} raised {result.kind}: {result.text}\n{result.trace}"
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def _result(self, rank: int) -> Any:
        if not self.pipes[rank].poll(TIMEOUT):
            raise TimeoutError(f"rank {rank} hangs")
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except EOFError:
            return None


def _serve(rank: int, size: int, store: str, timeout: float, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.pop("FLASH_KDA_IMPL", None)
    os.environ.pop("FLASH_KDA_DEBUG", None)
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    groups = [dist.new_group(list(range(n + 1)), timeout=limit) for n in range(size)]
    while True:
        try:
            ranks, function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            sys.exit()
        try:
            result = function(groups[ranks - 1], *arguments)
        except Exception as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(result))
