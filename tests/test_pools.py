"""State pools: slots named by indices, read and written apart, in place, padded, out of range, and what debug mode says."""

import pytest
import torch
from cases import D, grouped, nan_state, packed_offsets, random, same_bits, state

import flash_kda
from flash_kda import host, validation
from flash_kda.reference import chunks, stages
from flash_kda.reference.stages import gather_rows, scatter_rows

FUNCTIONS = {"fwd": (flash_kda.fwd, {}), "fwd_cp": (flash_kda.fwd_cp, {"segment_len": 32})}
BOTH = pytest.mark.parametrize("name", FUNCTIONS)
LENGTHS = (40, 0, 70, 33)
OFFSETS = packed_offsets(*LENGTHS)
CASE = random(sum(LENGTHS), 2)
READ, WRITE = (4, -1, 0, 2), (1, 3, -1, 6)


def call(name, **arguments):
    function, options = FUNCTIONS[name]
    return function(**CASE.fwd(cu_seqlens=OFFSETS, **arguments), **options)


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


def by_hand(name, pool, read, write, target):
    """Gather, run, scatter."""
    start = torch.stack([pool[i] if 0 <= i < len(pool) else torch.zeros_like(pool[0]) for i in read])
    out, final = call(name, initial_state=start, final_state=nan_state(len(LENGTHS), 2, target.dtype))
    want = target.clone()
    for n, i in enumerate(write):
        if 0 <= i < len(target):
            want[i] = final[n]
    return out, want


@pytest.fixture(params=["readable", "blind"])
def device(request, monkeypatch):
    """On a CPU, and as on a device whose contents the host must not read."""
    if request.param == "blind":
        for module in (host, validation, chunks, stages):
            monkeypatch.setattr(module, "readable", lambda _x: False)
    return request.param


@BOTH
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_slots_are_gathered_and_scattered(device, name, dtypes):
    pool, target = state(5, 2, dtypes[0]), nan_state(7, 2, dtypes[1])
    out, want = by_hand(name, pool, READ, WRITE, target)
    before = pool.clone()
    got, final = call(
        name,
        initial_state=pool,
        initial_state_indices=index(*READ),
        final_state=target,
        final_state_indices=index(*WRITE),
    )
    assert final is target
    assert same_bits(got, out)
    assert same_bits(target, want)
    assert target[[0, 2, 4, 5]].isnan().all()
    assert same_bits(pool, before)


@BOTH
def test_in_place(device, name):
    pool = state(9, 2)
    slots = (7, 0, 3, 5)
    out, want = by_hand(name, pool, slots, slots, pool)
    got, _ = call(
        name, initial_state=pool, initial_state_indices=index(*slots), final_state=pool, final_state_indices=index(*slots)
    )
    assert same_bits(got, out)
    assert same_bits(pool, want)


@BOTH
def test_in_place_to_other_slots(device, name):
    """A prefix that two sequences share is read twice and kept."""
    pool = state(9, 2)
    read, write = (7, 7, 3, -1), (1, 2, 3, 4)
    out, want = by_hand(name, pool, read, write, pool)
    got, _ = call(
        name, initial_state=pool, initial_state_indices=index(*read), final_state=pool, final_state_indices=index(*write)
    )
    assert same_bits(got, out)
    assert same_bits(pool, want)


@BOTH
@pytest.mark.parametrize("bad", [5, 7, 2**31 - 1, -2, -(2**31)])
def test_slots_out_of_range_are_none(device, name, bad):
    pool = state(5, 2)
    guarded = torch.full((7, 2, D, D), torch.nan)
    target = guarded[1:-1]
    read, write = (bad, 1, 2, 3), (0, bad, bad, 3)
    out, want = by_hand(name, pool, read, write, target)
    got, _ = call(
        name, initial_state=pool, initial_state_indices=index(*read), final_state=target, final_state_indices=index(*write)
    )
    assert same_bits(got, out)
    assert same_bits(target, want)
    assert guarded[[0, 2, 3, 6]].isnan().all()


