"""The Hopper forward kernel behind ``fwd``: the whole contract on the GPU.

The judge of short calls is the fp64 token recurrence, of long ones the chunked reference in fp64, which the CPU tests tie to
it. The unit of every tolerance is the error of an honest evaluation with bf16 operands, made here (:func:`emulate`).
"""

import subprocess
import sys
import threading
from dataclasses import replace

import cases
import pytest
import torch
from cases import D, nan_like, packed_offsets, rel, same_bits

import flash_kda
from flash_kda.reference import forward
from flash_kda.sm90 import build, launch, plan, repeat, stages
from flash_kda.sm90.variants import VARIANTS

MULTIPLE = 1.25
"""Times the emulated error, worst head against worst head."""
LARGER = {"collinear_keys": 1.75, "nearly_collinear_keys": 1.75, "beta_ends": 1.5}
"""Set after the kernel was measured, so they guard against more, not against that. Collinear keys: 1.2e-2 against 8.1e-3; the
kernel rounds v - W S where the emulation rounds U. fla errs 2.3e-2 to 3.9e-2 there. beta_ends: the state of one head, 3.8e-3;
of what it still holds, nineteen parts in twenty are in two channels, and the roundings of one key in these make its error."""
LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 0, 200, 0)


def on_gpu(case: cases.Case) -> cases.Case:
    return replace(case, **{name: x.cuda() for name, x in vars(case).items() if torch.is_tensor(x)})


def fwd(case, initial_state=None, final_state=None, cu_seqlens=None, out=None):
    """On the kernel or not at all; outputs poisoned with NaN unless given."""
    out = nan_like(case.q) if out is None else out
    arguments = {**vars(case), "out": out, "initial_state": initial_state, "final_state": final_state}
    results = flash_kda.fwd(**arguments, cu_seqlens=cu_seqlens, impl="sm90")
    assert flash_kda.last_path() == "sm90"
    return results


def states(sequences, heads, dtype=torch.float32, seed=7):
    return cases.state(sequences, heads, dtype, seed).cuda()


def nan_states(sequences, heads, dtype=torch.float32):
    return torch.full((sequences, heads, D, D), torch.nan, dtype=dtype, device="cuda")


def exact(case, initial_state=None, cu_seqlens=None):
    """Outputs and final states of the chunked reference in fp64."""
    offsets = torch.tensor([0, case.tokens], device="cuda") if cu_seqlens is None else cu_seqlens
    out = torch.zeros(case.q.shape[1:], dtype=torch.float64, device="cuda")
    final = torch.zeros(offsets.numel() - 1, case.heads, D, D, dtype=torch.float64, device="cuda")
    longest = int(offsets.diff().max())
    forward(case.inputs(torch.float64), offsets, out, max_len=longest, initial_state=initial_state, final_state=final)
    return out[None], final


def emulate(case, initial_state=None):
    """One sequence by chunks in fp32, with bf16 wherever a tensor core would read an operand; fp32 state."""

    def bf(x):
        return x.bfloat16().float()

    def chunks(x):
        """``[1, T, H, ...]`` to ``[chunks, H, 16, ...]``, zeros behind the end."""
        x = torch.nn.functional.pad(x[0].float(), (0, 0) * (x.dim() - 2) + (0, -case.tokens % 16))
        return x.unflatten(0, (-1, 16)).transpose(1, 2)

    def unit(x):
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    inside = chunks(torch.ones_like(case.beta)[..., None])
    gate = (chunks(case.g) + case.dt_bias[:, None]) * case.A_log.exp().clamp(max=3e38)[:, None, None]
    log_gamma = (case.lower_bound * torch.sigmoid(gate) * inside).cumsum(2)
    strength = chunks(case.beta[..., None])
    strength = (strength if case.beta_is_activated else torch.sigmoid(strength)) * inside
    q, k, v = unit(chunks(case.q)), unit(chunks(case.k)), chunks(case.v)
    qd, kd, ki = bf(q * log_gamma.exp()), bf(k * log_gamma.exp()), bf(k * (-log_gamma).exp())
    gamma = log_gamma[:, :, -1].exp()
    kg = bf(ki * gamma[:, :, None])
    eye = torch.eye(16, device=k.device)
    inverse = torch.linalg.inv(eye + strength * (kd @ ki.mT).tril(-1))
    mix = bf(inverse * strength.mT)
    w, u, aqk = bf(mix @ kd), bf(mix @ v), bf((qd @ ki.mT).tril())
    state = torch.zeros(case.heads, D, D, device=k.device) if initial_state is None else initial_state[0].float().mT
    rows = []
    for j in range(len(k)):
        write = bf(u[j] - w[j] @ bf(state))
        rows.append(case.scale * (qd[j] @ bf(state) + aqk[j] @ write))
        state = state * gamma[j, :, :, None] + kg[j].mT @ write
    out = torch.cat(rows, 1)[:, : case.tokens].transpose(0, 1)[None].bfloat16()
    return out, state.mT[None]


