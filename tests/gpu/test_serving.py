"""What serving engines rely on, on the Hopper kernel: grouped heads, pools, checkpoints, graphs, streams, one launch."""

import threading
import warnings
from contextlib import contextmanager
from dataclasses import replace

import cases
import pytest
import torch
from cases import D, nan_like, packed_offsets, rel, same_bits
from test_forward import MULTIPLE, emulate
from test_summary import BOUND

import flash_kda
from flash_kda.reference import forward, state_summary

LENGTHS = (40, 0, 130, 33, 64, 1)
OFFSETS = packed_offsets(*LENGTHS, dtype=torch.int32)


def on_gpu(case: cases.Case) -> cases.Case:
    return replace(case, **{name: x.cuda() for name, x in vars(case).items() if torch.is_tensor(x)})


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def states(sequences, heads, dtype=torch.float32, seed=7):
    return cases.state(sequences, heads, dtype, seed).cuda()


def nan_states(*shape, dtype=torch.float32):
    return torch.full((*shape, D, D), torch.nan, dtype=dtype, device="cuda")


def fwd(case, function=flash_kda.fwd, impl="sm90", **options):
    """On the kernel or not at all, unless told otherwise; outputs poisoned with NaN unless given."""
    out = options.pop("out", None)
    results = function(**vars(case), out=nan_like(case.v) if out is None else out, **options, impl=impl)
    assert flash_kda.last_path() == impl
    return results


def kernels(call):
    """Names of the kernels and copies that a call puts on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def exact(case, initial_state, tokens):
    """State after so many tokens by the chunked reference in fp64."""
    case = case.cut(0, tokens)
    out = torch.zeros(case.v.shape[1:], dtype=torch.float64, device="cuda")
    final = torch.zeros(1, case.heads, D, D, dtype=torch.float64, device="cuda")
    offsets = torch.tensor([0, tokens], device="cuda")
    forward(case.inputs(torch.float64), offsets, out, max_len=tokens, initial_state=initial_state, final_state=final)
    return final


@contextmanager
def no_waiting():
    """The host may not wait for the device in here."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Layouts.


@pytest.mark.parametrize(("heads", "group"), [(8, 2), (6, 3), (4, 4), (64, 8)])
def test_grouped_heads_equal_repeated_ones(heads, group):
    case = on_gpu(cases.grouped(cases.random(int(OFFSETS[-1]), heads), group))
    start, final, want_final = states(6, heads), nan_states(6, heads), nan_states(6, heads)
    out, _ = fwd(case, initial_state=start, final_state=final, cu_seqlens=OFFSETS.cuda())
    want, _ = fwd(cases.repeated(case), initial_state=start, final_state=want_final, cu_seqlens=OFFSETS.cuda())
    assert same_bits(out, want)
    assert same_bits(final, want_final)


def test_views_of_a_fused_projection_and_odd_beta():
    tokens, heads = 300, 12
    case = on_gpu(cases.grouped(cases.random(tokens, heads), 3))
    widths = [4 * D, 4 * D, 12 * D, 12 * D, heads]
    fused = torch.full((1, tokens + 9, sum(widths) + 20), torch.nan, dtype=torch.bfloat16, device="cuda")
    parts = fused[:, :tokens, : sum(widths)].split(widths, -1)
    views = {name: x if name == "beta" else x.unflatten(-1, (-1, D)) for name, x in zip(cases.TOKEN_INPUTS, parts, strict=True)}
    for name, view in views.items():
        view.copy_(getattr(case, name))
    want, _ = fwd(case)
    got, _ = fwd(replace(case, **views))
    assert same_bits(got, want)
    odd = torch.full((1, tokens, 41), torch.nan, dtype=torch.bfloat16, device="cuda")[..., 7 : 7 + heads]
    odd.copy_(case.beta)
    assert same_bits(fwd(replace(case, beta=odd))[0], want)


def test_missing_and_flat_parameters():
    case = on_gpu(cases.plain(cases.random(100, 4)))
    want, _ = fwd(case)
    for change in ({"A_log": None}, {"dt_bias": None}, {"A_log": None, "dt_bias": None}, {"dt_bias": case.dt_bias.flatten()}):
        assert same_bits(fwd(replace(case, **change))[0], want)


def test_what_the_kernel_does_not_take_is_named_and_runs_elsewhere():
    case = on_gpu(cases.random(64, 2))
    case = replace(case, k=case.k[:, :1].expand_as(case.k))
    with pytest.raises(NotImplementedError, match="k has strides"):
        fwd(case)
    out, _ = flash_kda.fwd(**{**vars(case), "out": nan_like(case.v)})
    assert flash_kda.last_path() == "reference"
    assert out.isfinite().all()


# What the kernel finds in other dtypes and places: as good as, or the same as, what it always takes.

CUT = {"fwd": (flash_kda.fwd, {}), "cut": (flash_kda.fwd_cp, {"segment_len": 64})}
BOTH = pytest.mark.parametrize("call", CUT)


def calls(name, case, **options):
    """Outputs and final states of a call of LENGTHS, which must be all there, by ``fwd`` or in pieces."""
    function, cut = CUT[name]
    start, final = states(6, case.heads), nan_states(6, case.heads)
    given = {"initial_state": start, "cu_seqlens": OFFSETS.cuda()} | options
    out, _ = fwd(case, function, final_state=final, **given, **cut)
    assert out.isfinite().all()
    assert final.isfinite().all()
    return out, final


