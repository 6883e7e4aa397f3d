"""Operators of torch.library and traced calls: honest schemas, no graph break, the same bits as the functions."""

from dataclasses import replace

import cases
import pytest
import torch
from cases import D, grouped, nan_state, packed_offsets, random, same_bits, state
from torch.utils._python_dispatch import TorchDispatchMode

import flash_kda.ops

OFFSETS = packed_offsets(40, 0, 70)
CASE = grouped(random(110, 4), 2)
POSITIONAL = ("q", "k", "v", "g", "beta", "scale")
GATE = ("A_log", "dt_bias", "lower_bound")
OPERATORS = torch.ops.flash_kda


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


def of(case, *names):
    return tuple(getattr(case, name) for name in names)


def fwd_calls():
    """Arguments of the operators ``fwd`` and ``fwd_cp``, everything that is written fresh."""
    pool = state(5, 4)
    slots = index(3, -1, 0)
    states = torch.zeros(3, 2, 4, D, D)
    chosen = torch.tensor([[16, 32], [-1, -1], [64, -1]])
    plain = (None, None, None)
    return {
        "nothing else": (*plain, None, None, None, None),
        "states": (state(3, 4), torch.zeros(3, 4, D, D).bfloat16(), OFFSETS, None, None, None, None),
        "pool": (state(5, 4), torch.zeros(6, 4, D, D), OFFSETS, None, None, slots, slots),
        "pool in place": (pool, pool, OFFSETS, None, None, slots, slots),
        "checkpoints": (None, torch.zeros(3, 4, D, D), OFFSETS, states, chosen, None, None),
    }


CALLS = pytest.mark.parametrize("call", fwd_calls())


def check(operator, *arguments, **options):
    torch.library.opcheck(operator, arguments, options)


@CALLS
def test_fwd_is_what_it_says(call):
    rest = fwd_calls()[call]
    for workspace in (None, torch.zeros(8, dtype=torch.uint8)):
        out = torch.zeros_like(CASE.v)
        check(OPERATORS.fwd.default, *of(CASE, *POSITIONAL), out, workspace, *of(CASE, *GATE), *rest)


@CALLS
def test_fwd_cp_is_what_it_says(call):
    *states, chosen_states, chosen, read, write = fwd_calls()[call]
    check(
        OPERATORS.fwd_cp.default,
        *of(CASE, *POSITIONAL),
        torch.zeros_like(CASE.v),
        *of(CASE, *GATE),
        *states,
        True,
        chosen_states,
        chosen,
        read,
        write,
        segment_len=32,
        eps=1e-6,
    )


def test_the_parts_are_what_they_say():
    tokens, gate = of(CASE, "k", "v", "g", "beta"), of(CASE, *GATE)
    for calc_mt in (False, True):
        check(OPERATORS.state_only.default, *tokens, *gate, OFFSETS, None, calc_mt, eps=1e-6)
    check(OPERATORS.state_only.default, *tokens, *gate, None, index(1), eps=0.0)
    check(OPERATORS.get_warmup_chunks.default, CASE.g, *gate, OFFSETS, eps=1e-6)
    ht, mt = torch.randn(3, 4, D, D), torch.randn(3, 4, D, D)
    fallback = torch.tensor([True, False, True])
    check(OPERATORS.correct_initial_states.default, state(2, 4), ht, mt, fallback, torch.tensor([0, 1, 3]))
    check(OPERATORS.correct_initial_states.default, None, ht, None, None, torch.tensor([0, 3]))


