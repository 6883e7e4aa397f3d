"""Rows of benchmarks: what is in one, how they are written and read, and which of them count. Needs no PyTorch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FIELDS = (
    "suite",
    "impl",
    "gates",
    "lower_bound",
    "heads",
    "tokens",
    "seq_lens",
    "segments",
    "graph_ms",
    "graph_ms_p10",
    "graph_ms_p90",
    "eager_ms",
    "floor_ms",
    "rel_l2_out",
    "rel_l2_state",
    "gpu",
    "torch",
    "triton",
    "commit",
    "date",
    "command",
)
"""In every row; null where something was not measured or does not apply. benchmarks/README.md says what each means."""

EXTRAS = (
    "layout",
    "path",
    "version",
    "cpu",
    "host_us",
    "add_us",
    "head_rel_l2_out",
    "head_rel_l2_state",
    "ratio_out",
    "ratio_state",
    "dropped",
)
"""In rows of suites that have something to say by them, after the others."""

MAX_LISTED = 16
"""Lengths of sequences written one by one."""


def make(**values: object) -> Row:
    """A row with every one of :data:`FIELDS`, in order, then the extras given.

    Raises:
        ValueError: a name that is neither a field nor an extra.
    """
    unknown = sorted(set(values) - {*FIELDS, *EXTRAS})
    if unknown:
        raise ValueError(f"a row must consist of {', '.join((*FIELDS, *EXTRAS))}, got {', '.join(unknown)}")
    return {name: values.get(name) for name in FIELDS} | {name: values[name] for name in EXTRAS if name in values}


def append(row: Row, path: Path) -> None:
    """One more line at the end of ``path``."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def read(paths: Iterable[Path]) -> list[Row]:
    """All rows, file by file.

    Raises:
        ValueError: a line is no JSON object with a suite.
    """
    rows = []
    for path in paths:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} must be a JSON object, got {text[:40]!r} ({error})") from error
            if not isinstance(row, dict) or "suite" not in row:
                raise ValueError(f"{path}, line {number} must be a JSON object with a suite, got {text[:40]!r}")
            rows.append(row)
    return rows


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row for each case, implementation and machine: that of the latest date, of one date the last. Order of appearance."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = (
            row["suite"],
            row["gpu"],
            row["impl"],
            row.get("gates"),
            row.get("lower_bound"),
            row["heads"],
            seq_lens(row),
            row.get("layout", "packed"),
            # What was cut how often is the case in `warmup`, and the outcome elsewhere.
            row["segments"] if row["suite"] == "warmup" else None,
        )
        if key not in found or row["date"] >= found[key]["date"]:
            found[key] = row
    return list(found.values())


def written(lengths: Sequence[int]) -> list[int] | str:
    """Lengths as a row has them: a list, or ``4096 x 33`` or ``512 x (1023 + 1025)`` of many sequences."""
    if len(lengths) <= MAX_LISTED:
        return list(lengths)
    period = next(n for n in range(1, len(lengths) + 1) if tuple(lengths) == tuple(lengths[:n]) * (len(lengths) // n))
    one = " + ".join(map(str, lengths[:period]))
    return f"{len(lengths) // period} x {one if period == 1 else f'({one})'}"


def seq_lens(row: Row) -> str:
    """Lengths as a table has them: ``8,192``, ``8 x 1,024``, ``1,300 + 547`` or ``512 x (1,023 + 1,025)``."""
    of = row["tokens"] if row.get("seq_lens") is None else row["seq_lens"]
    if isinstance(of, list):
        alike = len(set(of)) == 1 and len(of) > 1
        of = f"{len(of)} x {of[0]}" if alike else " + ".join(map(str, of))
    return re.sub(r"\d+", lambda digits: f"{int(digits.group()):,}", str(of))


def milliseconds(row: Row) -> float:
    """Graph replays where there are any, else ordinary calls."""
    value = row["graph_ms"] if row["graph_ms"] is not None else row["eager_ms"]
    return float(value)