def agrees(case, results):
    """With the fp64 token recurrence, about as well as an honest evaluation with bf16 operands."""
    start = states(6, case.heads)
    wants = case.oracle(start, OFFSETS.cuda())
    used = [n for n in range(6) if LENGTHS[n]]
    honest = [emulate(case.cut(int(OFFSETS[n]), int(OFFSETS[n + 1])), start[n : n + 1]) for n in used]
    kept = (results[0], results[1][used]), (wants[0], wants[1][used])
    for got, want, mine, axis in zip(
        *kept, (torch.cat([o for o, _ in honest], 1), torch.cat([h for _, h in honest])), (2, 1), strict=True
    ):
        error, unit = rel(got, want, axis), rel(mine, want, axis)
        assert error.max() <= MULTIPLE * unit.max() + 2e-4, f"{error.tolist()} against honest {unit.tolist()}"


def with_beta(case, beta):
    """In a view with both strides odd, NaN around it."""
    wide = torch.full((1, case.tokens, case.heads, 3), torch.nan, dtype=beta.dtype, device="cuda")
    wide[..., 1] = beta
    return replace(case, beta=wide[..., 1])


@BOTH
@pytest.mark.parametrize("heads", [2, 40])
def test_beta_in_fp32(call, heads):
    case = on_gpu(cases.random(int(OFFSETS[-1]), heads))
    want = calls(call, case)
    got = calls(call, with_beta(case, case.beta.float()))
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    other = between(case.beta)
    got = calls(call, with_beta(case, other))
    assert not same_bits(got[0], want[0])
    agrees(replace(case, beta=other), got)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [2, 40])
def test_activated_beta_up_to_two(call, dtype, heads):
    case = cases.negative(on_gpu(cases.random(int(OFFSETS[-1]), heads)))
    beta = case.beta.clone()
    beta[:, ::7] = 2.0
    beta[:, 3::7] = 0.0
    case = replace(case, beta=beta.to(dtype))
    agrees(case, calls(call, with_beta(case, case.beta)))


def summary_errors(case):
    """Worst relative errors of ht and mt of the kernel against the chunked reference in fp64, one sequence."""
    got = flash_kda.state_only(**case.summary(calc_mt=True, eps=0.0), impl="sm90")
    doubles = replace(case, **{name: getattr(case, name).double() for name in cases.TOKEN_INPUTS}).inputs()
    want = state_summary(doubles, torch.tensor([0, case.tokens], device="cuda"), max_len=case.tokens, eps=0.0)
    return rel(got[0], want.ht, 1).max(), rel(got[1], want.mt, 1).max()


def test_summary_of_fp32_and_activated_beta():
    case = on_gpu(cases.random(130, 3))
    plain = flash_kda.state_only(
        **case.summary(calc_mt=True, num_warmup_chunks=torch.full((1,), 9, device="cuda")), impl="sm90"
    )
    same = with_beta(case, case.beta.float())
    got = flash_kda.state_only(**same.summary(calc_mt=True, num_warmup_chunks=torch.full((1,), 9, device="cuda")), impl="sm90")
    assert all(same_bits(a, b) for a, b in zip(got, plain, strict=True))
    slow = replace(case, g=torch.full_like(case.g, -4))
    units = summary_errors(slow)
    for dtype in (torch.bfloat16, torch.float32):
        some = cases.negative(slow)
        errors = summary_errors(with_beta(some, some.beta.to(dtype)))
        # strengths are twice as large
        assert all(error <= max(2 * unit, BOUND) for error, unit in zip(errors, units, strict=True)), (
            f"{errors} against {units}"
        )


@BOTH
def test_neighbours_beta_of_nan_stays_where_it_is(call):
    """In the shared step at the end of a sequence, whatever beta is."""
    case = on_gpu(cases.random(int(OFFSETS[-1]), 2))
    for some in (with_beta(case, case.beta.float()), cases.negative(case)):
        beta = some.beta.clone()
        beta[:, 170:203] = torch.nan
        want, _ = calls(call, some)
        function, cut = CUT[call]
        out, _ = fwd(replace(some, beta=beta), function, initial_state=states(6, 2), cu_seqlens=OFFSETS.cuda(), **cut)
        healthy = torch.ones(case.tokens, dtype=torch.bool, device="cuda")
        healthy[170:203] = False
        assert same_bits(out[:, healthy], want[:, healthy])
        assert out[:, 170:203].isnan().any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_columns_of_offsets_in_the_small_kernels(dtype):
    case = on_gpu(cases.random(130, 2, lower_bound=-0.1))
    wide = torch.full((4, 3), -1, dtype=dtype, device="cuda")
    wide[:, 1] = torch.tensor([0, 40, 40, 130])
    both = wide[:, 1], wide[:, 1].clone()
    chunks, want = (flash_kda.get_warmup_chunks(**case.gates(cu_seqlens=x), impl="sm90")[0] for x in both)
    assert torch.equal(chunks, want)
    ht, want = (flash_kda.state_only(**case.summary(cu_seqlens=x), impl="sm90") for x in both)
    assert ht.isfinite().all()
    assert same_bits(ht, want)
    ht, mt = torch.randn(5, 2, D, D, device="cuda"), torch.randn(5, 2, D, D, device="cuda") / D
    wide[:, 1] = torch.tensor([0, 2, 2, 5])
    got, want = (
        flash_kda.correct_initial_states(None, ht, mt, None, seq_map, impl="sm90")
        for seq_map in (wide[:, 1], wide[:, 1].clone())
    )
    assert got.isfinite().all()
    assert same_bits(got, want)


