"""What goes wrong on one rank is told on every rank, in time, and does not get the others out of step."""

import os
import time
from dataclasses import replace

import pytest
import torch
from cases import make, random, same_bits, state
from pool import Raised
from sharded import Share, arguments, shares, work

from flash_kda import distributed, host, validation
from flash_kda.distributed import forward, local, verdict
from flash_kda.reference import chunks, stages

SHARDS = [50, 60, 40]
LENGTHS = [20, 100, 30]


def told(**options):
    return shares(random(150, 1), LENGTHS, SHARDS, **options)


def raised(pool, each: list[Share], function=work) -> list[Raised]:
    """What every rank raised."""
    pool.start(function, [(share,) for share in each])
    results = pool.results(len(each))
    assert all(isinstance(result, Raised) for result in results), results
    return results


def in_step(pool):
    """After a failure all ranks are as good as new."""
    pool.run(work, [(share,) for share in told()])


def assert_refused(results, rank, kind, text):
    """``rank`` has raised this, the others a RankError that says so."""
    for r, result in enumerate(results):
        assert result.kind == (kind if r == rank else "RankError"), result
        assert text in result.text
        assert r == rank or f"rank {rank}: {kind}: " in result.text


# The agreement.


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (
            {"cu_seqlens": [0, 20, 121, 150]},
            "cu_seqlens must be the same on every rank, got 0,20,120,150 on rank 0 and 0,20,121",
        ),
        (
            {"shard_lens": [50, 61, 39]},
            "shard_lens must be the same on every rank, got 50,60,40 on rank 0 and 50,61,39 on rank 2",
        ),
        ({"heads": 2}, "heads must be the same on every rank, got 1 on rank 0 and 2 on rank 2"),
        ({"final_state": "all"}, "final_state must be the same"),
        ({"exchange": "scan"}, "exchange must be the same"),
        ({"send_mt": False}, "send_mt must be the same"),
    ],
)
def test_a_context_that_differs_is_refused_everywhere(pool, change, name):
    each = told()
    each[2] = replace(each[2], context=each[2].context | change)
    for result in raised(pool, each):
        assert result.kind == "ValueError"
        assert name in result.text
    in_step(pool)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cu_seqlens": [0, 20, 10, 150]}, "cu_seqlens must be non-decreasing, got 20 then 10"),
        ({"shard_lens": [50, 60]}, "shard_lens must have one length for each of the 3 ranks, got 2"),
        ({"shard_lens": [50, 60, 39]}, "shard_lens must cover the 150 tokens of cu_seqlens, got 149 in all"),
        ({"heads": 0}, "heads must be a positive integer, got 0"),
        ({"exchange": "ring"}, "exchange must be one of auto, all_gather, scan, got 'ring'"),
        ({"final_state": "start"}, "final_state must be one of end, all, got 'start'"),
    ],
)
def test_a_context_that_one_rank_cannot_make_is_refused_everywhere(pool, change, text):
    each = told()
    each[1] = replace(each[1], context=each[1].context | change)
    assert_refused(raised(pool, each), 1, "ValueError", text)
    in_step(pool)


# A call.


def bad_case(share):
    return replace(share, case=share.case.cut(0, share.case.tokens - 1))


BAD_CALLS = {
    "one token short": (
        bad_case,
        "ValueError",
        "v must have shape [1,T,H,V] = (1, 60, 1, 128) on this rank, got (1, 59, 1, 128)",
    ),
    "two heads": (
        lambda share: replace(share, case=random(60, 2)),
        "ValueError",
        "v must have shape [1,T,H,V] = (1, 60, 1, 128) on this rank, got (1, 60, 2, 128)",
    ),
    "fp32 keys": (
        lambda share: replace(share, case=replace(share.case, k=share.case.k.float())),
        "TypeError",
        "k must be bfloat16, got float32",
    ),
    "gradients": (
        lambda share: replace(share, case=replace(share.case, v=share.case.v.clone().requires_grad_())),
        "RuntimeError",
        "v must not require grad",
    ),
    "a state too many": (
        lambda share: replace(share, initial_state=state(1, 1)),
        "ValueError",
        "initial_state must have shape [n,H,V,K] = (0, 1, 128, 128), got (1, 1, 128, 128)",
    ),
    "a softplus gate": (lambda share: replace(share, case=replace(share.case, lower_bound=None)), "ValueError", "lower_bound"),
    "an eps of 1": (lambda share: replace(share, options={"eps": 1.0}), "ValueError", "eps must be in [0, 1), got 1.0"),
    "half a chunk": (
        lambda share: replace(share, options={"segment_len": 8}),
        "ValueError",
        "segment_len must be >= 16, got 8",
    ),
    "no such impl": (lambda share: replace(share, options={"impl": "sm80"}), "ValueError", "impl must be one of"),
}


