"""States on the way: what a call that stops there returns, in the rows that were asked for and no others."""

import pytest
import torch
from cases import D, grouped, make, nan_state, packed_offsets, random, same_bits, state

import flash_kda
from flash_kda import checkpoints, host, validation
from flash_kda.reference import chunks, stages

FUNCTIONS = {
    "fwd": (flash_kda.fwd, {}),
    "segments": (flash_kda.fwd_cp, {"segment_len": 48}),
    "fixed_plan": (flash_kda.fwd_cp, {"fixed_plan": True}),
}
LENGTHS = (130, 0, 70, 16, 257)
OFFSETS = packed_offsets(*LENGTHS)


@pytest.fixture(params=FUNCTIONS)
def name(request, monkeypatch):
    monkeypatch.setattr(flash_kda.plan, "FIXED_SEGMENT_LEN", 80)
    return request.param


@pytest.fixture(params=["readable", "blind"])
def device(request, monkeypatch):
    """On a CPU, and as on a device whose contents the host must not read."""
    if request.param == "blind":
        for module in (host, validation, chunks, stages, checkpoints):
            monkeypatch.setattr(module, "readable", lambda _x: False)
    return request.param


def call(name, case, offsets=None, **arguments):
    function, options = FUNCTIONS[name]
    return function(**case.fwd(cu_seqlens=offsets, **arguments), **options)


def stopped(name, case, h0, tokens):
    """Final state of a call that stops after so many tokens, row by row of a dense batch."""
    final = nan_state(case.q.shape[0], case.heads)
    call(name, case.cut(0, tokens), initial_state=h0, final_state=final)
    return final