def with_gate(case, g):
    """In a view whose rows are no multiple of 8 elements apart, NaN around it."""
    wide = torch.full((*g.shape[:-1], D + 4), torch.nan, dtype=g.dtype, device="cuda")
    wide[..., 4:] = g
    return replace(case, g=wide[..., 4:])


def between(x):
    """fp32 that bf16 cannot hold: its rounding moves every element by 2^-10."""
    return x.float() * (1 + 2**-10)


@BOTH
@pytest.mark.parametrize("heads", [2, 40])
@pytest.mark.parametrize("name", ["random_5", "slow_eighth", "no_decay", "full_decay", "real_tiled", "distinct_a_log"])
def test_g_in_fp32(call, heads, name):
    case = on_gpu(cases.make(name, int(OFFSETS[-1]), heads))
    want = calls(call, case)
    got = calls(call, with_gate(case, case.g.float()))
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    other = between(case.g)
    got = calls(call, with_gate(case, other))
    if name in ("random_5", "real_tiled"):
        assert not same_bits(got[0], want[0])
        agrees(replace(case, g=other), got)


@pytest.mark.parametrize("heads", [1, 3, 40, 70])
@pytest.mark.parametrize("tokens", [2053, 33, 16, 1])
def test_g_in_fp32_of_all_lengths(heads, tokens):
    """Rings that go round many times, with V split over two CTAs and without, in dense batches."""
    case = on_gpu(cases.random(tokens, heads, batch=2, lower_bound=-0.5))
    finals = nan_states(2, heads), nan_states(2, heads)
    outs = [
        fwd(some, final_state=final)[0] for some, final in zip((case, with_gate(case, case.g.float())), finals, strict=True)
    ]
    assert outs[0].isfinite().all()
    assert same_bits(*outs)
    assert same_bits(*finals)


def test_g_in_fp32_in_many_short_sequences():
    """More items than CTAs: the stages go on from one item to the next."""
    lengths = [(7 * n) % 97 for n in range(300)]
    offsets = packed_offsets(*lengths).cuda()
    case = on_gpu(cases.random(int(offsets[-1]), 12))
    finals = nan_states(300, 12), nan_states(300, 12)
    for _ in range(5):
        outs = [
            fwd(some, final_state=final, cu_seqlens=offsets)[0]
            for some, final in zip((case, with_gate(case, case.g.float())), finals, strict=True)
        ]
        assert same_bits(*outs)
        assert same_bits(*finals)


@BOTH
def test_neighbours_g_of_nan_stays_where_it_is(call):
    case = on_gpu(cases.random(int(OFFSETS[-1]), 2))
    g = case.g.float()
    want, _ = calls(call, with_gate(case, g))
    g[:, 170:203] = torch.nan
    function, cut = CUT[call]
    out, _ = fwd(with_gate(case, g), function, initial_state=states(6, 2), cu_seqlens=OFFSETS.cuda(), **cut)
    healthy = torch.ones(case.tokens, dtype=torch.bool, device="cuda")
    healthy[170:203] = False
    assert same_bits(out[:, healthy], want[:, healthy])
    assert out[:, 170:203].isnan().any()


def test_drift_of_fp32_gates():
    """Long memory: a decay from a rounded g is another one after a thousand tokens."""
    case = on_gpu(cases.gate(cases.random(2048, 2), -9.0))
    case = replace(case, g=between(case.g), beta=torch.full_like(case.beta, -12))
    start = states(1, 2)
    final, rounded = nan_states(1, 2), nan_states(1, 2)
    fwd(case, initial_state=start, final_state=final)
    fwd(replace(case, g=case.g.bfloat16()), initial_state=start, final_state=rounded)
    want = exact(case, start, 2048)
    assert rel(final, want, 1).max() < 0.2 * rel(rounded, want, 1).max()


@pytest.mark.parametrize("heads", [1, 3, 40])
def test_summary_and_bound_of_fp32_g(heads):
    case = on_gpu(cases.make("random_half", 700, heads))
    wide = with_gate(case, case.g.float())
    offsets = packed_offsets(40, 0, 130, 33, 64, 1, 432).cuda()
    for options in ({}, {"num_warmup_chunks": torch.full((7,), 3, device="cuda")}):
        results = [
            flash_kda.state_only(**some.summary(cu_seqlens=offsets), calc_mt=True, return_info=True, impl="sm90", **options)
            for some in (case, wide)
        ]
        (ht, mt, info), (want_ht, want_mt, want_info) = results
        assert ht.isfinite().all()
        assert same_bits(ht, want_ht)
        assert same_bits(mt, want_mt)
        assert all(torch.equal(a, b) for a, b in zip(vars(info).values(), vars(want_info).values(), strict=True))
    got, want = (flash_kda.get_warmup_chunks(**some.gates(cu_seqlens=offsets), impl="sm90") for some in (wide, case))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    short = case.cut(0, 130)
    errors, units = summary_errors(with_gate(short, between(short.g))), summary_errors(short)
    assert all(error <= max(MULTIPLE * unit + 2e-4, BOUND) for error, unit in zip(errors, units, strict=True)), (
        f"{errors}, {units}"
    )


