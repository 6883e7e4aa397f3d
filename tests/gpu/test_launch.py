"""Cubins on a Hopper: the same bits as Triton's JIT of the same source, a quick first call, cheap launches.

All with a small kernel that is built here; the variants that ship are loaded, their results are other tests' business.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from scale_variant import SCALE

from flash_kda.sm90 import build, launch
from flash_kda.sm90.variants import VARIANTS

KERNELS = Path(__file__).resolve().parents[1] / "sm90_kernels"
ROOT = KERNELS.parents[1]
ROWS = 256

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
    pytest.mark.skipif(build.compiler_problem() is not None, reason=str(build.compiler_problem())),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("cubins")
    build.build(out, [SCALE])
    return out


@pytest.fixture(scope="module")
def kernel(folder):
    return launch.KernelLibrary(folder, [SCALE], KERNELS).kernel("scale")


def problem(tokens=1000, heads=3, device="cuda"):
    """Inputs, and outputs poisoned with NaN, heads padded so that strides are not those of a contiguous tensor."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, heads, 128, device=device, generator=generator).bfloat16()
    y = torch.full((tokens, heads + 1, 128), float("nan"), device=device, dtype=torch.bfloat16)[:, :heads]
    bias = torch.randn(heads, device=device, generator=generator)
    marks = torch.full((-(-tokens // ROWS) * heads,), -1, device=device, dtype=torch.int64)
    return x, y, bias, marks


FIRST_ROW = 2**40
SCALE_BY = 0.3


def grid(x):
    return -(-x.shape[0] // ROWS), x.shape[1], 1


def arguments(x, y, bias, marks):
    views = [(t.data_ptr(), t.shape, t.stride()) for t in (x, y)]
    return (*views, bias.data_ptr(), marks.data_ptr(), x.shape[1], FIRST_ROW, SCALE_BY)


def expected(x, bias):
    return (x.float() * SCALE_BY + bias[:, None]).bfloat16()


def check(x, y, bias, marks):
    torch.testing.assert_close(y, expected(x, bias), rtol=2**-7, atol=1e-6)
    tiles = torch.arange(-(-x.shape[0] // ROWS), device=x.device) + FIRST_ROW
    assert torch.equal(marks.view(-1, x.shape[1]), tiles[:, None].expand(-1, x.shape[1]))


def test_cubin_and_jit_give_the_same_bits(kernel):
    import scale_tile
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    x, y, bias, marks = problem()
    kernel.launch(0, grid(x), *arguments(x, y, bias, marks))
    x_jit, y_jit, bias_jit, marks_jit = problem()
    layout = scale_tile.TILE_LAYOUT.value
    descriptors = [TensorDescriptor(t, list(t.shape), list(t.stride()), [ROWS, 1, 128], layout) for t in (x_jit, y_jit)]
    scale_tile.scale_tile[grid(x)[:2]](
        *descriptors, bias_jit, marks_jit, x.shape[1], FIRST_ROW, SCALE_BY, WITH_BIAS=True, num_warps=SCALE.num_warps
    )
    torch.cuda.synchronize()
    check(x, y, bias, marks)
    assert torch.equal(y.contiguous().view(torch.int16), y_jit.contiguous().view(torch.int16))
    assert torch.equal(marks, marks_jit)


def test_the_driver_sees_the_parameters_that_the_manifest_lists(folder, kernel):
    from cuda.bindings import driver

    kernel.prepare(0)
    params = json.loads((folder / "manifest.json").read_text())["kernels"]["scale"]["params"]
    for index, param in enumerate(params):
        error, _, size = driver.cuKernelGetParamInfo(kernel._loaded, index)
        assert (int(error), size) == (0, param["bytes"])
    assert int(driver.cuKernelGetParamInfo(kernel._loaded, len(params))[0]) != 0


@pytest.mark.parametrize("tokens", [1, 255, 256, 257])
def test_ragged_lengths_stop_at_the_end(kernel, tokens):
    x, y, bias, marks = problem(tokens, 1)
    kernel.launch(0, grid(x), *arguments(x, y, bias, marks))
    check(x, y, bias, marks)
    assert y.as_strided((tokens, 128), (256, 1), y.storage_offset() + 128).isnan().all()


def test_first_launch_inside_a_capture_and_replay_with_new_values(folder):
    fresh = launch.KernelLibrary(folder, [SCALE], KERNELS).kernel("scale")
    x, y, bias, marks = problem()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fresh.launch(0, grid(x), *arguments(x, y, bias, marks))
    assert y.isnan().all()
    x.mul_(2.0)
    graph.replay()
    check(x, y, bias, marks)


def test_launches_follow_the_current_stream_and_do_not_wait(kernel):
    x, y, bias, marks = problem()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.add_(1.0)
            kernel.launch(0, grid(x), *arguments(x, y, bias, marks))
            assert not stream.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    check(x, y, bias, marks)


def test_threads_launch_side_by_side_even_if_they_never_used_cuda(kernel):
    problems = [problem(300 + 100 * i) for i in range(4)]
    torch.cuda.synchronize()
    errors = []

    def work(x, y, bias, marks):
        try:
            for _ in range(50):
                kernel.launch(0, grid(x), *arguments(x, y, bias, marks))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=p) for p in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert errors == []
    for p in problems:
        check(*p)


def test_another_device_than_the_current_one(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, y, bias, marks = problem(device="cuda:1")
    with torch.cuda.device(0):
        kernel.launch(1, grid(x), *arguments(x, y, bias, marks))
        assert torch.cuda.current_device() == 0
    check(x, y, bias, marks)


def test_a_refused_launch_is_an_error(kernel):
    x, y, bias, marks = problem()
    with pytest.raises(launch.KernelError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(0, (0, 1, 1), *arguments(x, y, bias, marks))
    kernel.launch(0, grid(x), *arguments(x, y, bias, marks))
    check(x, y, bias, marks)


FIRST_CALL = """
import sys, time
from pathlib import Path
import torch
x = torch.ones(256, 1, 128, device="cuda").bfloat16()
y, bias, marks = torch.empty_like(x), torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda", dtype=torch.int64)
torch.cuda.synchronize()
start = time.perf_counter()
from flash_kda.sm90 import launch
from scale_variant import SCALE
shelf = launch.KernelLibrary(Path(sys.argv[1]), [SCALE], Path(sys.argv[2]))
assert shelf.available(0) is None, shelf.available(0)
views = [(t.data_ptr(), t.shape, t.stride()) for t in (x, y)]
shelf.kernel("scale").launch(0, (1, 1, 1), *views, bias.data_ptr(), marks.data_ptr(), 1, 0, 0.5)
torch.cuda.synchronize()
elapsed = time.perf_counter() - start
assert (y == 0.5).all() and "triton" not in sys.modules
print(elapsed)
"""


def test_first_call_of_a_process_is_quick_and_needs_no_triton(folder, record_property):
    """From importing the launcher to a finished kernel, torch and its context being there already."""
    command = [sys.executable, "-c", FIRST_CALL, str(folder), str(KERNELS)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{KERNELS}"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    seconds = float(run.stdout)
    record_property("first_call_s", seconds)
    print(f"first call {seconds * 1e3:.1f} ms")
    assert seconds < 0.3


def host_cost(call, repeats=2000):
    """Median host microseconds of a call that only enqueues, in batches that never fill the queue."""
    times = []
    for _ in range(repeats // 200):
        torch.cuda.synchronize()
        for _ in range(200):
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def test_launch_costs_a_few_microseconds_of_host_time(kernel, record_property):
    x, y, bias, marks = problem(256, 1)
    prepared = arguments(x, y, bias, marks)
    kernel.launch(0, (1, 1, 1), *prepared)
    ours = host_cost(lambda: kernel.launch(0, (1, 1, 1), *prepared))
    whole = host_cost(lambda: kernel.launch(0, grid(x), *arguments(x, y, bias, marks)))
    yardstick = host_cost(lambda: x.add_(0.0))
    raw = host_cost(
        lambda: kernel._cu_launch(
            kernel._handle, 1, 1, 1, 128, 1, 1, kernel._shared, kernel._cuda.CUstream(0), kernel._pointers_address, 0
        )
    )
    for name, value in {
        "launch": ours,
        "with_arguments": whole,
        "bare_driver_call": raw,
        "torch_add": yardstick,
    }.items():
        record_property(f"{name}_us", value)
        print(f"{name} {value:.2f} us")
    # relative to a call that torch makes on the same host, because hosts differ
    assert ours < 2 * yardstick


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_shipped_variants_load(variant):
    """Fails if the tree's cubins were never built, or are stale."""
    assert launch.available(0) is None, launch.available(0)
    launch.kernel(variant.name).prepare(0)
