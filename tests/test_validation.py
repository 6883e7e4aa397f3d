"""The input contract: each rule is enforced, in one message shape, before anything is written."""

import math
import re

import cases
import numpy as np
import pytest
import torch
from cases import D, nan_like, nan_state, packed_offsets, random, same_bits, state

import flash_kda

CASE = random(48, 2)
STATE = state(1, 2)
FORWARD = pytest.mark.parametrize("function", [flash_kda.fwd, flash_kda.fwd_cp])


def assert_message(error: BaseException, argument: str) -> None:
    """``<argument> must <requirement>, got <value>``."""
    assert re.match(rf"{argument} must [^,].*, got \S", str(error), re.DOTALL), str(error)


def refused(error, argument, function, arguments) -> str:
    """Calls, expects the error in the house shape, and that no tensor passed in has changed. Returns the message."""
    tensors = {
        n: x for n, x in arguments.items() if isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_meta
    }
    before = {name: x.detach().clone() for name, x in tensors.items()}
    with pytest.raises(error) as caught:
        function(**arguments)
    assert caught.type is error
    assert_message(caught.value, argument)
    assert all(same_bits(x.detach(), before[name]) for name, x in tensors.items())
    return str(caught.value)


def forward_arguments(**changes):
    return CASE.fwd(initial_state=STATE.clone(), final_state=nan_state(1, 2)) | changes


def tensor_of(argument):
    return forward_arguments(cu_seqlens=packed_offsets(48))[argument]


# Each tensor argument: type, layout, rank, shape, dtype, device, grad.

LAYOUTS = {
    "q": "[B,T,H,K]",
    "k": "[B,T,H,K]",
    "v": "[B,T,HV,V]",
    "g": "[B,T,HV,K]",
    "beta": "[B,T,HV]",
    "out": "[B,T,HV,V]",
    "A_log": "[HV]",
    "dt_bias": "[HV,K]",
    "initial_state": "[N,HV,V,K]",
    "final_state": "[N,HV,V,K]",
    "cu_seqlens": "[N+1]",
}
EVERY_TENSOR = pytest.mark.parametrize("argument", LAYOUTS)
REQUIRED = ("q", "k", "v", "g", "beta")


@FORWARD
@EVERY_TENSOR
def test_not_a_tensor(function, argument):
    for value in (np.zeros(3), 1.0, [1.0]):
        refused(TypeError, argument, function, forward_arguments(**{argument: value}))
    if argument in REQUIRED:
        refused(TypeError, argument, function, forward_arguments(**{argument: None}))


@FORWARD
@EVERY_TENSOR
def test_not_strided(function, argument):
    refused(TypeError, argument, function, forward_arguments(**{argument: tensor_of(argument).to_sparse()}))


@FORWARD
@EVERY_TENSOR
def test_wrong_rank(function, argument):
    for wrong in (tensor_of(argument)[None], tensor_of(argument).flatten()[0]):
        message = refused(ValueError, argument, function, forward_arguments(**{argument: wrong}))
        assert LAYOUTS[argument] in message
        assert str(tuple(wrong.shape)) in message


@FORWARD
@pytest.mark.parametrize("argument", [name for name in LAYOUTS if name not in ("q", "cu_seqlens")])
def test_wrong_shape(function, argument):
    right = tensor_of(argument)
    for axis in range(right.dim()):
        for wrong in (torch.cat([right, right], axis), right.narrow(axis, 0, 1 if right.shape[axis] > 1 else 0)):
            if argument == "v" and axis == 2:
                continue  # the number of value heads is taken from v: test_value_heads
            message = refused(ValueError, argument, function, forward_arguments(**{argument: wrong}))
            assert LAYOUTS[argument] in message
            assert str(tuple(right.shape)) in message
            assert str(tuple(wrong.shape)) in message


ACCEPTED = {
    "g": {torch.bfloat16, torch.float32},
    "beta": {torch.bfloat16, torch.float32},
    "A_log": {torch.float32},
    "dt_bias": {torch.float32},
    "initial_state": {torch.bfloat16, torch.float32},
    "final_state": {torch.bfloat16, torch.float32},
    "cu_seqlens": {torch.int32, torch.int64},
}
ALL_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)


