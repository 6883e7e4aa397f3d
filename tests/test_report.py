"""benchmarks/report.py: rows of benchmarks become the tables of README.md and docs/."""

from __future__ import annotations

import json

import pytest
import report

from flash_kda.bench import rows, suites
from flash_kda.bench.suites import FWD, FWD_CP, KNOWN, PACKED, STATE_ONLY, Case

ROW = {
    "suite": "forward",
    "impl": "flash_kda.fwd",
    "gates": "random",
    "lower_bound": -5.0,
    "heads": 96,
    "tokens": 8192,
    "seq_lens": [8192],
    "segments": 1,
    "graph_ms": 0.5,
    "graph_ms_p10": 0.49,
    "graph_ms_p90": 0.51,
    "eager_ms": 0.6,
    "floor_ms": 0.25,
    "rel_l2_out": 0.0037,
    "rel_l2_state": None,
    "gpu": "GPU A",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "aaaaaaa",
    "date": "2026-11-30",
    "command": "flash-kda bench forward --output somewhere.jsonl",
}
ROWS = [
    {**ROW, "heads": 12, "seq_lens": "4096 x 33", "rel_l2_out": None},
    ROW,
    {**ROW, "graph_ms": 0.4, "commit": "bbbbbbb", "date": "2026-12-01"},
    {**ROW, "graph_ms": 0.3, "date": "2026-11-29"},  # older, though further down
    {**ROW, "heads": 16, "seq_lens": [65536], "graph_ms": 3.0},
    {**ROW, "heads": 5, "seq_lens": [100, 7], "graph_ms": 0.1},
    {"suite": "host", "impl": "flash_kda.fwd", "gpu": "GPU A", "heads": 12, "tokens": 2048, "date": "2026-11-30"},
]


