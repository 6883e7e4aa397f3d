"""With the real flash-linear-attention: its dispatcher finds this package, and what ``integrations.fla`` routes besides."""

import logging
import warnings

import pytest
import torch
from budget import judge
from cases import grouped, packed_offsets, random, same_bits, state

import flash_kda
from flash_kda.constants import EXIT_EPS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fla complains where Triton has no GPU
    fla_kda = pytest.importorskip("fla.ops.kda", reason="flash-linear-attention is not installed")

from flash_kda.integrations import fla as integration

IN_KERNEL = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
QUALIFYING = IN_KERNEL | {"safe_gate": True, "state_v_first": True}


class ReachedFlaError(Exception):
    """The call went on to fla's own kernels."""


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    def reached(*_arguments):
        raise ReachedFlaError

    monkeypatch.setattr("fla.ops.kda.chunk.ChunkKDAFunction.apply", reached)
    monkeypatch.setattr(flash_kda.dispatch._local, "path", None, raising=False)
    with torch.no_grad():
        yield
    integration.disable()


def call(case, **options):
    given = {"lower_bound": case.lower_bound, "A_log": case.A_log, "dt_bias": case.dt_bias.flatten(), **QUALIFYING}
    return fla_kda.chunk_kda(case.q, case.k, case.v, case.g, case.beta, **given | options)


def test_flas_dispatcher_finds_this_package_by_itself():
    case, offsets, h0 = random(110, 2), packed_offsets(40, 70), state(2, 2)
    o, final = call(case, initial_state=h0, output_final_state=True, cu_seqlens=offsets.int())
    assert flash_kda.last_path() == "reference"
    want, want_final = flash_kda.fwd(**case.fwd(initial_state=h0, cu_seqlens=offsets), output_final_state=True)
    assert same_bits(o, want)
    assert same_bits(final, want_final)


REFUSED_BY_FLASH_KDA = {
    "grouped heads": (lambda: grouped(random(60, 4), 2), {}),
    "K-first states": (
        lambda: random(60, 4),
        {"state_v_first": False, "initial_state": state(1, 4), "output_final_state": True},
    ),
    "no A_log": (lambda: random(60, 4), {"A_log": None}),
    "no dt_bias": (lambda: random(60, 4), {"dt_bias": None}),
    "activated beta": (lambda: random(60, 4), {"use_beta_sigmoid_in_kernel": False}),
    "negative eigenvalues": (lambda: random(60, 4), {"allow_neg_eigval": True}),
    "no safe_gate": (lambda: random(60, 4), {"safe_gate": False}),
    "a tile of fla's kernels": (lambda: grouped(random(60, 4), 2), {"chunk_size": 32}),
}


@pytest.mark.parametrize("what", REFUSED_BY_FLASH_KDA)
def test_what_flash_kda_refuses_comes_here_once_enabled(what):
    make, options = REFUSED_BY_FLASH_KDA[what]
    case = make()
    with pytest.raises(ReachedFlaError):
        call(case, **options)
    integration.enable()
    integration.enable()
    assert integration.is_enabled()
    got = call(case, **options)
    assert flash_kda.last_path() == "reference"
    plain = {name: x for name, x in options.items() if name != "chunk_size"}
    given = {"A_log": case.A_log, "dt_bias": case.dt_bias, "lower_bound": -5.0} | QUALIFYING | plain
    want = flash_kda.chunk_kda(case.q, case.k, case.v, case.g, case.beta, **given)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    integration.disable()
    assert not integration.is_enabled()
    with pytest.raises(ReachedFlaError):
        call(case, **options)


def test_enabled_calls_are_right():
    integration.enable()
    case, offsets = grouped(random(150, 4), 2), packed_offsets(90, 60)
    h0 = state(2, 4)
    judged = judge(case, h0, offsets)
    o, final = call(case, initial_state=h0.mT.contiguous(), output_final_state=True, state_v_first=False, cu_seqlens=offsets)
    judged.out(o, EXIT_EPS)
    judged.state(final.mT, EXIT_EPS)


@pytest.mark.parametrize(
    "options",
    [
        {"use_gate_in_kernel": False},
        {"use_qk_l2norm_in_kernel": False},
        {"safe_gate": False, "lower_bound": None},
    ],
)
def test_another_operation_is_left_to_fla(options):
    integration.enable()
    with pytest.raises(ReachedFlaError):
        call(random(60, 4), **options)


def test_other_head_dimensions_and_dtypes_are_left_to_fla():
    integration.enable()
    case = random(60, 4)
    with pytest.raises(ReachedFlaError):
        call(case.map(lambda x: x.half()))
    with pytest.raises(ReachedFlaError):
        call(case.map(lambda x: x[..., :64] if x.dim() == 4 else x), dt_bias=case.dt_bias[:, :64].flatten())


def test_training_is_left_to_fla():
    integration.enable()
    with torch.enable_grad():
        assert "backward" in integration.why_not()
        with pytest.raises(ReachedFlaError):
            call(random(60, 4))


def test_flas_switch_turns_it_off(monkeypatch):
    integration.enable()
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    with pytest.raises(ReachedFlaError):
        call(grouped(random(60, 4), 2))


def test_fla_says_what_it_chose(caplog):
    integration.enable()
    registry, _ = integration._registry()
    registry._logged.clear()
    with caplog.at_level(logging.INFO, logger="fla"):
        call(grouped(random(60, 4), 2))
    assert any(integration.NAME in message for message in caplog.messages)


def test_on_a_gpu_only_what_the_kernels_take(monkeypatch):
    """A slower reference on the GPU is no favour: fla's kernels are there."""
    case = grouped(random(60, 4), 2)
    given = {"lower_bound": -5.0, "A_log": case.A_log, "dt_bias": case.dt_bias, **QUALIFYING}

    def why_not(**changes):
        tokens = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")} | changes
        return integration.why_not(*tokens.values(), **given)

    assert why_not() is None
    real = integration.check.check_forward

    class OnGpu:
        type = "cuda"

    def checked(q, *arguments, **options):
        return real(q.tensor, *arguments, **options)

    class Queries:
        device = OnGpu()
        tensor = case.q

    monkeypatch.setattr(integration.check, "check_forward", checked)
    monkeypatch.setattr(integration.dispatch, "why_not_sm90", lambda _device: "no Hopper")
    assert why_not(q=Queries()) == "no Hopper"
    monkeypatch.setattr(integration.dispatch, "why_not_sm90", lambda _device: None)
    assert why_not(q=Queries()) is None
    assert "g is torch.float32" in why_not(q=Queries(), g=case.g.float())
    given["allow_neg_eigval"] = True
    assert "beta is activated" in why_not(q=Queries())


def test_a_fla_without_a_registry_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("fla.backends._function_registries", {})
        with pytest.raises(RuntimeError, match="fla must have a registry"):
            integration.enable()
