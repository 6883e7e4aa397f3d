"""benchmarks/report.py: rows of benchmarks become the tables of README.md and docs/measured.md."""

from __future__ import annotations

import json

import pytest
import report

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
    "command": "python benchmarks/forward.py --output somewhere.jsonl",
}
ROWS = [
    {**ROW, "heads": 12, "seq_lens": "4096 x 33", "rel_l2_out": None},
    ROW,
    {**ROW, "graph_ms": 0.4, "commit": "bbbbbbb", "date": "2026-12-01"},
    {**ROW, "graph_ms": 0.3, "date": "2026-11-29"},  # older, though further down
    {**ROW, "heads": 16, "seq_lens": [65536], "graph_ms": 3.0},
    {**ROW, "heads": 5, "seq_lens": [100, 7], "graph_ms": 0.1},
    {"suite": "host", "gpu": "GPU A"},
]


@pytest.fixture
def tree(tmp_path):
    """Results and a page with markers."""
    results, page = tmp_path / "results", tmp_path / "page.md"
    results.mkdir()
    page.write_text("before\n\n<!-- forward-table -->\nold\n<!-- /forward-table -->\n\nafter\n")

    def run(rows: list[dict], *arguments: str) -> tuple[int, str]:
        (results / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return report.main(arguments, results, [page]), page.read_text()

    return run


def test_table(tree):
    status, page = tree(ROWS)
    assert status == 0
    assert page.startswith("before\n\n<!-- forward-table -->\n\n`flash_kda.fwd` on one GPU A.")
    assert page.endswith("\n\n<!-- /forward-table -->\n\nafter\n")
    assert "old" not in page
    assert "commit bbbbbbb, aaaaaaa, 2026-12-01, 2026-11-30: `python benchmarks/forward.py`." in page
    assert [line for line in page.splitlines() if line[:3] in ("| 1", "| 5", "| 9")] == [
        "| 96 | 8,192 | 0.250 | 0.400 | 0.600 | 1.60 | 3.7e-03 | 1.16 |",
        "| 16 | 65,536 | 0.250 | 3.000 | 0.600 | 12.00 | 3.7e-03 | 6.98 (FlashKDA) |",
        "| 12 | 4,096 x 33 | 0.250 | 0.500 | 0.600 | 2.00 |  |  |",
        "| 5 | 100 + 7 | 0.250 | 0.100 | 0.600 | 0.40 | 3.7e-03 |  |",
    ]


def test_last_row_of_a_day_counts(tree):
    assert "| 0.700 |" in tree([ROW, {**ROW, "graph_ms": 0.7}])[1]
    assert "| 0.500 |" in tree([{**ROW, "graph_ms": 0.7}, ROW])[1]


def test_each_gpu_has_its_table(tree):
    page = tree([ROW, {**ROW, "gpu": "GPU B"}])[1]
    assert page.count("| 96 | 8,192 |") == 2
    assert "on one GPU A" in page
    assert "on one GPU B" in page


def test_check_changes_nothing(tree):
    assert tree(ROWS, "--check") == (1, "before\n\n<!-- forward-table -->\nold\n<!-- /forward-table -->\n\nafter\n")
    _, written = tree(ROWS)
    assert tree(ROWS, "--check") == (0, written)
    assert tree(ROWS) == (0, written)
    assert tree([*ROWS, {**ROW, "date": "2026-12-02", "graph_ms": 0.45}], "--check") == (1, written)


def test_no_rows(tree):
    assert report.NOTHING in tree([])[1]


@pytest.mark.parametrize(
    "page",
    ["nothing", "<!-- forward-table -->", "<!-- /forward-table --> <!-- forward-table -->", 2 * "".join(report.MARKERS)],
)
def test_markers_must_be_there(page):
    with pytest.raises(ValueError, match="once each"):
        report.filled(page, "x")


def test_bad_rows_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\nno json\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 must be a JSON object"):
        report.read(tmp_path)


def test_documents_are_up_to_date():
    assert report.main(["--check"]) == 0
