"""Writes the tables of benchmark rows into README.md and docs/, so that nobody types a time or an error in.

    python benchmarks/report.py              # rewrite what lies between the markers
    python benchmarks/report.py --check      # change nothing; 1 if a file is not up to date

Reads ``benchmarks/results/*.jsonl``, as ``flash-kda bench`` wrote them (benchmarks/README.md). Of rows about the same case
that with the latest date counts, of one date the last in the file. Table NAME stands between ``<!-- NAME-table -->`` and
``<!-- /NAME-table -->``. What has no row is "not measured".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_kda.bench import rows as bench_rows
from flash_kda.bench import suites
from flash_kda.bench.rows import Row, milliseconds, seq_lens
from flash_kda.bench.suites import FWD, FWD_CP, KNOWN, PACKED, STATE_ONLY, WARMUP_CHUNKS, Case

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MISSING = "not measured"
ROUNDING = "bf16 rounding"


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

BARS: dict[tuple[str, float, int], tuple[tuple[int, float, float], ...]] = {
    ("random", -5.0, 16): ((4096, 0.070, 0.045), (16384, 0.19, 0.12), (65536, 0.58, 0.42)),
    ("random", -0.5, 16): ((4096, 0.075, 0.05), (16384, 0.20, 0.13), (65536, 0.60, 0.44)),
    ("real", -5.0, 16): ((4096, 0.10, 0.06), (16384, 0.25, 0.16), (65536, 0.68, 0.48)),
    ("none", -5.0, 16): ((4096, 0.11, 0.07), (16384, 0.32, 0.20), (65536, 0.92, 0.62)),
    ("real", -5.0, 4): ((65536, 0.28, 0.18),),
    ("real", -5.0, 8): ((65536, 0.42, 0.28),),
}
"""What issue 4 asks of ``fwd_cp`` on an H200, by gates, lower_bound and heads: tokens, ms that it must reach, ms aimed at."""

PUBLISHED: dict[tuple[float, int], tuple[float, float]] = {
    (-5.0, 4096): (0.63, 0.35),
    (-5.0, 8192): (1.24, 0.54),
    (-5.0, 16384): (2.45, 0.99),
    (-5.0, 32768): (4.87, 1.76),
    (-5.0, 65536): (9.64, 3.91),
    (-1.0, 4096): (0.63, 0.35),
    (-1.0, 8192): (1.23, 0.54),
    (-1.0, 16384): (2.44, 0.99),
    (-1.0, 32768): (4.84, 1.75),
    (-1.0, 65536): (9.65, 3.91),
    (-0.5, 4096): (0.63, 0.35),
    (-0.5, 8192): (1.23, 0.54),
    (-0.5, 16384): (2.44, 0.99),
    (-0.5, 32768): (4.84, 1.76),
    (-0.5, 65536): (9.64, 3.91),
}
"""The recipe's own times on an H20, B = 1, H = 16, by lower_bound and tokens: ms without and with context parallelism.