def sequence(case, n):
    return case.cut(int(OFFSETS[n]), int(OFFSETS[n + 1]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_chosen_tokens(device, name, dtype):
    case, h0 = random(int(OFFSETS[-1]), 2), state(5, 2)
    chosen = torch.tensor([[64, 128, 96], [-1, 0, -1], [64, -1, 32], [16, -1, 0], [256, 16, 48]], dtype=dtype)
    states, final = torch.full((5, 3, 2, D, D), torch.nan), nan_state(5, 2)
    out, _ = call(name, case, OFFSETS, initial_state=h0, final_state=final, checkpoint_states=states, checkpoint_offsets=chosen)
    want_final = nan_state(5, 2)
    want, _ = call(name, case, OFFSETS, initial_state=h0, final_state=want_final)
    assert same_bits(out, want)
    assert same_bits(final, want_final)
    for n, row in enumerate(chosen.tolist()):
        for c, tokens in enumerate(row):
            if tokens <= 0:
                assert states[n, c].isnan().all()
            else:
                assert same_bits(states[n, c], stopped(name, sequence(case, n), h0[n : n + 1], tokens)[0]), (n, tokens)


@pytest.mark.parametrize("every", [16, 64, 80, 128, 512])
def test_every_so_many_tokens(device, name, every):
    case, h0 = random(int(OFFSETS[-1]), 2), state(5, 2)
    states = nan_state(int(OFFSETS[-1]) // every, 2)
    out, _ = call(name, case, OFFSETS, initial_state=h0, checkpoint_states=states, checkpoint_every=every)
    assert same_bits(out, call(name, case, OFFSETS, initial_state=h0)[0])
    asked = set()
    for n, length in enumerate(LENGTHS):
        for j in range(1, length // every + 1):
            row = int(OFFSETS[n]) // every + j - 1
            asked.add(row)
            if every > 16 or j in (1, 3, length // every):
                assert same_bits(states[row], stopped(name, sequence(case, n), h0[n : n + 1], j * every)[0]), (n, j)
    assert len(asked) == sum(length // every for length in LENGTHS)
    for row in set(range(len(states))) - asked:
        assert states[row].isnan().all()


def test_dense_batch_and_grouped_heads(device, name):
    case, h0 = grouped(random(100, 4, batch=3), 2), state(3, 4)
    states = nan_state(9, 4, torch.bfloat16)
    call(name, case, initial_state=h0, checkpoint_states=states, checkpoint_every=32)
    for b in range(3):
        for j in range(1, 4):
            row = 100 * b // 32 + j - 1
            want = stopped(name, case, h0, 32 * j)[b].bfloat16()
            assert same_bits(states[row], want)
    vector = torch.full((3, 4, D, D), torch.nan)
    call(name, case, initial_state=h0, checkpoint_states=vector, checkpoint_offsets=torch.tensor([96, -1, 32]))
    assert same_bits(vector[0], stopped(name, case, h0, 96)[0])
    assert vector[1].isnan().all()
    assert same_bits(vector[2], stopped(name, case, h0, 32)[2])


def test_the_same_token_twice_is_stored_twice(device, name):
    case = random(100, 2)
    states = torch.full((1, 4, 2, D, D), torch.nan)
    call(name, case, checkpoint_states=states, checkpoint_offsets=torch.tensor([[96, 32, 96, 32]]))
    assert states.isfinite().all()
    assert same_bits(states[:, 0], states[:, 2])
    assert same_bits(states[:, 1], states[:, 3])
    assert not same_bits(states[:, 0], states[:, 1])


def test_with_pools_in_place(device, name):
    """Checkpoints are of the sequence, whatever slots it reads and writes."""
    case, pool = random(200, 2), state(6, 2)
    offsets, slots = packed_offsets(90, 110), torch.tensor([4, 2], dtype=torch.int32)
    states, chosen = torch.full((2, 1, 2, D, D), torch.nan), torch.tensor([[64], [96]])
    want = [stopped(name, case.cut(0, 90), pool[4:5], 64), stopped(name, case.cut(90, 200), pool[2:3], 96)]
    final = nan_state(2, 2)
    call(name, case, offsets, initial_state=pool[[4, 2]], final_state=final)
    call(
        name,
        case,
        offsets,
        initial_state=pool,
        final_state=pool,
        initial_state_indices=slots,
        final_state_indices=slots,
        checkpoint_states=states,
        checkpoint_offsets=chosen,
    )
    assert same_bits(states[:, 0], torch.cat(want))
    assert same_bits(pool[[4, 2]], final)


def test_states_may_be_slices_of_something_wider(device, name):
    case = random(100, 2)
    wide = torch.full((4, 2 * D * D + 64), torch.nan)
    states = wide[:3, : 2 * D * D].view(3, 2, D, D)
    call(name, case, checkpoint_states=states, checkpoint_every=32)
    assert same_bits(states[2], stopped(name, case, None, 96)[0])
    assert wide[:, 2 * D * D :].isnan().all()
    assert wide[3].isnan().all()


@pytest.mark.parametrize("kind", ["random_1", "no_decay", "real"])
def test_a_call_goes_on_from_a_checkpoint(kind):
    """What prefix caching does with it."""
    case = make(kind, 200)
    states = nan_state(200 // 64, 2)
    final = nan_state(1, 2)
    out, _ = flash_kda.fwd(**case.fwd(final_state=final), checkpoint_states=states, checkpoint_every=64)
    rest_final = nan_state(1, 2)
    rest, _ = flash_kda.fwd(**case.cut(128, 200).fwd(initial_state=states[1:2], final_state=rest_final))
    assert same_bits(rest, out[:, 128:])
    assert same_bits(rest_final, final)


def test_the_certificate_is_the_same(device):
    case, offsets = make("random_5", 520), packed_offsets(300, 220)
    options = {"segment_len": 64, "certificate": True}
    want = flash_kda.fwd_cp(**case.fwd(cu_seqlens=offsets), **options)[2]
    states = torch.full((2, 2, 2, D, D), torch.nan)
    chosen = torch.tensor([[16, 240], [48, -1]])
    got = flash_kda.fwd_cp(**case.fwd(cu_seqlens=offsets), **options, checkpoint_states=states, checkpoint_offsets=chosen)[2]
    assert want.dropped.max() > 0
    for field in ("segment", "chunks", "norm", "fallback", "dropped"):
        assert same_bits(getattr(got, field), getattr(want, field)), field


def test_empty_calls(device, name):
    none = torch.zeros(0, 2, D, D)
    call(name, random(0, 2), torch.zeros(3, dtype=torch.int64), checkpoint_states=none, checkpoint_every=64)
    call(name, random(40, 2), torch.zeros(1, dtype=torch.int64), checkpoint_states=none, checkpoint_every=64)
    states = torch.full((2, 1, 2, D, D), torch.nan)
    arguments = {"checkpoint_states": states, "checkpoint_offsets": torch.tensor([[-1], [0]])}
    call(name, random(0, 2), torch.zeros(3, dtype=torch.int64), **arguments)
    assert states.isnan().all()
    call(
        name, random(40, 2), packed_offsets(40, 0), checkpoint_states=states[:, :0], checkpoint_offsets=torch.zeros(2, 0).long()
    )


def test_what_cannot_be_produced_becomes_nan(monkeypatch, name):
    """Where the host must not read offsets, a wrong one must not look like a state."""
    for module in (host, validation, chunks, stages, checkpoints):
        monkeypatch.setattr(module, "readable", lambda _x: False)
    case = random(200, 2)
    states = torch.zeros(2, 3, 2, D, D)
    chosen = torch.tensor([[64, 100, 25], [112, 80, -1]])
    out, _ = call(name, case, packed_offsets(90, 110), checkpoint_states=states, checkpoint_offsets=chosen)
    assert same_bits(out, call(name, case, packed_offsets(90, 110))[0])
    assert states[0, 0].isfinite().all()
    assert states[0, 0].any()
    assert states[0, 1:].isnan().all()
    assert states[1, 0].isnan().all()
    assert same_bits(states[1, 1], stopped(name, case.cut(90, 200), None, 80)[0])
    assert not states[1, 2].any()


def refused(error, match, name="fwd", **arguments):
    with pytest.raises(error, match=match):
        call(name, random(100, 2), packed_offsets(40, 60), **arguments)


STATES = torch.zeros(2, 1, 2, D, D)


def test_the_contract(name):
    chosen, rows = torch.tensor([[32], [48]]), torch.zeros(100 // 32, 2, D, D)
    given = {"name": name, "checkpoint_states": STATES, "checkpoint_offsets": chosen}
    refused(ValueError, "checkpoint_states must be given with checkpoint_offsets", name, checkpoint_offsets=chosen)
    refused(ValueError, "checkpoint_states must be given with checkpoint_every", name, checkpoint_every=32)
    refused(ValueError, "checkpoint_states must come with", name, checkpoint_states=STATES)
    refused(ValueError, "checkpoint_every must be None with checkpoint_offsets", **given, checkpoint_every=32)
    refused(TypeError, "checkpoint_states must be a torch.Tensor", **given | {"checkpoint_states": [1.0]})
    refused(TypeError, "checkpoint_states must be bfloat16 or float32", **given | {"checkpoint_states": STATES.half()})
    refused(TypeError, "checkpoint_offsets must be int32 or int64", **given | {"checkpoint_offsets": chosen.float()})
    refused(ValueError, r"checkpoint_offsets must have shape \[N,C\]", **given | {"checkpoint_offsets": chosen[:1]})
    refused(ValueError, r"checkpoint_states must have shape \[N,C,HV,V,K\]", **given | {"checkpoint_states": STATES[:1]})
    refused(ValueError, r"checkpoint_states must have shape \[N,HV,V,K\]", **given | {"checkpoint_offsets": chosen[:, 0]})
    refused(ValueError, "checkpoint_states must be on cpu", **given | {"checkpoint_states": STATES.to("meta")})
    expanded = STATES[:, :, :1].expand(2, 1, 2, D, D)
    refused(ValueError, "checkpoint_states must not overlap itself", **given | {"checkpoint_states": expanded})
    apart = torch.zeros(2, 3, 2, D, D)[:, :2]
    refused(ValueError, "C states apart", **given | {"checkpoint_states": apart, "checkpoint_offsets": chosen.repeat(1, 2)})
    for every, error in ((0, ValueError), (24, ValueError), (-16, ValueError), (32.0, TypeError), (True, TypeError)):
        refused(error, "checkpoint_every must be", name, checkpoint_states=rows, checkpoint_every=every)
    refused(ValueError, r"\[B\*T//checkpoint_every,HV,V,K\] = \(3, 2", name, checkpoint_states=rows[:2], checkpoint_every=32)
    final = state(2, 2)
    refused(
        ValueError,
        "final_state must not share memory with checkpoint_states",
        **given | {"checkpoint_states": final[:, None]},
        final_state=final,
    )


@pytest.mark.parametrize("offsets", [[[24], [48]], [[32], [64]], [[32], [17]]])
def test_wrong_offsets_are_named(name, offsets):
    states = STATES.clone()
    match = r"checkpoint_offsets must .*, got (24|64|17) at \[[01], 0\]"
    refused(ValueError, match, name, checkpoint_states=states, checkpoint_offsets=torch.tensor(offsets))
    assert not states.any()


def test_the_gaps_of_a_table_are_empty(monkeypatch):
    """Between two pieces the table runs backward: a stage finds nothing to do there."""
    tables = []

    def stage(_inputs, table, *_arguments, **_options):
        tables.append(table.tolist())

    case, cu = random(100, 2), torch.tensor([0, 40, 100])
    lengths = cu.diff()
    cuts = checkpoints.at_offsets(
        torch.zeros(2, 2, 2, D, D), torch.tensor([[32, 16], [48, -1]]), lengths, checkpoints.Segments(lengths, 60)
    )
    checkpoints.forward(stage, cuts, case.inputs(), cu, torch.zeros(100, 2, D))
    assert tables == [[40, 40, 0, 16], [40, 88, 16, 32], [88, 100, 32, 40]]
    assert all(a >= b for table in tables for a, b in zip(table[1::2], table[2::2], strict=False))