@FORWARD
@EVERY_TENSOR
def test_wrong_dtype(function, argument):
    accepted = ACCEPTED.get(argument, {torch.bfloat16})
    for dtype in ALL_DTYPES:
        arguments = forward_arguments(**{argument: tensor_of(argument).to(dtype)})
        if dtype in accepted:
            function(**arguments)
        else:
            message = refused(TypeError, argument, function, arguments)
            assert all(str(x).removeprefix("torch.") in message for x in accepted)


@FORWARD
@pytest.mark.parametrize("argument", [name for name in LAYOUTS if name != "q"])
def test_other_device(function, argument):
    message = refused(ValueError, argument, function, forward_arguments(**{argument: tensor_of(argument).to("meta")}))
    assert "meta" in message
    assert "cpu" in message


@FORWARD
@pytest.mark.parametrize("argument", [name for name in LAYOUTS if name != "cu_seqlens"])
def test_requires_grad(function, argument):
    arguments = forward_arguments(**{argument: tensor_of(argument).clone().requires_grad_()})
    message = refused(RuntimeError, argument, function, arguments)
    assert "flash_kda.reference" in message
    with torch.no_grad():
        function(**arguments)


@FORWARD
@pytest.mark.parametrize("dim", [0, 1, 32, 60, 64, 96, 127, 256])
def test_other_head_dimensions(function, dim):
    tokens = {name: torch.zeros(1, 48, 2, dim, dtype=torch.bfloat16) for name in ("q", "k", "v", "g")}
    message = refused(ValueError, "q", function, forward_arguments(**tokens, out=torch.zeros_like(tokens["q"])))
    assert "K = V = 128" in message


@FORWARD
@pytest.mark.parametrize(("heads", "value_heads"), [(4, 6), (4, 2), (2, 3), (2, 0)])
def test_value_heads_are_a_multiple_of_heads(function, heads, value_heads):
    case = random(48, value_heads)
    few = random(48, heads)
    message = refused(ValueError, "v", function, case.fwd(q=few.q, k=few.k))
    assert "multiple" in message
    assert f"(1, 48, {value_heads}, 128)" in message


@FORWARD
@pytest.mark.parametrize("argument", ["g", "beta", "out", "A_log", "dt_bias", "initial_state", "final_state"])
def test_everything_but_q_and_k_has_the_value_heads(function, argument):
    few, many = random(48, 2), random(48, 4)
    wrong = few.fwd(initial_state=state(1, 2), final_state=state(1, 2))[argument]
    arguments = many.fwd(q=few.q, k=few.k, initial_state=state(1, 4), final_state=nan_state(1, 4)) | {argument: wrong}
    message = refused(ValueError, argument, function, arguments)
    assert str(tuple(wrong.shape)) in message
    assert "HV" in message


@FORWARD
@pytest.mark.parametrize("value", [1, 0, None, "yes", torch.tensor(True)])
def test_beta_is_activated_is_a_flag(function, value):
    refused(TypeError, "beta_is_activated", function, forward_arguments(beta_is_activated=value))
    refused(TypeError, "beta_is_activated", flash_kda.state_only, CASE.summary(beta_is_activated=value))


@FORWARD
def test_no_heads(function):
    empty = random(48, 1).map(lambda x: x[:, :, :0])
    refused(ValueError, "q", function, forward_arguments(**empty.fwd(A_log=None, dt_bias=None)))


@FORWARD
def test_swapped_layouts_name_the_right_one(function):
    swapped = CASE.map(lambda x: x.transpose(1, 2).contiguous())
    message = refused(ValueError, "k", function, forward_arguments(k=swapped.k))
    assert "[B,T,H,K] = (1, 48, 2, 128)" in message
    message = refused(ValueError, "A_log", function, swapped.fwd())
    assert "HV is the third axis of v = (1, 2, 48, 128)" in message
    refused(ValueError, "initial_state", function, forward_arguments(initial_state=STATE[0]))


@FORWARD
def test_wrong_shapes_of_dt_bias(function):
    for shape in ((2,), (D, 2), (1, D), (3, D), (3 * D,), (2, D, 1), ()):
        assert "[HV*K] = (256,)" in refused(ValueError, "dt_bias", function, forward_arguments(dt_bias=torch.zeros(shape)))


# Scalars.

NOT_A_NUMBER = pytest.mark.parametrize("value", [True, "1", [1.0], torch.tensor(-1.0), 1j])


@FORWARD
def test_softplus_gate_is_refused_by_name(function):
    message = refused(ValueError, "lower_bound", function, forward_arguments(lower_bound=None))
    assert "softplus" in message
    assert "Kimi-Linear-48B" in message