def test_certificate_with_fp32_g():
    case = on_gpu(cases.make("random_half", 700, 3))
    results = [
        fwd(some, flash_kda.fwd_cp, segment_len=128, certificate=True) for some in (case, with_gate(case, case.g.float()))
    ]
    assert same_bits(results[0][0], results[1][0])
    assert torch.equal(results[0][2].dropped, results[1][2].dropped)


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_columns_of_tables(call, dtype):
    """Slots and offsets some elements apart, in every kernel that reads them."""
    case = on_gpu(cases.random(int(OFFSETS[-1]), 4))
    read, write = int32(3, -1, 8, 0, 99, 3), int32(6, 2, -1, -5, 0, 1)
    table = torch.full((6, 9), 77, dtype=torch.int32, device="cuda")
    table[:, 2], table[:, 7] = read, write
    wide = torch.full((7, 3), -1, dtype=dtype, device="cuda")
    wide[:, 1] = OFFSETS.cuda()
    function, cut = CUT[call]
    pools, outs, start = [], [], states(9, 4)
    for offsets, first, last in ((OFFSETS.cuda(), read, write), (wide[:, 1], table[:, 2], table[:, 7])):
        pools.append(nan_states(7, 4))
        indices = {"initial_state_indices": first, "final_state_indices": last}
        with no_waiting():
            out, _ = fwd(case, function, initial_state=start, final_state=pools[-1], cu_seqlens=offsets, **indices, **cut)
        outs.append(out)
    assert same_bits(*outs)
    assert same_bits(*pools)
    assert pools[0][[0, 1, 2, 6]].isfinite().all()
    assert pools[0][3:6].isnan().all()


# Pools.


def pool_of(slots, heads, dtype=torch.float32, pad=64):
    wide = torch.full((slots, heads * D * D + pad), torch.nan, dtype=dtype, device="cuda")
    pool = wide[:, : heads * D * D].view(slots, heads, D, D)
    pool.copy_(states(slots, heads))
    return wide, pool


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("heads", [2, 40])
@pytest.mark.parametrize("function", [flash_kda.fwd, flash_kda.fwd_cp])
def test_pools_equal_gather_run_scatter(function, heads, dtypes):
    case, offsets = on_gpu(cases.random(int(OFFSETS[-1]), heads)), OFFSETS.cuda()
    read, write = (3, -1, 8, 0, 99, 3), (6, 2, -1, -5, 0, 7)
    (_, pool), (wide, target) = pool_of(9, heads, dtypes[0]), pool_of(7, heads, dtypes[1])
    before, want = pool.clone(), target.clone()
    start = torch.stack([pool[i] if 0 <= i < 9 else torch.zeros_like(pool[0]) for i in read])
    final = nan_states(6, heads, dtype=dtypes[1])
    want_out, _ = fwd(case, function, initial_state=start, final_state=final, cu_seqlens=offsets)
    for n, i in enumerate(write):
        if 0 <= i < 7:
            want[i] = final[n]
    indices = {"initial_state_indices": int32(*read), "final_state_indices": int32(*write)}
    with no_waiting():
        out, _ = fwd(case, function, initial_state=pool, final_state=target, cu_seqlens=offsets, **indices)
    assert same_bits(out, want_out)
    assert same_bits(target, want)
    assert same_bits(pool, before)
    assert wide[:, heads * D * D :].isnan().all()


def test_pools_in_place():
    case, offsets = on_gpu(cases.random(int(OFFSETS[-1]), 4)), OFFSETS.cuda()
    _, pool = pool_of(9, 4)
    slots = (5, 0, 8, 3, 1, 2)
    final = nan_states(6, 4)
    want, _ = fwd(case, initial_state=pool[list(slots)], final_state=final, cu_seqlens=offsets)
    indices = {"initial_state_indices": int32(*slots), "final_state_indices": int32(*slots)}
    untouched = pool[[4, 6, 7]]
    out, _ = fwd(case, initial_state=pool, final_state=pool, cu_seqlens=offsets, **indices)
    assert same_bits(out, want)
    assert same_bits(pool[list(slots)], final)
    assert same_bits(pool[[4, 6, 7]], untouched)


@pytest.mark.parametrize("dense", [False, True])
def test_an_empty_batch_moves_states(dense):
    """Through a launch whose tensor maps describe memory that nobody touches."""
    case = on_gpu(cases.random(0, 2, batch=3 if dense else 1))
    offsets = None if dense else int32(0, 0, 0, 0)
    start, final = states(3, 2), nan_states(3, 2)
    fwd(case, initial_state=start, final_state=final, cu_seqlens=offsets)
    assert same_bits(final, start)
    fwd(case, final_state=final, cu_seqlens=offsets)
    assert not final.any()
    pool, target = states(5, 2), nan_states(4, 2)
    indices = {"initial_state_indices": int32(4, -1, 0), "final_state_indices": int32(1, 0, -1)}
    fwd(case, initial_state=pool, final_state=target, cu_seqlens=offsets, **indices)
    assert same_bits(target[1], pool[4])
    assert not target[0].any()
    assert target[2:].isnan().all()


