"""Host time of one call, by what is asked of it; H = 12, T = 2,048, four packed sequences.

On a Hopper GPU the calls are real and one elementwise add is timed beside them. Elsewhere the kernel's launch is replaced by
nothing, so what is left is this package's Python, and it says so.

    python benchmarks/host.py
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch

import flash_kda
from flash_kda import dispatch, host, validation
from flash_kda.sm90 import launch, stages

HEADS, TOKENS, D = 12, 2048, 128
BATCH, BATCHES = 200, 15


class Nothing:
    """A kernel that is not launched."""

    def launch(self, *_arguments: object, **_options: object) -> None:
        return None


def microseconds(call: Callable[[], object], on_gpu: bool) -> float:
    """Median over batches of the mean of a batch, the GPU idle at the start of each."""
    times = []
    for _ in range(BATCHES):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter() - start) / BATCH * 1e6)
    return statistics.median(times)


def calls(device: str) -> dict[str, Callable[[], object]]:
    q, k, v, g = (torch.randn(1, TOKENS, HEADS, D, device=device).bfloat16() for _ in range(4))
    beta = torch.randn(1, TOKENS, HEADS, device=device).bfloat16()
    A_log, dt_bias = torch.zeros(HEADS, device=device), torch.zeros(HEADS, D, device=device)
    out, pool = torch.empty_like(v), torch.zeros(8, HEADS, D, D, device=device)
    offsets = torch.tensor([0, 500, 1000, 1500, TOKENS], dtype=torch.int32, device=device)
    slots = torch.tensor([3, 1, 0, 7], dtype=torch.int32, device=device)
    arguments = (q, k, v, g, beta, D**-0.5, out, A_log, dt_bias, -5.0)
    in_place = {"initial_state_indices": slots, "final_state_indices": slots}
    saved, chosen = torch.zeros(4, 1, HEADS, D, D, device=device), torch.full((4, 1), 256, device=device)
    return {
        "one elementwise add": lambda: torch.add(out, out, out=out),
        "fwd": lambda: flash_kda.fwd(*arguments),
        "fwd, packed, states": lambda: flash_kda.fwd(*arguments, pool[:4], pool[4:], offsets),
        "fwd, packed, pool in place": lambda: flash_kda.fwd(*arguments, pool, pool, offsets, **in_place),
        "fwd_cp, packed, pool in place": lambda: flash_kda.fwd_cp(*arguments, pool, pool, offsets, **in_place),
        "torch.ops.flash_kda.fwd": lambda: torch.ops.flash_kda.fwd(*arguments[:7], None, *arguments[7:]),
        "fwd, packed, one checkpoint a sequence": lambda: flash_kda.fwd(
            *arguments, None, None, offsets, checkpoint_states=saved, checkpoint_offsets=chosen
        ),
    }


def main() -> None:
    on_gpu = torch.cuda.is_available() and dispatch.why_not_sm90(torch.device("cuda", 0)) is None
    if on_gpu:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: real calls")
    else:
        kernel = Nothing()
        launch.kernel = lambda _name: kernel  # type: ignore[assignment, return-value]
        stages._multiprocessors = lambda _device: 132  # type: ignore[assignment]
        dispatch.why_not_sm90 = lambda _device: None
        validation.readable = host.readable = lambda _x: False
        print(f"{platform.machine()}, torch {torch.__version__}: no GPU, nothing is launched")
    torch.set_num_threads(1)
    with torch.no_grad():
        for name, call in calls("cuda" if on_gpu else "cpu").items():
            for _ in range(200 if on_gpu or "checkpoint" not in name else 5):
                call()
            if on_gpu or name.split(",")[0] != "one elementwise add":
                print(f"{name:40}{microseconds(call, on_gpu):8.1f} us")


if __name__ == "__main__":
    main()