@FORWARD
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5.0001, 1.0, 1e-9])
def test_lower_bound_out_of_range(function, value):
    refused(ValueError, "lower_bound", function, forward_arguments(lower_bound=value))


@FORWARD
@pytest.mark.parametrize("value", [0, 0.0, -0.0, -5, -5.0, -1e-300, np.float32(-1), np.float64(-1)])
def test_lower_bound_in_range(function, value):
    out, _ = function(**forward_arguments(lower_bound=value))
    assert out.isfinite().all()


@FORWARD
@NOT_A_NUMBER
@pytest.mark.parametrize("argument", ["lower_bound", "scale"])
def test_not_a_number(function, argument, value):
    refused(TypeError, argument, function, forward_arguments(**{argument: value}))


@FORWARD
def test_scale_must_be_finite(function):
    for value in (math.nan, math.inf, -math.inf):
        refused(ValueError, "scale", function, forward_arguments(scale=value))
    refused(TypeError, "scale", function, forward_arguments(scale=None))


@pytest.mark.parametrize("value", [-1e-9, 1.0, 2, math.nan, math.inf])
def test_eps_out_of_range(value):
    refused(ValueError, "eps", flash_kda.fwd_cp, forward_arguments(eps=value))
    refused(ValueError, "eps", flash_kda.state_only, CASE.summary(eps=value))
    refused(ValueError, "eps", flash_kda.get_warmup_chunks, CASE.gates(eps=value))


@NOT_A_NUMBER
def test_eps_not_a_number(value):
    refused(TypeError, "eps", flash_kda.fwd_cp, forward_arguments(eps=value))


# Offsets.


@FORWARD
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [[1, 48], [-1, 48], [0, 30, 20, 48], [0, 49], [0, -1], [0, 2**31 - 1]])
def test_bad_offsets(function, offsets, dtype):
    arguments = forward_arguments(
        cu_seqlens=torch.tensor(offsets, dtype=dtype),
        initial_state=state(len(offsets) - 1, 2),
        final_state=nan_state(len(offsets) - 1, 2),
    )
    refused(ValueError, "cu_seqlens", function, arguments)


@FORWARD
def test_offsets_are_never_empty(function):
    refused(ValueError, "cu_seqlens", function, forward_arguments(cu_seqlens=torch.zeros(0, dtype=torch.int32)))


@FORWARD
def test_packing_needs_one_batch_row(function):
    message = refused(ValueError, "q", function, random(48, 2, batch=2).fwd(cu_seqlens=packed_offsets(48)))
    assert "B = 1" in message


@FORWARD
def test_states_count_sequences_not_rows(function):
    offsets = packed_offsets(20, 28)
    for name in ("initial_state", "final_state"):
        arguments = CASE.fwd(cu_seqlens=offsets) | {name: state(1, 2)}
        assert "(2, 2, 128, 128)" in refused(ValueError, name, function, arguments)


@pytest.mark.parametrize("hint", [[0, 20], [0, 20, 48, 48], [0, 21, 48], torch.tensor([0, 48, 48])])
def test_host_offsets_must_be_the_offsets(hint):
    offsets = packed_offsets(20, 28)
    refused(ValueError, "cu_seqlens_cpu", flash_kda.fwd_cp, CASE.fwd(cu_seqlens=offsets, cu_seqlens_cpu=hint))


# Memory.


@FORWARD
@pytest.mark.parametrize("source", ["q", "k", "v", "g"])
def test_out_must_not_be_an_input(function, source):
    arguments = forward_arguments()
    x = arguments[source]
    for out in (x, x.view(x.shape), torch.as_strided(x, x.shape, x.stride())):
        refused(ValueError, "out", function, arguments | {"out": out})


@FORWARD
def test_partial_overlaps_are_refused(function):
    buffer = torch.randn(49, 2, D).bfloat16()
    refused(ValueError, "out", function, forward_arguments(v=buffer[None, :48], out=buffer[None, 1:]))
    wide = torch.randn(1, 48, 2, 2 * D).bfloat16()
    refused(ValueError, "out", function, forward_arguments(k=wide[..., :D], out=wide[..., 1 : D + 1]))
    flat = torch.zeros(1 << 16)
    inside = flat[: 2 * D * D].view(1, 2, D, D)
    shared = flat.view(torch.bfloat16)[: CASE.q.numel()].view(CASE.q.shape)
    refused(ValueError, "out", function, forward_arguments(out=shared, initial_state=inside))
    refused(ValueError, "out", function, forward_arguments(out=shared, final_state=inside))


