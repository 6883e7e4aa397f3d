"""The oracle itself: against scalars in plain Python and against closed forms."""

import math

import pytest
import torch
from cases import packed_offsets, random

from flash_kda.reference import recurrent_kda

BIG = 1e6  # an l2 norm this large makes the epsilon of the normalisation vanish in fp64


def tiny(tokens: int, heads: int = 1, k_dim: int = 4, v_dim: int = 3, **changes) -> dict:
    rng = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    arguments = {name: normal(1, tokens, heads, k_dim) for name in ("q", "k", "g")}
    arguments |= {"v": normal(1, tokens, heads, v_dim), "beta": normal(1, tokens, heads), "scale": 0.3}
    arguments |= {"A_log": normal(heads), "dt_bias": normal(heads, k_dim), "lower_bound": -3.0}
    return arguments | changes


def scalar_kda(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state):
    """The recurrence in Python floats, one head at a time."""
    _, tokens, heads, k_dim = q.shape
    v_dim = v.shape[-1]
    o, final = torch.zeros(1, tokens, heads, v_dim, dtype=torch.float64), initial_state.clone()
    for h in range(heads):
        S = [[initial_state[0, h, j, i].item() for j in range(v_dim)] for i in range(k_dim)]
        for t in range(tokens):
            qt, kt, gt = q[0, t, h].tolist(), k[0, t, h].tolist(), g[0, t, h].tolist()
            q_norm = math.sqrt(sum(x * x for x in qt) + 1e-6)
            k_norm = math.sqrt(sum(x * x for x in kt) + 1e-6)
            b = 1 / (1 + math.exp(-beta[0, t, h].item()))
            for i in range(k_dim):
                gate = math.exp(A_log[h].item()) * (gt[i] + dt_bias[h, i].item())
                alpha = math.exp(lower_bound / (1 + math.exp(-gate)))
                S[i] = [alpha * x for x in S[i]]
            for j in range(v_dim):
                read = sum(kt[i] / k_norm * S[i][j] for i in range(k_dim))
                for i in range(k_dim):
                    S[i][j] += b * kt[i] / k_norm * (v[0, t, h, j].item() - read)
                o[0, t, h, j] = scale * sum(qt[i] / q_norm * S[i][j] for i in range(k_dim))
        final[0, h] = torch.tensor(S, dtype=torch.float64).T
    return o, final


def test_equals_the_definition_in_scalars():
    arguments = tiny(7, heads=2, initial_state=torch.randn(1, 2, 3, 4, dtype=torch.float64))
    o, final = recurrent_kda(**arguments)
    want_o, want_final = scalar_kda(**arguments)
    torch.testing.assert_close(o, want_o, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(final, want_final, rtol=1e-13, atol=1e-14)


def test_orthonormal_keys_without_decay_store_every_value():
    keys = BIG * torch.eye(4, dtype=torch.float64)[None, :, None]
    arguments = tiny(4, k=keys, q=keys, beta=torch.full((1, 4, 1), 800.0), lower_bound=0.0)
    o, final = recurrent_kda(**arguments)
    torch.testing.assert_close(final[0, 0], arguments["v"][0, :, 0].T, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(o, 0.3 * arguments["v"], rtol=1e-11, atol=1e-12)


def test_writing_the_same_key_replaces_the_value():
    keys = torch.full((1, 2, 1, 4), BIG, dtype=torch.float64)
    arguments = tiny(2, k=keys, q=keys, beta=torch.full((1, 2, 1), 800.0))
    o, _ = recurrent_kda(**arguments)
    torch.testing.assert_close(o, 0.3 * arguments["v"], rtol=1e-11, atol=1e-12)


def test_without_writes_the_state_decays_by_its_gates():
    h0 = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    gates = torch.tensor([-800.0, 0.0, 800.0, 0.0], dtype=torch.float64).expand(1, 6, 1, 4)
    arguments = tiny(6, g=gates, beta=torch.full((1, 6, 1), -800.0), A_log=torch.zeros(1), dt_bias=torch.zeros(1, 4))
    _, final = recurrent_kda(**arguments, initial_state=h0)
    decay = torch.tensor([0.0, -1.5, -3.0, -1.5], dtype=torch.float64).mul(6).exp()
    torch.testing.assert_close(final, h0 * decay, rtol=1e-12, atol=0)


def test_packed_sequences_equal_separate_calls():
    case = random(37, 2)
    h0 = torch.randn(4, 2, 128, 128, dtype=torch.float64)
    o, final = case.oracle(h0, packed_offsets(5, 0, 20, 7))
    for n, (start, end) in enumerate([(0, 5), (5, 5), (5, 25), (25, 32)]):
        alone, state = case.cut(start, end).oracle(h0[n : n + 1])
        assert torch.equal(o[:, start:end], alone)
        assert torch.equal(final[n : n + 1], state)
    assert not o[:, 32:].any()
    assert torch.equal(final[1], h0[1])


def test_batch_rows_are_independent_sequences():
    case = random(9, 2, batch=3)
    o, final = case.oracle()
    packed_o, packed_final = case.packed().oracle(None, packed_offsets(9, 9, 9))
    assert torch.equal(o.flatten(0, 1), packed_o[0])
    assert torch.equal(final, packed_final)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_computes_in_the_dtype_asked_for(dtype):
    o, final = random(4, 1).oracle(dtype=dtype)
    assert (o.dtype, final.dtype) == (dtype, dtype)
