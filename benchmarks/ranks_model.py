"""Prints the model of docs/distributed.md: time of one call over ranks, and what of it is the exchange. Nothing is run.

    python benchmarks/ranks_model.py

One sequence of T tokens, H = 16 heads, T / R tokens on each rank, each with its own GPU. A rank between others

    summarises its segments -> folds them into one (ht, mt) -> exchanges -> chains -> runs its segments

and nothing overlaps with its exchange, so all of that is exposed. Bytes, rounds and the times of links are those by which
flash_kda/distributed/exchange.py chooses. What is assumed says so; nothing was measured on more than one GPU.
"""

from __future__ import annotations

import argparse

from flash_kda.distributed import even_shards
from flash_kda.distributed import exchange as ways
from flash_kda.distributed.layout import Layout

HEADS = 16
RANKS = (2, 4, 8, 16, 32, 64)
TOKENS = (262_144, 1_048_576)

FORWARD_US = 549 / 65_536
"""Microseconds a token, a full GPU: 65,536 tokens x 16 heads in 0.549 ms. Measured on one H200 (README.md, first row)."""
SCAN_US = 545 / 65_536
"""Likewise the summary to the start of every segment: 0.545 ms. Measured on one H200 (docs/measured.md, State summary)."""
EXIT_US = 184
"""The summary of 8 segments x 16 heads that stop for themselves, real gates, however long they are. Measured as above."""
CHAIN_US = 15
"""One launch that chains 8 segments of 16 heads. Assumed."""

LINKS = {
    f"NVLink, {ways.NVLINK.gbytes:g} GB/s a GPU": ways.NVLINK,
    f"400 Gb/s network, a port a GPU, {ways.NETWORK.gbytes:g} GB/s": ways.NETWORK,
}
KINDS = {"send_mt=False": (True, False), "real": (True, True), "no decay": (False, True)}
"""Whether scans exit, and whether mt is sent."""


def local_us(tokens: float, exits: bool) -> float:
    """Summary, chain and forward of one GPU."""
    scan = SCAN_US * tokens
    return (min(EXIT_US, scan) if exits else scan) + CHAIN_US + FORWARD_US * tokens


def call_us(tokens: int, ranks: int, exits: bool, exchange_us: float) -> float:
    """One call over ranks: a rank between others folds ht and mt of its segments; of two ranks there is none, and only ht."""
    return local_us(tokens / ranks, exits) + CHAIN_US * (1 if ranks == 2 else 2) + exchange_us


def table() -> list[str]:
    lines = []
    heads = [f"{kind}, {tokens:,}" for tokens in TOKENS for kind in KINDS]
    for name, link in LINKS.items():
        lines += [f"{name}:", ""]
        lines.append("| ranks | all-gather, us | scan, us | neighbour, us | " + " | ".join(heads) + " |")
        lines.append("|---" * (4 + len(heads)) + "|")
        for ranks in RANKS:
            made = Layout.of([0, TOKENS[0]], even_shards(TOKENS[0], ranks), ranks)
            times = {way: ways.time_us(made, HEADS, way, link) for way in ("all_gather", "scan", "neighbour")}
            cells = [f"{time:.0f}" for time in times.values()]
            for tokens in TOKENS:
                for exits, send_mt in KINDS.values():
                    taken = times[ways.choose(made, HEADS, "auto", send_mt, link)]
                    total = call_us(tokens, ranks, exits, taken)
                    cells.append(f"{local_us(tokens, exits) / total:.1f} x, {taken / total:.0%}")
            lines.append(f"| {ranks} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines[:-1]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("\n".join(table()))
