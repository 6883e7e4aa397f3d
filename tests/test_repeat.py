"""Calls of a kind that was seen before: the launches they would make anyway, at their own addresses, and the same refusals."""

from dataclasses import replace

import cases
import pytest
import torch
from cases import D, same_bits
from kernel_double import ForwardDouble, Recorder

import flash_kda
from flash_kda import api, dispatch, validation
from flash_kda.sm90 import cp, launch, plan, repeat, small, stages


@pytest.fixture
def launches(monkeypatch):
    """The launches of the test, as dicts of arguments by name. No content of a tensor is read, as on a GPU."""
    seen = []
    monkeypatch.setattr(launch, "kernel", lambda name: Recorder(name, seen))
    for module in (stages, small):
        monkeypatch.setattr(module, "_multiprocessors", lambda _device: 132)
    monkeypatch.setattr(api, "processor_count", lambda _device: 132)
    monkeypatch.setattr(dispatch, "why_not_sm90", lambda _device: None)
    for module in (validation, api):
        monkeypatch.setattr(module, "readable", lambda _x: False)
    monkeypatch.setattr(plan, "LOOK_SHARE", 1e6)  # a look pays for itself only in larger calls than a test wants
    plan._remembered.cache_clear()
    yield seen
    plan._remembered.cache_clear()


TOKENS = 4096
OFFSETS = [0, 3000, 3000, 4000, 4080]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def dense(seed):
    return cases.random(TOKENS, 4, seed=seed).fwd()


def grouped_fp32(seed):
    case = cases.random(300, 4, seed=seed)
    return cases.grouped(replace(case, g=case.g.float(), beta=case.beta.float()), 2).fwd()


def states(seed):
    return dense(seed) | {"initial_state": cases.state(1, 4), "final_state": cases.nan_state(1, 4, torch.bfloat16)}


def fresh_results(seed):
    return dense(seed) | {"out": None, "output_final_state": True}


def packed(seed):
    return dense(seed) | {"cu_seqlens": torch.tensor(OFFSETS)}


def in_place(seed):
    pool, slots = cases.state(9, 4), int32(3, -1, 8, 0)
    indices = {"initial_state_indices": slots, "final_state_indices": slots}
    return packed(seed) | {"initial_state": pool, "final_state": pool} | indices


def checkpoints(seed):
    chosen, saved = torch.full((4, 2), 64), torch.full((4, 2, 4, D, D), torch.nan)
    return packed(seed) | {"checkpoint_states": saved, "checkpoint_offsets": chosen}


def bare(seed):
    return dense(seed) | {"A_log": None, "dt_bias": None}


def fused(seed):
    """q, k, v and g are interleaved slices of one tensor."""
    case = cases.random(TOKENS, 4, seed=seed)
    parts = torch.cat([case.q, case.k, case.v, case.g], -1).split(D, -1)
    return case.fwd(**dict(zip("qkvg", parts, strict=True)))


def many_slots(seed):
    """So many that chains begin anew."""
    return cases.random(TOKENS, 1, seed=seed).fwd() | {"segment_len": 64}


def looked_at(seed):
    """Lengths that the host does not know, and cannot guess."""
    lengths = [8000, *[8] * 24]
    case = cases.random(sum(lengths), 8, seed=seed)
    return case.fwd() | {"cu_seqlens": cases.packed_offsets(*lengths)}


KINDS = [dense, grouped_fp32, states, fresh_results, packed, in_place, checkpoints, bare, fused, many_slots, looked_at]


def relative(launched, scratch):
    """The arguments of a launch with addresses of scratch memory counted from its start."""

    def place(x):
        for name, part in zip(("work", "zeros"), scratch, strict=True):
            if part is not None and isinstance(x, int) and 0 <= x - part.data_ptr() < part.nbytes:
                return name, x - part.data_ptr()
        return x

    placed = {}
    for name, value in launched.items():
        if name.endswith("_desc"):
            placed[name] = (place(value[0]), *value[1:])
        else:
            placed[name] = place(value) if name.endswith("_ptr") else value
    return placed


@pytest.fixture
def scratch(monkeypatch):
    """All scratch memory that was allocated."""
    made = []
    allocate = cp.Layout.allocate

    def kept(layout, device):
        made.append(allocate(layout, device))
        return made[-1]

    monkeypatch.setattr(cp.Layout, "allocate", kept)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", [flash_kda.fwd, flash_kda.fwd_cp])
