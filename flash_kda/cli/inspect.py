"""``flash-kda inspect``: how long each head remembers, and how much of it each rule would replay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from .. import samples
from ..constants import CHUNK, EXIT_EPS
from ..samples import TOKEN_TENSORS, Sample
from . import files, recipe
from .console import UserError, heading, line, shorten, steps, table
from .memory import BATCH, Memory, measure

EXITS = (-16, -20, -24)
"""Exponents of the tolerances that are reported; the default of the scan is 2^-20."""
DEFAULT_EXIT = EXITS[1]
COMPARED_EXIT = -16
COMPARED = (
    ("random", -5.0),
    ("random", -1.0),
    ("random", -0.5),
    ("slow_eighth", -5.0),
    ("log_uniform", -5.0),
    ("real", -5.0),
)
"""Rows of ``--table``: gates and lower_bound."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
HEADS = 4
assert 2.0**DEFAULT_EXIT == EXIT_EPS


@dataclass(frozen=True)
class Options:
    """The options of the command, as typed."""

    file: Path | None = None
    gates: str | None = None
    lower_bound: float | None = None
    cu_seqlens: str | None = None
    heads: int | None = None
    chunks: int = 256
    plot: Path | None = None


def main(options: Options) -> int:
    """Prints the report and draws the picture; 0.

    Raises:
        UserError: bad input.
    """
    _check_plot(options)
    sample, origin = _sample(options)
    with steps(_steps(sample)) as begin:
        memory = measure(sample, begin)
    line(f"flash-kda inspect: {origin}")
    line(f"the last {memory.tokens} tokens, H={sample.heads}, lower_bound {sample.lower_bound:g}")
    _print_time_constants(memory)
    _print_decay(memory)
    _print_chunks(memory)
    if options.plot is not None:
        from .picture import draw

        draw(memory, origin, options.plot)
        line()
        line(f"drew {options.plot}")
    return 0