@FORWARD
def test_final_state_may_be_the_initial_state_itself_only(function):
    pool = torch.zeros(3, 2, D, D)
    refused(
        ValueError, "final_state", function, forward_arguments(initial_state=pool[0:1], final_state=pool.transpose(2, 3)[0:1])
    )
    two = packed_offsets(20, 28)
    refused(
        ValueError, "final_state", function, forward_arguments(initial_state=pool[0:2], final_state=pool[1:3], cu_seqlens=two)
    )
    function(**forward_arguments(initial_state=pool[0:1], final_state=pool[1:2]))
    function(**forward_arguments(initial_state=pool[0:1], final_state=pool[0:1]))


@FORWARD
def test_written_tensors_must_not_overlap_themselves(function):
    row = torch.zeros(1, 1, 2, D).bfloat16()
    refused(ValueError, "out", function, forward_arguments(out=row.expand(CASE.q.shape)))
    sliding = torch.zeros(100 * D).bfloat16().as_strided(CASE.q.shape, (100 * D, D, D, 1))
    refused(ValueError, "out", function, forward_arguments(out=sliding))
    refused(ValueError, "final_state", function, forward_arguments(final_state=torch.zeros(1, 1, D, D).expand(1, 2, D, D)))


@FORWARD
def test_interleaved_slices_of_one_buffer_are_allowed(function):
    want, _ = function(**CASE.fwd())
    buffer = torch.zeros(1, 48, 2, 5 * D).bfloat16()
    q, k, v, g, out = buffer.split(D, -1)
    for target, source in ((q, CASE.q), (k, CASE.k), (v, CASE.v), (g, CASE.g)):
        target.copy_(source)
    function(**CASE.fwd(q=q, k=k, v=v, g=g, out=out))
    assert same_bits(out, want)
    row = torch.zeros(1, 48, 2 * D + 2).bfloat16()
    beta, out = row[..., 2 * D :], row[..., : 2 * D].unflatten(-1, (2, D))
    beta.copy_(CASE.beta)
    function(**CASE.fwd(beta=beta, out=out))
    assert same_bits(out, want)


@FORWARD
def test_inputs_may_share_memory(function):
    function(**forward_arguments(q=CASE.k, v=CASE.k, g=CASE.k))


# Choice of implementation, environment, debug mode.


@FORWARD
def test_impl(function, monkeypatch):
    refused(ValueError, "impl", function, forward_arguments(impl="cuda"))
    refused(NotImplementedError, "impl='sm90'", function, forward_arguments(impl="sm90"))
    for impl in ("auto", "reference", None):
        function(**forward_arguments(impl=impl))
    monkeypatch.setenv("FLASH_KDA_IMPL", "sm90")
    refused(NotImplementedError, "impl='sm90'", function, forward_arguments())
    function(**forward_arguments(impl="reference"))
    for bad in ("", "SM90", "fast"):
        monkeypatch.setenv("FLASH_KDA_IMPL", bad)
        refused(ValueError, "FLASH_KDA_IMPL", function, forward_arguments())


@FORWARD
def test_debug_mode_looks_for_nan(function, monkeypatch):
    for bad in ("2", "true"):
        monkeypatch.setenv("FLASH_KDA_DEBUG", bad)
        refused(ValueError, "FLASH_KDA_DEBUG", function, forward_arguments())
    arguments = forward_arguments(v=CASE.v.clone(), initial_state=STATE.clone())
    arguments["v"][0, 3, 1, 7] = torch.nan
    monkeypatch.setenv("FLASH_KDA_DEBUG", "0")
    function(**arguments)
    monkeypatch.setenv("FLASH_KDA_DEBUG", "1")
    assert "[0, 3, 1, 7]" in refused(ValueError, "v", function, arguments)
    function(**forward_arguments())
    arguments = forward_arguments()
    arguments["initial_state"][0, 1, 2, 3] = torch.inf
    assert "[0, 1, 2, 3]" in refused(ValueError, "initial_state", function, arguments)
    for name in ("A_log", "dt_bias"):
        refused(ValueError, name, function, forward_arguments(**{name: nan_like(getattr(CASE, name))}))


