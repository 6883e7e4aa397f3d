"""``flash-kda bench``: times and errors of named suites, checked before they are timed, as rows."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from .. import dispatch
from ..bench import rows, suites
from ..bench.impls import Peer, installed
from ..bench.rows import Row
from ..bench.run import Bench, commit_of
from ..bench.suites import FWD, FWD_CP, Case, allowed_ms, slower
from . import files
from .console import UserError, heading, line, table


@dataclass(frozen=True)
class Options:
    """The options of the command, as typed."""

    suites: Sequence[str] = ()
    only: Sequence[str] = ()
    device: str | None = None
    impl: str | None = None
    peers: bool = True
    seconds: float = 0.4
    smoke: bool = False
    commit: str | None = None
    output: Path | None = None


def main(options: Options) -> int:
    """Runs the cases asked for; 0 if every result of this package was right and was measured, 1 if not.

    Raises:
        UserError: bad input.
    """
    chosen = list(options.suites or suites.SUITES)
    unknown = [name for name in chosen if name not in suites.SUITES]
    if unknown:
        raise UserError(f"suites must be of {', '.join(suites.SUITES)}, got {', '.join(unknown)}")
    cases = suites.cases(chosen, smoke=options.smoke)
    if options.only:
        cases = [case for case in cases if any(fnmatchcase(case.name, f"*{pattern}*") for pattern in options.only)]
    if not cases:
        raise UserError(
            f"only must match the name of a case, got {' '.join(options.only)}; cp/real-5/h16/65536 is one of suite cp"
        )
    if options.output is not None:
        files.check_output(options.output, None)
    device = _device(options.device, smoke=options.smoke or chosen == ["accuracy"])
    try:
        impl = dispatch.choose(options.impl or ("sm90" if device.type == "cuda" else "auto"), device)
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"{error}; see 'flash-kda doctor'") from None
    peers = _peers(cases, device) if options.peers else []
    done: list[Row] = []

    def emit(case: Case, row: Row) -> None:
        done.append(row)
        line(_one_line(case, row))
        if options.output is not None:
            _append(row, options.output)

    bench = Bench(
        cases,
        device,
        impl=impl,
        peers=peers,
        seconds=0.0 if options.smoke else options.seconds,
        commit=options.commit or commit_of(Path(__file__).parent),
        command=_command(sys.argv[1:]),
        emit=emit,
        say=line,
    )
    line(f"{len(cases)} cases on {device} by {impl}; copy bandwidth {bench.bandwidth / 1e12:.3f} TB/s")
    failures = bench.run()
    _print_slower(done)
    if failures:
        line(f"{failures} results were wrong or missing; none of them was timed")
    return 1 if failures else 0


def _device(name: str | None, *, smoke: bool) -> torch.device:
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise UserError("device must be one that PyTorch sees, got cuda and no CUDA device; see 'flash-kda doctor'")
    if name != "cpu" and there:
        return torch.device("cuda", torch.cuda.current_device())
    if not smoke:
        raise UserError("device must be a GPU for suites that time, got cpu; --smoke runs them on tiny shapes")
    return torch.device("cpu")


def _peers(cases: Sequence[Case], device: torch.device) -> list[Peer]:
    if not any(case.peers for case in cases):
        return []
    found, missing = installed(device)
    for peer in found:
        line(f"beside it: {peer.name} {peer.version}")
    for name, reason in missing.items():
        line(f"not beside it: {name}, {reason}")
    return found


def _command(arguments: Sequence[str]) -> str:
    """The command for the rows, without the file that they are written to, and the commit, which they hold."""
    dropped = ("--output", "--commit")
    kept = [word for at, word in enumerate(arguments) if not {word, *arguments[at - 1 : at]} & set(dropped)]
    return shlex.join(["flash-kda", *(word for word in kept if not word.startswith(tuple(f"{x}=" for x in dropped)))])


def _append(row: Row, output: Path) -> None:
    try:
        rows.append(row, output)
    except OSError as error:
        raise UserError(f"output could not be written to {output}: {error.strerror or error}") from None


def _one_line(case: Case, row: Row) -> str:
    parts = [f"{case.name:34s} {row['impl']:28s}"]
    if row["layout"] not in ("dense", "packed"):
        parts.append(f"({row['layout']})")
    for name, text in (("graph_ms", "graph"), ("eager_ms", "eager"), ("floor_ms", "floor")):
        if row[name] is not None:
            parts.append(f"{text} {row[name]:.4f} ms")
    if row.get("host_us") is not None:
        parts.append(f"host {row['host_us']:.1f} us, an addition {row['add_us']:.1f}")
    for name, text in (("rel_l2_out", "error"), ("rel_l2_state", "state")):
        if row[name] is not None:
            parts.append(f"{text} {row[name]:.2e}")
    if row.get("ratio_out") is not None:
        parts.append(f"ours over theirs, worst head {row['ratio_out']:.2f}")
    if row["segments"] is not None:
        parts.append(f"segments {row['segments']}")
    if row.get("path"):
        parts.append(f"[{row['path']}]")
    return "  ".join(parts)


def _print_slower(done: Sequence[Row]) -> None:
    """Cases of suite sweep where fwd_cp exceeds what is allowed."""
    swept = [row for row in done if row["suite"] == "sweep"]
    if not swept:
        return
    serial = {_shape(row): row for row in swept if row["impl"] == FWD}
    cut = [row for row in swept if row["impl"] == FWD_CP and _shape(row) in serial]
    over = [row for row in cut if slower(row, serial[_shape(row)])]
    heading(f"fwd_cp exceeds max(3 %, 8 us) (lengths on the host: 1 us) beside fwd in {len(over)} of {len(cut)} cases")
    lines = []
    for row in over:
        fwd = rows.milliseconds(serial[_shape(row)])
        numbers = [f"{x:.4f}" for x in (fwd, rows.milliseconds(row), allowed_ms(fwd, row["layout"]))]
        lines.append([f"{row['gates']}, H={row['heads']}, {rows.seq_lens(row)}, {row['layout']}", *numbers])
    if lines:
        table(("case", "fwd, ms", "fwd_cp", "allowed"), lines)


def _shape(row: Row) -> tuple[object, ...]:
    return row["gates"], row["heads"], rows.seq_lens(row)
