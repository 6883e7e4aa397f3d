"""A case from inputs to rows: checked first, then timed. What is wrong is not timed, and is counted."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import api, dispatch
from .._version import __version__
from ..constants import CHUNK, EXIT_EPS, HEAD_DIM
from ..plan import SegmentPlan, plan_segments
from ..samples import Sample
from ..sm90.variants import TRITON_VERSION
from . import gate, rows, timing
from .impls import FORWARD, Peer, Problem, problem
from .inputs import Source
from .rows import Row
from .suites import DENSE, FWD, FWD_CP, KNOWN, PACKED, STATE_ONLY, WARMUP_CHUNKS, Case, slower

ROUNDING = "bf16 rounding"
"""Stands for an implementation that errs only where it must: the exact outputs, rounded."""
SEGMENT = 256
"""Tokens of ``fwd_cp``'s segments in suite ``accuracy``."""


class Bench:
    """Runs cases and hands on their rows.

    Args:
        cases: all that will be run.
        device: where; a CUDA device must be the current one.
        impl: of ``fwd`` and ``fwd_cp``; the other functions choose for themselves.
        peers: other packages to run where a case wants them.
        seconds: for one measurement, about.
        commit, command: for the rows.
        emit: is given each row as soon as its case is done.
        say: is given what was not measured, and why.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        device: torch.device,
        *,
        impl: str,
        peers: Sequence[Peer] = (),
        seconds: float,
        commit: str | None,
        command: str,
        emit: Callable[[Case, Row], None],
        say: Callable[[str], None],
    ) -> None:
        self.cases, self.device, self.impl, self.peers, self.seconds = cases, device, impl, peers, seconds
        self.emit, self.say = emit, say
        self.failures = 0
        self.source = Source(cases, device)
        self.exact = gate.Exact()
        self.bandwidth = timing.copy_bandwidth(device)
        cuda = device.type == "cuda"
        self.common: dict[str, Any] = {
            "gpu": torch.cuda.get_device_name(device) if cuda else None,
            "torch": torch.__version__,
            "commit": commit,
            "date": datetime.date.today().isoformat(),
            "command": command,
        }
        if not cuda:
            threads = torch.get_num_threads()
            self.common["cpu"] = f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"

    def run(self) -> int:
        """Runs all cases; how many results of this package were wrong or missing."""
        measures = {"host": self.host, "warmup": self.warmup, "accuracy": self.accuracy}
        for case in self.cases:
            with self.guarded(case, "inputs"):
                sample = self.source.sample(case)
                for row in measures.get(case.suite, self.timed)(case, sample):
                    self.emit(case, row)
        return self.failures

    @contextmanager
    def guarded(self, case: Case, who: str, *, ours: bool = True) -> Iterator[None]:
        """Goes on after what went wrong for one implementation, and says it; counts it if it was ours."""
        try:
            yield
        except Exception as error:
            # A foreign package may raise anything; ours only what is listed, or there is a fault to be seen whole.
            if ours and not isinstance(error, (gate.WrongError, RuntimeError, ValueError)):
                raise
            self.failures += ours
            kind = "WRONG" if isinstance(error, gate.WrongError) else type(error).__name__
            self.say(f"{case.name}: {who} not measured, {kind}: {(str(error).splitlines() or [''])[0]}")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def row(self, case: Case, impl: str, **values: object) -> Row:
        """What is the same for all rows of a case, and what is given; ours unless a version says otherwise."""
        known: dict[str, object] = {
            "suite": case.suite,
            "impl": impl,
            "gates": case.gates,
            "lower_bound": case.lower_bound,
            "heads": case.heads,
            "tokens": case.tokens,
            "seq_lens": rows.written(case.lengths),
            "layout": case.layouts[0],
            "version": __version__,
        }
        if "version" in values:
            known["triton"] = _version("triton")
        else:
            known["path"] = path = dispatch.last_path()
            known["triton"] = f"{TRITON_VERSION} (build)" if path == "sm90" else None
        return rows.make(**{**known, **self.common, **values})

    # Suites forward, cp, recipe, sweep, scaling

    def timed(self, case: Case, sample: Sample) -> Iterator[Row]:
        floor = self.floor_ms(5, case.tokens, case.heads)
        first = problem(sample, case.lengths, case.layouts[0], self.impl)
        serial_call = serial_out = serial = None
        with self.guarded(case, FWD):
            call = FORWARD[FWD].prepare(first)
            out, _ = call()
            gate.check_finite(out)
            error = self.exact.error(case, first, out)
            serial_call, serial_out = call, out
            if FWD in case.impls:
                serial = self.row(case, FWD, segments=1, floor_ms=floor, rel_l2_out=error, **self.times(call))
        made = []
        plan = None
        if FWD_CP in case.impls and serial_out is not None and serial_call is not None:
            for layout in case.layouts:
                with self.guarded(case, FWD_CP):
                    as_handed = problem(sample, case.lengths, layout, self.impl)
                    call = FORWARD[FWD_CP].prepare(as_handed)
                    out, _ = call()
                    gate.check_finite(out)
                    error = self.exact.error(case, as_handed, out)
                    gate.check_apart(out, serial_out)
                    plan = self.plan(as_handed, out)
                    segments = 1 if plan is None else int(plan.seq_map.diff().max())
                    times = self.times(call)
                    row = self.row(case, FWD_CP, layout=layout, segments=segments, floor_ms=floor, rel_l2_out=error, **times)
                    if case.suite == "sweep" and serial is not None and slower(row, serial):
                        # Once more, both: a single outlier is no finding, and what is one stays.
                        serial |= self.times(serial_call)
                        row |= self.times(call)
                    made.append(row)
        if STATE_ONLY in case.impls and plan is not None and len(case.lengths) == 1:
            with self.guarded(case, STATE_ONLY):
                made.append(self.summary(case, first, plan))
        yield from [serial, *made] if serial is not None else made
        yield from self.foreign(case, first, floor)

    def foreign(self, case: Case, first: Problem, floor: float) -> Iterator[Row]:
        for peer in self.peers if case.peers else ():
            with self.guarded(case, peer.name, ours=False):
                call = peer.prepare(first)
                out, _ = call()
                gate.check_finite(out)
                error = self.exact.error(case, first, out)
                # Whether it cuts is its own affair.
                yield self.row(case, peer.name, floor_ms=floor, rel_l2_out=error, version=peer.version, **self.times(call))

    def summary(self, case: Case, given: Problem, plan: SegmentPlan) -> Row:
        """``state_only`` alone, on the segments that have a successor."""
        x = given.sample
        offsets = plan.cu_seqlens[: int(plan.seq_map[1])]
        arguments = (x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.lower_bound, offsets)

        def call() -> Any:
            return api.state_only(*arguments, calc_mt=True, impl="auto")

        ht, mt = call()
        gate.check_summary(given, offsets, ht, mt)
        floor = self.floor_ms(3, int(offsets[-1]), case.heads)
        return self.row(case, STATE_ONLY, segments=len(offsets), floor_ms=floor, **self.times(call))

    def plan(self, given: Problem, out: Tensor) -> SegmentPlan | None:
        """How ``fwd_cp`` cuts, asked of itself, or of its planner where it gives no certificate; None if it does not."""
        arguments = given.sample.arguments() | {"out": out, "cu_seqlens": given.offsets, "impl": given.impl}
        known = None if given.layout == PACKED else given.packed_offsets.cpu()
        try:
            returned = api.fwd_cp(**arguments, cu_seqlens_cpu=known if given.layout == KNOWN else None, certificate=True)
        except NotImplementedError:
            x = given.sample
            offsets = given.packed_offsets
            plan = plan_segments(offsets, int(offsets[-1]), x.heads, cu_seqlens_cpu=known)
            return plan if plan.num_slots else None
        certificate = returned[2] if len(returned) == 3 else None
        return None if certificate is None else certificate.plan

    def times(self, call: Callable[[], object]) -> dict[str, Any]:
        return vars(timing.measure(call, self.device, self.seconds))

    def floor_ms(self, vectors: int, tokens: int, heads: int) -> float:
        """Milliseconds to move so many vectors and beta of every token and head, all bf16, at the copy bandwidth."""
        return tokens * heads * (vectors * HEAD_DIM + 1) * 2 / self.bandwidth * 1e3

    # Suite warmup

    def warmup(self, case: Case, sample: Sample) -> Iterator[Row]:
        length = -(-case.tokens // case.segments // CHUNK) * CHUNK
        lengths = [min(length, case.tokens - start) for start in range(0, case.tokens, length)]
        given = problem(sample, lengths, case.layouts[0], self.impl)
        x = sample

        def call() -> tuple[Tensor, Tensor]:
            return api.get_warmup_chunks(x.g, x.A_log, x.dt_bias, x.lower_bound, given.offsets, impl="auto")

        with self.guarded(case, WARMUP_CHUNKS):
            chunks, fallback = call()
            gate.check_warmup(given, EXIT_EPS, chunks, fallback)
            # Only g, and only the tokens that the answer depends on.
            floor = int(chunks.sum()) * CHUNK * HEAD_DIM * 2 / self.bandwidth * 1e3
            yield self.row(case, WARMUP_CHUNKS, segments=len(lengths), floor_ms=floor, **self.times(call))

    # Suite host

    def host(self, case: Case, sample: Sample) -> Iterator[Row]:
        state = torch.zeros(len(case.lengths), case.heads, HEAD_DIM, HEAD_DIM, device=self.device)
        given = problem(replace(sample, initial_state=state), case.lengths, DENSE, self.impl)
        small = torch.zeros(8, device=self.device)
        repeats = 2000 if self.device.type == "cuda" else 10
        add_us = timing.host_us(lambda: small.add(1.0), self.device, repeats)
        for name in case.impls:
            with self.guarded(case, name):
                call = FORWARD[name].prepare(given, state=True)
                out, _ = call()
                gate.check_finite(out)
                error = self.exact.error(case, given, out)
                host_us = timing.host_us(call, self.device, repeats)
                yield self.row(case, name, rel_l2_out=error, host_us=host_us, add_us=add_us)

    # Suite accuracy

    def accuracy(self, case: Case, sample: Sample) -> Iterator[Row]:
        given = problem(sample, case.lengths, DENSE, self.impl)
        exact = gate.recurrence(sample)
        rounded = exact[0].bfloat16()
        yield self.judged(case, ROUNDING, (rounded, None), exact)
        ours = None
        segment_len = min(SEGMENT, case.tokens // 4 // CHUNK * CHUNK)
        for name in case.impls:
            options = {"segment_len": segment_len} if name == FWD_CP else {}
            with self.guarded(case, name):
                call = FORWARD[name].prepare(given, state=True, **options)
                made = call()
                for x in made:
                    if x is not None:
                        gate.check_finite(x)
                row = self.judged(case, name, made, exact)
                if name == FWD:
                    ours = row
                else:
                    row["segments"] = -(-case.tokens // segment_len)
                    row["dropped"] = self.dropped(given, segment_len)
                yield row
        for peer in self.peers if case.peers else ():
            with self.guarded(case, peer.name, ours=False):
                row = self.judged(case, peer.name, peer.prepare(given, state=True)(), exact, version=peer.version)
                if ours is not None:
                    row |= {"ratio_out": _worst(ours, row, "head_rel_l2_out")}
                    row |= {"ratio_state": _worst(ours, row, "head_rel_l2_state")}
                yield row

    def judged(
        self, case: Case, impl: str, made: tuple[Tensor, Tensor | None], exact: tuple[Tensor, Tensor], **values: object
    ) -> Row:
        """The errors of one result, whole and head by head; null where it is not finite, which only a peer's row may say."""
        errors: dict[str, object] = {}
        for what, x, want, head in (("out", made[0], exact[0], 2), ("state", made[1], exact[1], 1)):
            if x is not None and bool(x.isfinite().all()):
                errors[f"rel_l2_{what}"] = gate.relative(x.double(), want)
                errors[f"head_rel_l2_{what}"] = _by_head(x.double(), want, head)
        if impl == ROUNDING:
            values |= {"version": None, "triton": None}
        return self.row(case, impl, segments=1 if impl == FWD else None, **errors, **values)

    def dropped(self, given: Problem, segment_len: int) -> float | None:
        """The largest bound in the certificate, where who computed the outputs can give one."""
        arguments = given.sample.arguments() | {"impl": given.impl, "segment_len": segment_len}
        try:
            returned = api.fwd_cp(**arguments, certificate=True)
        except NotImplementedError:
            return None
        certificate = returned[2] if len(returned) == 3 else None
        return None if certificate is None else float(certificate.dropped.max())


def commit_of(folder: Path) -> str | None:
    """The short hash of the commit that is checked out there, with ``+`` if files differ from it; None outside a clone."""
    try:
        names = ("rev-parse --short HEAD", "status --porcelain --untracked-files=no")
        found, changed = (
            subprocess.check_output(["git", "-C", folder, *x.split()], text=True, stderr=subprocess.DEVNULL) for x in names
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.strip() + ("+" if changed.strip() else "")


def cpu_name() -> str:
    """The processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _by_head(x: Tensor, exact: Tensor, head: int) -> list[float]:
    dims = [d for d in range(x.dim()) if d != head]
    errors = torch.linalg.vector_norm(x - exact, dim=dims) / torch.linalg.vector_norm(exact, dim=dims)
    return [float(f"{error:.4g}") for error in errors.tolist()]


def _worst(ours: Row, theirs: Row, name: str) -> float | None:
    """The largest ratio of our error to theirs on one head; None if either has none."""
    if ours.get(name) is None or theirs.get(name) is None:
        return None
    return float(max(a / b for a, b in zip(ours[name], theirs[name], strict=True) if b > 0))