https://github.com/MoonshotAI/FlashKDA/pull/10 and docs/cp_optimization.md of its branch.
"""

PUBLISHED_BATCHES: dict[tuple[int, int], float] = {
    (1, 8192): 1.235,
    (8, 8192): 2.871,
    (16, 8192): 5.650,
    (32, 8192): 10.413,
    (1, 16384): 2.429,
    (8, 16384): 5.728,
    (16, 16384): 11.241,
    (32, 16384): 21.161,
    (1, 65536): 9.509,
    (8, 65536): 22.625,
    (16, 65536): 45.017,
    (1, 262144): 37.860,
    (1, 524288): 75.675,
}
"""From the same page: ms of FlashKDA without context parallelism on an H20, by batch and tokens."""

PUBLISHED_SCAN_MS = 0.03
"""From the same page: the scan of gates on an H20. It samples one token in 16."""


class Rows:
    """The rows that count, of one machine."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self.by_case = {
            (
                *(row.get(name) for name in ("suite", "impl", "gates", "lower_bound", "heads")),
                seq_lens(row),
                row.get("layout", PACKED),
                row["segments"] if row["suite"] == "warmup" else None,
            ): row
            for row in self.rows
        }

    def find(self, case: Case, impl: str, layout: str | None = None) -> Row | None:
        """The row of an implementation on a case, handed over as the case says or as ``layout`` does."""
        lengths = seq_lens({"seq_lens": bench_rows.written(case.lengths)})
        segments = case.segments if case.suite == "warmup" else None
        key = (case.suite, impl, case.gates, case.lower_bound, case.heads, lengths, layout or case.layouts[0], segments)
        return self.by_case.get(key)

    def peers(self) -> list[str]:
        """Other packages that have rows, by name."""
        return sorted({row["impl"] for row in self.rows} - {FWD, FWD_CP, STATE_ONLY, WARMUP_CHUNKS, ROUNDING})

    def origin(self) -> str:
        """Versions, commit, date and command, each once if they are the same for all rows."""

        def each(name: str) -> str:
            return ", ".join(dict.fromkeys(str(row[name]) for row in self.rows if row[name] is not None))

        commands = dict.fromkeys(str(row["command"]).split(" --output")[0] for row in self.rows)
        made = ", ".join(f"`{command}`" for command in commands)
        compilers = f", Triton {each('triton')}" if each("triton") else ""
        theirs = {row["impl"]: row["version"] for row in self.rows if row["impl"] in self.peers()}
        beside = "".join(f", {impl} of version {version}" for impl, version in sorted(theirs.items()))
        return f"torch {each('torch')}{compilers}{beside}, commit {each('commit')}, {each('date')}: {made}."


Content = Callable[[Rows], list[str]]


def on_gpus(suite: str, title: str, content: Content, also: str | None = None) -> Callable[[list[Row]], str]:
    """A table for each GPU that has rows of the suite, under a line that says where they come from."""

    def table(rows: list[Row]) -> str:
        of_suite = [row for row in rows if row["suite"] in (suite, also) and row["gpu"] is not None]
        # an older benchmark wrote rows without gates; later ones of the same implementation replace them
        replaced = {row["impl"] for row in of_suite if row.get("gates")}
        of_suite = [row for row in of_suite if row.get("gates") or row["impl"] not in replaced]
        blocks = []
        for gpu in sorted({row["gpu"] for row in of_suite if row["suite"] == suite}):
            here = Rows(row for row in of_suite if row["gpu"] == gpu)
            blocks.append("\n".join([f"{title} on one {gpu}. {here.origin()}", "", *content(here)]))
        return "\n\n".join(blocks) if blocks else nothing(suite, "h200")

    return table


def nothing(suite: str, machine: str) -> str:
    return f"Not measured yet; `flash-kda bench {suite} --output benchmarks/results/{machine}.jsonl` makes the rows."


