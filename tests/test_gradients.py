"""The reference stages are differentiable: gradcheck in fp64, and autograd through the token recurrence."""

import pytest
import torch
from cases import D, random, state

from flash_kda.reference import Inputs, chain, forward, recurrent_kda, state_summary

F64 = torch.float64
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def leaves(tokens, heads=2, k_dim=5, v_dim=3, segments=1):
    rng = torch.Generator().manual_seed(tokens)

    def leaf(*shape):
        return torch.randn(*shape, generator=rng, dtype=F64).requires_grad_()

    rows = [leaf(tokens, heads, dim) for dim in (k_dim, k_dim, v_dim, k_dim)]
    return [*rows, leaf(tokens, heads), leaf(heads), leaf(heads, k_dim), leaf(segments, heads, v_dim, k_dim)]


def run_forward(q, k, v, g, beta, A_log, dt_bias, initial_state, offsets, lower_bound=-2.0):
    inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, lower_bound, scale=0.4)
    out, final = torch.zeros_like(v), torch.zeros_like(initial_state)
    forward(inputs, offsets, out, max_len=q.shape[0], initial_state=initial_state, final_state=final)
    return out, final


@pytest.mark.parametrize("tokens", [5, 16, 20, 37])
def test_forward(tokens):
    offsets = torch.tensor([0, tokens])
    assert torch.autograd.gradcheck(lambda *x: run_forward(*x, offsets), leaves(tokens), fast_mode=True)


def test_forward_of_ragged_sequences():
    offsets = torch.tensor([0, 3, 3, 21])
    assert torch.autograd.gradcheck(lambda *x: run_forward(*x, offsets), leaves(21, segments=3), fast_mode=True)


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_summary_and_chain(eps):
    """Also through an exit: what was dropped has no gradient."""
    offsets = torch.tensor([0, 33, 52, 60])

    def run(q, k, v, g, beta, A_log, dt_bias, initial_state):
        inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, -2.0)
        summary = state_summary(inputs, offsets, max_len=60, eps=eps)
        assert summary.exited.any() == (eps > 0)
        slots = torch.tensor([0, 3])
        return chain(initial_state, summary.ht, summary.mt, ~summary.exited, slots, max_slots=3)

    q, *rest = leaves(60)
    assert torch.autograd.gradcheck(lambda *x: run(q.detach(), *x), rest, fast_mode=True)


@pytest.mark.parametrize("lower_bound", [-5.0, -0.5])
def test_chunked_gradients_equal_those_of_the_recurrence(lower_bound):
    case = random(40, 2, lower_bound=lower_bound)
    tensors = [getattr(case, name).double() for name in NAMES[:-1]] + [state(1, 2, F64)]
    weight_o, weight_s = torch.randn(40, 2, D, dtype=F64), torch.randn(1, 2, D, D, dtype=F64)

    def gradients(run):
        inputs = [x.clone().requires_grad_() for x in tensors]
        out, final = run(*inputs)
        return torch.autograd.grad((out * weight_o).sum() + (final * weight_s).sum(), inputs)

    def chunked(q, k, v, g, beta, *rest):
        return run_forward(*(x[0] for x in (q, k, v, g, beta)), *rest, torch.tensor([0, 40]), lower_bound)

    def recurrent(q, k, v, g, beta, A_log, dt_bias, h0):
        o, final = recurrent_kda(q, k, v, g, beta, 0.4, A_log, dt_bias, lower_bound, h0)
        return o[0], final

    for name, got, want in zip(NAMES, gradients(chunked), gradients(recurrent), strict=True):
        assert (got - want).norm() <= 1e-10 * want.norm(), name


def test_gradients_are_finite_where_gates_saturate():
    q, k, v, g, beta, A_log, dt_bias, h0 = (x.detach().float() for x in leaves(64, 1))
    g, A_log = 30 * g.sign(), torch.full_like(A_log, 20)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta, A_log, dt_bias, h0)]
    out, final = run_forward(*inputs, torch.tensor([0, 64]), lower_bound=-5.0)
    grads = torch.autograd.grad(out.sum() + final.sum(), inputs)
    assert all(x.isfinite().all() for x in grads)
    assert not grads[3].any()