@pytest.fixture
def tree(tmp_path):
    """Results and a page with markers."""
    results, page = tmp_path / "results", tmp_path / "page.md"
    results.mkdir()
    page.write_text("before\n\n<!-- forward-table -->\nold\n<!-- /forward-table -->\n\nafter\n")

    def run(rows: list[dict], *arguments: str) -> tuple[int, str]:
        (results / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return report.main(arguments, results, {page: ("forward",)}), page.read_text()

    return run


def test_table(tree):
    status, page = tree(ROWS[:-1])
    assert status == 0
    assert page.startswith("before\n\n<!-- forward-table -->\n\n`flash_kda.fwd` on one GPU A.")
    assert page.endswith("\n\n<!-- /forward-table -->\n\nafter\n")
    assert "old" not in page
    assert "commit aaaaaaa, bbbbbbb, 2026-11-30, 2026-12-01: `flash-kda bench forward`." in page
    assert [line for line in page.splitlines() if line[:3] in ("| 1", "| 5", "| 9")] == [
        "| 16 | 8 x 8,192 | not measured | not measured | not measured | not measured | not measured | 1.14 (cuDNN) |",
        "| 96 | 8,192 | 0.250 | 0.400 | 0.600 | 1.60 | 3.7e-03 | 1.16 |",
        "| 96 | 8 x 1,024 | not measured | not measured | not measured | not measured | not measured | 0.885 |",
        "| 96 | 1,300 + 547 + 2,048 + 963 + 271 + 3,063 "
        "| not measured | not measured | not measured | not measured | not measured | 1.30 |",
        "| 16 | 65,536 | 0.250 | 3.000 | 0.600 | 12.00 | 3.7e-03 | 6.98 (FlashKDA) |",
        "| 12 | 4,096 x 33 | 0.250 | 0.500 | 0.600 | 2.00 |  |  |",
        "| 5 | 100 + 7 | 0.250 | 0.100 | 0.600 | 0.40 | 3.7e-03 |  |",
    ]


def test_last_row_of_a_day_counts(tree):
    assert "| 0.700 |" in tree([ROW, {**ROW, "graph_ms": 0.7}])[1]
    assert "| 0.500 |" in tree([{**ROW, "graph_ms": 0.7}, ROW])[1]


def test_each_gpu_has_its_table(tree):
    page = tree([ROW, {**ROW, "gpu": "GPU B"}])[1]
    assert page.count("| 96 | 8,192 | 0.250 |") == 2
    assert "on one GPU A" in page
    assert "on one GPU B" in page


def test_check_changes_nothing(tree):
    made = ROWS[:-1]
    assert tree(made, "--check") == (1, "before\n\n<!-- forward-table -->\nold\n<!-- /forward-table -->\n\nafter\n")
    _, written = tree(made)
    assert tree(made, "--check") == (0, written)
    assert tree(made) == (0, written)
    assert tree([*made, {**ROW, "date": "2026-12-02", "graph_ms": 0.45}], "--check") == (1, written)


def test_no_rows(tree):
    assert "Not measured yet; `flash-kda bench forward --output" in tree([])[1]
    # What a CPU did is no table of a GPU.
    assert "Not measured yet" in tree([{**ROW, "gpu": None}])[1]


def measured(case: Case, impl: str, ms: float, **values) -> dict:
    """A row of a case as flash-kda bench would write it."""
    known = {name: ROW[name] for name in ("gpu", "torch", "triton", "commit", "date", "command", "rel_l2_out")}
    known |= {"suite": case.suite, "impl": impl, "gates": case.gates, "lower_bound": case.lower_bound, "heads": case.heads}
    known |= {"tokens": case.tokens, "seq_lens": rows.written(case.lengths), "layout": case.layouts[0], "version": "9"}
    return rows.make(**{**known, "graph_ms": ms, "floor_ms": 0.02, "segments": 8, **values})


def lines_of(name: str, found: list[dict]) -> list[str]:
    return report.TABLES[name](rows.latest(found)).splitlines()


def test_tables_of_cp_and_its_bars():
    third, second, first = suites.cp(False)[:3]
    found = [
        measured(first, FWD_CP, 0.05),
        measured(first, FWD, 0.2, segments=1),
        measured(first, "fla.chunk_kda", 0.3, segments=None),
        measured(second, FWD_CP, 0.10),
        measured(third, FWD_CP, 0.60),
    ]
    made = lines_of("cp", found)
    assert "fla.chunk_kda of version 9" in made[0]
    assert made[2].endswith("| error | fla.chunk_kda, ms |")
    assert made[4] == "| random | -5 | 16 | 4,096 | 0.020 | 0.050 | 2.50 | 8 | 0.200 | 4.00 | 3.7e-03 | 0.300 |"
    assert made[5] == (
        "| random | -5 | 16 | 16,384 | 0.020 | 0.100 | 5.00 | 8 | not measured | not measured | 3.7e-03 | not measured |"
    )
    assert made[7].count("not measured") == 8
    assert len(made) == 4 + 14
    reached = [line.split(" | ")[-2:] for line in lines_of("bars", found)[4:]]
    assert reached[:4] == [["0.050", "must |"], ["0.100", "aim |"], ["0.600", "missed |"], ["not measured", "not measured |"]]
    assert len(reached) == 14


def test_table_of_the_recipe():
    case = Case("recipe", 16, (65536,))
    scan = suites.warmup(False)[1]
    found = [
        measured(case, FWD_CP, 0.5),
        measured(case, FWD, 3.0),
        measured(case, STATE_ONLY, 0.1),
        measured(Case("recipe", 16, (8192,) * 8), FWD, 1.0),
        measured(Case("recipe", 16, (8192,)), FWD_CP, 0.4, segments=1),
        measured(scan, "flash_kda.get_warmup_chunks", 0.04, segments=64),
        measured(scan, "flash_kda.get_warmup_chunks", 0.09, segments=32),
    ]
    made = lines_of("recipe", found)
    assert "| -5 | 65,536 | 9.64 | 3.91 | 2.47 | 3.000 | 0.500 | 6.00 | 8 | 20 % |" in made
    assert "| -5 | 8,192 | 1.24 | 0.54 | 2.30 | not measured | 0.400 | not measured | 1 | 0 |" in made
    assert "| 8 | 8,192 | 2.87 | 1.000 | not measured | not measured | not measured |" in made
    assert "| -0.5 | 16 | 65,536 | 64 | 0.03 | 0.0200 | 0.0350 | 0.0400 |" in made
    assert sum(line.startswith("| -1 |") for line in made) == 6
    # Every row of the published tables is there: 15 by length, 14 by batch, 3 scans; and three heads of two lines.
    assert sum(line.startswith("|") for line in made) == 15 + 14 + 3 + 6


def test_table_of_the_sweep():
    cases = [case for case in suites.sweep(False) if case.gates == "none"]
    found = []
    for case, ms, blind, known in ((cases[0], 1.0, 1.02, 1.04), (cases[1], 0.01, 0.0175, 0.0175), (cases[2], 1.0, 0.5, 0.25)):
        found += [measured(case, FWD, ms), measured(case, FWD_CP, blind), measured(case, FWD_CP, known, layout=KNOWN)]
    made = lines_of("sweep", found)
    assert f"| random | {PACKED} | 0 | 186 | not measured | not measured |" in made
    assert f"| none | {PACKED} | 3 | 183 | 0 | 0.57 / 0.98 / 2.00 |" in made
    assert f"| none | {KNOWN} | 3 | 183 | 2 | 0.57 / 0.96 / 4.00 |" in made
    assert [line for line in made if line.startswith("| none") and line.endswith("| 8 |")] == [
        f"| none | {KNOWN} | 1 | 1,024 | 0.010 | 0.018 | 1.75 | 8 |",
        f"| none | {KNOWN} | 1 | 512 | 1.000 | 1.040 | 1.04 | 8 |",
    ]


def test_tables_of_scaling_and_host():
    first, second = suites.scaling(False)[:2]
    made = lines_of("scaling", [measured(first, FWD_CP, 0.5), measured(second, FWD_CP, 1.05)])
    assert made[4] == "| random | -5 | 16 | 65,536 | 0.500 | 25.00 | 1.000 |"
    assert made[5] == "| random | -5 | 16 | 131,072 | 1.050 | 52.50 | 1.050 |"
    assert made[6].endswith("| not measured | not measured | not measured |")
    case = suites.host(False)[0]
    older = {**measured(case, FWD, 0.0, host_us=70.0, add_us=9.0), "gates": None, "date": "2026-11-29"}
    made = lines_of("host", [measured(case, FWD, 0.0, host_us=55.0, add_us=9.0), older])
    assert made[4:] == [
        "| flash_kda.fwd | 12 | 2,048 | 55.0 | 9.0 |",
        "| flash_kda.fwd_cp | 12 | 2,048 | not measured | not measured |",
    ]


def test_tables_of_accuracy():
    case = next(case for case in suites.accuracy(False) if case.gates == "real")
    found = [
        measured(case, "bf16 rounding", None, head_rel_l2_out=[1e-3, 2e-3]),
        measured(case, FWD, None, head_rel_l2_out=[4e-3, 3e-3], head_rel_l2_state=[1e-3, 2e-3]),
        measured(case, FWD_CP, None, head_rel_l2_out=[5e-3, 3e-3], head_rel_l2_state=[1e-3, 1e-3], dropped=0.0),
    ]
    made = lines_of("accuracy", found)
    assert "| real | -5 | 1,024 | 2.0e-03 | 4.0e-03 | 5.0e-03 | 2.0e-03 | 1.0e-03 | 0 |" in made
    theirs = measured(case, "fla.chunk_kda", None, head_rel_l2_out=[4e-3, 4e-3], ratio_out=1.0, ratio_state=None)
    made = lines_of("accuracy", [*found, theirs])
    assert made[2].endswith("| out, fla.chunk_kda | state, fla.chunk_kda | out, fwd over it | state, fwd over it |")
    (line,) = (line for line in made if line.startswith("| real"))
    assert line.endswith("| 4.0e-03 | NaN or inf | 1.00 |  |")
    on_cpu = [{**row, "gpu": None, "cpu": "CPU X, 2 threads"} for row in found]
    made = lines_of("reference-accuracy", [*on_cpu, theirs])
    assert made[0].startswith("On CPU X, 2 threads. torch 2.11.0")
    assert "fla.chunk_kda" not in made[0]


@pytest.mark.parametrize(
    "page",
    [
        "nothing",
        "<!-- cp-table -->",
        "<!-- /cp-table --> <!-- cp-table -->",
        2 * "<!-- cp-table --><!-- /cp-table -->",
        "<!-- bars-table --><!-- /bars-table -->",
    ],
)
def test_markers_must_be_there(page):
    with pytest.raises(ValueError, match="once each"):
        report.filled(page, "cp", "x")


def test_bad_rows_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"suite": "cp"}\nno json\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 must be a JSON object"):
        rows.read([path])
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 must be a JSON object with a suite"):
        rows.read([path])


def test_every_table_has_a_page():
    assert {name for names in report.PAGES.values() for name in names} == set(report.TABLES)


def test_documents_are_up_to_date():
    assert report.main(["--check"]) == 0
