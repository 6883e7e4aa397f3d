"""States along the pieces of sequences on the GPU, against fp64. Everything that a kernel writes is poisoned with NaN first."""

import itertools

import pytest
import torch
from cases import D, packed_offsets, rel

import flash_kda
from flash_kda.sm90 import small

TOLERANCE = 1e-5
"""Relative error of a product of bf16 terms; a product leaves about 4e-6."""
LONG = 3e-5
"""The same where hundreds of products add up, each state still holding the errors of the last ten or so."""


def effects(slots, heads, seed=0):
    """Random ht, and mt that shrink a state by a twentieth on average: errors of many products add up."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    ht = torch.randn(slots, heads, D, D, device="cuda", generator=gen)
    mt = torch.randn(slots, heads, D, D, device="cuda", generator=gen)
    return ht, mt * (0.95 * D**-0.5)


def owners(offsets, segment_len):
    """(sequence, first slot, slots) of every sequence."""
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        yield n, begin // segment_len, max(end - begin - 1, 0) // segment_len


def judge(ht, mt, needs, offsets, segment_len, start=None, index=None):
    """Slots in fp64; NaN where nobody owns one."""
    want = torch.full_like(ht, torch.nan, dtype=torch.float64)
    for n, first, count in owners(offsets, segment_len):
        row = n if index is None else index[n]
        known = start is not None and 0 <= row < start.shape[0]
        h = start[row].double() if known else torch.zeros_like(want[0])
        for s in range(first, first + count):
            carried = h @ mt[s].double().nan_to_num().mT
            h = ht[s].double() + torch.where(needs[s].bool()[:, None, None], carried, 0)
            want[s] = h
    return want


def run(ht, mt, needs, offsets, segment_len, start=None, index=None, anew=None, **options):
    """`small.chain` on a copy, without a synchronisation."""
    states = ht.clone()
    cu = packed_offsets(*torch.tensor(offsets).diff().tolist(), **options).cuda()
    more = {} if anew is None else dict(zip(("effects", "norm", "eps"), anew, strict=True))
    rows = None if index is None else torch.tensor(index, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        small.chain(
            states,
            mt,
            needs,
            cu,
            tokens=offsets[-1],
            max_len=0,
            segment_len=segment_len,
            initial_state=start,
            in_index=rows,
            **more,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return states


def close(states, want, ht, tolerance=TOLERANCE):
    owned = ~want[:, 0, 0, 0].isnan()
    assert states[owned].isfinite().all()
    assert rel(states[owned], want[owned], 1).max() <= tolerance
    assert torch.equal(states[~owned].nan_to_num(), ht[~owned].nan_to_num()), "a slot that nobody owns was written"


def needs_of(kind, slots, heads):
    if kind == "mixed":
        gen = torch.Generator(device="cuda").manual_seed(3)
        return (torch.rand(slots, heads, device="cuda", generator=gen) < 0.7).int()
    return torch.full((slots, heads), int(kind == "all"), dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("start", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["all", "none", "mixed"])
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_one_sequence(heads, kind, start):
    ht, mt = effects(9, heads)
    needs = needs_of(kind, 9, heads)
    mt[needs == 0] = torch.nan
    initial = None if start is None else torch.randn(1, heads, D, D, device="cuda").to(start)
    offsets = [0, 64 * 9 + 5]
    states = run(ht, mt, needs, offsets, 64, initial)
    close(states, judge(ht, mt, needs, offsets, 64, initial), ht)
    assert torch.equal(states, run(ht, mt, needs, offsets, 64, initial, dtype=torch.int64))
    if kind == "all":
        assert torch.equal(states, run(ht, mt, None, offsets, 64, initial))
        assert torch.equal(states, run(ht, mt, needs.bool(), offsets, 64, initial))


@pytest.mark.parametrize("index", [None, [2, -1, 0, 7, 1, 1, -3]])
def test_packed_sequences_with_unused_slots(index):
    offsets = [0, 300, 300, 333, 340, 700, 1000, 1000]
    slots = (offsets[-1] - 1) // 32
    ht, mt = effects(slots, 2)
    needs = needs_of("mixed", slots, 2)
    used = {s for _, first, count in owners(offsets, 32) for s in range(first, first + count)}
    unused = [s for s in range(slots) if s not in used]
    assert unused
    ht[unused] = torch.nan
    mt[unused] = torch.nan
    mt[needs == 0] = torch.nan
    pool = torch.randn(7 if index is None else 3, 2, D, 2 * D, device="cuda")[..., :D].contiguous()
    states = run(ht, mt, needs, offsets, 32, pool, index)
    close(states, judge(ht, mt, needs, offsets, 32, pool, index), ht)


def test_dense_rows():
    ht, mt = effects(7, 2)
    start = torch.randn(2, 2, D, D, device="cuda")
    states = ht.clone()
    small.chain(states, mt, None, None, tokens=256, max_len=128, segment_len=32, initial_state=start)
    close(states, judge(ht, mt, torch.ones(7, 2, device="cuda"), [0, 128, 256], 32, start), ht)


@pytest.mark.parametrize("short", [True, False])
def test_chains_begin_anew_where_they_may(short):
    """Every eighth slot, if two transitions in a row keep less than eps; what came before then has no influence at all."""
    offsets = [0, 32 * 3 + 1, 32 * 30 + 5]  # slots 0 to 2, and 3 to 29
    ht, mt = effects(30, 3)
    mt *= 1e-4 if short else 1.0
    needs = needs_of("all", 30, 3)
    start = torch.randn(2, 3, D, D, device="cuda")
    norm = mt.norm(dim=(2, 3))
    kept = torch.full((4, 3, D, D), torch.nan, device="cuda")
    for slot in (10, 18, 26):
        kept[slot // 8] = ht[slot]
    eps = 2.0**-20
    states = run(ht, mt, needs, offsets, 32, start, anew=(kept, norm, eps))
    close(states, judge(ht, mt, needs, offsets, 32, start), ht, LONG)
    changed = ht.clone()
    changed[4] += 1
    again = run(changed, mt, needs, offsets, 32, start, anew=(kept, norm, eps))
    assert torch.equal(states[11:], again[11:]) == short
    assert not torch.equal(states[4:11], again[4:11])


@pytest.mark.parametrize("slots", [300, 600])
def test_runs_longer_than_a_look_ahead(slots):
    ht, mt = effects(slots, 1)
    needs = needs_of("all", slots, 1)
    offsets = [0, 32 * slots + 1]
    start = torch.randn(1, 1, D, D, device="cuda")
    close(run(ht, mt, needs, offsets, 32, start), judge(ht, mt, needs, offsets, 32, start), ht, LONG)


def test_more_runs_than_ctas():
    ht, mt = effects(40, 20)
    needs = needs_of("mixed", 40, 20)
    offsets = [0, 32 * 40 + 1]
    close(run(ht, mt, needs, offsets, 32), judge(ht, mt, needs, offsets, 32), ht)


def test_many_sequences_with_few_slots():
    lengths = [1] * 70_000
    lengths[123], lengths[60_000] = 5000, 3000
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    slots = (offsets[-1] - 1) // 1024
    ht, mt = effects(slots, 1)
    needs = needs_of("all", slots, 1)
    start = torch.randn(70_000, 1, D, D, device="cuda", dtype=torch.bfloat16)
    close(run(ht, mt, needs, offsets, 1024, start), judge(ht, mt, needs, offsets, 1024, start), ht)


def test_rows_are_independent():
    """A NaN in one V row of a state stays in that row."""
    ht, mt = effects(6, 2)
    needs = needs_of("all", 6, 2)
    offsets = [0, 6 * 64 + 1]
    clean = run(ht, mt, needs, offsets, 64)
    ht[1, 0, 70, 3] = torch.nan
    states = run(ht, mt, needs, offsets, 64)
    assert states[2:, 0, 70].isnan().all()
    hit = torch.zeros_like(ht, dtype=torch.bool)
    hit[1:, 0, 70] = True
    assert torch.equal(states[~hit], clean[~hit])


def test_graph_replays_with_other_offsets_and_flags():
    slots = 12
    ht, mt = effects(slots, 3)
    needs = needs_of("all", slots, 3)
    start = torch.randn(3, 3, D, D, device="cuda")
    cu = packed_offsets(200, 100, 100).cuda()
    states = ht.clone()

    def call():
        small.chain(states, mt, needs, cu, tokens=400, max_len=0, segment_len=32, initial_state=start)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lengths, kind in (((200, 100, 100), "all"), ((0, 33, 367), "mixed"), ((400, 0, 0), "mixed"), ((30, 30, 340), "none")):
        cu.copy_(packed_offsets(*lengths))
        needs.copy_(needs_of(kind, slots, 3))
        states.copy_(ht)
        graph.replay()
        offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        close(states, judge(ht, mt, needs, offsets, 32, start), ht)


@pytest.mark.parametrize("kind", ["all", "none", "mixed", "given None", "no mt"])
@pytest.mark.parametrize("start", [None, torch.float32, torch.bfloat16])
def test_correct_initial_states(kind, start):
    segments, heads = 11, 3
    ht, mt = effects(segments, heads)
    seq_map = torch.tensor([0, 4, 4, 5, 9])  # the last two segments belong to nobody
    fallback = needs_of("all" if "None" in kind else "none" if "mt" in kind else kind, segments, heads).bool()
    initial = None if start is None else torch.randn(4, heads, D, D, device="cuda").to(start)
    arguments = [initial, ht, mt, fallback, seq_map.cuda()]
    want = flash_kda.correct_initial_states(
        None if start is None else initial.float().cpu(), *(x.cpu() for x in arguments[1:]), impl="reference"
    )
    if kind == "given None":
        arguments[3] = None
    elif kind == "no mt":
        arguments[2:4] = None, None
    else:
        mt[~fallback] = torch.nan
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = flash_kda.correct_initial_states(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert flash_kda.last_path() == "sm90"
    assert got.isfinite().all()
    assert not got[9:].any()
    assert rel(got.cpu().double(), want.double(), 1).max() <= TOLERANCE
    by_segment = flash_kda.correct_initial_states(initial, ht, effects(segments, heads)[1], fallback[:, 0], seq_map.cuda())
    wide = flash_kda.correct_initial_states(
        initial, ht, effects(segments, heads)[1], fallback[:, :1].repeat(1, heads), seq_map.cuda()
    )
    assert torch.equal(by_segment, wide)
