"""``fwd_cp`` on the Hopper kernels: the serial answer on every gate, however a sequence is cut.

The judge is the chunked reference in fp64, the unit of error what serial ``fwd`` errs on the same input.
"""

from dataclasses import replace

import cases
import pytest
import torch
from cases import D, nan_like, packed_offsets, rel, same_bits
from test_forward import exact, nan_states, on_gpu, states

import flash_kda
from flash_kda.sm90 import plan, small, stages

TOKENS, HEADS = 4096, 4
NAMES = [name for name in cases.NAMES if name != "real"]


def fwd_cp(case, initial_state=None, final_state=None, cu_seqlens=None, **options):
    """On the kernels or not at all; outputs poisoned with NaN."""
    arguments = {**vars(case), "out": nan_like(case.q), "initial_state": initial_state, "final_state": final_state}
    results = flash_kda.fwd_cp(**arguments, cu_seqlens=cu_seqlens, impl="sm90", **options)
    assert flash_kda.last_path() == "sm90"
    return results


def fwd(case, initial_state=None, final_state=None, cu_seqlens=None):
    arguments = {**vars(case), "out": nan_like(case.q), "initial_state": initial_state, "final_state": final_state}
    return flash_kda.fwd(**arguments, cu_seqlens=cu_seqlens, impl="sm90")


@pytest.fixture(scope="module", params=NAMES)
def problem(request):
    """A case, its initial state, the fp64 answer with and without it, and the errors of the serial kernel."""
    case = on_gpu(cases.make(request.param, TOKENS, HEADS))
    answers = {}
    for start in (None, states(1, HEADS)):
        want, want_final = exact(case, start)
        out, final = fwd(case, start, nan_states(1, HEADS))
        answers[start is not None] = (start, want, want_final, rel(out, want, 2), rel(final, want_final, 1))
    return case, answers