def check(case, out, final, want, want_final, initial_state=None, multiple=MULTIPLE):
    honest, honest_final = emulate(case, initial_state)
    assert out.isfinite().all(), "outputs are not finite"
    assert final.isfinite().all(), "states are not finite"
    for what, got, mine, oracle, axis in (
        ("out", out, honest, want, 2),
        ("state", final, honest_final, want_final, 1),
    ):
        error, unit = rel(got, oracle, axis), rel(mine, oracle, axis)
        assert error.max() <= multiple * unit.max() + 2e-4, f"{what}: {error.tolist()} against honest {unit.tolist()}"


@pytest.mark.parametrize("name", cases.NAMES)
def test_named_case(name):
    case = on_gpu(cases.make(name, 523, 4))
    start = states(1, 4)
    out, final = fwd(case, start, nan_states(1, 4))
    want, want_final = exact(case, start)
    check(case, out, final, want, want_final, start, LARGER.get(name, MULTIPLE))


def test_the_judge_is_the_token_recurrence():
    case = on_gpu(cases.make("random_5", 97, 2))
    want, want_final = exact(case)
    o, final = case.oracle()
    assert rel(want, o, 2).max() < 1e-12
    assert rel(want_final, final, 1).max() < 1e-12


@pytest.mark.parametrize("lower_bound", [-0.1, -0.5, -1.0, -2.0, -2.5, -3.0, -4.0, -5.0, 0.0])
def test_decay_sweep(lower_bound):
    for mean in (-8, -2, 0, 2, 8):
        case = cases.random(200, 2, lower_bound=lower_bound, seed=mean + 10)
        case = on_gpu(replace(case, g=(case.g.float() + mean).bfloat16()))
        out, final = fwd(case, final_state=nan_states(1, 2))
        check(case, out, final, *exact(case))


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 1e4])
def test_tiny_and_large_keys(scale):
    case = cases.random(300, 2, seed=3)
    k = (case.k.float() * scale).bfloat16()
    k[:, 100:103] = 0
    case = on_gpu(replace(case, k=k, q=(case.q.float() * scale).bfloat16()))
    out, final = fwd(case, final_state=nan_states(1, 2))
    check(case, out, final, *exact(case))


def test_no_drift_over_65536_tokens():
    """Decay 0.9999 a token: a decay or a state rounded to bf16 would drift away."""
    case = on_gpu(cases.random(65536, 1, seed=21))
    case = replace(cases.plain(case), g=torch.full_like(case.g, -10.8), beta=torch.full_like(case.beta, -4.0), lower_bound=-5.0)
    errors = []
    for tokens in (1024, 65536):
        part = case.cut(0, tokens)
        _, final = fwd(part, final_state=nan_states(1, 1))
        errors.append(rel(final, exact(part)[1], 1).item())
    assert errors[1] < 1.5 * errors[0], errors


@pytest.mark.parametrize("heads", [1, 3, 12, 96])
def test_head_counts(heads):
    case = on_gpu(cases.random(70, heads, seed=heads))
    out, final = fwd(case, final_state=nan_states(1, heads))
    check(case, out, final, *exact(case))


@pytest.fixture(scope="module")
def ragged():
    case = on_gpu(cases.random(sum(LENGTHS), 3, seed=1))
    start = states(len(LENGTHS), 3)
    final = nan_states(len(LENGTHS), 3)
    out, _ = fwd(case, start, final, packed_offsets(*LENGTHS).cuda())
    return case, start, out, final


