"""The picture of ``inspect --plot``: what is left of the past against tokens walked back, a line a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..constants import CHUNK, EXIT_EPS
from . import files
from .memory import Memory

LOWEST = 1e-8
MAX_NAMED = 8
"""Heads named one by one; of more, the colours run from the first to the last."""


def draw(memory: Memory, origin: str, path: Path) -> None:
    """Writes a PNG, whole or not at all."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    heads = memory.norm.shape[1]
    walked = memory.norm.shape[0] - 1
    tokens = [min(j * CHUNK, memory.tokens) for j in range(1, walked + 1)]
    stops, bounds = memory.until(EXIT_EPS), memory.bound(EXIT_EPS)
    published, _ = memory.published()
    mark: dict[str, Any] = {"mec": "black", "mew": 0.8, "ls": "none", "zorder": 4, "clip_on": False}
    colours = [colormaps["viridis"](0.92 * h / max(heads - 1, 1)) for h in range(heads)]
    for h, colour in enumerate(colours):
        curve = memory.norm[1:, h].tolist()
        axes.plot(tokens, curve, color=colour, lw=1.7)
        stop, bound = stops[h], bounds[h]
        if stop is not None:
            axes.plot(tokens[stop - 1], max(curve[stop - 1], LOWEST), "o", color=colour, ms=8, **mark)
        if bound is not None:
            axes.plot(bound * CHUNK, EXIT_EPS, "^", color=colour, ms=8, **mark)
        if published is not None and published <= walked:
            axes.plot(tokens[published - 1], max(curve[published - 1], LOWEST), "X", color=colour, ms=9, **mark)

    seen = int((memory.norm[1:] > LOWEST).any(1).sum())
    last = max([tokens[min(seen, walked - 1)], 2 * CHUNK, *(b * CHUNK for b in bounds if b is not None)])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(CHUNK * 0.9, last * 1.15)
    axes.set_ylim(LOWEST, 30)
    axes.axhspan(LOWEST, EXIT_EPS, color="0.92", zorder=0)
    axes.axhline(EXIT_EPS, color="0.4", lw=1, ls="--")
    label = {"facecolor": "0.92", "edgecolor": "none", "pad": 1.5}
    axes.text(
        CHUNK, EXIT_EPS * 0.55, "forgotten: less than rounding (2^-20)", color="0.3", va="top", fontsize=9, bbox=label, zorder=1
    )
    axes.xaxis.set_major_locator(FixedLocator([CHUNK * 2**i for i in range(20) if CHUNK * 2**i <= last * 1.15]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.grid(which="major", color="0.88", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("tokens walked back from the end")
    axes.set_ylabel("||M||_F: what is left of an earlier state")
    figure.suptitle("How long each head remembers", fontsize=14)
    axes.set_title(f"{origin}, lower_bound {memory.sample.lower_bound:g}", fontsize=9, color="0.35")

    grey: dict[str, Any] = {"color": "0.8", **mark}
    rule = f"published mean rule stops ({_count(published)})" if published is not None else "published mean rule: never stops"
    entries = [
        Line2D([], [], marker="X", ms=9, label=rule, **grey),
        Line2D([], [], marker="o", ms=8, label="backward scan stops, measured" + _missing(stops, memory.tokens), **grey),
        Line2D([], [], marker="^", ms=8, label="sound bound from gates alone" + _missing(bounds, memory.tokens), **grey),
    ]
    named = range(heads) if heads <= MAX_NAMED else (0, heads - 1)
    entries += [Line2D([], [], color=colours[h], lw=1.7, label=f"head {h}") for h in named]
    axes.legend(handles=entries, loc="best", fontsize=9, framealpha=0.95)

    with files.replacing(path, "plot") as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def _count(chunks: int) -> str:
    return "1 chunk" if chunks == 1 else f"{chunks} chunks"


def _missing(found: list[int | None], tokens: int) -> str:
    without = sum(x is None for x in found)
    return f" ({without} of {len(found)} heads: not in {tokens:,} tokens)" if without else ""
