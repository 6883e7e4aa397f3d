"""The path of devices whose contents the host must not read, run on a CPU by forbidding the host to look."""

import pytest
import torch

import flash_kda
from flash_kda import checkpoints, host, validation
from flash_kda.reference import chunks, stages


def _inputs(tokens, heads, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen).bfloat16()

    wide = (1, tokens, heads, 128)
    params = (-0.2 * torch.rand(heads, generator=gen), torch.randn(heads, 128, generator=gen), -5.0)
    return [normal(*wide), normal(*wide), normal(*wide), normal(*wide), normal(1, tokens, heads), 128**-0.5], params


@pytest.fixture
def blind(monkeypatch):
    """Every module believes that nothing can be read back, and reading a scalar back is an error."""

    def no(_x):
        return False

    for module in (host, validation, chunks, stages, checkpoints):
        monkeypatch.setattr(module, "readable", no)
    for name in ("item", "tolist", "__bool__", "nonzero", "__int__", "__float__"):

        def refuse(self, *_args, _name=name, **_kwargs):
            raise AssertionError(f"the host waited for the device: Tensor.{_name}")

        monkeypatch.setattr(torch.Tensor, name, refuse)


OFFSETS = [0, 33, 33, 200, 456, 470]


@pytest.mark.parametrize("with_state", [False, True])
def test_blind_equals_readable(monkeypatch, request, with_state):
    inputs, params = _inputs(500, 2)
    cu_seqlens = torch.tensor(OFFSETS)
    state = torch.randn(5, 2, 128, 128) if with_state else None

    def run():
        final = torch.full((5, 2, 128, 128), float("nan"))
        out = torch.full_like(inputs[2], float("nan"))
        flash_kda.fwd(*inputs, out, *params, state, final, cu_seqlens)
        final_cp = torch.full((5, 2, 128, 128), float("nan"))
        out_cp = torch.full_like(inputs[2], float("nan"))
        flash_kda.fwd_cp(*inputs, out_cp, *params, state, final_cp, cu_seqlens, segment_len=64)
        segments = flash_kda.plan_segments(cu_seqlens, 500, 2, segment_len=64)
        ht, mt, info = flash_kda.state_only(*inputs[1:5], *params, segments.cu_seqlens, calc_mt=True, return_info=True)
        h0 = flash_kda.correct_initial_states(state, ht, mt, info.fallback, segments.seq_map)
        bound = flash_kda.get_warmup_chunks(inputs[3], *params, segments.cu_seqlens)
        return [out, final, out_cp, final_cp], [segments, ht, mt, info, h0, bound]

    seen, seen_parts = run()
    request.getfixturevalue("blind")
    blind_results, blind_parts = run()
    monkeypatch.undo()
    for a, b in zip(seen, blind_results, strict=True):
        assert torch.equal(a[:, :470].isnan(), b[:, :470].isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    # Without the lengths the plan has room for more segments; those in use are the same.
    used = seen_parts[0].capacity
    assert torch.equal(seen_parts[0].cu_seqlens, blind_parts[0].cu_seqlens[: used + 1])
    for a, b in zip(seen_parts[1:3] + seen_parts[4:5], blind_parts[1:3] + blind_parts[4:5], strict=True):
        assert torch.equal(a, b[: len(a)])
    for a, b in zip(seen_parts[5], blind_parts[5], strict=True):
        assert torch.equal(a, b[: len(a)])
    assert torch.equal(seen_parts[3].chunks, blind_parts[3].chunks[:used])


@pytest.mark.parametrize("function", [flash_kda.fwd, flash_kda.fwd_cp])
def test_no_read_at_all(blind, function):
    inputs, params = _inputs(100, 1)
    options = {"cu_seqlens": torch.tensor([0, 40, 100]), "impl": "reference"}
    if function is flash_kda.fwd_cp:
        options["segment_len"] = 32
    function(*inputs, None, *params, **options)
    pool, slots = torch.zeros(5, 1, 128, 128), torch.tensor([3, -1], dtype=torch.int32)
    pools = {"initial_state": pool, "final_state": pool, "initial_state_indices": slots, "final_state_indices": slots}
    function(*inputs, None, *params, **options, **pools)
    states = torch.zeros(2, 2, 1, 128, 128)
    chosen = torch.tensor([[16, -1], [16, 48]])
    function(*inputs, None, *params, **options, **pools, checkpoint_states=states, checkpoint_offsets=chosen)
    function(*inputs, None, *params, **options, checkpoint_states=states[0].repeat(2, 1, 1, 1)[:3], checkpoint_every=32)
