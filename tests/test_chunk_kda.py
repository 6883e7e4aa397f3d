"""``chunk_kda`` in fla's argument names: what each flag means, against the oracle; nothing is taken and ignored."""

import inspect
from dataclasses import replace

import pytest
import torch
from budget import judge
from cases import SCALE, D, grouped, packed_offsets, random, same_bits, state

import flash_kda
from flash_kda.constants import EXIT_EPS

IN_KERNEL = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def call(case, **options):
    given = {"lower_bound": case.lower_bound, "A_log": case.A_log, "dt_bias": case.dt_bias.flatten(), **IN_KERNEL}
    return flash_kda.chunk_kda(case.q, case.k, case.v, case.g, case.beta, **given | options)


def test_signature_of_fla():
    published = [
        "q",
        "k",
        "v",
        "g",
        "beta",
        "scale",
        "initial_state",
        "output_final_state",
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "safe_gate",
        "lower_bound",
        "disable_recompute",
        "return_intermediate_states",
        "state_v_first",
        "cu_seqlens",
        "cu_seqlens_cpu",
        "cp_context",
        "use_graph",
        "max_num_seqs",
    ]
    parameters = inspect.signature(flash_kda.chunk_kda).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == published
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == {"A_log", "dt_bias", "impl"}


@pytest.mark.parametrize("state_v_first", [False, True])
def test_equals_the_oracle(state_v_first):
    case, offsets = grouped(random(150, 4), 2), packed_offsets(90, 60)
    h0 = state(2, 4)
    judged = judge(case, h0, offsets)
    given = h0 if state_v_first else h0.mT.contiguous()
    o, final = call(case, initial_state=given, output_final_state=True, state_v_first=state_v_first, cu_seqlens=offsets)
    judged.out(o, EXIT_EPS)
    assert final.shape == (2, 4, D, D)
    judged.state(final if state_v_first else final.mT, EXIT_EPS)
    # What is returned may be handed back: no layout is lost on the way.
    again, _ = call(case, initial_state=final, state_v_first=state_v_first, cu_seqlens=offsets)
    want, _ = call(case, initial_state=final if state_v_first else final.mT, state_v_first=True, cu_seqlens=offsets)
    assert same_bits(again, want)


def test_a_state_nobody_asked_for_is_none():
    case = random(40, 2)
    o, final = call(case)
    assert final is None
    assert same_bits(o, flash_kda.fwd(**case.fwd())[0])
    assert case.scale == SCALE
    assert same_bits(call(case, scale=2 * SCALE)[0], 2 * o)


def test_beta_flags():
    case = random(60, 2)
    case = replace(case, beta=case.beta.float())
    logits, _ = call(case)
    activated, _ = call(replace(case, beta=flash_kda.reference.gate.sigmoid(case.beta)), use_beta_sigmoid_in_kernel=False)
    assert same_bits(activated, logits)
    negative = replace(case, beta=2 * torch.sigmoid(case.beta), beta_is_activated=True)
    o, final = call(case, allow_neg_eigval=True, output_final_state=True, state_v_first=True)
    judged = judge(negative)
    judged.out(o)
    judged.state(final)


@pytest.mark.parametrize(
    "without", [{}, {"safe_gate": True}, {"disable_recompute": True}, {"use_graph": True, "max_num_seqs": 1}]
)
def test_what_changes_nothing(without):
    case = random(40, 2)
    assert same_bits(call(case, **without)[0], call(case)[0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"use_qk_l2norm_in_kernel": False}, "use_qk_l2norm_in_kernel must be True"),
        ({"use_gate_in_kernel": False}, "use_gate_in_kernel must be True"),
        ({"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True}, "use_beta_sigmoid_in_kernel must be True with"),
        ({"return_intermediate_states": True}, "return_intermediate_states must be False"),
        ({"cp_context": object()}, "cp_context must be None"),
        ({"lower_bound": None}, "lower_bound must be a number .*softplus"),
    ],
)
def test_another_operation_is_refused_by_name(options, match):
    with pytest.raises(ValueError, match=match):
        call(random(40, 2), **options)


def test_misspelt_names_are_errors():
    with pytest.raises(TypeError, match="chunk_size"):
        call(random(40, 2), chunk_size=64)


def test_gradients_are_refused():
    case = random(40, 2)
    with pytest.raises(RuntimeError, match="v must not require grad"):
        call(replace(case, v=case.v.requires_grad_()))


def test_compiles_whole():
    case = random(40, 2)
    torch._dynamo.reset()
    traced = torch.compile(lambda x: call(replace(case, v=x))[0] * 2, fullgraph=True, backend="eager")
    assert same_bits(traced(case.v), call(case)[0] * 2)