def close(error, unit, what, mean=1.1):
    assert error.isfinite().all(), what
    # below the rounding of an output to bf16 a ratio of errors says nothing
    unit = unit.clamp(min=1.6e-3)
    assert error.mean() <= mean * unit.mean(), f"{what}: mean {error.tolist()} against serial {unit.tolist()}"
    assert (error <= max(1.25, mean + 0.15) * unit).all(), f"{what}: {error.tolist()} against serial {unit.tolist()}"


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("pieces", [2, 5, 16, 64, 256])
def test_as_exact_as_serial(problem, pieces, with_state):
    case, answers = problem
    start, want, want_final, unit, unit_final = answers[with_state]
    segment_len = -(-TOKENS // pieces // 16) * 16
    out, final = fwd_cp(case, start, nan_states(1, HEADS), segment_len=segment_len)
    close(rel(out, want, 2), unit, "out")
    # Pieces of a single chunk: what rounds once a piece then rounds as often as the serial kernel does (random_1: 1.17 times).
    close(rel(final, want_final, 1), unit_final, "state", 1.25 if segment_len == 16 else 1.1)


def test_the_automatic_plan(problem):
    case, answers = problem
    assert plan.choose(TOKENS, 1, HEADS, 132, None) is not None
    start, want, want_final, unit, unit_final = answers[True]
    out, final = fwd_cp(case, start, nan_states(1, HEADS))
    close(rel(out, want, 2), unit, "out")
    close(rel(final, want_final, 1), unit_final, "state")


@pytest.mark.parametrize(
    "fault", ["no chain", "no initial state", "slots in the wrong order", "everything exits", "chains begin anew"]
)
def test_what_a_fault_would_do(monkeypatch, fault):
    """The check above must be able to fail: without decay everything depends on what came before."""
    case = on_gpu(cases.make("no_decay", TOKENS, HEADS))
    start = states(1, HEADS)
    want, _ = exact(case, start)
    unit = rel(fwd(case, start)[0], want, 2)
    chain, summary = small.chain, stages.state_summary
    if fault == "no chain":
        monkeypatch.setattr(small, "chain", lambda *_arguments, **_options: None)
    elif fault == "no initial state":
        monkeypatch.setattr(
            small, "chain", lambda *arguments, **options: chain(*arguments, **options | {"initial_state": None})
        )
    elif fault == "slots in the wrong order":

        def backwards(slots, *arguments, **options):
            chain(slots, *arguments, **options | {"overlap": False})
            slots.copy_(slots.flip(0))

        monkeypatch.setattr(small, "chain", backwards)
    elif fault == "chains begin anew":

        def careless(*arguments, **options):
            chain(*arguments, **options | {"norm": torch.zeros_like(options["norm"])})

        monkeypatch.setattr(small, "chain", careless)
    else:
        monkeypatch.setattr(
            stages, "state_summary", lambda *arguments, **options: summary(*arguments, **options | {"eps": 1e9})
        )
    out, _ = fwd_cp(case, start, segment_len=256)
    with pytest.raises(AssertionError):
        close(rel(out, want, 2), unit, "out")


LENGTHS = (1500, 0, 17, 4000, 33, 64, 1, 2048, 31)


@pytest.mark.parametrize("hint", [False, True])
@pytest.mark.parametrize("options", [{}, {"segment_len": 96}, {"segment_len": 1024}, {"fixed_plan": True}])
def test_ragged_batches(options, hint):
    case = on_gpu(cases.make("real_tiled", sum(LENGTHS), 2))
    offsets = packed_offsets(*LENGTHS).cuda()
    start = states(len(LENGTHS), 2)
    want, want_final = exact(case, start, offsets)
    serial, serial_final = fwd(case, start, nan_states(len(LENGTHS), 2), offsets)
    if hint:
        options = {**options, "cu_seqlens_cpu": packed_offsets(*LENGTHS)}
    out, final = fwd_cp(case, start, nan_states(len(LENGTHS), 2), offsets, **options)
    close(rel(out, want, 2), rel(serial, want, 2), "out")
    for n, length in enumerate(LENGTHS):
        if length == 0:
            assert same_bits(final[n], start[n])
            continue
        got, ours = (rel(x[n : n + 1], want_final[n : n + 1], 1) for x in (final, serial_final))
        assert (got <= 1.25 * ours.clamp(min=1.6e-3)).all(), (n, length)


def test_dense_batch_is_packed_batch():
    batch = on_gpu(cases.random(3000, 2, batch=3, lower_bound=-0.5, seed=11))
    final, final2 = nan_states(3, 2), nan_states(3, 2)
    out, _ = fwd_cp(batch, None, final, segment_len=512)
    out2, _ = fwd_cp(batch.packed(), None, final2, packed_offsets(3000, 3000, 3000).cuda(), segment_len=512)
    # slots differ, arithmetic does not: pieces start at the same tokens
    assert same_bits(out.flatten(0, 1), out2[0])
    assert same_bits(final, final2)


def test_fixed_plan_makes_bits_independent_of_the_batch():
    case = on_gpu(cases.make("real_tiled", 6000, 2))
    offsets = packed_offsets(700, 3100, 2200).cuda()
    out, final = fwd_cp(case, None, nan_states(3, 2), offsets, fixed_plan=True)
    alone, alone_final = fwd_cp(case.cut(700, 3800), None, nan_states(1, 2), fixed_plan=True)
    assert same_bits(out[:, 700:3800], alone)
    assert same_bits(final[1:2], alone_final)


def test_prefix_independence_and_repeats():
    case = on_gpu(cases.make("random_half", 4096, 4))
    out, final = fwd_cp(case, None, nan_states(1, 4))
    for _ in range(20):
        again, final2 = fwd_cp(case, None, nan_states(1, 4))
        assert same_bits(again, out)
        assert same_bits(final2, final)

    def louder(x):
        x = x.clone()
        x[:, 3000:] = (3 * torch.randn(x[:, 3000:].shape, device="cuda")).bfloat16()
        return x

    changed, _ = fwd_cp(case.map(louder))
    assert same_bits(changed[:, :3000], out[:, :3000])


def test_neighbours_and_their_nans():
    case = on_gpu(cases.make("random_1", 6000, 2))
    offsets = packed_offsets(2000, 2000, 2000).cuda()
    out, final = fwd_cp(case, None, nan_states(3, 2), offsets, segment_len=256)

    def poison(x):
        x = x.clone()
        x[:, 2000:4000] = torch.nan
        return x

    out2, final2 = fwd_cp(case.map(poison), None, nan_states(3, 2), offsets, segment_len=256)
    for kept in (slice(0, 2000), slice(4000, 6000)):
        assert same_bits(out2[:, kept], out[:, kept])
    assert same_bits(final2[[0, 2]], final[[0, 2]])


def test_state_dtypes_and_in_place():
    case = on_gpu(cases.make("no_decay", 2048, 2))
    start = states(1, 2)
    out, final = fwd_cp(case, start, nan_states(1, 2), segment_len=256)
    low = nan_states(1, 2, torch.bfloat16)
    out2, _ = fwd_cp(case, start.bfloat16(), low, segment_len=256)
    assert same_bits(out2, out)
    assert same_bits(low, final.bfloat16())
    state = start.clone()
    out3, _ = fwd_cp(case, state, state, segment_len=256)
    assert same_bits(out3, out)
    assert same_bits(state, final)


def test_many_states_in_place():
    """More items than processors, and last pieces of one token, which end long before the first ones of their sequences."""
    lengths = [257, 129, 1] * 30
    case = on_gpu(cases.make("no_decay", sum(lengths), 4))
    offsets = packed_offsets(*lengths).cuda()
    start = states(len(lengths), 4)
    out, final = fwd_cp(case, start, nan_states(len(lengths), 4), offsets, segment_len=128)
    for _ in range(20):
        state = start.clone()
        again, _ = fwd_cp(case, state, state, offsets, segment_len=128)
        assert same_bits(again, out)
        assert same_bits(state, final)


def test_pools_and_offsets_that_end_early():
    lengths = (1500, 0, 700, 33)
    case = on_gpu(cases.make("no_decay", sum(lengths) + 300, 2))
    offsets = packed_offsets(*lengths).cuda().int()
    start = states(4, 2)
    out, final = fwd_cp(case, start, nan_states(4, 2), offsets, segment_len=256)
    pool = states(9, 2, seed=8)
    slots = torch.tensor([7, 2, -1, 4], dtype=torch.int32, device="cuda")
    pool[[7, 2, 4]] = start[[0, 1, 3]]
    kept = pool.clone()
    indices = {"initial_state_indices": slots, "final_state_indices": slots}
    out2, _ = fwd_cp(case, pool, pool, offsets, segment_len=256, **indices)
    assert same_bits(out2[:, :1500], out[:, :1500])
    assert same_bits(pool[[7, 2, 4]], final[[0, 1, 3]])
    rest = [0, 1, 3, 5, 6, 8]
    assert same_bits(pool[rest], kept[rest])
    assert out2[:, sum(lengths) :].isnan().all()


@pytest.mark.parametrize("long", [True, False])
def test_graph_replay_with_other_offsets(monkeypatch, long):
    """Captured once without looking at lengths; replayed with lengths that are cut elsewhere or not at all."""
    monkeypatch.setattr(plan, "LOOK_SHARE", 1e6)  # decide on the device in a small call too
    plan._remembered.cache_clear()
    case = on_gpu(cases.make("random_half", 16384, 8))
    lengths = [(16384, 0, 0, 0, 0, 0, 0, 0, 0, 0), (2048, 2048, 2048, 2048, 2048, 2048, 2048, 2047, 1, 0)]
    offsets = packed_offsets(*lengths[0 if long else 1]).cuda()
    out, final = nan_like(case.q), nan_states(10, 8)
    arguments = {**vars(case), "out": out, "initial_state": None, "final_state": final, "cu_seqlens": offsets}
    flash_kda.fwd_cp(**arguments, impl="sm90")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_kda.fwd_cp(**arguments, impl="sm90")
    for other in (lengths[1], lengths[0], (1, 16000, 300, 83, 0, 0, 0, 0, 0, 0)):
        offsets.copy_(packed_offsets(*other))
        out.fill_(torch.nan)
        final.fill_(torch.nan)
        graph.replay()
        direct, direct_final = fwd_cp(case, None, nan_states(10, 8), packed_offsets(*other).cuda())
        assert same_bits(out, direct)
        assert same_bits(final, direct_final)
        serial, _ = fwd(case, None, None, packed_offsets(*other).cuda())
        assert rel(out, serial.double(), 2).max() < 1e-2
    assert plan.choose(16384, 10, 8, 132, None).only_if_longer > 0
    plan._remembered.cache_clear()


def test_no_synchronisation():
    case = on_gpu(cases.make("random_half", 16384, 8))
    offsets = packed_offsets(16000, 384).cuda()
    final = nan_states(2, 8)
    fwd_cp(case, None, final, offsets)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        arguments = {**vars(case), "out": None, "initial_state": None, "final_state": final, "cu_seqlens": offsets}
        flash_kda.fwd_cp(**arguments, impl="sm90")
        flash_kda.fwd_cp(**arguments, impl="sm90", segment_len=512)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_beyond_outputs():
    case = on_gpu(cases.make("no_decay", 16384, 8))
    out, final = nan_like(case.q), nan_states(1, 8)
    arguments = {**vars(case), "out": out, "initial_state": None, "final_state": final}
    flash_kda.fwd_cp(**arguments, impl="sm90", segment_len=512)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flash_kda.fwd_cp(**arguments, impl="sm90", segment_len=512)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 3 * (16384 // 512) * 8 * D * D * 4


@pytest.mark.parametrize("name", ["random_5", "random_half", "slow_eighth", "real_tiled", "no_decay"])
def test_certificate_agrees_with_the_reference(name):
    case = on_gpu(cases.make(name, 2048, 2))
    offsets = packed_offsets(1500, 548).cuda()
    start = states(2, 2)
    *_, certificate = fwd_cp(case, start, nan_states(2, 2), offsets, segment_len=512, certificate=True)
    arguments = {**vars(case), "out": None, "initial_state": start, "final_state": nan_states(2, 2), "cu_seqlens": offsets}
    *_, want = flash_kda.fwd_cp(**arguments, segment_len=512, certificate=True, impl="reference")
    used, want_used = (c.segment < c.plan.capacity for c in (certificate, want))
    assert torch.equal(certificate.segment[used], want.segment[want_used])
    got_chunks, chunks = certificate.chunks[used], want.chunks[want_used]
    # the kernel looks after 1, 2, 4, 8 and then every 8 steps of two chunks
    assert (got_chunks >= chunks).all()
    assert (got_chunks <= 2 * chunks + 16).all()
    exited = ~certificate.fallback[used]
    assert torch.equal(exited, got_chunks < 32)
    assert (certificate.norm[used][exited] <= 2.0**-20).all()
    dropped = certificate.dropped[used]
    assert (dropped <= want.dropped[want_used] * 1.01 + 1e-5).all()
    # what is lost is measured: its bound is not 0 where something was left to lose
    assert (dropped[exited & (certificate.norm[used] > 0)] > 0).all()
    out, final, _ = fwd_cp(case, start, nan_states(2, 2), offsets, segment_len=512, certificate=True)
    plain, plain_final = fwd_cp(case, start, nan_states(2, 2), offsets, segment_len=512)
    assert same_bits(out, plain)
    assert same_bits(final, plain_final)


def test_a_large_past_is_not_dropped():
    """Values 10,000 times larger before the replayed suffix still cost less than rounding."""
    case = on_gpu(cases.make("random_1", 2048, 4))
    v = case.v.clone()
    v[:, : 2 * 512 - 128] *= 10_000  # the second segment replays what follows, at most 8 chunks or a little more
    case = replace(case, v=v)
    want, _ = exact(case)
    serial, _ = fwd(case)
    out, _, certificate = fwd_cp(case, segment_len=512, certificate=True)
    assert not certificate.fallback.all(), "no scan exited"
    close(rel(out, want, 2), rel(serial, want, 2), "out")