@pytest.mark.parametrize("name", ["fwd", "fwd_cp"])
def test_what_is_written_is_declared(name):
    written = {a.name for a in getattr(OPERATORS, name).default._schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == {"out", "final_state", "checkpoint_states"}


def test_the_positional_call_of_vllms_operator():
    """``q, k, v, g, beta, scale, out, workspace, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens,
    checkpoint_state, checkpoint_offsets``."""
    case, h0 = random(110, 2), state(3, 2)
    out, final = cases.nan_like(case.v), nan_state(3, 2)
    states, chosen = torch.full((3, 2, D, D), torch.nan), torch.tensor([32, 0, 64])
    offsets, workspace = OFFSETS.int(), torch.empty(0, dtype=torch.uint8)
    bias = case.dt_bias.view(-1, D)
    torch.ops.flash_kda.fwd(
        case.q, case.k, case.v, case.g, case.beta, D**-0.5, out, workspace, case.A_log, bias, -5.0, h0, final, offsets, states,
        chosen,
    )  # fmt: skip
    want_final, want_states = nan_state(3, 2), torch.full((3, 2, D, D), torch.nan)
    want, _ = flash_kda.fwd(
        **case.fwd(initial_state=h0, final_state=want_final, cu_seqlens=offsets),
        checkpoint_states=want_states,
        checkpoint_offsets=chosen,
    )
    assert same_bits(out, want)
    assert same_bits(final, want_final)
    assert same_bits(states, want_states)


class Seen(TorchDispatchMode):
    """Names of the operators that are dispatched."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.names.append(func.namespace)
        return func(*args, **(kwargs or {}))


def test_eager_calls_do_not_pay_for_an_operator():
    with Seen() as seen:
        flash_kda.fwd(**CASE.fwd())
        flash_kda.fwd_cp(**CASE.fwd(), segment_len=32)
        flash_kda.state_only(**CASE.summary())
    assert "aten" in seen.names
    assert "flash_kda" not in seen.names


# Traced.


def layer(q, k, v, g, beta, A_log, dt_bias, offsets, pool, slots):
    """What a model does around the call; the pool is updated in place."""
    out, _ = flash_kda.fwd(
        q * 2, k, v, g, beta, D**-0.5, None, A_log, dt_bias, -5.0, pool, pool, offsets,
        initial_state_indices=slots, final_state_indices=slots,
    )  # fmt: skip
    out_cp, final = flash_kda.fwd_cp(
        q, k, v, g, beta.float(), D**-0.5, torch.empty_like(v), A_log, dt_bias, -5.0, None, None, offsets,
        output_final_state=True, segment_len=32,
    )  # fmt: skip
    return out * out_cp, final


def parts(k, v, g, beta, A_log, dt_bias, offsets, seq_map):
    """The parts, composed."""
    ht, mt, info = flash_kda.state_only(k, v, g, beta, A_log, dt_bias, -5.0, offsets, calc_mt=True, return_info=True)
    states = flash_kda.correct_initial_states(None, ht, mt, info.fallback, seq_map)
    chunks, fallback = flash_kda.get_warmup_chunks(g, A_log, dt_bias, -5.0, offsets)
    only = flash_kda.state_only(k, v, g, beta, A_log, dt_bias, -5.0, offsets, chunks)
    return states + 1, chunks, fallback, only


BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend, **options):
    if backend == "inductor":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:  # whatever it is, there is no compiler to test with
            pytest.skip(f"inductor finds no C++ compiler: {error}")
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@BACKENDS
@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_a_layer_compiles_whole(backend, no_grad):
    arguments = (*of(CASE, *POSITIONAL[:5]), CASE.A_log, CASE.dt_bias, OFFSETS)
    slots = index(3, -1, 0)
    with no_grad():
        pool, want_pool = state(5, 4), state(5, 4)
        want = layer(*arguments, want_pool, slots)
        got = compiled(layer, backend)(*arguments, pool, slots)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
        assert same_bits(pool, want_pool)
        assert not same_bits(pool, state(5, 4))


@BACKENDS
def test_the_parts_compile_whole(backend):
    arguments = (*of(CASE, "k", "v", "g", "beta"), CASE.A_log, CASE.dt_bias, OFFSETS, torch.tensor([0, 2, 3]))
    for a, b in zip(compiled(parts, backend)(*arguments), parts(*arguments), strict=True):
        assert same_bits(a, b)


def test_other_lengths_need_no_new_graph():
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph

    traced = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    for lengths in ((40, 0, 70), (33, 20, 11), (64, 64, 64)):
        case, offsets = grouped(random(sum(lengths), 4), 2), packed_offsets(*lengths)
        arguments = (*of(case, *POSITIONAL[:5]), case.A_log, case.dt_bias, offsets)
        pool, want_pool, slots = state(5, 4), state(5, 4), index(3, -1, 0)
        want = layer(*arguments, want_pool, slots)
        assert all(same_bits(a, b) for a, b in zip(traced(*arguments, pool, slots), want, strict=True))
        assert same_bits(pool, want_pool)
    assert len(graphs) == 1


def test_errors_of_a_compiled_call_are_those_of_the_function():
    def call(v):
        return flash_kda.fwd(CASE.q, CASE.k, v, CASE.g, CASE.beta, 0.1, None, CASE.A_log, CASE.dt_bias, -5.0)[0]

    with pytest.raises(ValueError, match="v must have a multiple of the H = 2 heads"):
        compiled(call, "eager")(CASE.v[:, :, :3])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_call_refuses_gradients(backend):
    """While it is traced: the graph would run without grad mode and return what is detached."""

    def call(v):
        return flash_kda.fwd(CASE.q, CASE.k, v, CASE.g, CASE.beta, 0.1, None, CASE.A_log, CASE.dt_bias, -5.0)[0]

    with pytest.raises(Exception, match="inputs must not require grad"):
        compiled(call, backend)(CASE.v.clone().requires_grad_())
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(call, backend)(CASE.v.clone().requires_grad_())


def test_checkpoints_compile():
    def call(states, chosen):
        out, _ = flash_kda.fwd(
            CASE.q, CASE.k, CASE.v, CASE.g, CASE.beta, 0.1, None, CASE.A_log, CASE.dt_bias, -5.0, cu_seqlens=OFFSETS,
            checkpoint_states=states, checkpoint_offsets=chosen,
        )  # fmt: skip
        return out, states.sum()

    chosen = torch.tensor([[32], [0], [48]])
    states, want_states = torch.zeros(3, 1, 4, D, D), torch.zeros(3, 1, 4, D, D)
    want = call(want_states, chosen)
    got = compiled(call, "aot_eager")(states, chosen)
    assert same_bits(got[0], want[0])
    assert same_bits(states, want_states)
    assert want_states.any()


def test_activated_beta_compiles():
    case = cases.negative(replace(CASE))

    def call(beta):
        return flash_kda.fwd(
            case.q, case.k, case.v, case.g, beta, 0.1, None, case.A_log, case.dt_bias, -5.0, beta_is_activated=True
        )[0]

    assert same_bits(compiled(call, "aot_eager")(case.beta), call(case.beta))
