"""fla's dispatcher on a GPU: a call of its ``chunk_kda`` that qualifies runs this package's kernel, and is right.

Nothing here makes fla compile a kernel of its own.
"""

import importlib.util
import itertools
import warnings

import pytest
import torch
from cases import packed_offsets, random, state
from test_forward import check, on_gpu

import flash_kda
from flash_kda import dispatch

if importlib.util.find_spec("fla") is None:
    pytest.skip("flash-linear-attention is not installed", allow_module_level=True)

QUALIFYING = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "state_v_first": True,
}


@pytest.fixture
def chunk_kda(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fla, where Triton has no GPU
        from fla.ops.kda import chunk_kda

    def reached(*_arguments):
        pytest.fail("the call went on to fla's own kernels")

    monkeypatch.setattr("fla.ops.kda.chunk.ChunkKDAFunction.apply", reached)
    monkeypatch.setenv("FLA_FLASH_KDA", "1")
    monkeypatch.setattr(dispatch._local, "path", None, raising=False)
    return chunk_kda


@pytest.mark.parametrize(
    ("lengths", "dtype"),
    [((100,), None), ((64, 0, 33, 1, 62), torch.int32), ((64, 0, 33, 1, 62), torch.int64)],
    ids=["dense", "int32 offsets", "int64 offsets"],
)
def test_a_qualifying_call_runs_the_hopper_kernel(chunk_kda, lengths, dtype):
    case, h0 = random(sum(lengths), 3), state(len(lengths), 3)
    offsets = None if dtype is None else packed_offsets(*lengths, dtype=dtype)
    given = on_gpu(case)
    with torch.inference_mode():
        o, final = chunk_kda(
            given.q,
            given.k,
            given.v,
            given.g,
            given.beta,
            A_log=given.A_log,
            dt_bias=given.dt_bias.flatten(),
            lower_bound=case.lower_bound,
            initial_state=h0.cuda(),
            output_final_state=True,
            cu_seqlens=None if offsets is None else offsets.cuda(),
            **QUALIFYING,
        )
    assert flash_kda.last_path() == "sm90"
    want, want_final = case.oracle(h0, offsets)
    for n, (start, end) in enumerate(itertools.pairwise(itertools.accumulate(lengths, initial=0))):
        own = slice(n, n + 1)
        if start < end:
            rows = o[:, start:end].cpu(), final[own].cpu(), want[:, start:end], want_final[own]
            check(case.cut(start, end), *rows, h0[own])
        else:
            assert torch.equal(final[own].cpu(), h0[own])


def test_a_call_with_gradients_is_not_ours(chunk_kda):
    case = on_gpu(random(40, 2))
    with pytest.raises(pytest.fail.Exception, match="fla's own kernels"):
        chunk_kda(
            case.q, case.k, case.v, case.g, case.beta,
            A_log=case.A_log, dt_bias=case.dt_bias.flatten(), lower_bound=-5.0, **QUALIFYING,
        )  # fmt: skip
    assert flash_kda.last_path() is None