@FORWARD
def test_debug_mode_leaves_padding_alone(function, monkeypatch):
    monkeypatch.setenv("FLASH_KDA_DEBUG", "1")
    k = CASE.k.clone()
    k[:, 40:] = torch.nan
    function(**forward_arguments(k=k, cu_seqlens=packed_offsets(40)))


# The parts.


@pytest.mark.parametrize("argument", ["k", "v", "g", "beta", "A_log", "dt_bias"])
def test_state_only_has_the_contract_of_fwd(argument):
    right = CASE.summary()[argument]
    call = flash_kda.state_only
    refused(TypeError, argument, call, CASE.summary(**{argument: np.zeros(3)}))
    refused(TypeError, argument, call, CASE.summary(**{argument: right.double()}))
    refused(ValueError, argument, call, CASE.summary(**{argument: right[None]}))
    refused(RuntimeError, argument, call, CASE.summary(**{argument: right.clone().requires_grad_()}))
    refused(ValueError, "cu_seqlens", call, CASE.summary(cu_seqlens=torch.tensor([0, 49])))
    refused(ValueError, "lower_bound", call, CASE.summary(lower_bound=None))


@pytest.mark.parametrize("argument", ["g", "A_log", "dt_bias"])
def test_get_warmup_chunks_has_the_contract_of_fwd(argument):
    right = CASE.gates()[argument]
    call = flash_kda.get_warmup_chunks
    refused(TypeError, argument, call, CASE.gates(**{argument: np.zeros(3)}))
    refused(TypeError, argument, call, CASE.gates(**{argument: right.double()}))
    refused(ValueError, argument, call, CASE.gates(**{argument: right[None]}))
    refused(ValueError, "cu_seqlens", call, CASE.gates(cu_seqlens=torch.tensor([1, 48])))
    refused(ValueError, "lower_bound", call, CASE.gates(lower_bound=0.1))


def test_num_warmup_chunks():
    def arguments(x):
        return CASE.summary(cu_seqlens=packed_offsets(16, 32), num_warmup_chunks=x)

    call = flash_kda.state_only
    refused(TypeError, "num_warmup_chunks", call, arguments(3))
    refused(TypeError, "num_warmup_chunks", call, arguments(torch.ones(2)))
    refused(ValueError, "num_warmup_chunks", call, arguments(torch.ones(3, dtype=torch.int32)))
    refused(ValueError, "num_warmup_chunks", call, arguments(torch.ones(2, 3, dtype=torch.int32)))
    refused(ValueError, "num_warmup_chunks", call, arguments(torch.ones(2, 2, dtype=torch.int32, device="meta")))
    refused(ValueError, "num_warmup_chunks", call, arguments(torch.tensor([1, -1])))


def correction(**changes):
    ht = torch.zeros(3, 2, D, D)
    arguments = {"initial_state": None, "ht": ht, "mt": ht.clone(), "fallback": None, "seq_map": torch.tensor([0, 3])}
    return arguments | changes


@pytest.mark.parametrize(
    ("error", "argument", "value"),
    [
        (TypeError, "ht", None),
        (TypeError, "ht", torch.zeros(3, 2, D, D).bfloat16()),
        (ValueError, "ht", torch.zeros(3, 2, D)),
        (ValueError, "ht", torch.zeros(3, 2, D, 64)),
        (TypeError, "mt", torch.zeros(3, 2, D, D).double()),
        (ValueError, "mt", torch.zeros(2, 2, D, D)),
        (ValueError, "mt", torch.zeros(3, 2, D, D, device="meta")),
        (RuntimeError, "mt", torch.zeros(3, 2, D, D, requires_grad=True)),
        (TypeError, "fallback", torch.zeros(3, dtype=torch.int32)),
        (ValueError, "fallback", torch.zeros(2, dtype=torch.bool)),
        (TypeError, "seq_map", None),
        (TypeError, "seq_map", [0, 3]),
        (TypeError, "seq_map", torch.tensor([0.0, 3.0])),
        (ValueError, "seq_map", torch.zeros(0, dtype=torch.int32)),
        (ValueError, "seq_map", torch.tensor([[0, 3]])),
        (ValueError, "seq_map", torch.tensor([1, 3])),
        (ValueError, "seq_map", torch.tensor([0, 2, 1])),
        (ValueError, "seq_map", torch.tensor([0, 4])),
        (TypeError, "initial_state", torch.zeros(1, 2, D, D).half()),
        (ValueError, "initial_state", torch.zeros(2, 2, D, D)),
    ],
)
def test_correct_initial_states(error, argument, value):
    refused(error, argument, flash_kda.correct_initial_states, correction(**{argument: value}))


