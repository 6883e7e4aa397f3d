"""``flash-kda plot``: what ``flash-kda bench`` wrote about one uncut or cut sequence, as a picture. Draws from rows only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..bench import rows as bench_rows
from ..bench.rows import Row, milliseconds
from ..bench.suites import DENSE, FWD, FWD_CP, STATE_ONLY
from . import files
from .console import UserError, line

FORMATS = (".svg", ".png")
DASHES = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
"""Of ``fwd`` and of other packages; ``fwd_cp`` is drawn through."""
STABLE: dict[Any, Any] = {"svg.hashsalt": "flash-kda"}
METADATA: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".png": {"Software": None}}
"""The same rows give the same file, bit by bit with the same matplotlib: no dates, no random names."""

Curves = dict[tuple[str, float], dict[str, dict[int, float]]]
"""Milliseconds by (gates, lower_bound), implementation and tokens."""


@dataclass(frozen=True)
class Options:
    """The options of the command, as typed."""

    rows: Sequence[Path]
    output: Path
    heads: int | None = None
    gpu: str | None = None


def main(options: Options) -> int:
    """Draws; 0.

    Raises:
        UserError: bad input, nothing to draw, no matplotlib.
    """
    if find_spec("matplotlib") is None:
        raise UserError('plot must have matplotlib, got none installed; pip install "flash-kda[plot]"')
    if options.output.suffix.lower() not in FORMATS:
        raise UserError(f"output must be the name of an .svg or .png file, got {options.output}")
    for path in options.rows:
        files.check_output(options.output, path)
    found = _one_machine(_drawable(_read(options.rows)), options.gpu)
    counts = Counter(row["heads"] for row in found)
    heads = min(counts, key=lambda h: (-counts[h], h)) if options.heads is None else options.heads
    found = [row for row in found if row["heads"] == heads]
    if not found:
        raise UserError(f"heads must be of {', '.join(map(str, sorted(counts)))}, got {heads}")
    curves, floor = _curves(found)
    _draw(curves, floor, f"{_machine(found[0])}, one sequence, H={heads}, D=128", options.output)
    line(f"drew {options.output} from {len(found)} rows")
    return 0


def _read(paths: Sequence[Path]) -> list[Row]:
    try:
        return bench_rows.latest(bench_rows.read(paths))
    except OSError as error:
        raise UserError(f"{error.filename} must be readable, got {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"rows must be text, got {error.reason} in one of {', '.join(map(str, paths))}") from None
    except KeyError as error:
        raise UserError(f"rows must be those of flash-kda bench, got one without {error}") from None
    except ValueError as error:
        raise UserError(str(error)) from None


def _drawable(found: Iterable[Row]) -> list[Row]:
    """Timed rows of one dense sequence by a whole forward."""
    return [
        row
        for row in found
        if row.get("layout") == DENSE
        and isinstance(row["seq_lens"], list)
        and len(row["seq_lens"]) == 1
        and row["impl"] != STATE_ONLY
        and (row["graph_ms"] is not None or row["eager_ms"] is not None)
    ]


def _one_machine(found: list[Row], wanted: str | None) -> list[Row]:
    machines = sorted({_machine(row) for row in found})
    if not machines:
        raise UserError("rows must hold times of one sequence, got none; 'flash-kda bench cp' makes them")
    if wanted is None and len(machines) > 1:
        raise UserError(f"gpu must be said where rows are of several, got {', '.join(machines)}")
    if wanted is not None and wanted not in machines:
        raise UserError(f"gpu must be of {', '.join(machines)}, got {wanted}")
    return [row for row in found if _machine(row) == (wanted or machines[0])]


def _machine(row: Row) -> str:
    return str(row["gpu"] or row.get("cpu") or "CPU")


def _curves(found: Iterable[Row]) -> tuple[Curves, dict[int, float]]:
    """Times, and the floor by tokens. Of rows about the same call in several suites the latest counts."""
    curves: Curves = {}
    floor = {}
    for row in sorted(found, key=lambda row: str(row["date"])):
        of_gates = curves.setdefault((row["gates"], row["lower_bound"]), {})
        of_gates.setdefault(row["impl"], {})[row["tokens"]] = milliseconds(row)
        floor[row["tokens"]] = row["floor_ms"]
    return curves, floor


def _draw(curves: Curves, floor: dict[int, float], title: str, path: Path) -> None:
    import matplotlib
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    impls = sorted({impl for of_gates in curves.values() for impl in of_gates}, key=lambda x: (x != FWD_CP, x != FWD, x))
    dashes: dict[str, Any] = {impl: "-" if impl == FWD_CP else DASHES[(i - 1) % len(DASHES)] for i, impl in enumerate(impls)}
    colours = [colormaps["viridis"](0.85 * i / max(len(curves) - 1, 1)) for i in range(len(curves))]
    ticks = sorted(floor)
    figure = Figure(figsize=(14, 5), layout="constrained")
    FigureCanvasAgg(figure)
    time, ratio, speedup = figure.subplots(1, 3)
    time.plot(ticks, [floor[t] for t in ticks], color="black", lw=1)
    ratio.axhline(1, color="black", lw=1)
    speedup.axhline(1, color="black", lw=1)
    for colour, of_gates in zip(colours, curves.values(), strict=True):
        ours = of_gates.get(FWD_CP, {})
        for impl, times in of_gates.items():
            style = {"color": colour, "ls": dashes[impl], "marker": "o", "ms": 3.5, "lw": 1.6 if impl == FWD_CP else 1.1}
            tokens = sorted(times)
            time.plot(tokens, [times[t] for t in tokens], **style)
            if impl == FWD_CP:
                ratio.plot(tokens, [times[t] / floor[t] for t in tokens], **style)
            both = [t for t in tokens if t in ours]
            if impl != FWD_CP and both:
                speedup.plot(both, [times[t] / ours[t] for t in both], **style)
    for axes, label in ((time, "ms"), (ratio, "fwd_cp, times the floor"), (speedup, "speed-up of fwd_cp over")):
        axes.set_xscale("log", base=2)
        axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
        if axes is ratio:
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}K"))
        axes.tick_params(axis="x", rotation=45)
        axes.grid(color="0.9", lw=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("tokens")
        axes.set_title(label, fontsize=10)
    shades = zip(colours, curves, strict=True)
    entries = [Line2D([], [], color=colour, lw=3, label=f"{gates}, {bound:g}") for colour, (gates, bound) in shades]
    entries += [Line2D([], [], color="0.3", ls=dashes[impl], label=impl) for impl in impls]
    entries.append(Line2D([], [], color="black", lw=1, label="memory floor"))
    figure.legend(handles=entries, loc="outside lower center", ncols=min(len(entries), 6), fontsize=9)
    figure.suptitle(title)
    suffix = path.suffix.lower()
    with files.replacing(path, "output") as temporary, matplotlib.rc_context(STABLE):
        figure.savefig(temporary, dpi=130, format=suffix[1:], metadata=METADATA[suffix])