def test_nothing_but_the_kernel_is_launched():
    """No copy of beta, no cast of offsets, no gather and no scatter of states."""
    case, offsets = on_gpu(cases.random(int(OFFSETS[-1]), 12)), OFFSETS.cuda()
    beta = torch.zeros(1, case.tokens, 6288, dtype=torch.bfloat16, device="cuda")[..., 41:53]
    beta.copy_(case.beta)
    _, pool = pool_of(9, 12)
    slots, out = int32(5, 0, 8, 3, 1, 2), nan_like(case.v)
    options = {"initial_state": pool, "final_state": pool, "initial_state_indices": slots, "final_state_indices": slots}
    names = kernels(lambda: fwd(replace(case, beta=beta), out=out, cu_seqlens=offsets, **options))
    assert len(names) == 1, names
    assert "kda_forward" in names[0]


# Checkpoints.


def stopped(case, start, tokens):
    final = nan_states(case.q.shape[0], case.heads)
    fwd(case.cut(0, tokens), initial_state=start, final_state=final)
    return final


@pytest.mark.parametrize("heads", [2, 40])
def test_checkpoints_are_what_a_call_that_stops_there_returns(heads):
    case, offsets, start = on_gpu(cases.random(int(OFFSETS[-1]), heads)), OFFSETS.cuda(), states(6, heads)
    chosen = torch.tensor([[32, 0], [-1, 0], [128, 64], [32, 32], [64, -1], [0, 0]], device="cuda")
    saved, final, want_final = nan_states(6, 2, heads), nan_states(6, heads), nan_states(6, heads)
    options = {"initial_state": start, "cu_seqlens": offsets}
    want, _ = fwd(case, final_state=want_final, **options)
    with no_waiting():
        out, _ = fwd(case, final_state=final, checkpoint_states=saved, checkpoint_offsets=chosen, **options)
    assert same_bits(out, want)
    assert same_bits(final, want_final)
    for n, row in enumerate(chosen.tolist()):
        alone = case.cut(int(OFFSETS[n]), int(OFFSETS[n + 1]))
        for c, tokens in enumerate(row):
            if tokens > 0:
                assert same_bits(saved[n, c], stopped(alone, start[n : n + 1], tokens)[0]), (n, tokens)
            else:
                assert saved[n, c].isnan().all()