@BOTH
def test_padded_slots(device, name):
    wide = torch.full((7, 2 * D * D + 128), torch.nan)
    pool = wide[:, : 2 * D * D].view(7, 2, D, D)
    pool.copy_(state(7, 2))
    assert pool.stride(0) == 2 * D * D + 128
    out, want = by_hand(name, pool, READ, READ, pool)
    got, _ = call(
        name, initial_state=pool, initial_state_indices=index(*READ), final_state=pool, final_state_indices=index(*READ)
    )
    assert same_bits(got, out)
    assert same_bits(pool, want)
    assert wide[:, 2 * D * D :].isnan().all()


@BOTH
def test_one_side_only(device, name):
    pool = state(5, 2)
    final = nan_state(4, 2)
    out, want = by_hand(name, pool, READ, range(4), final)
    got, _ = call(name, initial_state=pool, initial_state_indices=index(*READ), final_state=final)
    assert same_bits(got, out)
    assert same_bits(final, want)
    target, h0 = nan_state(7, 2), state(4, 2)
    out, want = by_hand(name, h0, range(4), WRITE, target)
    got, _ = call(name, initial_state=h0, final_state=target, final_state_indices=index(*WRITE))
    assert same_bits(got, out)
    assert same_bits(target, want)
    got, _ = call(name, final_state=target, final_state_indices=index(*WRITE))
    assert same_bits(got, by_hand(name, pool, (-1,) * 4, WRITE, target)[0])


@BOTH
def test_nothing_read_and_nothing_written(device, name):
    pool = nan_state(3, 2)
    none = index(-1, -1, -1, -1)
    want, _ = call(name)
    got, _ = call(name, initial_state=pool, initial_state_indices=none, final_state=pool, final_state_indices=none)
    assert same_bits(got, want)
    assert pool.isnan().all()
    empty = pool[:0]
    got, _ = call(name, initial_state=empty, initial_state_indices=index(*READ), final_state=empty, final_state_indices=none)
    assert same_bits(got, want)


@BOTH
def test_padded_buckets_repeat_the_last_offset(device, name):
    """A bucket of eight: the rest has no tokens, no slot to read and none to write."""
    function, options = FUNCTIONS[name]
    pool = state(9, 2)
    slots = (7, 0, 3, 5)
    out, want = by_hand(name, pool, slots, slots, pool)
    padded = index(*slots, -1, -1, -1, -1)
    arguments = CASE.fwd(cu_seqlens=torch.cat([OFFSETS, OFFSETS[-1:].expand(4)]), initial_state=pool, final_state=pool)
    got, _ = function(**arguments, initial_state_indices=padded, final_state_indices=padded, **options)
    assert same_bits(got, out)
    assert same_bits(pool, want)


@BOTH
def test_an_empty_batch_still_moves_states(device, name):
    function, options = FUNCTIONS[name]
    case, offsets = random(0, 2), torch.zeros(3, dtype=torch.int32)
    pool, target = state(5, 2), nan_state(4, 2)
    function(
        **case.fwd(cu_seqlens=offsets, initial_state=pool, final_state=target),
        initial_state_indices=index(3, -1),
        final_state_indices=index(0, 2),
        **options,
    )
    assert same_bits(target[0], pool[3])
    assert not target[2].any()
    assert target[[1, 3]].isnan().all()


@BOTH
def test_grouped_heads_in_a_dense_batch(name):
    case = grouped(random(50, 4, batch=3), 2)
    function, options = FUNCTIONS[name]
    pool = state(5, 4)
    out, final = function(**case.fwd(initial_state=pool[[4, 0, 2]], final_state=nan_state(3, 4)), **options)
    slots = index(4, 0, 2)
    same, _ = function(
        **case.fwd(initial_state=pool, final_state=pool), initial_state_indices=slots, final_state_indices=slots, **options
    )
    assert same_bits(same, out)
    assert same_bits(pool[[4, 0, 2]], final)