@pytest.mark.parametrize("exchange", ["all_gather", "scan"])
@pytest.mark.parametrize("what", BAD_CALLS)
def test_a_call_that_one_rank_refuses_is_refused_everywhere(pool, what, exchange):
    change, kind, text = BAD_CALLS[what]
    each = told(context={"exchange": exchange})
    each[1] = change(each[1])
    assert_refused(raised(pool, each), 1, kind, text)
    in_step(pool)


def shared_memory(group, share):
    """States on top of each other, and on top of ``out``."""
    context = distributed.ContextParallel(group, **share.context)
    both = state(1, 1)
    out = both.view(torch.bfloat16).flatten()[: share.case.v.numel()].view(share.case.v.shape)
    texts = []
    for states in (
        {"initial_state": both, "final_state": both},
        {"out": out, "final_state": both},
        {"out": out, "initial_state": both},
    ):
        try:
            distributed.fwd_cp(**arguments(share.case, **states), context=context)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_states_on_top_of_other_arguments_are_refused(pool):
    (share,) = shares(random(30, 1), [30], [30])
    (texts,) = pool.run(shared_memory, [(share,)])
    end = "got overlapping views; allocate it separately"
    assert texts == [
        f"final_state must not share memory with initial_state, {end}",
        f"final_state must not share memory with out, {end}",
        f"out must not share memory with initial_state, {end}",
    ]


def fails_in(step):
    """A rank whose machine gives up in one of the steps."""

    def before():
        def fail(*_arguments, **_options):
            raise MemoryError(f"no memory in {step}")

        module = {"run": local.PartRun, "summarise": local.PartRun, "map": local.PartRun}[step]
        right = getattr(module, step)
        setattr(module, step, fail)
        return lambda: setattr(module, step, right)

    return before


def run_fails():
    return fails_in("run")()


def summarise_fails():
    return fails_in("summarise")()