def test_a_needed_transition_must_be_given():
    fallback = torch.tensor([False, True, False])
    refused(ValueError, "mt", flash_kda.correct_initial_states, correction(mt=None, fallback=fallback))
    flash_kda.correct_initial_states(**correction(mt=None, fallback=torch.zeros(3, dtype=torch.bool)))


PLAN = {"cu_seqlens": torch.tensor([0, 20, 48]), "total_tokens": 48, "num_heads": 2}


@pytest.mark.parametrize(
    ("error", "argument", "value"),
    [
        (TypeError, "cu_seqlens", [0, 48]),
        (TypeError, "cu_seqlens", torch.tensor([0.0, 48.0])),
        (ValueError, "cu_seqlens", torch.tensor([[0, 48]])),
        (ValueError, "cu_seqlens", torch.zeros(0, dtype=torch.int32)),
        (ValueError, "cu_seqlens", torch.tensor([1, 48])),
        (ValueError, "cu_seqlens", torch.tensor([0, 30, 20])),
        (ValueError, "cu_seqlens", torch.tensor([0, 49])),
        (ValueError, "total_tokens", -1),
        (TypeError, "total_tokens", 48.0),
        (ValueError, "num_heads", -1),
        (TypeError, "num_heads", True),
        (ValueError, "segment_len", 0),
        (ValueError, "segment_len", -16),
        (ValueError, "segment_len", 24),
        (TypeError, "segment_len", 32.0),
        (TypeError, "segment_len", True),
        (ValueError, "num_processors", 0),
        (TypeError, "num_processors", 1.5),
        (ValueError, "cu_seqlens_cpu", [0, 48]),
        (ValueError, "cu_seqlens_cpu", [0, 48, 20]),
        (TypeError, "cu_seqlens_cpu", [0.0, 20.0, 48.0]),
        (ValueError, "cu_seqlens_cpu", torch.tensor([0, 20, 48]).to("meta")),
        (ValueError, "cu_seqlens_cpu", [0, 21, 48]),
    ],
)
def test_plan_segments(error, argument, value):
    refused(error, argument, flash_kda.plan_segments, PLAN | {argument: value})


@pytest.mark.parametrize("value", [0, 24, 16.0, "32"])
def test_segment_len_of_fwd_cp(value):
    error = ValueError if isinstance(value, int) else TypeError
    refused(error, "segment_len", flash_kda.fwd_cp, forward_arguments(segment_len=value))
    refused(ValueError, "segment_len", flash_kda.fwd_cp, forward_arguments(segment_len=32, fixed_plan=True))


@pytest.mark.parametrize("segment_len", [2**31, 2**40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_huge_segment_len_does_not_overflow(segment_len, dtype):
    offsets = packed_offsets(20, 28, dtype=dtype)
    want, _ = flash_kda.fwd(**CASE.fwd(cu_seqlens=offsets))
    assert same_bits(flash_kda.fwd_cp(**CASE.fwd(cu_seqlens=offsets), segment_len=segment_len)[0], want)


def test_tensors_of_inference_mode_are_refused_outside_it():
    case = cases.make("random_5", 40, 1)
    with torch.inference_mode():
        made_inside = torch.zeros(1, 1, 128, 128)
    flash_kda.fwd(**case.fwd(final_state=torch.zeros(1, 1, 128, 128)))
    arguments = case.fwd(final_state=made_inside)
    kept = arguments["out"].clone()
    with pytest.raises(RuntimeError, match="final_state must be writable"):
        flash_kda.fwd(**arguments)
    assert cases.same_bits(arguments["out"], kept)
    with torch.inference_mode():
        flash_kda.fwd(**arguments)
    assert made_inside.isfinite().all()


def test_strides_of_single_axes_do_not_hide_the_same_state():
    case = cases.make("random_5", 40, 2)
    pool = torch.zeros(5, 3, 128, 128)[:, :2]
    flash_kda.fwd(**case.fwd(initial_state=pool[2:3], final_state=pool[2].unsqueeze(0)))


@pytest.mark.parametrize("value", [10**400, 1e300], ids=["integer", "float"])
def test_numbers_beyond_fp32_are_refused(value):
    with pytest.raises(ValueError, match="scale must be finite in fp32"):
        flash_kda.fwd(**cases.make("random_5", 40, 1).fwd(scale=value))