def test_launches_are_those_of_a_call_that_was_never_seen(launches, scratch, monkeypatch, function, kind):
    if function is flash_kda.fwd and kind is many_slots:
        pytest.skip("fwd cuts nothing")
    results = []
    first, second, other = kind(seed=1), kind(seed=3), kind(seed=2)

    def call(arguments, *, repeated):
        launches.clear()
        scratch.clear()
        monkeypatch.setattr(dispatch._local, "path", None, raising=False)
        results[:] = function(**arguments)
        assert launches
        assert flash_kda.last_path() == "sm90"
        assert {launched.pop("repeated") for launched in launches} == {repeated}
        assert len(scratch) <= 1
        of_scratch = scratch[0] if scratch else (None, None)
        return [relative(launched, of_scratch) for launched in launches]

    call(first, repeated=False)
    call(second, repeated=True)
    got = call(other, repeated=True)
    if kind is fresh_results:
        assert {got[-1]["out_ptr"], got[-1]["ht_ptr"]} == {x.data_ptr() for x in results}
        other = other | dict(zip(("out", "final_state"), results, strict=True))
    else:
        assert results[0] is other["out"]
        assert results[1] is other.get("final_state")
    monkeypatch.setattr(repeat, "_kept", {})
    assert call(other, repeated=False) == got


@pytest.fixture
def computing(launches, monkeypatch):
    """The forward kernel's double computes."""
    monkeypatch.setattr(launch, "kernel", lambda name: ForwardDouble(name, launches))
    return launches


@pytest.mark.parametrize("kind", [grouped_fp32, in_place, checkpoints, fresh_results, fused])
def test_results_are_those_of_the_tensors_given(computing, kind):
    flash_kda.fwd(**kind(seed=1))
    arguments, again = kind(seed=2), kind(seed=2)
    got = flash_kda.fwd(**arguments)
    assert [launched["repeated"] for launched in computing] == [False, True]
    want = flash_kda.fwd(**again, impl="reference")
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True) if a is not None)
    if kind is checkpoints:
        assert same_bits(arguments["checkpoint_states"], again["checkpoint_states"])


def other_eps(arguments):
    return arguments | {"eps": 0.5}


def other_segments(arguments):
    return arguments | {"segment_len": 64}


def not_cut(arguments):
    return arguments | {"auto_cp": False}


def other_scale(arguments):
    return arguments | {"scale": 0.5}


def other_offsets_dtype(arguments):
    return arguments | {"cu_seqlens": arguments["cu_seqlens"].int()}


def states_not_in_place(arguments):
    return arguments | {"final_state": arguments["final_state"].clone()}


def a_hint(arguments):
    return arguments | {"cu_seqlens_cpu": OFFSETS}


def a_certificate(arguments):
    return arguments | {"certificate": True}


def strided(arguments):
    return arguments | {"beta": arguments["beta"].repeat(1, 1, 2)[..., ::2]}


