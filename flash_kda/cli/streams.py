"""Standard streams that cannot be written to: closed, on a full disk, or a pipe whose reader left. Standard library only."""

from __future__ import annotations

import contextlib
import os
import sys


def complain(text: str) -> None:
    """One line on stderr, if there is one that takes it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def silence_stdout() -> None:
    """After a write has failed: what is still buffered goes nowhere, so that the interpreter does not fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
