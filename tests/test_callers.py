"""The calls that serving engines make of FlashKDA, in their positional form and with the shapes that they pass."""

import pytest
import torch
from cases import D, nan_like, nan_state, packed_offsets, random, same_bits, state

import flash_kda
from flash_kda.integrations import vllm

LENGTHS = (70, 64, 128)
OFFSETS = packed_offsets(*LENGTHS, dtype=torch.int32)
CASE = random(sum(LENGTHS), 2)


def test_sglang_gathers_runs_and_scatters():
    """Ten positional arguments, states and offsets by name; parameters reshaped from the model's."""
    pool, slots = state(7, 2), torch.tensor([5, 0, 3], dtype=torch.int32)
    A_log, dt_bias = CASE.A_log.view(1, 1, 2, 1), CASE.dt_bias.flatten()
    start = pool[slots.long()].contiguous()
    final, out = torch.empty_like(start), torch.empty_like(CASE.v)
    flash_kda.fwd(
        CASE.q, CASE.k, CASE.v, CASE.g, CASE.beta, D**-0.5, out, A_log.reshape(-1).float().contiguous(),
        dt_bias.reshape(2, -1).float().contiguous(), -5.0, initial_state=start, final_state=final, cu_seqlens=OFFSETS.long(),
    )  # fmt: skip
    # What it could do instead: no gather, no scatter, no cast of the offsets.
    same = nan_like(CASE.v)
    flash_kda.fwd(
        CASE.q, CASE.k, CASE.v, CASE.g, CASE.beta, D**-0.5, same, CASE.A_log, dt_bias, -5.0, pool, pool, OFFSETS,
        initial_state_indices=slots, final_state_indices=slots,
    )  # fmt: skip
    assert same_bits(same, out)
    assert same_bits(pool[slots.long()], final)


def test_callers_that_ask_for_a_workspace_need_none():
    assert flash_kda.get_workspace_size(65536, 16) == 0
    assert flash_kda.get_workspace_size(total_tokens=0, num_heads=96, num_sequences=4096) == 0
    for numbers in ((-1, 1, 1), (1, -1, 1), (1, 1, -1)):
        with pytest.raises(ValueError, match="must be >= 0, got -1"):
            flash_kda.get_workspace_size(*numbers)
    with pytest.raises(TypeError, match="total_tokens must be an integer"):
        flash_kda.get_workspace_size(1.5, 1)


@pytest.fixture
def vllms_operator():
    """An operator of the name and schema of vLLM's, which fails."""
    library = torch.library.Library(vllm.NAMESPACE, "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, Tensor workspace, "
        "Tensor A_log, Tensor dt_bias, float lower_bound, Tensor? initial_state=None, Tensor(b!)? final_state=None, "
        "Tensor? cu_seqlens=None, Tensor(c!)? checkpoint_state=None, Tensor? checkpoint_offsets=None) -> ()"
    )

    def not_ours(*_arguments):
        raise NotImplementedError("vLLM's own kernel")

    library.impl("fwd", not_ours, "CPU")
    yield
    vllm.disable()
    library._destroy()


def call_vllms_operator():
    out, start, final = nan_like(CASE.v), state(3, 2), nan_state(3, 2)
    saved, chosen = torch.full((3, 2, 2, D, D), torch.nan), torch.tensor([[32, 64], [0, 0], [128, 0]], dtype=torch.int32)
    projected = torch.zeros(1, CASE.tokens, 41, dtype=torch.bfloat16)
    beta = projected[..., 7:9]
    beta.copy_(CASE.beta)
    torch.ops._flashkda_C.fwd(
        CASE.q, CASE.k, CASE.v, CASE.g, beta, D**-0.5, out, torch.empty(64, dtype=torch.uint8), CASE.A_log,
        CASE.dt_bias.flatten().view(-1, D), -5.0, start, final, OFFSETS, saved, chosen,
    )  # fmt: skip
    return out, final, saved, chosen


def test_vllms_operator_comes_here_once_enabled(vllms_operator):
    with pytest.raises(NotImplementedError, match="vLLM's own kernel"):
        call_vllms_operator()
    vllm.enable("cpu")
    vllm.enable("cpu")
    out, final, saved, chosen = call_vllms_operator()
    want_final, want_saved = nan_state(3, 2), torch.full_like(saved, torch.nan)
    want, _ = flash_kda.fwd(
        **CASE.fwd(initial_state=state(3, 2), final_state=want_final, cu_seqlens=OFFSETS),
        checkpoint_states=want_saved,
        checkpoint_offsets=chosen,
    )
    assert same_bits(out, want)
    assert same_bits(final, want_final)
    assert same_bits(saved, want_saved)
    assert same_bits(saved[2, 0], final[2])
    vllm.disable()
    with pytest.raises(NotImplementedError, match="vLLM's own kernel"):
        call_vllms_operator()


def test_without_vllm_there_is_nothing_to_enable():
    with pytest.raises(RuntimeError, match=r"import vllm\._flashkda_C first"):
        vllm.enable()