@pytest.mark.parametrize("exchange", ["all_gather", "scan"])
@pytest.mark.parametrize("final_state", ["end", "all"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_fails_on_its_way_raises_everywhere(pool, rank, final_state, exchange):
    """Rank 0 fails while others wait for its state or after it has sent it, rank 2 when nobody waits for it any more."""
    for before, text in ((run_fails, "no memory in run"), (summarise_fails, "no memory in summarise")):
        each = told(context={"exchange": exchange, "final_state": final_state}, options={"segment_len": 16})
        each[rank] = replace(each[rank], before=before)
        assert_refused(raised(pool, each), rank, "MemoryError", text)
    in_step(pool)


def test_two_ranks_that_fail_are_both_named(pool):
    each = told()
    each[0], each[2] = bad_case(each[0]), bad_case(each[2])
    first, middle, last = raised(pool, each)
    assert "got (1, 49, 1, 128)" in first.text
    assert "got (1, 39, 1, 128)" in last.text
    assert "rank 0: ValueError: v must" in middle.text
    assert "rank 2: ValueError: v must" in middle.text


def test_a_part_that_remembers_is_no_place_to_leave_out_mt(pool):
    each = shares(make("no_decay", 150), [150], SHARDS, context={"send_mt": False})
    assert_refused(raised(pool, each), 1, "ValueError", verdict.FORGOTTEN)
    in_step(pool)


# A rank that does not come.


def late(group, share):
    """Comes to the second call only after the others have given up."""
    context = distributed.ContextParallel(group, **share.context)
    call = arguments(share.case)
    distributed.fwd_cp(**call, context=context)
    time.sleep(share.sleep)
    begun = time.monotonic()
    errors = []
    for _ in range(2):
        try:
            distributed.fwd_cp(**call, context=context)
        except distributed.RankError as error:
            errors.append(str(error))
    return errors, time.monotonic() - begun


def test_a_rank_that_is_late_fails_everywhere_within_the_timeout(brief_pool):
    each = told(context={"exchange": "scan"})
    each[1] = replace(each[1], sleep=4.5)
    results = brief_pool.run(late, [(share,) for share in each])
    for errors, seconds in results:
        assert len(errors) == 2
        assert "must be completed by all 3 ranks" in errors[0]
        assert "did not come within the timeout" in errors[0]
        assert "the ranks must be in step, got an earlier failure" in errors[1]
        assert seconds < 4.5, "one timeout for the states, one for the verdict"
        assert errors[0].isascii()


def dies(group, share):
    context = distributed.ContextParallel(group, **share.context)
    if share.sleep:
        os._exit(1)
    distributed.fwd_cp(**arguments(share.case), context=context)


def test_a_rank_that_dies_is_noticed_at_once(brief_pool):
    each = told()
    each[2] = replace(each[2], sleep=1.0)
    begun = time.monotonic()
    brief_pool.start(dies, [(share,) for share in each])
    first, middle, last = brief_pool.results(3)
    assert time.monotonic() - begun < 2, "before any timeout"
    assert last is None
    assert first.kind == middle.kind == "RankError"
    assert "another rank has died" in first.text


def test_outside_of_a_process_group():
    with pytest.raises(ValueError, match=r"group must be initialised, got no process group; call torch.distributed"):
        distributed.ContextParallel(None, [0, 4], 1)


# A device whose contents the host must not read: run on a CPU by forbidding the host to look, as in test_device_path.py.


def blind():
    names = ("item", "tolist", "__bool__", "nonzero", "__int__", "__float__")
    modules = (host, validation, chunks, stages, forward, verdict)
    kept = [(module, "readable", module.readable) for module in modules]
    kept += [(torch.Tensor, name, getattr(torch.Tensor, name)) for name in names]

    def refuse(*_arguments, **_options):
        raise AssertionError("the host waited for the device")

    for module in modules:
        module.readable = lambda _x: False
    for name in names:
        setattr(torch.Tensor, name, refuse)
    return lambda: [setattr(owner, name, right) for owner, name, right in kept]


@pytest.mark.parametrize("exchange", ["all_gather", "scan"])
@pytest.mark.parametrize("final_state", ["end", "all"])
def test_nothing_is_read_back_on_a_device(pool, exchange, final_state):
    options = {
        "initial_state": state(3, 1),
        "context": {"exchange": exchange, "final_state": final_state},
        "options": {"segment_len": 32},
    }
    want = pool.run(work, [(share,) for share in told(**options)])
    got = pool.run(work, [(share,) for share in told(before=blind, **options)])
    for (out, final), (blind_out, blind_final) in zip(want, got, strict=True):
        assert same_bits(out, blind_out)
        assert same_bits(final, blind_final)


def later_calls(group, share, bad):
    """On a device: a call, one that a rank may refuse, and then two more; what each of them says, and then ``check``."""
    context = distributed.ContextParallel(group, **share.context)
    undo = blind()
    said = []
    outs = []
    try:
        for case in (share.case, bad, share.case, share.case):
            try:
                outs.append(distributed.fwd_cp(**arguments(case), context=context, segment_len=32)[0])
                said.append(None)
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    finally:
        undo()
    try:
        context.check()
        said.append(None)
    except distributed.RankError as error:
        said.append(str(error))
    return said, [bool(out.isnan().any()) for out in outs]


def test_on_a_device_the_next_call_tells(pool):
    each = told()
    results = pool.run(
        later_calls, [(share, bad_case(share).case if rank == 1 else share.case) for rank, share in enumerate(each)]
    )
    (first, first_nan), (failed, _), (last, last_nan) = results
    assert failed[0] is None
    assert failed[1].startswith("ValueError: v must have shape")
    for said in (first, last):
        assert said[:2] == [None, None]
        assert "rank 1: ValueError: v must have shape" in said[2]
    # Nothing of rank 0 depends on rank 1; what rank 2 made of its state is not to be mistaken for a result.
    assert not first_nan[1]
    assert last_nan[1]


def waits_for_verdicts():
    right = verdict.readable
    verdict.readable = lambda _x: False
    os.environ["FLASH_KDA_DEBUG"] = "1"

    def undo():
        verdict.readable = right
        del os.environ["FLASH_KDA_DEBUG"]

    return undo


def test_on_a_device_debug_mode_waits_for_the_verdict(pool):
    each = told(before=waits_for_verdicts)
    each[1] = bad_case(each[1])
    assert_refused(raised(pool, each), 1, "ValueError", "v must have shape")
    in_step(pool)


def remembers(group, share):
    context = distributed.ContextParallel(group, **share.context)
    undo = blind()
    try:
        out, _ = distributed.fwd_cp(**arguments(share.case), context=context)
    finally:
        undo()
    try:
        context.check()
    except distributed.RankError as error:
        return bool(out.isnan().any()), str(error)


def test_on_a_device_a_part_that_remembers_is_told_by_check(pool):
    each = shares(make("no_decay", 150), [150], SHARDS, context={"send_mt": False})
    results = pool.run(remembers, [(share,) for share in each])
    assert [nan for nan, _ in results] == [False, False, True]
    assert all(f"rank 1: {verdict.FORGOTTEN}" in text for _, text in results)