CHANGES = [
    other_eps, other_segments, not_cut, other_scale, other_offsets_dtype, states_not_in_place, a_hint, a_certificate, strided
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_another_kind_or_another_option_is_no_repetition(launches, change):
    flash_kda.fwd_cp(**in_place(seed=1))
    launches.clear()
    flash_kda.fwd_cp(**change(in_place(seed=2)))
    assert launches
    assert not any(launched["repeated"] for launched in launches)


def test_contents_that_are_looked_at_are_looked_at_again(launches, monkeypatch):
    for module in (validation, api):
        monkeypatch.setattr(module, "readable", lambda x: x.device.type == "cpu")
    arguments = packed(seed=1)
    flash_kda.fwd_cp(**arguments)
    with pytest.raises(ValueError, match="cu_seqlens must be non-decreasing"):
        flash_kda.fwd_cp(**arguments | {"cu_seqlens": torch.tensor([0, 3, 2, 4, 5])})
    flash_kda.fwd_cp(**packed(seed=2))
    assert not any(launched["repeated"] for launched in launches)


def test_debug_mode_looks_at_every_call(launches, monkeypatch):
    flash_kda.fwd(**dense(seed=1))
    monkeypatch.setenv("FLASH_KDA_DEBUG", "finite")
    bad = dense(seed=2)
    bad["v"][0, 7, 1, 3] = torch.nan
    with pytest.raises(ValueError, match="v must be finite"):
        flash_kda.fwd(**bad)


def test_the_implementation_asked_for_is_taken(launches, monkeypatch):
    flash_kda.fwd(**dense(seed=1))
    monkeypatch.setenv("FLASH_KDA_IMPL", "reference")
    flash_kda.fwd(**dense(seed=1))
    assert flash_kda.last_path() == "reference"
    monkeypatch.delenv("FLASH_KDA_IMPL")
    flash_kda.fwd(**dense(seed=1), impl="reference")
    assert flash_kda.last_path() == "reference"
    assert len(launches) == 1


@pytest.mark.parametrize("function", [flash_kda.fwd, flash_kda.fwd_cp])
def test_memory_that_is_written_is_shared_with_nothing(launches, function):
    function(**states(seed=1))
    launches.clear()
    for name, other in (("out", "q"), ("out", "v")):
        arguments = states(seed=2)
        arguments[name] = arguments[other]
        with pytest.raises(ValueError, match=f"{name} must not share memory with {other}"):
            function(**arguments)
    assert not launches


@pytest.mark.parametrize("function", [flash_kda.fwd, flash_kda.fwd_cp])
def test_what_is_not_aligned_is_refused(launches, function):
    function(**dense(seed=1))
    launches.clear()
    arguments = dense(seed=2)
    shifted = torch.zeros(arguments["k"].numel() + 8, dtype=torch.bfloat16)[4:-4].view_as(arguments["k"])
    assert shifted.data_ptr() % 16
    with pytest.raises(NotImplementedError, match="k starts at address"):
        function(**arguments | {"k": shifted}, impl="sm90")
    function(**arguments | {"k": shifted})
    assert flash_kda.last_path() == "reference"
    assert not launches


def test_a_vector_needs_no_alignment(launches):
    flash_kda.fwd(**dense(seed=1))
    arguments = dense(seed=2)
    bias = torch.zeros(4 * D + 1)[1:].view(4, D)
    for repeated in (False, True):
        launches.clear()
        flash_kda.fwd(**arguments | {"dt_bias": bias})
        assert [(launched["dt_ptr"], launched["repeated"]) for launched in launches] == [(bias.data_ptr(), repeated)]


def test_gradients_are_refused(launches):
    with torch.no_grad():
        flash_kda.fwd(**dense(seed=1))
    arguments = dense(seed=2)
    arguments["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="q must not require grad"):
        flash_kda.fwd(**arguments)
    with torch.no_grad():
        flash_kda.fwd(**arguments)
    assert [launched["repeated"] for launched in launches] == [False, True]


def test_nothing_of_a_call_is_kept_but_numbers(launches):
    """Programs outlive the tensors they were made from."""
    import gc
    import weakref

    arguments = in_place(seed=1)
    alive = [weakref.ref(x) for x in arguments.values() if isinstance(x, torch.Tensor)]
    flash_kda.fwd_cp(**arguments)
    assert repeat._kept
    del arguments
    gc.collect()
    assert [x for x in alive if x() is not None] == []


def test_no_more_is_kept_than_allowed(launches, monkeypatch):
    monkeypatch.setattr(repeat, "KEPT", 3)
    monkeypatch.setattr(repeat, "MAPS_KEPT", 2)
    for tokens in range(64, 160, 16):
        for seed in range(4):
            flash_kda.fwd(**cases.random(tokens, 1, seed=seed).fwd())
            assert len(repeat._kept) <= 3
    assert all(len(step.blocks) <= 2 for program in repeat._kept.values() for step in program._steps)
    assert sum(launched["repeated"] for launched in launches) == 6 * 3


def test_memory_of_nobody_is_not_kept(launches, monkeypatch):
    chain = small.chain
    monkeypatch.setattr(small, "chain", lambda *given, **named: chain(*given, **named | {"norm": torch.zeros(63, 1)}))
    for _ in range(2):
        flash_kda.fwd_cp(**many_slots(seed=1))
    assert not repeat._kept
    assert not any(launched["repeated"] for launched in launches)
