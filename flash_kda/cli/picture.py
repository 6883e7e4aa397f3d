"""The picture of ``inspect --plot``: what is left of the past against tokens walked back, a line a head."""

from __future__ import annotations

import os
from pathlib import Path

from ..constants import CHUNK
from .memory import Memory

TOLERANCE_EXPONENT = -20
LOWEST = 2.0**-26
MAX_LEGEND = 8


def draw(memory: Memory, origin: str, path: Path) -> None:
    """Writes a PNG, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    eps = 2.0**TOLERANCE_EXPONENT
    heads = memory.norm.shape[1]
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    walked = memory.norm.shape[0] - 1
    tokens = [min(j * CHUNK, memory.tokens) for j in range(1, walked + 1)]

    from matplotlib import colormaps

    colours = colormaps["viridis"]
    stops, bounds = memory.until(eps), memory.bound(eps)
    for h in range(heads):
        colour = colours(0.9 * h / max(heads - 1, 1))
        curve = memory.norm[1:, h].clamp(min=LOWEST / 16).tolist()
        axes.plot(tokens, curve, color=colour, lw=1.6, label=f"head {h}" if heads <= MAX_LEGEND else None)
        stop = stops[h]
        if stop is not None:
            axes.plot(stop * CHUNK, curve[stop - 1], "o", color=colour, ms=7, mec="black", mew=0.8, zorder=4)
        bound = bounds[h]
        if bound is not None:
            axes.plot(bound * CHUNK, eps, "^", color=colour, ms=8, mec="black", mew=0.8, zorder=4)
    published, _ = memory.published()
    axes.axhspan(LOWEST, eps, color="0.93", zorder=0)
    axes.axhline(eps, color="0.45", lw=1, ls="--")
    if published is not None:
        axes.axvline(published * CHUNK, color="crimson", lw=1.6, ls=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(LOWEST, 20)
    axes.set_xlim(CHUNK * 0.9, max(tokens[-1], *(b * CHUNK for b in bounds if b is not None), CHUNK * 2) * 1.1)
    figure.savefig(path, dpi=130)
    del os, FuncFormatter, LogLocator, NullLocator
