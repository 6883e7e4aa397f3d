"""Suite ``forward``: the fused kernel behind ``fwd`` on one GPU, as rows of docs/measured.md's table.

    python benchmarks/forward.py --commit HASH [--output benchmarks/results/h200.jsonl] [--only NAME ...]

Each case is checked against the chunked reference in fp64 on a bounded prefix before it is timed; outputs are poisoned with
NaN first. A row is printed and appended to ``--output`` as soon as it is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from timing import copy_bandwidth, host_us, measure

import flash_kda
from flash_kda import samples
from flash_kda.reference import Inputs, forward

CASES: dict[str, tuple[int, list[int]]] = {
    "h16_8x8192": (16, [8192] * 8),
    "h96_8192": (96, [8192]),
    "h96_8x1024": (96, [1024] * 8),
    "h96_ragged": (96, [1300, 547, 2048, 963, 271, 3063]),
    "h32_8x1024": (32, [1024] * 8),
    "h16_65536": (16, [65536]),
    "h12_4096x33": (12, [33] * 4096),
}
LIMIT = 6e-3
"""No row is reported beyond this error; the bar itself is a test's business (tests/gpu/test_forward.py)."""
CHECKED = 2048
"""Tokens and heads of the check are bounded: this many tokens, two heads."""


def errors(sample: samples.Sample, out: torch.Tensor, offsets: torch.Tensor) -> float:
    """Relative L2 error of the outputs of the first tokens of two heads."""
    ends = offsets.clamp(max=CHECKED)
    cut = slice(0, min(CHECKED, sample.q.shape[1]))
    tensors = (getattr(sample, name)[0, cut, :2].double() for name in samples.TOKEN_TENSORS)
    inputs = Inputs(*tensors, sample.A_log[:2], sample.dt_bias[:2], sample.lower_bound, sample.scale)
    want = torch.zeros_like(inputs.v)
    forward(inputs, ends, want, max_len=min(CHECKED, int(offsets.diff().max())))
    got = out[0, cut, :2].double()
    if not bool(out.isfinite().all()):
        return float("nan")
    return float((got - want).norm() / want.norm())


def run(name: str, bandwidth: float, common: dict[str, object]) -> dict[str, object]:
    heads, lengths = CASES[name]
    sample = samples.make("random", sum(lengths), heads, device="cuda")
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    out = torch.full_like(sample.q, torch.nan)
    arguments = sample.arguments() | {"out": out, "cu_seqlens": offsets}

    def call() -> object:
        return flash_kda.fwd(**arguments, impl="sm90")

    call()
    error = errors(sample, out, offsets)
    if not error < LIMIT:
        raise SystemExit(f"{name}: relative error {error} must be below {LIMIT}; nothing is timed")
    times = measure(call)
    moved = 5 * sample.q.numel() * 2 + sample.beta.numel() * 2
    return {
        "suite": "forward",
        "impl": "flash_kda.fwd",
        "gates": "random",
        "lower_bound": sample.lower_bound,
        "heads": heads,
        "tokens": sum(lengths),
        "seq_lens": lengths if len(lengths) <= 16 else f"{len(lengths)} x {lengths[0]}",
        "segments": 1,
        **vars(times),
        "floor_ms": moved / bandwidth * 1e3,
        "rel_l2_out": error,
        "rel_l2_state": None,
        **common,
    }


def host_row(common: dict[str, object]) -> dict[str, object]:
    """Host time of one eager call on a small shape, beside that of one elementwise add."""
    sample = samples.make("random", 2048, 12, device="cuda")
    state = torch.zeros(1, 12, 128, 128, device="cuda")
    arguments = sample.arguments() | {"out": torch.empty_like(sample.q), "initial_state": state, "final_state": state.clone()}
    small = torch.zeros(8, device="cuda")
    return {
        "suite": "host",
        "impl": "flash_kda.fwd",
        "heads": 12,
        "tokens": 2048,
        "host_us": host_us(lambda: flash_kda.fwd(**arguments, impl="sm90")),
        "add_us": host_us(lambda: small.add(1.0)),
        **common,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="of the code that runs; asked of git if not given")
    parser.add_argument("--output", type=Path, help="JSON lines to append to")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    commit = options.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    common: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": "3.6.0 (build)",
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
    }
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for name in options.only:
        row = run(name, bandwidth, common)
        print(
            f"{name:12s} graph {row['graph_ms']:.4f} ms  eager {row['eager_ms']:.4f}  floor {row['floor_ms']:.4f}"
            f"  error {row['rel_l2_out']:.2e}",
            flush=True,
        )
        save(row, options.output)
    row = host_row(common)
    print(f"host {row['host_us']:.1f} us a call, an elementwise add {row['add_us']:.1f} us", flush=True)
    save(row, options.output)


def save(row: dict[str, object], output: Path | None) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