def test_checkpoints_every_so_many_tokens():
    case, start = on_gpu(cases.random(300, 4)), states(1, 4)
    for every in (32, 64, 128):
        saved = nan_states(300 // every, 4)
        with no_waiting():
            fwd(case, initial_state=start, checkpoint_states=saved, checkpoint_every=every)
        for j in range(300 // every):
            assert same_bits(saved[j : j + 1], stopped(case, start, (j + 1) * every))


@pytest.mark.parametrize("heads", [2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("g", [torch.bfloat16, torch.float32])
def test_checkpoints_in_the_middle_of_a_step(heads, dtype, g):
    """At odd multiples of 16 too, with every row in disorder, and nothing else changes by them."""
    case, start = on_gpu(cases.make("real_tiled", 300, heads)), states(1, heads)
    case = replace(case, g=case.g.to(g))
    chosen = torch.tensor([[240, 16, 48, 288, 48, 0, 176, 32, 272]], device="cuda")
    saved, final, want_final = nan_states(1, 9, heads, dtype=dtype), nan_states(1, heads), nan_states(1, heads)
    want, _ = fwd(case, initial_state=start, final_state=want_final)
    out, _ = fwd(case, initial_state=start, final_state=final, checkpoint_states=saved, checkpoint_offsets=chosen)
    assert same_bits(out, want)
    assert same_bits(final, want_final)
    for c, tokens in enumerate(chosen[0].tolist()):
        if tokens:
            assert same_bits(saved[:, c], stopped(case, start, tokens).to(dtype)), tokens
        else:
            assert saved[:, c].isnan().all()
    error, unit = rel(saved[:, 0], exact(case, start, 240), 1), rel(saved[:, 7], exact(case, start, 32), 1)
    assert error.max() < 2e-2
    assert unit.max() < 2e-2


@pytest.mark.parametrize("heads", [2, 40])
@pytest.mark.parametrize("segment_len", [32, 48, 64, 112])
@pytest.mark.parametrize("every", [None, 16, 32, 80])
def test_checkpoints_in_cut_sequences(heads, segment_len, every):
    """Each is what a call that stops there, cut alike, returns; in pools, and with a certificate beside them."""
    case, offsets = on_gpu(cases.make("random_half", int(OFFSETS[-1]), heads)), OFFSETS.cuda()
    chosen = torch.tensor([[32, 16], [-1, 0], [128, 48], [32, 32], [64, -1], [0, 0]], device="cuda")
    read, write = int32(3, -1, 8, 0, 4, 3), int32(6, 2, -1, -5, 0, 1)
    pool, target, want_target = states(9, heads), nan_states(7, heads), nan_states(7, heads)
    cut = {"segment_len": segment_len, "initial_state": pool, "initial_state_indices": read, "cu_seqlens": offsets}
    want, _ = fwd(case, flash_kda.fwd_cp, final_state=want_target, final_state_indices=write, **cut)
    rows = int(OFFSETS[-1]) // every if every else 12
    saved = nan_states(rows, heads)
    where = {"checkpoint_every": every} if every else {"checkpoint_offsets": chosen}
    given = saved if every else saved.unflatten(0, (6, 2))
    with no_waiting():
        out, _ = fwd(
            case, flash_kda.fwd_cp, final_state=target, final_state_indices=write, checkpoint_states=given, **where, **cut
        )
    assert same_bits(out, want)
    assert same_bits(target, want_target)
    asked = {}
    for n, length in enumerate(LENGTHS):
        if every:
            asked |= {int(OFFSETS[n]) // every + j - 1: (n, j * every) for j in range(1, length // every + 1)}
        else:
            asked |= {2 * n + c: (n, tokens) for c, tokens in enumerate(chosen[n].tolist()) if tokens > 0}
    for row in range(rows):
        if row not in asked:
            assert saved[row].isnan().all()
            continue
        n, tokens = asked[row]
        slot = int(read[n])
        start, stop = pool[slot : slot + 1] if slot >= 0 else None, nan_states(1, heads)
        short = case.cut(int(OFFSETS[n]), int(OFFSETS[n]) + tokens)
        fwd(short, flash_kda.fwd_cp, initial_state=start, final_state=stop, segment_len=segment_len)
        assert same_bits(saved[row : row + 1], stop), (n, tokens)
    again = nan_states(rows, heads)
    given = again if every else again.unflatten(0, (6, 2))
    results = fwd(case, flash_kda.fwd_cp, checkpoint_states=given, certificate=True, **where, **cut)
    assert results[2] is not None
    assert same_bits(again, saved)


def test_checkpoints_of_a_sequence_that_is_cut_by_itself():
    """Long enough for the planner, in place in a pool; close to serial, and the state that goes on is theirs."""
    case, pool = on_gpu(cases.make("random_half", 4096, 4)), states(3, 4)
    saved, serial, final = nan_states(4, 4), nan_states(4, 4), nan_states(1, 4)
    start, slots = pool[2:].clone(), int32(2)
    fwd(case, initial_state=start, final_state=final, checkpoint_states=serial, checkpoint_every=1024)
    assert same_bits(serial[3:], final)
    indices = {"initial_state_indices": slots, "final_state_indices": slots}
    fwd(case, flash_kda.fwd_cp, initial_state=pool, final_state=pool, checkpoint_states=saved, checkpoint_every=1024, **indices)
    assert same_bits(saved[3], pool[2])
    assert rel(saved, serial.double(), 1).max() < 1e-2
    names = kernels(
        lambda: fwd(
            case, flash_kda.fwd_cp, initial_state=start, checkpoint_states=saved, checkpoint_every=1024, out=nan_like(case.v)
        )
    )
    assert sum("kda_forward" in name for name in names) == 1
    assert sum("kda_summary" in name for name in names) == 1


def test_checkpoints_are_one_launch():
    case, saved, out = on_gpu(cases.random(300, 4)), nan_states(9, 4), nan_like(on_gpu(cases.random(300, 4)).v)
    names = kernels(lambda: fwd(case, out=out, checkpoint_states=saved, checkpoint_every=32))
    assert len(names) == 1, names
    chosen = torch.tensor([[32, 48, 64, -1, 0, 96, 96, 128, 16]], device="cuda")
    names = kernels(lambda: fwd(case, out=out, checkpoint_states=saved[None], checkpoint_offsets=chosen))
    assert len(names) == 1, names


def test_checkpoints_do_not_see_what_follows():
    case, start = on_gpu(cases.random(128, 2)), states(1, 2)
    chosen = torch.tensor([[16, 32, 48, 64, 80, 96]], device="cuda")
    for stop in (16, 32, 48, 80):
        changed = case.map(lambda x, stop=stop: torch.cat([x[:, :stop], torch.full_like(x[:, stop:], torch.nan)], 1))
        saved, want = nan_states(1, 6, 2), nan_states(1, 6, 2)
        fwd(case, initial_state=start, checkpoint_states=want, checkpoint_offsets=chosen)
        fwd(changed, initial_state=start, checkpoint_states=saved, checkpoint_offsets=chosen)
        before = chosen[0] <= stop
        assert same_bits(saved[:, before], want[:, before])
        assert saved[:, ~before].isnan().flatten(2).any(2).all()


def test_checkpoints_of_many_sequences():
    """More items than CTAs, offsets and states some elements apart in tables, rows that nobody asks for poisoned."""
    lengths = [(16 * n) % 176 for n in range(120)]
    offsets = packed_offsets(*lengths).cuda()
    case, start = on_gpu(cases.random(int(offsets[-1]), 12)), states(120, 12)
    for dtype in (torch.int32, torch.int64):
        table = torch.full((120, 5), 32, dtype=dtype, device="cuda")
        table[:, 3] = torch.tensor(lengths, dtype=dtype)
        wide = torch.full((120, 12 * D * D + 8), torch.nan, device="cuda")
        saved, final = wide[:, : 12 * D * D].view(120, 12, D, D), nan_states(120, 12)
        fwd(
            case,
            initial_state=start,
            final_state=final,
            cu_seqlens=offsets,
            checkpoint_states=saved,
            checkpoint_offsets=table[:, 3],
        )
        some = torch.tensor([length > 0 for length in lengths], device="cuda")
        assert same_bits(saved[some], final[some])
        assert saved[~some].isnan().all()
        assert wide[:, 12 * D * D :].isnan().all()


def test_checkpoints_that_the_kernel_cannot_store_go_in_rounds():
    case, start = on_gpu(cases.random(300, 2)), states(1, 2)
    saved = torch.full((1, 2, 2, D, 2 * D), torch.nan, device="cuda")[..., :D]
    at = torch.tensor([[256, 96]], device="cuda")
    with no_waiting():
        fwd(case, initial_state=start, checkpoint_states=saved, checkpoint_offsets=at)
    assert same_bits(saved[:, 0].contiguous(), stopped(case, start, 256))
    assert same_bits(saved[:, 1].contiguous(), stopped(case, start, 96))


def test_what_cannot_be_produced_becomes_nan():
    case = on_gpu(cases.random(100, 2))
    chosen = torch.tensor([[64, 24, 128, 112, 2**32 + 32, -(2**32) + 32]], device="cuda")
    for function, cut in CUT.values():
        for dtype in (torch.float32, torch.bfloat16):
            saved = torch.zeros(1, 6, 2, D, D, device="cuda", dtype=dtype)
            with no_waiting():
                fwd(case, function, checkpoint_states=saved, checkpoint_offsets=chosen, **cut)
            assert saved[:, 0].isfinite().all()
            assert saved[:, 1:5].isnan().all()
            assert not saved[:, 5].any()
    empty = torch.zeros(3, 1, 2, D, D, device="cuda")
    fwd(case, cu_seqlens=int32(0, 0, 100, 100), checkpoint_states=empty, checkpoint_offsets=int32(16, 96, -1)[:, None])
    assert empty[0].isnan().all()
    assert empty[1].isfinite().all()
    assert not empty[2].any()


# Graphs, streams, compilers.


def graph_of(call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def test_graphs_of_padded_buckets_share_a_pool():
    """Two captured buckets, replayed in turn with other offsets and slots; unused rows repeat the last offset."""
    heads, pool = 4, states(12, 4)
    buckets = []
    for tokens, rows in ((256, 4), (512, 8)):
        case = on_gpu(cases.random(tokens, heads, seed=tokens))
        offsets, slots, out = torch.zeros(rows + 1, dtype=torch.int32, device="cuda"), int32(*[-1] * rows), nan_like(case.v)
        options = {"initial_state": pool, "final_state": pool, "initial_state_indices": slots, "final_state_indices": slots}
        call = lambda case=case, out=out, offsets=offsets, options=options: fwd(case, out=out, cu_seqlens=offsets, **options)  # noqa: E731
        buckets.append((case, offsets, slots, out, graph_of(call)))
    work = [
        (0, (100, 80), (3, 5)),
        (1, (33, 0, 200, 64, 31), (5, 7, 3, 0, 11)),
        (0, (256,), (11,)),
        (1, (512,), (3,)),
        (0, (1, 1, 1, 1), (0, 1, 2, 3)),
    ]
    want_pool = pool.clone()
    for bucket, lengths, used in work:
        case, offsets, slots, out, graph = buckets[bucket]
        rows = slots.numel()
        ends = packed_offsets(*lengths, *[0] * (rows - len(lengths)), dtype=torch.int32)
        offsets.copy_(ends)
        slots.copy_(torch.tensor([*used, *[-1] * (rows - len(used))], dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        final = nan_states(len(lengths), heads)
        want, _ = fwd(case, initial_state=want_pool[list(used)], final_state=final, cu_seqlens=packed_offsets(*lengths).cuda())
        want_pool[list(used)] = final
        assert same_bits(out, want)
        assert same_bits(pool, want_pool)


def test_a_graph_with_checkpoints_follows_its_offsets():
    case, offsets = on_gpu(cases.random(300, 2)), packed_offsets(100, 200).cuda()
    chosen = torch.tensor([[32], [64]], device="cuda")
    saved, out = nan_states(2, 1, 2), nan_like(case.v)
    graph = graph_of(lambda: fwd(case, out=out, cu_seqlens=offsets, checkpoint_states=saved, checkpoint_offsets=chosen))
    for lengths, tokens in (((100, 200), (96, 128)), ((260, 40), (256, -1)), ((0, 300), (0, 288))):
        offsets.copy_(packed_offsets(*lengths))
        chosen.copy_(torch.tensor(tokens)[:, None])
        saved.fill_(torch.nan)
        graph.replay()
        want = nan_states(2, 1, 2)
        want_out, _ = fwd(case, cu_seqlens=offsets, checkpoint_states=want, checkpoint_offsets=chosen)
        assert same_bits(out, want_out)
        assert same_bits(saved, want)
        assert saved[1 - int(tokens[0] > 0)].isfinite().all()


def test_streams_and_threads_share_a_pool():
    """Each thread on a stream of its own, with slots of its own in one pool."""
    heads, count, repeats = 4, 4, 20
    pool = states(2 * count, heads)
    cases_ = [on_gpu(cases.random(200 + 40 * i, heads, seed=i)) for i in range(count)]
    want_pool, wants = pool.clone(), []
    for i, case in enumerate(cases_):
        for _ in range(repeats):
            final = nan_states(2, heads)
            offsets = packed_offsets(90, case.tokens - 90).cuda()
            want, _ = fwd(case, initial_state=want_pool[2 * i : 2 * i + 2], final_state=final, cu_seqlens=offsets)
            want_pool[2 * i : 2 * i + 2] = final
        wants.append(want)
    torch.cuda.synchronize()
    results, errors = {}, []

    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                case, slots = cases_[i], int32(2 * i, 2 * i + 1)
                offsets = packed_offsets(90, case.tokens - 90, dtype=torch.int32).cuda()
                indices = {"initial_state_indices": slots, "final_state_indices": slots}
                for _ in range(repeats):
                    results[i], _ = fwd(case, initial_state=pool, final_state=pool, cu_seqlens=offsets, **indices)
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(same_bits(results[i], wants[i]) for i in range(count))
    assert same_bits(pool, want_pool)


def test_a_compiled_layer_runs_on_the_kernel():
    case, offsets, slots = on_gpu(cases.random(200, 4)), packed_offsets(90, 110).cuda(), int32(3, 1)

    def layer(q, v, pool):
        out, _ = flash_kda.fwd(
            q * 2, case.k, v, case.g, case.beta, case.scale, None, case.A_log, case.dt_bias, -5.0, pool, pool, offsets,
            initial_state_indices=slots, final_state_indices=slots,
        )  # fmt: skip
        return out * 2

    torch._dynamo.reset()
    with torch.no_grad():
        pool, want_pool = states(5, 4), states(5, 4)
        want = layer(case.q, case.v, want_pool)
        got = torch.compile(layer, fullgraph=True)(case.q, case.v, pool)
    assert flash_kda.last_path() == "sm90"
    assert same_bits(got, want)
    assert same_bits(pool, want_pool)


def test_opcheck():
    case, offsets, slots, pool = on_gpu(cases.random(100, 2)), packed_offsets(60, 40).cuda(), int32(2, -1), states(4, 2)
    saved, chosen = torch.zeros(2, 1, 2, D, D, device="cuda"), torch.tensor([[32], [0]], device="cuda")
    torch.library.opcheck(
        torch.ops.flash_kda.fwd.default,
        (
            case.q, case.k, case.v, case.g, case.beta, case.scale, torch.zeros_like(case.v), None, case.A_log, case.dt_bias,
            -5.0, pool, pool, offsets, saved, chosen, slots, slots,
        ),
    )  # fmt: skip


# Bad days, and fla.


@pytest.mark.parametrize("mode", ["1", "bounds"])
def test_debug_mode_names_what_is_wrong_on_the_device(monkeypatch, mode):
    monkeypatch.setenv("FLASH_KDA_DEBUG", mode)
    case, offsets, pool = on_gpu(cases.random(100, 2)), packed_offsets(60, 40).cuda(), states(4, 2)
    options = {"initial_state": pool, "final_state": pool, "cu_seqlens": offsets}
    with pytest.raises(ValueError, match=r"got 4 at position 1"):
        fwd(case, **options, initial_state_indices=int32(0, 4), final_state_indices=int32(0, 1))
    with pytest.raises(ValueError, match=r"must name a slot once, got 1"):
        fwd(case, **options, initial_state_indices=int32(0, 1), final_state_indices=int32(1, 1))
    with pytest.raises(ValueError, match="cu_seqlens must end at or before the 100 tokens"):
        fwd(case, cu_seqlens=int32(0, 101))
    fwd(case, **options, initial_state_indices=int32(0, 3), final_state_indices=int32(0, 3))


def test_debug_mode_finds_nan_in_results(monkeypatch):
    case = on_gpu(cases.random(100, 2))
    monkeypatch.setenv("FLASH_KDA_DEBUG", "finite")
    start = states(1, 2)
    fwd(case, initial_state=start)
    start[0, 1, 5, 7] = torch.nan
    with pytest.raises(ValueError, match=r"initial_state must be finite, got nan at \[0, 1, 5, 7\]"):
        fwd(case, initial_state=start)


def test_flas_dispatcher_reaches_the_kernel():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fla_kda = pytest.importorskip("fla.ops.kda", reason="flash-linear-attention is not installed")
    from flash_kda.integrations import fla as integration

    case, offsets = on_gpu(cases.random(300, 4)), packed_offsets(120, 180).cuda()
    given = {
        "initial_state": states(2, 4), "output_final_state": True, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True, "safe_gate": True, "lower_bound": -5.0, "state_v_first": True,
        "cu_seqlens": offsets, "A_log": case.A_log, "dt_bias": case.dt_bias.flatten(),
    }  # fmt: skip

    def call(some, **changes):
        return fla_kda.chunk_kda(some.q, some.k, some.v, some.g, some.beta, **given | changes)

    with torch.no_grad():
        flash_kda.dispatch._local.path = None
        o, final = call(case)
        assert flash_kda.last_path() == "sm90"
        want, want_final = flash_kda.fwd(
            **{**vars(case), "out": None}, initial_state=given["initial_state"], cu_seqlens=offsets, output_final_state=True
        )
        assert same_bits(o, want)
        assert same_bits(final, want_final)
        some = cases.grouped(case, 2)
        flash_kda.dispatch._local.path = None
        fla_o, fla_final = call(some, state_v_first=False, initial_state=given["initial_state"].mT.contiguous())
        assert flash_kda.last_path() is None  # grouped heads: fla's own kernels
        integration.enable()
        try:
            o, final = call(some, state_v_first=False, initial_state=given["initial_state"].mT.contiguous())
            assert flash_kda.last_path() == "sm90"
        finally:
            integration.disable()
    assert rel(o, fla_o, 2).max() < 2e-2
    assert rel(final, fla_final, 1).max() < 2e-2