def grid(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return head + ["| " + " | ".join(cells) + " |" for cells in lines]


def ms(row: Row | None) -> str:
    return MISSING if row is None else f"{milliseconds(row):.3f}"


def over(row: Row | None, other: Row | float | None, digits: int = 2) -> str:
    """``row``'s time in units of another row's, or of some milliseconds."""
    if row is None or other is None:
        return MISSING
    return f"{milliseconds(row) / (other if isinstance(other, float) else milliseconds(other)):.{digits}f}"


def error(value: Any) -> str:
    return "" if value is None else f"{value:.1e}"


def forward(here: Rows) -> list[str]:
    """Suite ``forward``, in the order of :data:`BEST`; whatever else has rows comes after."""
    cases = suites.forward(False)
    found = {(row["heads"], seq_lens(row)): row for row in here.rows if row["impl"] == FWD}
    order = [*BEST, *(key for key in found if key not in BEST)]
    by_key = {(case.heads, seq_lens({"seq_lens": bench_rows.written(case.lengths)})): case for case in cases}
    peers = here.peers()
    lines = []
    for heads, lengths in order:
        row, known = found.get((heads, lengths)), BEST.get((heads, lengths))
        numbers = [MISSING] * 5
        if row is not None:
            floor = row["floor_ms"]
            numbers = [f"{floor:.3f}", ms(row), f"{row['eager_ms']:.3f}", over(row, floor), error(row["rel_l2_out"])]
        case = by_key.get((heads, lengths))
        others = [ms(here.find(case, peer) if case else None) for peer in peers]
        best = "" if known is None else f"{known.ms:#.3g}" + (f" ({known.whose})" if known.whose else "")
        lines.append((str(heads), lengths, *numbers, *others, best))
    times = ("floor, ms", "CUDA graph, ms", "eager, ms", "x floor", "error", *(f"{peer}, ms" for peer in peers))
    return grid(("heads", "tokens of each sequence", *times, "best other, ms"), lines)


def cp(here: Rows) -> list[str]:
    peers = here.peers()
    cases = suites.cp(False)
    kinds = list(dict.fromkeys((*_gates(case), case.heads) for case in cases))
    lines = []
    for case in sorted(cases, key=lambda case: (kinds.index((*_gates(case), case.heads)), case.tokens)):
        cut, serial = here.find(case, FWD_CP), here.find(case, FWD)
        floor = cut["floor_ms"] if cut else None
        lines.append(
            (
                *_gates(case),
                str(case.heads),
                f"{case.tokens:,}",
                MISSING if floor is None else f"{floor:.3f}",
                ms(cut),
                over(cut, floor),
                str(cut["segments"]) if cut else MISSING,
                ms(serial),
                over(serial, cut),
                error(cut["rel_l2_out"]) if cut else MISSING,
                *(ms(here.find(case, peer)) for peer in peers),
            )
        )
    ours = ("floor, ms", "fwd_cp, ms", "x floor", "segments", "fwd, ms", "fwd / fwd_cp", "error")
    return grid(("gates", "lower_bound", "heads", "tokens", *ours, *(f"{peer}, ms" for peer in peers)), lines)


def bars(here: Rows) -> list[str]:
    lines = []
    for (gates, bound, heads), asked in BARS.items():
        for tokens, must, aim in asked:
            case = Case("cp", heads, (tokens,), gates, bound)
            row = here.find(case, FWD_CP)
            verdict = MISSING
            if row is not None:
                verdict = "aim" if milliseconds(row) <= aim else "must" if milliseconds(row) <= must else "missed"
            lines.append((*_gates(case), str(heads), f"{tokens:,}", f"{must:g}", f"{aim:g}", ms(row), verdict))
    return grid(("gates", "lower_bound", "heads", "tokens", "must, ms", "aim, ms", "fwd_cp, ms", "reached"), lines)


def recipe(here: Rows) -> list[str]:
    """Three tables, as published: by lower_bound and length, by batch, and the scan of the gates."""
    lines, by_batch = [], []
    for case in suites.recipe(False):
        if case.suite != "recipe":
            continue
        cut, serial, summary = (here.find(case, impl) for impl in (FWD_CP, FWD, STATE_ONLY))
        segments = str(cut["segments"]) if cut else MISSING
        ours = (ms(serial), ms(cut), over(serial, cut))
        published = PUBLISHED.get((case.lower_bound, case.tokens))
        if len(case.lengths) == 1 and published is not None:
            theirs = (*(f"{x:.2f}" for x in published), f"{published[0] / published[1]:.2f}")
            share = "0" if cut and cut["segments"] == 1 else _percent(summary, cut)
            lines.append((f"{case.lower_bound:g}", f"{case.tokens:,}", *theirs, *ours, segments, share))
        batch = (len(case.lengths), case.lengths[0])
        if case.lower_bound == -5 and (batch in PUBLISHED_BATCHES or batch[0] > 1):
            known = PUBLISHED_BATCHES.get(batch)
            theirs_ms = "" if known is None else f"{known:.2f}"
            by_batch.append((str(batch[0]), f"{batch[1]:,}", theirs_ms, *ours, segments))
    by_batch.sort(key=lambda cells: (int(cells[1].replace(",", "")), int(cells[0])))
    times = ("fwd, ms", "fwd_cp, ms", "fwd / fwd_cp")
    theirs = ("H20: serial, ms", "H20: CP, ms", "H20: serial / CP")
    scans = []
    for case in suites.warmup(False):
        row = here.find(case, WARMUP_CHUNKS)
        floor = row["floor_ms"] if row else None
        allowed = MISSING if floor is None else f"{1.5 * floor + 5e-3:.4f}"
        measured = [MISSING, MISSING] if row is None else [f"{floor:.4f}", f"{milliseconds(row):.4f}"]
        numbers = (f"{case.lower_bound:g}", str(case.heads), f"{case.tokens:,}", str(case.segments))
        scans.append((*numbers, f"{PUBLISHED_SCAN_MS:g}", measured[0], allowed, measured[1]))
    return [
        *grid(("lower_bound", "tokens", *theirs, *times, "segments", "summary alone / fwd_cp"), lines),
        "",
        *grid(("batch", "tokens", theirs[0], *times, "segments"), by_batch),
        "",
        *grid(
            (
                "lower_bound",
                "heads",
                "tokens",
                "segments",
                "H20, ms",
                "floor, ms",
                "1.5 floors + 5 us",
                "get_warmup_chunks, ms",
            ),
            scans,
        ),
    ]


def sweep(here: Rows) -> list[str]:
    """How often ``fwd_cp`` exceeds what is allowed beside ``fwd``, and where."""
    cases = suites.sweep(False)
    lines, worst = [], []
    for gates in dict.fromkeys(case.gates for case in cases):
        for layout in (PACKED, KNOWN):
            of = [case for case in cases if case.gates == gates]
            pairs = [(case, here.find(case, FWD), here.find(case, FWD_CP, layout)) for case in of]
            both = [(case, a, b) for case, a, b in pairs if a is not None and b is not None]
            slower = [(milliseconds(b) / milliseconds(a), case, a, b) for case, a, b in both if suites.slower(b, a)]
            ratios = sorted(milliseconds(a) / milliseconds(b) for _, a, b in both)
            spread = f"{ratios[0]:.2f} / {ratios[len(ratios) // 2]:.2f} / {ratios[-1]:.2f}" if ratios else MISSING
            missing = len(of) - len(both)
            lines.append((gates, layout, str(len(both)), str(missing), str(len(slower)) if both else MISSING, spread))
            worst += slower
    found = grid(("gates", "offsets", "cases", MISSING, "too slow", "fwd / fwd_cp, min / median / max"), lines)
    if worst:
        worst.sort(key=lambda x: -x[0])
        slow = [
            (case.gates, b["layout"], str(case.heads), seq_lens(b), ms(a), ms(b), f"{ratio:.2f}", str(b["segments"]))
            for ratio, case, a, b in worst
        ]
        found += ["", *grid(("gates", "offsets", "heads", "tokens", "fwd, ms", "fwd_cp, ms", "fwd_cp / fwd", "segments"), slow)]
    return found


def scaling(here: Rows) -> list[str]:
    """Time for each token against that of the shortest length."""
    lines = []
    first: dict[str, Row | None] = {}
    for case in suites.scaling(False):
        row = here.find(case, FWD_CP)
        base = first.setdefault(case.gates, row)
        linear = milliseconds(base) / base["tokens"] * case.tokens if base else None
        cells = (ms(row), over(row, row["floor_ms"] if row else None), over(row, linear, 3))
        lines.append((*_gates(case), str(case.heads), f"{case.tokens:,}", *cells))
    return grid(("gates", "lower_bound", "heads", "tokens", "fwd_cp, ms", "x floor", "x linear"), lines)


def host(here: Rows) -> list[str]:
    """Rows that an older benchmark wrote have no gates."""
    lines = []
    for impl in (FWD, FWD_CP):
        found = [row for row in here.rows if row["impl"] == impl and row["heads"] == 12 and row["tokens"] == 2048]
        row = max(reversed(found), key=lambda row: row["date"], default=None)
        numbers = (f"{row['host_us']:.1f}", f"{row['add_us']:.1f}") if row else (MISSING, MISSING)
        lines.append((impl, "12", "2,048", *numbers))
    return grid(("function", "heads", "tokens", "host time of a call, us", "of an addition of 8 numbers, us"), lines)


def accuracy(here: Rows) -> list[str]:
    """Errors of the worst head, and for other packages the largest ratio of ours to theirs on one head."""
    peers = here.peers()
    lines = []
    for case in suites.accuracy(False):
        found = {impl: here.find(case, impl) for impl in (ROUNDING, FWD, FWD_CP, *peers)}
        cells = [case.gates, f"{case.lower_bound:g}", f"{case.tokens:,}", _worst(found[ROUNDING], "out")]
        cells += [_worst(found[impl], what) for what in ("out", "state") for impl in (FWD, FWD_CP)]
        for peer in peers:
            row = found[peer]
            cells += [_worst(row, "out"), _worst(row, "state")]
            cells += [_over(found[FWD], row, what) for what in ("out", "state")]
        if not peers:
            dropped = found[FWD_CP]
            cells.append(MISSING if dropped is None else _small(dropped.get("dropped")))
        lines.append(cells)
    columns = ["input", "lower_bound", "T", "rounding", "out, fwd", "out, fwd_cp", "state, fwd", "state, fwd_cp"]
    for peer in peers:
        columns += [f"out, {peer}", f"state, {peer}", "out, fwd over it", "state, fwd over it"]
    return grid(columns if peers else [*columns, "dropped"], lines)


def reference_accuracy(rows: list[Row]) -> str:
    here = Rows(row for row in rows if row["suite"] == "accuracy" and row["gpu"] is None)
    if not here.rows:
        return nothing("accuracy --device cpu", "cpu")
    machines = ", ".join(dict.fromkeys(row["cpu"] for row in here.rows))
    return "\n".join([f"On {machines}. {here.origin()}", "", *accuracy(here)])


def _gates(case: Case) -> tuple[str, str]:
    return case.gates, f"{case.lower_bound:g}"


def _percent(part: Row | None, whole: Row | None) -> str:
    return MISSING if part is None or whole is None else f"{100 * milliseconds(part) / milliseconds(whole):.0f} %"


def _worst(row: Row | None, what: str) -> str:
    if row is None:
        return MISSING
    heads = row.get(f"head_rel_l2_{what}")
    return "NaN or inf" if not heads else f"{max(heads):.1e}"


def _over(ours: Row | None, theirs: Row | None, what: str) -> str:
    """Largest ratio of our error to theirs on one head. The rows need not be of one run; the inputs are the same."""
    if ours is None or theirs is None:
        return MISSING
    heads = [row.get(f"head_rel_l2_{what}") for row in (ours, theirs)]
    return f"{max(a / b for a, b in zip(*heads, strict=True) if b > 0):.2f}" if all(heads) else ""


def _small(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "forward": on_gpus("forward", "`flash_kda.fwd`", forward),
    "cp": on_gpus("cp", "`flash_kda.fwd_cp` and `flash_kda.fwd`", cp),
    "bars": on_gpus("cp", "`flash_kda.fwd_cp`", bars),
    "recipe": on_gpus("recipe", "`flash_kda`", recipe, also="warmup"),
    "sweep": on_gpus("sweep", "`flash_kda.fwd_cp` beside `flash_kda.fwd`", sweep),
    "scaling": on_gpus("scaling", "`flash_kda.fwd_cp`", scaling),
    "host": on_gpus("host", "One ordinary call", host),
    "accuracy": on_gpus("accuracy", "Errors", accuracy),
    "reference-accuracy": reference_accuracy,
}

PAGES: dict[Path, tuple[str, ...]] = {
    ROOT / "README.md": ("forward", "cp"),
    ROOT / "docs" / "measured.md": ("forward", "bars", "sweep", "scaling", "host"),
    ROOT / "docs" / "recipe.md": ("recipe",),
    ROOT / "docs" / "numerics.md": ("reference-accuracy", "accuracy"),
}


def filled(page: str, name: str, content: str) -> str:
    """``page`` with ``content`` between the markers of table ``name``.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    first, last = f"<!-- {name}-table -->", f"<!-- /{name}-table -->"
    before, found, rest = page.partition(first)
    _, closed, after = rest.partition(last)
    if not (found and closed) or first in rest or last in before + after:
        raise ValueError(f"a page must hold {first} and {last} once each, in this order")
    return f"{before}{first}\n\n{content}\n\n{last}{after}"


def main(
    arguments: Sequence[str] | None = None, results: Path = RESULTS, pages: dict[Path, tuple[str, ...]] | None = None
) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a file is not up to date")
    options = parser.parse_args(arguments)
    rows = bench_rows.latest(bench_rows.read(sorted(results.glob("*.jsonl"))))
    made = {name: table(rows) for name, table in TABLES.items()}
    stale = False
    for path, names in (PAGES if pages is None else pages).items():
        page = wanted = path.read_text(encoding="utf-8")
        for name in names:
            wanted = filled(wanted, name, made[name])
        if wanted == page:
            continue
        stale = True
        if not options.check:
            path.write_text(wanted, encoding="utf-8")
        print(f"{path}: {'not up to date' if options.check else 'rewritten'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
