"""Several threads call at once: dispatch, what is remembered of a kind of call, and the path of each thread."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import grouped, packed_offsets, random, same_bits, state
from kernel_double import ForwardDouble

import flash_kda
from flash_kda import dispatch, validation
from flash_kda.sm90 import launch, stages

THREADS = 8
CALLS = 30


def kinds():
    """Calls of many kinds, so that what is remembered is written all the time."""
    made = []
    for i in range(12):
        case = grouped(random(20 + 3 * i, 4, seed=i), 1 + i % 2)
        offsets = packed_offsets(5 + i, case.tokens - 5 - i, dtype=torch.int32 if i % 3 else torch.int64)
        made.append((case, offsets, state(2, 4, seed=i)))
    return made


@pytest.fixture
def few_are_kept(monkeypatch):
    """What is remembered overflows every few calls."""
    monkeypatch.setattr(validation, "SEEN_KEPT", 3)
    validation._seen.clear()
    yield
    validation._seen.clear()


def call(kind, impl):
    case, offsets, h0 = kind
    final = torch.full_like(h0, torch.nan)
    out, _ = flash_kda.fwd(**case.fwd(initial_state=h0, final_state=final, cu_seqlens=offsets), impl=impl)
    assert flash_kda.last_path() == impl
    return out, final


def run_together(impl):
    """Every thread makes every call, in an order of its own, and compares with what one thread computed by the reference."""
    ours = kinds()
    want = [call(kind, "reference") for kind in ours]
    validation._seen.clear()
    start = threading.Barrier(THREADS)

    def work(thread):
        torch.set_num_threads(1)
        start.wait()
        for j in range(CALLS):
            i = (7 * thread + 5 * j) % len(ours)
            got = call(ours[i], impl)
            if not all(same_bits(a, b) for a, b in zip(got, want[i], strict=True)):
                return f"thread {thread}, call {j}, kind {i}"
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        assert [x for x in pool.map(work, range(THREADS)) if x] == []


def test_reference(few_are_kept):
    run_together("reference")


def test_hopper_arguments(few_are_kept, monkeypatch):
    """The kernel's double reads memory through what the launcher was given: a mix-up of two threads' calls shows."""
    launches = []
    monkeypatch.setattr(launch, "kernel", lambda name: ForwardDouble(name, launches))
    monkeypatch.setattr(stages, "_multiprocessors", lambda _device: 132)
    monkeypatch.setattr(dispatch, "why_not_sm90", lambda _device: None)
    run_together("sm90")
    assert len(launches) == THREADS * CALLS


def test_a_reason_is_logged_once(monkeypatch, caplog):
    """However many calls and threads, and although it names an address or a length that changes every time."""
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(dispatch, "why_not_sm90", lambda _device: None)
    device = torch.device("cuda", 0)

    def work(thread):
        for j in range(20):
            reason = f"q starts at address {16 * j + thread:#x}" if j % 2 else f"g has batch stride {j + thread}"
            assert dispatch.choose("auto", device, lambda reason=reason: reason) == "reference"

    with caplog.at_level("WARNING", logger="flash_kda"), ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    assert len(caplog.messages) == 2
    assert len(dispatch._logged) == 2


def test_each_thread_has_its_own_last_path(monkeypatch):
    seen = {}

    def work():
        seen["before"] = flash_kda.last_path()
        flash_kda.fwd(**random(16, 1).fwd())
        seen["after"] = flash_kda.last_path()

    monkeypatch.setattr(dispatch._local, "path", "sm90", raising=False)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == {"before": None, "after": "reference"}
    assert flash_kda.last_path() == "sm90"
