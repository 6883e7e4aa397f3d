"""FLASH_KDA_DEBUG: what it reads, and that it names the offender. Slots: test_pools.py; checkpoints: test_checkpoints.py."""

from dataclasses import replace

import pytest
import torch
from cases import nan_like, nan_state, negative, packed_offsets, random, same_bits, state

import flash_kda
from flash_kda import host, validation
from flash_kda.reference import chunks, stages

CASE = random(48, 2)
BOTH = pytest.mark.parametrize("function", [flash_kda.fwd, flash_kda.fwd_cp])


@pytest.fixture(params=["1", "bounds", "finite"])
def mode(request, monkeypatch):
    monkeypatch.setenv("FLASH_KDA_DEBUG", request.param)
    return request.param


@pytest.fixture
def blind(monkeypatch):
    """As on a device: nothing is read unless debug mode asks for it."""
    for module in (host, validation, chunks, stages, flash_kda.checkpoints):
        monkeypatch.setattr(module, "readable", lambda _x: False)


def raises_if(wanted, match, function, **arguments):
    if not wanted:
        function(**arguments)
        return
    with pytest.raises(ValueError, match=match):
        function(**arguments)


@BOTH
def test_offsets_of_a_device(blind, mode, function):
    arguments = CASE.fwd(cu_seqlens=torch.tensor([0, 30, 20]), impl="reference")
    raises_if(mode != "finite", "cu_seqlens must be non-decreasing, got 30 then 20 at positions 1 and 2", function, **arguments)


@BOTH
def test_checkpoint_offsets_of_a_device(blind, mode, function):
    arguments = CASE.fwd(checkpoint_states=state(1, 2), checkpoint_offsets=torch.tensor([24]))
    raises_if(mode != "finite", "checkpoint_offsets must be multiples of 16", function, **arguments)


@BOTH
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias"])
def test_inputs_are_finite(mode, function, name):
    arguments = replace(CASE, **{name: nan_like(getattr(CASE, name))}).fwd()
    raises_if(mode != "bounds", f"{name} must be finite, got nan at", function, **arguments)


@BOTH
def test_results_are_finite(mode, function):
    """Finite inputs that overflow: the keys are one, the values differ by more than fp32 holds."""
    key = CASE.k[:, :1].expand_as(CASE.k).contiguous()
    v = CASE.v.clone()
    v[:, 9], v[:, 10] = 3.2e38, -3.2e38
    case = replace(CASE, k=key, v=v, g=torch.full_like(CASE.g, -60), beta=torch.full_like(CASE.beta, 30))
    raises_if(mode != "bounds", r"out must be finite, got (nan|inf|-inf) at \[0, 10", function, **case.fwd())


@BOTH
def test_strengths_are_within_two(mode, function):
    case = negative(CASE)
    beta = case.beta.clone()
    beta[0, 3, 1] = 2.25
    match = r"beta must be in \[0, 2\] with beta_is_activated, got 2.25 at \[0, 3, 1\]"
    raises_if(mode != "finite", match, function, **replace(case, beta=beta).fwd())
    beta[0, 3, 1] = -0.5
    raises_if(mode != "finite", r"got -0.5 at \[0, 3, 1\]", function, **replace(case, beta=beta).fwd())
    function(**case.fwd())


def test_the_parts_are_checked_too(mode):
    bad = nan_like(CASE.g)
    raises_if(mode != "bounds", "g must be finite", flash_kda.state_only, **CASE.summary(g=bad))
    raises_if(mode != "bounds", "g must be finite", flash_kda.get_warmup_chunks, **CASE.gates(g=bad))


@BOTH
def test_nothing_is_wrong_with_a_right_call(mode, function):
    offsets = packed_offsets(20, 28)
    final = nan_state(2, 2)
    out, _ = function(**CASE.fwd(cu_seqlens=offsets, initial_state=state(2, 2), final_state=final))
    assert out.isfinite().all()


@BOTH
def test_off_means_off(monkeypatch, blind, function):
    for value in ("", "0"):
        monkeypatch.setenv("FLASH_KDA_DEBUG", value)
        out, _ = function(**replace(CASE, v=nan_like(CASE.v)).fwd())
        assert out.isnan().all()
    monkeypatch.delenv("FLASH_KDA_DEBUG")
    want, _ = function(**CASE.fwd())
    monkeypatch.setenv("FLASH_KDA_DEBUG", "1")
    assert same_bits(function(**CASE.fwd())[0], want)
