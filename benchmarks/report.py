"""Writes the tables of benchmark rows into README.md and docs/measured.md, so that nobody types a time in.

    python benchmarks/report.py              # rewrite what lies between the markers
    python benchmarks/report.py --check      # change nothing; 1 if a file is not up to date

Reads ``benchmarks/results/*.jsonl``, as the suites wrote them (benchmarks/README.md). Of rows about the same case the one with
the latest date counts, of one date the last in the file. A table stands between ``<!-- forward-table -->`` and
``<!-- /forward-table -->``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "measured.md")
MARKERS = ("<!-- forward-table -->", "<!-- /forward-table -->")
NOTHING = (
    "No rows in `benchmarks/results/` yet: `python benchmarks/forward.py --output benchmarks/results/h200.jsonl` makes them."
)


@dataclass(frozen=True)
class Best:
    """The best time of another implementation on an H200 that was known when the kernel was begun."""

    ms: float
    whose: str


BEST: dict[tuple[int, str], Best | None] = {
    (16, "8 x 8,192"): Best(1.141, "cuDNN"),
    (96, "8,192"): Best(1.16, ""),
    (96, "8 x 1,024"): Best(0.885, ""),
    (96, "1,300 + 547 + 2,048 + 963 + 271 + 3,063"): Best(1.30, ""),
    (32, "8 x 1,024"): Best(0.303, ""),
    (16, "65,536"): Best(6.984, "FlashKDA"),
    (12, "4,096 x 33"): None,
}
"""By heads and lengths, in the order of the table.

1.141 and 6.984 ms: measured side by side on one H200 on 2026-11-29, CUDA-graph replay, D = 128, random gates at lower_bound
-5: the Hopper kernel of cuDNN-frontend 1.32 on 65,536 tokens cut into segments (it truncates history, so it does less work
and is wrong where gates remember), and FlashKDA, serial. The others: "best published today" in the list of bars of the issue
that asked for this kernel (number 3), which does not say whose they are. None: no figure known.
"""


def read(results: Path) -> list[Row]:
    """All rows, file by file in order of their names.

    Raises:
        ValueError: a line is no JSON object.
    """
    rows = []
    for path in sorted(results.glob("*.jsonl")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} must be a JSON object, got {text[:40]!r} ({error})") from error
            rows.append(row)
    return rows


def lengths(row: Row) -> str:
    """``8 x 1,024``, ``8,192`` or ``1,300 + 547``, from a list or from the ``4096 x 33`` of many sequences."""
    of = row["seq_lens"]
    if isinstance(of, str):
        count, length = map(int, of.split(" x "))
        of = [length] * count
    if len(set(of)) > 1:
        return " + ".join(f"{n:,}" for n in of)
    return f"{of[0]:,}" if len(of) == 1 else f"{len(of):,} x {of[0]:,}"


def latest(rows: Iterable[Row]) -> list[Row]:
    """The rows of suite ``forward`` that count: one for each case, implementation and GPU, in the order of the table."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row["suite"] != "forward":
            continue
        key = (row["gpu"], row["impl"], row["gates"], row["lower_bound"], row["heads"], lengths(row))
        if key not in found or row["date"] >= found[key]["date"]:
            found[key] = row
    order = list(BEST)

    def place(row: Row) -> tuple[object, ...]:
        case = (row["heads"], lengths(row))
        return row["gpu"], row["impl"], order.index(case) if case in order else len(order)

    return sorted(found.values(), key=place)


def table(rows: Iterable[Row]) -> str:
    """What stands between the markers: for each GPU and implementation where the rows come from, then the rows."""
    blocks = []
    for (gpu, impl), group in groupby(latest(rows), key=lambda row: (row["gpu"], row["impl"])):
        cases = list(group)
        lines = [f"`{impl}` on one {gpu}. {_origin(cases)}", "", *_head()]
        blocks.append("\n".join(lines + [_line(row) for row in cases]))
    return "\n\n".join(blocks) if blocks else NOTHING


def _head() -> list[str]:
    columns = (
        "heads",
        "tokens of each sequence",
        "floor, ms",
        "CUDA graph, ms",
        "eager, ms",
        "x floor",
        "error",
        "best other, ms",
    )
    return ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]


def _line(row: Row) -> str:
    known = BEST.get((row["heads"], lengths(row)))
    error = row["rel_l2_out"]
    cells = (
        str(row["heads"]),
        lengths(row),
        f"{row['floor_ms']:.3f}",
        f"{row['graph_ms']:.3f}",
        f"{row['eager_ms']:.3f}",
        f"{row['graph_ms'] / row['floor_ms']:.2f}",
        "" if error is None else f"{error:.1e}",
        "" if known is None else f"{known.ms:#.3g}" + (f" ({known.whose})" if known.whose else ""),
    )
    return "| " + " | ".join(cells) + " |"


def _origin(rows: Sequence[Row]) -> str:
    """Versions, commit, date and command, each once if they are the same for all rows."""

    def each(name: str) -> str:
        return ", ".join(dict.fromkeys(str(row[name]) for row in rows))

    commands = dict.fromkeys(str(row["command"]).split(" --output")[0] for row in rows)
    made = ", ".join(f"`{command}`" for command in commands)
    return f"torch {each('torch')}, Triton {each('triton')}, commit {each('commit')}, {each('date')}: {made}."


def filled(page: str, content: str) -> str:
    """``page`` with ``content`` between the markers.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    first, last = MARKERS
    before, found, rest = page.partition(first)
    _, closed, after = rest.partition(last)
    if not (found and closed) or first in rest or last in before + after:
        raise ValueError(f"a page must hold {first} and {last} once each, in this order")
    return f"{before}{first}\n\n{content}\n\n{last}{after}"


def main(arguments: Sequence[str] | None = None, results: Path = RESULTS, pages: Sequence[Path] = PAGES) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a file is not up to date")
    options = parser.parse_args(arguments)
    content = table(read(results))
    stale = []
    for path in pages:
        page = path.read_text(encoding="utf-8")
        wanted = filled(page, content)
        if wanted == page:
            continue
        stale.append(path)
        if not options.check:
            path.write_text(wanted, encoding="utf-8")
        print(f"{path}: {'not up to date' if options.check else 'rewritten'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
