"""``flash-kda run``: one prefill, serial and in parallel segments; what ran, what it cost, and whether both are right."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .. import api, dispatch, samples
from ..api import Certificate
from ..constants import CHUNK, EXIT_EPS, MIN_SEGMENT_LEN
from ..samples import TOKEN_TENSORS, Sample
from ..validation import check_eps
from . import files
from .check import LIMIT, Check, Result, run_check
from .console import UserError, heading, line, shorten, steps, table

SAMPLE_TOKENS = 16384
"""Default length of the packaged activations: several segments, a few seconds on two cores."""
MAX_ROWS = 16
"""Heads listed one by one; of more, those that replay most."""


@dataclass(frozen=True)
class Options:
    """The options of the command, as typed."""

    file: Path | None = None
    lower_bound: float = samples.DEFAULT_LOWER_BOUND
    scale: float | None = None
    cu_seqlens: str | None = None
    tokens: int | None = None
    segment_len: int | None = None
    eps: float | None = None
    device: str = "cpu"
    impl: str | None = None
    repeat: int = 1
    output: Path | None = None
    ranks: int | None = None


def main(options: Options) -> int:
    """0 if the check passes, 1 if not.

    Raises:
        UserError: bad input.
    """
    eps = EXIT_EPS if options.eps is None else options.eps
    device = _device(options.device)
    if options.output is not None:
        files.check_output(options.output, options.file)
    try:
        check_eps(eps)
        impl = dispatch.choose(options.impl, device)
    except (ValueError, NotImplementedError) as error:
        raise UserError(str(error)) from None
    sample, origin = read_sample(options)
    sample = sample.to(device)
    batch, tokens = sample.q.shape[:2]
    packed, offsets = pack(sample)

    line(f"flash-kda run: {origin}")
    line(
        f"B={batch} T={tokens} H={sample.heads} K=V={sample.q.shape[-1]}, lower_bound {sample.lower_bound:g}, "
        f"scale {sample.scale:.4g}, {'an initial state' if sample.initial_state is not None else 'no initial state'}"
    )
    line(f"on {_device_name(device)}, computed by {path_name(impl)}")

    def serial() -> Result:
        return result_of(api.fwd(**packed.arguments(), output_final_state=True, impl=options.impl))

    def parallel(*, certificate: bool = False) -> tuple[Result, Certificate | None]:
        returned = api.fwd_cp(
            **packed.arguments(),
            output_final_state=True,
            segment_len=options.segment_len,
            eps=eps,
            cu_seqlens_cpu=offsets,
            certificate=certificate,
            impl=options.impl,
        )
        return result_of(returned), returned[2] if len(returned) == 3 else None

    with steps(2 * options.repeat + 10) as begin:
        # The certified call also warms up memory and threads for the timed ones.
        begin("context-parallel, with certificate")
        in_parallel, certificate = parallel(certificate=True)
        path = dispatch.last_path()
        in_series, serial_times = _timed(serial, options.repeat, device, lambda i: begin(f"serial {i}"))
        _, cp_times = _timed(lambda: parallel()[0], options.repeat, device, lambda i: begin(f"context-parallel {i}"))
        cut = tokens * batch if certificate is None else certificate.plan.segment_len
        cuts = [token for a, b in itertools.pairwise(offsets) for token in range(a + cut, b, cut)]
        found = run_check(packed, offsets, cuts, in_series, in_parallel, options.impl, begin)

    uncut = None
    if certificate is None:
        uncut = _why_uncut(options.segment_len, max(b - a for a, b in itertools.pairwise(offsets)), sample.heads, path)
    _print_plan(certificate, uncut, offsets, eps)
    _print_times(serial_times, cp_times, tokens * batch)
    print_check(found, sample.heads, cut=uncut is None)
    if not found.passed:
        line("CHECK FAILED" + ("; nothing was written" if options.output is not None else ""))
        return 1
    if options.output is not None:
        out = in_parallel.out.view(batch, tokens, *in_parallel.out.shape[2:])
        files.write(options.output, {"out": out, "final_state": in_parallel.final_state})
        line(f"wrote out {list(out.shape)} and final_state {list(in_parallel.final_state.shape)} to {options.output}")
    line("CHECK PASSED")
    return 0


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device must be one that PyTorch sees, got cuda and no CUDA device; see 'flash-kda doctor'")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({count(torch.get_num_threads(), 'thread')})"


def path_name(impl: str) -> str:
    return {"reference": "the PyTorch reference", "sm90": "the sm90 kernels"}[impl]


def read_sample(options: Options) -> tuple[Sample, str]:
    """The activations to run on, checked, and a sentence that says what they are."""
    tokens = options.tokens
    if options.file is None:
        sample = samples.packaged()
        own = sample.q.shape[1]
        tokens = SAMPLE_TOKENS if tokens is None else tokens
        scale = sample.scale if options.scale is None else options.scale
        sample = replace(sample, lower_bound=options.lower_bound, scale=scale)
        if options.cu_seqlens is not None:
            sample = replace(sample, cu_seqlens=files.parse_offsets(options.cu_seqlens))
        origin = "packaged activations of a KDA layer on real text"
    else:
        sample = files.read(options.file, lower_bound=options.lower_bound, scale=options.scale, cu_seqlens=options.cu_seqlens)
        if tokens is not None and sample.cu_seqlens is not None and options.cu_seqlens is None:
            raise UserError(
                f"tokens must not be given for packed sequences, got {tokens} and cu_seqlens in {options.file}; "
                "pass --cu-seqlens for the repeated activations"
            )
        origin = str(options.file)
        if tokens is not None:
            files.check(replace(sample, cu_seqlens=None, initial_state=None), origin, segment_len=options.segment_len)
        own = sample.q.shape[1] if sample.q.dim() > 1 else 0
    named = origin if options.file is not None else "the packaged activations"
    if tokens is not None and tokens != own:
        sample = sample.repeat(tokens)
        origin += f", {'repeated' if tokens > own else 'cut'} from {own} to {tokens} tokens"
    files.check(sample, named, segment_len=options.segment_len)
    return sample, origin


def pack(sample: Sample) -> tuple[Sample, list[int]]:
    """Batch rows one after the other on the token axis, and the offsets of the sequences on the host."""
    batch, tokens = sample.q.shape[:2]
    if sample.cu_seqlens is not None:
        return sample, sample.cu_seqlens.tolist()
    offsets = [b * tokens for b in range(batch + 1)]
    if batch == 1:
        return sample, offsets
    flat = {name: getattr(sample, name).flatten(0, 1)[None] for name in TOKEN_TENSORS}
    return replace(sample, **flat, cu_seqlens=torch.tensor(offsets, device=sample.q.device)), offsets


def result_of(returned: tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Certificate | None]) -> Result:
    out, final_state = returned[:2]
    if final_state is None:
        raise RuntimeError("a final state was asked for and not returned")
    return Result(out, final_state)


def _timed(
    call: Callable[[], Result], repeat: int, device: torch.device, begin: Callable[[int], None]
) -> tuple[Result, list[float]]:
    """The last result and the seconds of each call."""
    times = []
    for i in range(repeat):
        begin(i + 1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        made = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return made, times


def _why_uncut(segment_len: int | None, longest: int, heads: int, path: str | None) -> str:
    """Why ``fwd_cp`` gave no certificate."""
    if segment_len is not None:
        return f"no sequence is longer than a segment of {segment_len} tokens"
    if path == "sm90":
        return "beside the sm90 kernels only --segment-len makes segments"
    if longest <= MIN_SEGMENT_LEN:
        return f"no sequence is longer than {MIN_SEGMENT_LEN} tokens, the shortest segment that the planner makes"
    return f"the planner expects no gain from it with {count(heads, 'head')}; --segment-len cuts all the same"


def _print_plan(certificate: Certificate | None, uncut: str | None, offsets: list[int], eps: float) -> None:
    lengths = [b - a for a, b in itertools.pairwise(offsets)]
    heading("Plan")
    if certificate is None:
        line(f"{count(len(lengths), 'sequence')} of {span(lengths)} tokens")
        line(f"Nothing was cut: {uncut}.")
        line("fwd_cp ran every sequence serially, as fwd does.")
        return
    plan = certificate.plan
    counts = plan.seq_map.diff().tolist()
    line(
        f"{count(len(lengths), 'sequence')} of {span(lengths)} tokens, {count(sum(counts), 'segment')} "
        f"({span(counts)} a sequence) of at most {plan.segment_len} tokens = {plan.segment_len // CHUNK} chunks"
    )

    used = certificate.segment < plan.capacity
    chunks, norm, dropped = (x[used].cpu() for x in (certificate.chunks, certificate.norm, certificate.dropped))
    whole = certificate.fallback[used].cpu()
    heading(f"Backward scan of the {count(len(chunks), 'segment')} with a successor, until ||M||_F <= {eps:.3g}")
    order = list(range(chunks.shape[1]))
    if len(order) > MAX_ROWS:
        order = sorted(sorted(order, key=lambda h: -chunks[:, h].sum().item())[:MAX_ROWS])
        line(f"(the {MAX_ROWS} of {chunks.shape[1]} heads that replay most)")
    rows = []
    for h in order:
        at = chunks[:, h]
        rows.append(
            [
                str(h),
                f"{at.min()} / {at.float().median():g} / {at.max()}",
                f"{whole[:, h].sum()} of {len(at)}",
                shorten(norm[:, h].max().item()),
                shorten(dropped[:, h].max().item()),
            ]
        )
    table(("head", "replayed min/med/max", "whole", "max ||M||_F", "dropped <="), rows)
    line("replayed  trailing chunks that the scan went back over, per segment")
    line("whole     segments scanned to their start; they hand M on and drop nothing themselves")
    line("dropped   bound of the relative error of the state handed on after an earlier")
    line("          stop, ||M||_F ||S_c||_F / ||S_out||_F, or what a whole segment passes on")


def _print_times(serial: list[float], cp: list[float], tokens: int) -> None:
    heading("Time" + (f" (median of {len(serial)})" if len(serial) > 1 else ""))
    a, b = statistics.median(serial), statistics.median(cp)
    rows = [
        ["serial fwd", milliseconds(a), f"{tokens / a:,.0f}", "1.00"],
        ["context-parallel fwd_cp", milliseconds(b), f"{tokens / b:,.0f}", f"{a / b:.2f}"],
    ]
    table(("", "ms", "tokens/s", "speed-up"), rows)


def print_check(found: Check, heads: int, *, cut: bool) -> None:
    which = "all heads" if len(found.heads) == heads else f"heads {', '.join(map(str, found.heads))} of {heads}"
    heading(f"Check: relative L2 errors, the worst head; the oracle saw {found.oracle_tokens} tokens of {which}")
    if found.problem is not None:
        line(found.problem)
        return
    rows = []
    for x in found.findings:
        against = "" if x.reference == "oracle" else " vs serial"
        rows.append(
            [
                x.what + against,
                f"{x.rounding:.1e}",
                "" if x.serial is None else f"{x.serial:.1e}",
                f"{x.cp:.1e}",
                f"{x.multiple:.2f}",
                "ok" if x.passed else "FAIL",
            ]
        )
    table(("values", "bf16", "serial", "cp", "x bf16", ""), rows)
    line("The oracle is the fp64 token recurrence; inside a sequence it starts from serial's state.")
    line("'vs serial' compares the two over everything, the worst sequence and head.")
    if not cut:
        line("Nothing was cut: this checked the serial forward, and no boundary between segments.")
    line(f"bf16: what rounding the exact values to bf16 costs, measured here. Limit: {LIMIT:g} x bf16.")


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def span(values: list[int]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return f"{low}" if low == high else f"{low} to {high}"