def test_ragged_against_the_oracle(ragged):
    case, start, out, final = ragged
    want, want_final = exact(case, start, packed_offsets(*LENGTHS).cuda())
    unit = rel(want.bfloat16(), want, 2)
    assert (rel(out, want, 2) < 4 * unit).all()
    for n, length in enumerate(LENGTHS):
        if length == 0:
            assert same_bits(final[n], start[n])
        else:
            assert (rel(final[n : n + 1], want_final[n : n + 1], 1) < 6e-3).all(), (n, length)


def test_ragged_bits(ragged):
    case, start, out, final = ragged
    offsets = packed_offsets(*LENGTHS).cuda()
    for again in (offsets, offsets.int()):
        final2 = nan_states(len(LENGTHS), 3)
        out2, _ = fwd(case, start, final2, again)
        assert same_bits(out2, out)
        assert same_bits(final2, final)
    alone = LENGTHS.index(200)
    begin = sum(LENGTHS[:alone])
    own, own_final = fwd(case.cut(begin, begin + 200), start[alone : alone + 1], nan_states(1, 3))
    assert same_bits(own, out[:, begin : begin + 200])
    assert same_bits(own_final, final[alone : alone + 1])


def test_a_nan_sequence_leaves_its_neighbours_alone(ragged):
    case, start, out, final = ragged
    bad = LENGTHS.index(65)
    begin = sum(LENGTHS[:bad])

    def poison(x):
        x = x.clone()
        x[:, begin : begin + 65] = torch.nan
        return x

    final2 = nan_states(len(LENGTHS), 3)
    out2, _ = fwd(case.map(poison), start, final2, packed_offsets(*LENGTHS).cuda())
    keep = [n for n in range(len(LENGTHS)) if n != bad]
    assert same_bits(out2[:, :begin], out[:, :begin])
    assert same_bits(out2[:, begin + 65 :], out[:, begin + 65 :])
    assert same_bits(final2[keep], final[keep])


