"""A GPU stream beside the current one, so that an exchange and its compositions do not hold up local work."""

from __future__ import annotations

import functools
from types import TracebackType

import torch
from torch import Tensor


class Aside:
    """``with`` it, device work goes to a stream of its own, behind what has been asked of the current one so far.

    On a device without streams the work is done in place.

    Attributes:
        concurrent: there is such a stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.concurrent = device.type == "cuda"

    def __enter__(self) -> Aside:
        if self.concurrent:
            side = _side_stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            self._context = torch.cuda.stream(side)
            self._context.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.concurrent:
            self._context.__exit__(kind, error, trace)

    def join(self, *made: Tensor | None) -> None:
        """The current stream waits for what was done aside and may use the tensors made there."""
        if self.concurrent:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(_side_stream(self.device))
            for x in made:
                if x is not None:
                    x.record_stream(current)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