def test_rows_that_are_not_there():
    source = torch.randn(3, 2)
    got = gather_rows(source, torch.tensor([2, -1, 3, 0]))
    assert torch.equal(got, torch.stack([source[2], torch.zeros(2), torch.zeros(2), source[0]]))
    for rows, want in (([1, -1, 9], {1: 0}), ([-1, 0, 2], {0: 1, 2: 2}), ([-1, -1, 3], {})):
        target, values = torch.full((3, 2), torch.nan), torch.randn(3, 2)
        scatter_rows(target, torch.tensor(rows), values)
        for i in range(3):
            assert torch.equal(target[i], values[want[i]]) if i in want else target[i].isnan().all()


# The contract.


def refused(error, match, **arguments):
    for name in FUNCTIONS:
        with pytest.raises(error, match=match):
            call(name, **arguments)


@pytest.mark.parametrize("side", ["initial_state", "final_state"])
def test_indices_are_checked(side):
    given = {side: state(5, 2)}
    key = f"{side}_indices"
    good = index(0, 1, 2, 3)
    refused(TypeError, f"{key} must be a torch.Tensor", **given, **{key: [0, 1, 2, 3]})
    refused(TypeError, f"{key} must be int32, got int64", **given, **{key: good.long()})
    refused(ValueError, rf"{key} must have shape \[N\] = \(4,\), got \(3,\)", **given, **{key: good[:3]})
    refused(ValueError, rf"{key} must have shape \[N\] = \(4,\), got \(4, 1\)", **given, **{key: good[:, None]})
    refused(ValueError, f"{key} must be on cpu", **given, **{key: good.to("meta")})
    refused(ValueError, f"{side} must be given with {key}, got None", **{key: good})
    refused(
        ValueError, rf"{side} must have shape \[slots,HV,V,K\] = \(5, 2, 128, 128\), got", **{side: state(5, 3)}, **{key: good}
    )
    refused(ValueError, rf"{side} must have shape \[slots,HV,V,K\], got", **{side: state(5, 2)[0]}, **{key: good})


@pytest.mark.parametrize("mode", ["1", "bounds"])
def test_debug_mode_names_the_slot(monkeypatch, mode):
    monkeypatch.setenv("FLASH_KDA_DEBUG", mode)
    pool, other = state(5, 2), nan_state(5, 2)
    good = index(0, -1, 2, 3)

    def bad(match, read, write, final=other):
        before = final.clone()
        refused(
            ValueError,
            match,
            initial_state=pool,
            initial_state_indices=read,
            final_state=final,
            final_state_indices=write,
        )
        assert same_bits(final, before)

    bad(
        "initial_state_indices must be -1 or name one of the 5 slots of initial_state, got 5 at position 2",
        index(0, 1, 5, 2),
        good,
    )
    bad("final_state_indices must be -1 or name .*, got -2 at position 1", good, index(0, -2, 1, 2))
    bad("final_state_indices must name a slot once, got 3 at positions 1 and 3", good, index(0, 3, -1, 3))
    bad(
        "final_state_indices must not name a slot .* got 2 at position 0, which sequence 2 reads",
        good,
        index(2, 1, -1, 3),
        pool,
    )
    for name in FUNCTIONS:  # the same is right where the pools are apart
        call(name, initial_state=pool, initial_state_indices=good, final_state=other, final_state_indices=index(2, 1, -1, 3))


def test_debug_mode_reads_only_the_slots_that_are_named(monkeypatch):
    monkeypatch.setenv("FLASH_KDA_DEBUG", "finite")
    pool = state(5, 2)
    pool[1, 1, 2, 3] = torch.nan
    target = nan_state(5, 2)
    read, write = index(0, -1, 2, 3), index(4, -1, 0, 1)
    for name in FUNCTIONS:
        call(name, initial_state=pool, initial_state_indices=read, final_state=target, final_state_indices=write)
    bad = index(0, -1, 2, 1)
    refused(
        ValueError, r"initial_state must be finite, got nan at \[1, 1, 2, 3\]", initial_state=pool, initial_state_indices=bad
    )
