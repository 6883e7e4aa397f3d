"""Printing: tables and progress by rich; plain ASCII of a fixed layout where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .streams import silence_stdout

PLAIN_WIDTH = 200
"""Nothing is wrapped when the output is not a terminal."""
TABLE_WIDTH = 80
"""Tables fit into this; a narrower terminal folds their lines itself, which loses nothing."""


class UserError(Exception):
    """Bad input: one line for the user, exit status 2."""


def _console() -> Console:
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else PLAIN_WIDTH, highlight=False, markup=False, emoji=False, soft_wrap=not terminal)


@contextmanager
def _written() -> Iterator[None]:
    """A full disk under stdout is the user's to mend; rich leaves by itself when the reader of a pipe does."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        raise UserError(f"standard output must be writable, got: {error.strerror or error}") from None


def line(text: str = "") -> None:
    with _written():
        _console().print(text)


def heading(text: str) -> None:
    console = _console()
    with _written():
        console.print()
        console.print(text, style="bold")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Rows under a header; the first ``left`` columns are text, the others numbers set to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    console = _console()
    with _written():
        console.print(made, width=max(console.width, TABLE_WIDTH), soft_wrap=True)


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Progress of work of ``total`` steps on stderr, if that is a terminal. Call the yielded function as each begins."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        begun = 0

        def begin(what: str) -> None:
            nonlocal begun
            progress.update(task, description=what, completed=begun)
            begun += 1

        yield begin


def shorten(x: float) -> str:
    """Two significant digits; 0 and infinities by name."""
    return "0" if x == 0 else f"{x:.1e}" if abs(x) < 0.01 or abs(x) >= 1000 else f"{x:.2g}" if abs(x) < 100 else f"{x:.0f}"