def compare(options: Options) -> int:
    """Prints one row for each of :data:`COMPARED`; 0."""
    for name, value in (
        ("a file", options.file),
        ("gates", options.gates),
        ("lower-bound", options.lower_bound),
        ("cu-seqlens", options.cu_seqlens),
        ("plot", options.plot),
    ):
        if value is not None:
            raise UserError(f"table must be asked for alone, got {name} {value}; it makes its own six inputs")
    heads = options.heads or HEADS
    rows = []
    batches = -(-options.chunks // max(1, BATCH // heads))
    with steps(len(COMPARED) * batches) as begin:
        for gates, lower_bound in COMPARED:
            sample = samples.make(gates, options.chunks * CHUNK, heads, lower_bound=lower_bound)
            memory = measure(sample, lambda what, gates=gates: begin(f"{gates}: {what}"))  # type: ignore[misc]
            published, scan = memory.published()
            left = memory.norm[min(published, memory.norm.shape[0] - 1)] if published is not None else None
            rows.append(
                [
                    f"{gates}, {lower_bound:g}",
                    _range(memory.until(2.0**COMPARED_EXIT), options.chunks),
                    _range(memory.bound(2.0**COMPARED_EXIT), options.chunks),
                    _chunks(published, options.chunks),
                    _chunks(scan, options.chunks),
                    "" if left is None else f"{shorten(left.min().item())} .. {shorten(left.max().item())}",
                ]
            )
    line(f"Chunks of {CHUNK} tokens to replay until ||M||_F <= 2^{COMPARED_EXIT}")
    line(f"(ranges over {heads} heads; {options.chunks} chunks looked at)")
    line()
    table(("gates, bound", "measured", "sound", "published", "(its scan)", "||M||_F left"), rows)
    line()
    _explain()
    return 0


def _check_plot(options: Options) -> None:
    if options.plot is None:
        return
    if find_spec("matplotlib") is None:
        raise UserError('plot must have matplotlib, got none installed; pip install "flash-kda[plot]"')
    if options.plot.suffix.lower() != ".png":
        raise UserError(f"plot must be the name of a .png file, got {options.plot}")
    files.check_output(options.plot, options.file, "plot")


def _sample(options: Options) -> tuple[Sample, str]:
    """The end of the longest sequence, and a sentence that says what it is."""
    tokens = options.chunks * CHUNK
    lower_bound = samples.DEFAULT_LOWER_BOUND if options.lower_bound is None else options.lower_bound
    if options.file is not None:
        if options.gates is not None or options.heads is not None:
            raise UserError(
                f"gates and heads must not be given with a file, got {options.file}; they describe synthetic inputs"
            )
        sample = files.read(options.file, lower_bound=lower_bound, scale=None, cu_seqlens=options.cu_seqlens)
        files.check(sample, str(options.file))
        return _end(sample, tokens, str(options.file))
    if options.cu_seqlens is not None:
        raise UserError("cu-seqlens must be given with a file, got none; synthetic inputs are one sequence")
    gates = "real" if options.gates is None else options.gates
    sample = samples.make(gates, tokens, options.heads or HEADS, lower_bound=lower_bound)
    what = "packaged activations of a KDA layer on real text, repeated" if gates == "real" else f"synthetic gates '{gates}'"
    files.check(sample, what)
    return sample, what


def _end(sample: Sample, tokens: int, origin: str) -> tuple[Sample, str]:
    row, start, end = 0, 0, sample.q.shape[1]
    if sample.cu_seqlens is not None:
        offsets = sample.cu_seqlens.tolist()
        lengths = [b - a for a, b in itertools.pairwise(offsets)]
        n = max(range(len(lengths)), key=lengths.__getitem__)
        start, end = offsets[n], offsets[n + 1]
        origin += f", sequence {n} of {len(lengths)}"
    elif sample.q.shape[0] > 1:
        origin += f", batch row 0 of {sample.q.shape[0]}"
    # Chunks are counted from the start of the sequence, as everywhere.
    first = max(start, start + (files.whole_chunks(end - start) * CHUNK - tokens))
    part = {name: getattr(sample, name)[row : row + 1, first:end] for name in TOKEN_TENSORS}
    return replace(sample, **part, cu_seqlens=None, initial_state=None), origin


def _steps(sample: Sample) -> int:
    return -(-files.whole_chunks(sample.q.shape[1]) // max(1, BATCH // sample.heads))


def _print_time_constants(memory: Memory) -> None:
    heading("Time constants of the channels in tokens (-1 / mean log alpha), quantiles")
    q = torch.tensor(QUANTILES, dtype=memory.time_constant.dtype)
    values = torch.quantile(memory.time_constant, q, dim=1).T
    columns = ("head", "shortest", *(f"{x:.0%}" for x in QUANTILES[1:-1]), "longest")
    table(columns, [[str(h), *(shorten(x) for x in row)] for h, row in enumerate(values.tolist())])


def _print_decay(memory: Memory) -> None:
    heading("||M||_F after walking back so many tokens (it begins at ||I||_F = 11.3)")
    walked = memory.norm.shape[0] - 1
    marks = [j for j in (1, 4, 16, 32, 64, 128, 192, 256, 1024, 4096) if j <= walked]
    if not marks or marks[-1] != walked:
        marks.append(walked)
    rows = [[str(h), *(shorten(memory.norm[j, h].item()) for j in marks)] for h in range(memory.norm.shape[1])]
    table(("head", *(str(min(j * CHUNK, memory.tokens)) for j in marks)), rows)


def _print_chunks(memory: Memory) -> None:
    heading(f"Chunks of {CHUNK} tokens to replay, measured until ||M||_F <= 2^-n, and by two rules")
    available = files.whole_chunks(memory.tokens)
    measured = [memory.until(2.0**e) for e in EXITS]
    bound = memory.bound(2.0**DEFAULT_EXIT)
    published, scan = memory.published()
    left = _left(memory, published)
    rows = []
    for h in range(memory.norm.shape[1]):
        numbers = [_chunks(x[h], available) for x in (*measured, bound)]
        rows.append([str(h), *numbers, _chunks(published, available), "" if left is None else shorten(left[h].item())])
    table(("head", *(f"to 2^{e}" for e in EXITS), f"sound 2^{DEFAULT_EXIT}", "published", "||M||_F left"), rows)
    if recipe.fast_path(memory.sample.lower_bound):
        line(f"Published rule: 1 chunk, as lower_bound < -1.73; its scan would say {_chunks(scan, available)}.")
    _explain()


def _left(memory: Memory, published: int | None) -> Tensor | None:
    """``[H]`` norms where the published rule stops; 0 to its precision where the walk had ended before."""
    return None if published is None else memory.norm[min(published, memory.norm.shape[0] - 1)]


def _explain() -> None:
    line("measured   where the backward scan stops, by walking back chunk by chunk")
    line("sound      bound from the slowest channel of each token; certain, without looking at keys")
    line("published  mean rule of the published recipe, which is no bound: what it drops is")
    line("           ||M||_F left times the state before; below 2^-20 = 9.5e-07 is less than rounding")


def _chunks(x: int | None, available: int) -> str:
    return f"> {available}" if x is None else str(x)


def _range(values: Sequence[int | None], available: int) -> str:
    known = [x for x in values if x is not None]
    if not known:
        return f"> {available}"
    low, high = min(known), max(known)
    top = f"> {available}" if len(known) < len(values) else str(high)
    return str(low) if low == high and len(known) == len(values) else f"{low} - {top}"