@pytest.mark.parametrize("start_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("final_dtype", [None, torch.bfloat16, torch.float32])
def test_state_dtypes(ragged, start_dtype, final_dtype):
    case, start, _, _ = ragged
    offsets = packed_offsets(*LENGTHS).cuda()
    given = None if start_dtype is None else start.to(start_dtype)
    kept = None if given is None else given.clone()
    want = nan_states(len(LENGTHS), 3)
    out, _ = fwd(case, None if given is None else given.float(), want, offsets)
    final = None if final_dtype is None else nan_states(len(LENGTHS), 3, final_dtype)
    out2, returned = fwd(case, given, final, offsets)
    assert same_bits(out2, out)
    assert returned is final
    assert same_bits(given, kept)
    if final is not None:
        assert same_bits(final, want.to(final_dtype))


def test_in_place_state(ragged):
    case, start, out, final = ragged
    state = start.clone()
    out2, _ = fwd(case, state, state, packed_offsets(*LENGTHS).cuda())
    assert same_bits(out2, out)
    assert same_bits(state, final)


def test_prefixes():
    whole = on_gpu(cases.random(40, 4, seed=7))
    full, _ = fwd(whole)
    for tokens in range(1, 41):
        assert same_bits(fwd(whole.cut(0, tokens))[0], full[:, :tokens])

        def louder(x, tokens=tokens):
            x = x.clone()
            x[:, tokens - 1 :] = (3 * torch.randn(x[:, tokens - 1 :].shape, device="cuda")).bfloat16()
            return x

        assert same_bits(fwd(whole.map(louder))[0][:, : tokens - 1], full[:, : tokens - 1])


def test_split_at_multiples_of_32():
    whole = on_gpu(cases.random(1000, 2, seed=9))
    final = nan_states(1, 2)
    full, _ = fwd(whole, final_state=final)
    state, parts = None, []
    for begin, end in ((0, 32), (32, 512), (512, 928), (928, 1000)):
        after = nan_states(1, 2)
        parts.append(fwd(whole.cut(begin, end), state, after)[0])
        state = after
    assert same_bits(torch.cat(parts, 1), full)
    assert same_bits(state, final)


def test_dense_is_packed():
    batch = on_gpu(cases.random(100, 2, batch=3, seed=11))
    final, final2 = nan_states(3, 2), nan_states(3, 2)
    out, _ = fwd(batch, None, final)
    out2, _ = fwd(batch.packed(), None, final2, packed_offsets(100, 100, 100).cuda())
    assert same_bits(out.flatten(0, 1), out2[0])
    assert same_bits(final, final2)


def test_strided_views_and_guard_bytes(ragged):
    case, start, out, final = ragged
    tokens, heads = case.tokens, case.heads
    fused = torch.full((1, tokens + 40, heads, 4 * D + 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    narrow = torch.full((1, tokens + 40, 41), torch.nan, dtype=torch.bfloat16, device="cuda")
    views = {}
    for i, name in enumerate("qkvg"):
        views[name] = fused[:, :tokens, :, D * i : D * (i + 1)]
        views[name].copy_(getattr(case, name))
    views["beta"] = narrow[:, :tokens, 7 : 7 + heads]
    views["beta"].copy_(case.beta)
    guarded = torch.full((1, tokens + 40, heads, 2 * D), torch.nan, dtype=torch.bfloat16, device="cuda")
    final2 = nan_states(len(LENGTHS), heads)
    target = guarded[:, :tokens, :, D:]
    fwd(replace(case, **views), start, final2, packed_offsets(*LENGTHS).cuda(), out=target)
    assert same_bits(target, out)
    assert same_bits(final2, final)
    assert guarded[:, tokens:].isnan().all()
    assert guarded[..., :D].isnan().all()


def test_tokens_after_the_last_offset():
    case = on_gpu(cases.random(128, 2, seed=5))
    spoiled = case.map(
        lambda x: torch.where((torch.arange(128, device="cuda") >= 100).view(-1, *[1] * (x.dim() - 2)), torch.nan, x)
    )
    final, out = nan_states(2, 2), nan_like(case.q)
    fwd(spoiled, None, final, packed_offsets(50, 50).cuda(), out=out)
    assert final.isfinite().all()
    assert out[:, :100].isfinite().all()
    assert out[:, 100:].isnan().all()


@pytest.mark.parametrize("offsets", [[0, 0], [0, 0, 0], [0, 0, 17], [0, 17, 17], [0, 5, 5, 5, 37]])
def test_empty_sequences(offsets):
    case = on_gpu(cases.random(offsets[-1], 2, seed=2))
    n = len(offsets) - 1
    start, final = states(n, 2), nan_states(n, 2)
    fwd(case, start, final, torch.tensor(offsets, device="cuda"))
    for i, length in enumerate(torch.tensor(offsets).diff().tolist()):
        assert final[i].isfinite().all()
        if length == 0:
            assert same_bits(final[i], start[i])


def test_70_000_sequences():
    case = on_gpu(cases.random(70_000, 2, seed=13))
    out, _ = fwd(case, cu_seqlens=torch.arange(70_001, device="cuda"))
    want, _ = exact(case.cut(0, 2000), None, torch.arange(2001, device="cuda"))
    assert out.isfinite().all()
    assert (rel(out[:, :2000], want, 2) < 6e-3).all()


def test_more_than_2_to_the_31_elements():
    tokens, heads = 262_160, 64
    gen = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, device="cuda", dtype=torch.bfloat16)

    wide = (1, tokens, heads, D)
    case = cases.Case(
        normal(*wide), normal(*wide), normal(*wide), normal(*wide), normal(1, tokens, heads),
        torch.zeros(heads, device="cuda"), torch.zeros(heads, D, device="cuda"),
    )  # fmt: skip
    before = nan_states(1, heads)
    cut = tokens - 2064
    fwd(case.cut(0, cut), None, before)
    tail, _ = fwd(case.cut(cut, tokens), before)
    full, _ = fwd(case)
    assert same_bits(full[:, cut:], tail)


def test_more_than_2_to_the_31_state_elements():
    case = on_gpu(cases.random(1025 * 16, 128, seed=17))
    final = nan_states(1025, 128)
    fwd(case, None, final, torch.arange(1026, device="cuda") * 16)
    last, last_final = fwd(case.cut(1024 * 16, 1025 * 16), None, nan_states(1, 128))
    assert same_bits(final[-1:], last_final)
    assert last.isfinite().all()


def test_no_synchronisation_and_no_allocation():
    case = on_gpu(cases.random(300, 2))
    offsets, out, final = packed_offsets(100, 200).cuda(), nan_like(case.q), nan_states(2, 2)
    fwd(case, None, final, offsets, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        fwd(case, None, final, offsets, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_graph_replay_follows_offsets_and_values():
    case, other = on_gpu(cases.random(300, 2, seed=1)), on_gpu(cases.random(300, 2, seed=2))
    offsets, out, final = packed_offsets(100, 200, 0).cuda(), nan_like(case.q), nan_states(3, 2)
    buffers = case.map(torch.clone)
    buffers = replace(buffers, A_log=other.A_log, dt_bias=other.dt_bias)
    fwd(buffers, None, final, offsets, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fwd(buffers, None, final, offsets, out=out)
    for lengths in ((100, 200, 0), (33, 0, 267), (1, 1, 1)):
        offsets.copy_(packed_offsets(*lengths))
        for name in cases.TOKEN_INPUTS:
            getattr(buffers, name).copy_(getattr(other, name))
        out.fill_(torch.nan)
        final.fill_(torch.nan)
        graph.replay()
        want, want_final = fwd(other, None, nan_states(3, 2), packed_offsets(*lengths).cuda())
        assert same_bits(out, want)
        assert same_bits(final, want_final)


def test_side_stream_and_threads():
    case = on_gpu(cases.random(2000, 4, seed=3))
    want, _ = fwd(case)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out, _ = fwd(case)
    torch.cuda.current_stream().wait_stream(side)
    assert same_bits(out, want)
    results = {}

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            results[i] = [fwd(case)[0] for _ in range(20)]
            torch.cuda.synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same_bits(out, want) for outs in results.values() for out in outs)
    assert len(results) == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    case = on_gpu(cases.random(500, 2, seed=3))
    want, _ = fwd(case)
    there = replace(case, **{name: x.to("cuda:1") for name, x in vars(case).items() if torch.is_tensor(x)})
    out, _ = fwd(there)
    assert same_bits(out.to("cuda:0"), want)


def test_split_v_gives_the_same_bits():
    """Few items run with V split over two CTAs; the same item among many does not."""
    case = on_gpu(cases.random(300, 2, seed=4))
    many = replace(case.map(lambda x: x.repeat(80, *[1] * (x.dim() - 1))))
    few, _ = fwd(case)
    out, _ = fwd(many)
    assert same_bits(out[41:42], few)


def test_a_hundred_repeats():
    case = on_gpu(cases.random(777, 8, seed=6))
    start = states(1, 8)
    want, want_final = fwd(case, start, nan_states(1, 8))
    for _ in range(100):
        out, final = fwd(case, start, nan_states(1, 8))
        assert same_bits(out, want)
        assert same_bits(final, want_final)


def test_what_the_kernel_cannot_take_is_refused_by_name():
    case = on_gpu(cases.random(64, 2))
    odd = torch.zeros(1, 64, 2, D + 1, dtype=torch.bfloat16, device="cuda")[..., 1:]
    with pytest.raises(NotImplementedError, match="k has strides"):
        fwd(replace(case, k=odd))


@pytest.mark.parametrize("segment_len", [64, 256])
def test_segments_from_their_own_states(segment_len):
    """``fwd_cp`` cut by hand: the forward stage runs segments from indexed states."""
    case = on_gpu(cases.make("real_tiled", 1000, 4))
    start = states(1, 4)
    serial, serial_final = fwd(case, start, nan_states(1, 4))
    out, final = flash_kda.fwd_cp(
        **case.fwd(initial_state=start, final_state=nan_states(1, 4)), segment_len=segment_len, impl="sm90"
    )
    want, want_final = exact(case, start)
    assert (rel(out, want, 2) <= 1.25 * rel(serial, want, 2)).all()
    assert (rel(final, want_final, 1) <= 1.25 * rel(serial_final, want_final, 1)).all()


@pytest.mark.skipif(build.compiler_problem() is not None, reason=str(build.compiler_problem()))
@pytest.mark.parametrize(("name", "batch"), [("forward_split_v", 2), ("forward", 40)])
def test_cubin_and_jit_give_the_same_bits(monkeypatch, name, batch):
    """The very arguments that the launcher gets, given to Triton's own launcher and compiler."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from flash_kda.sm90.kernels import forward as source

    case = on_gpu(cases.random(200, 4, batch=batch, seed=8))
    start, final = states(batch, 4), nan_states(batch, 4)
    out, _ = fwd(case, start, final)
    out_jit, final_jit = nan_like(case.q), nan_states(batch, 4)
    variant = next(v for v in VARIANTS if v.name == name)
    tensors = {x.data_ptr(): x for x in (*(x for x in vars(case).values() if torch.is_tensor(x)), start, out_jit, final_jit)}
    launched = []

    def kernel(asked):
        class ThroughJit:
            def launch(self, device, grid, *arguments, overlap=False, record=None):
                launched.append((asked, device))
                given = dict(zip(variant.signature, arguments, strict=True))
                for argument, kind in variant.signature.items():
                    if kind.startswith("tensordesc"):
                        address, shape, strides = given[argument]
                        flat = tensors[address].flatten(0, 1)
                        assert (flat.shape, flat.stride()) == (shape, strides)
                        block = [source.STEP.value, 1, source.BOX_CHANNELS.value]
                        given[argument] = TensorDescriptor(flat, list(shape), list(strides), block, source.BOX.value)
                    elif kind.startswith("*"):
                        none = torch.empty(0, dtype=torch.int32 if kind == "*i32" else torch.float32, device="cuda")
                        given[argument] = tensors[given[argument]] if given[argument] else none
                source.kda_forward[grid](*given.values(), **variant.constexprs, num_warps=variant.num_warps)

        return ThroughJit()

    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(repeat, "_kept", {})
    fwd(case, start, final_jit, out=out_jit)
    torch.cuda.synchronize()
    assert launched == [(name, 0)]
    assert same_bits(out_jit, out)
    assert same_bits(final_jit, final)


def test_first_call_of_a_process_is_quick():
    script = (
        "import time, torch, flash_kda; from flash_kda import samples;"
        "x = samples.make('random', 64, 2, device='cuda').arguments(); torch.cuda.synchronize(); start = time.perf_counter();"
        "flash_kda.fwd(**x, impl='sm90'); torch.cuda.synchronize(); print(time.perf_counter() - start)"
    )
    seconds = float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert seconds < 0.3


@pytest.mark.parametrize("decide", [None, "cut", "whole"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pieces_from_true_states_give_the_serial_bits(ragged, decide, dtype):
    """Slots filled with the kernel's own states at the cuts: every piece then starts where the serial run passes."""
    case, start, out, final = ragged
    offsets = packed_offsets(*LENGTHS).cuda().to(dtype)
    cut = plan.Cut.every(64, case.tokens, only_if_longer=10_000 if decide == "whole" else 100)
    sequence, piece, used = plan.slot_pieces(offsets, cut)
    slots = torch.full((cut.num_slots, case.heads, D, D), torch.nan, device="cuda")
    for slot in used.nonzero().squeeze(1).tolist():
        n, tokens = int(sequence[slot]), 64 * (int(piece[slot]) + 1)
        begin = int(offsets[n])
        fwd(case.cut(begin, begin + tokens), start[n : n + 1], slots[slot : slot + 1])
    decided = None
    if decide is not None:
        decided = torch.zeros(1, dtype=torch.int32, device="cuda")
        stages.decide(offsets, case.tokens, cut, decided)
        assert int(decided) == (64 if decide == "cut" else stages.WHOLE)
    out2, final2 = nan_like(case.q), nan_states(len(LENGTHS), case.heads)
    stages.forward(
        case.inputs(torch.bfloat16),
        offsets,
        out2[0],
        max_len=max(LENGTHS),
        initial_state=start,
        final_state=final2,
        slots=slots,
        segment_len=cut.segment_len,
        decided=decided,
    )
    assert same_bits(out2, out)
    assert same_bits(final2, final)
