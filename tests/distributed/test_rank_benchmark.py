"""The scripts that measure and model: that they run, refuse what is wrong, and count what is really sent."""

import itertools
from pathlib import Path

import pytest
import ranks
import ranks_model
import torch
from cases import random
from sharded import Share, shares, work
from test_ranks import broken

from flash_kda.distributed import exchange as ways
from flash_kda.distributed.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]


def measured(group, exchange, before=None):
    undo = before() if before else None
    try:
        return ranks.run(group, torch.device("cpu"), "none", 1, 160, exchange, 2)
    except SystemExit as refused:
        return str(refused)
    finally:
        if undo:
            undo()


@pytest.mark.parametrize("exchange", ["scan", "all_gather"])
def test_suite_ranks_runs(pool, exchange):
    row, *others = pool.run(measured, [(exchange,)] * 3)
    assert others == [None, None]
    assert row["ranks"] == 3
    assert row["exchange"] == exchange
    assert row["eager_ms"] > 0
    assert row["ratio"] == row["eager_ms"] / row["one_rank_ms"]
    assert 0 < row["rel_l2_out"] < 2e-3
    assert row["difference"] < 1e-3


def no_state():
    return broken(ways.Scan, "finish", lambda right: lambda self: (right(self), None)[1])


def test_suite_ranks_times_nothing_that_is_wrong(pool):
    said = pool.run(measured, [("scan", no_state)] * 3)
    assert all("must be below 0.006; nothing is timed" in text for text in said)


def counted(group, share: Share):
    """The bytes of each transfer of a call that this rank sends or contributes."""
    sizes = []

    def swap(right):
        def called(self, sends, receives, what):
            sizes.append(max([x.numel() * 4 for x, _ in sends], default=0))
            return right(self, sends, receives, what)

        return called

    def gather(right):
        def called(self, mine, what):
            if what == ways.WHAT:
                sizes.append(mine.numel() * 4)
            return right(self, mine, what)

        return called

    undo = [broken(Ranks, "swap", swap), broken(Ranks, "all_gather", gather)]
    try:
        work(group, share)
    finally:
        for each in undo:
            each()
    return sizes


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_the_model_counts_what_is_sent(pool, size):
    told = shares(random(16 * size, 1), [16 * size], [16] * size, context={"exchange": "scan"})
    layout = ways.Layout.of([0, 16 * size], [16] * size, size)
    sent = pool.run(counted, [(share,) for share in told])
    rounds = [max(sizes) for sizes in itertools.zip_longest(*sent, fillvalue=0)]
    assert rounds == [planes * ways.state_bytes(1) for planes in ways.scan_rounds(layout)]
    told = shares(random(16 * size, 1), [16 * size], [16] * size, context={"exchange": "all_gather"})
    sent = pool.run(counted, [(share,) for share in told])
    assert sent == [[ways.gather_planes(layout) * ways.state_bytes(1)]] * size


def test_the_page_has_the_table_of_the_model():
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert "\n".join(ranks_model.table()) in page


def test_what_the_model_says_of_one_and_many():
    alone = ranks_model.local_us(2**20, exits=False)
    assert ranks_model.call_us(2**20, 64, False, 0) < alone / 50
    assert ranks_model.local_us(100, exits=True) < ranks_model.EXIT_US
