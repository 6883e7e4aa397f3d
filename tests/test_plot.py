"""flash-kda plot: what is drawn from rows, that it is the same each time, and what it says about bad input."""

from __future__ import annotations

import json

import pytest

from flash_kda.bench import rows
from flash_kda.bench.suites import DENSE, FWD, FWD_CP, PACKED


def synthetic(**changes) -> list[dict]:
    made = []
    for gates, factor in (("random", 1.5), ("none", 2.5)):
        for tokens in (4096, 16384):
            for impl, times in ((FWD_CP, factor), (FWD, 8.0), ("fla.chunk_kda", 12.0)):
                floor = tokens / 4096 * 0.02
                known = {"suite": "cp", "impl": impl, "gates": gates, "lower_bound": -5.0, "heads": 16, "tokens": tokens}
                known |= {"seq_lens": [tokens], "layout": DENSE, "floor_ms": floor, "graph_ms": times * floor}
                made.append(rows.make(**{**known, "gpu": "GPU A", "date": "2026-12-01", **changes}))
    return made


@pytest.fixture
def plot(command, tmp_path):
    pytest.importorskip("matplotlib")

    def run(found, *options, name="picture.svg"):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        status, out, err = command("plot", tmp_path / "rows.jsonl", "--output", tmp_path / name, *options)
        picture = tmp_path / name
        return status, out + err, picture.read_bytes() if picture.exists() else None

    return run


def test_picture(plot):
    status, out, picture = plot(synthetic())
    assert status == 0, out
    assert "from 12 rows" in out
    assert picture.startswith(b"<?xml")
    assert b"2026" not in picture
    assert plot(synthetic())[2] == picture
    # Drawn from these rows: another time is another picture, an older row and another suite's shape are not.
    changed = synthetic()
    changed[0]["graph_ms"] *= 1.1
    assert plot(changed)[2] != picture
    older = [{**row, "graph_ms": 9.0, "date": "2026-11-30"} for row in synthetic()]
    packed = [{**row, "layout": PACKED, "graph_ms": 9.0} for row in synthetic()]
    assert plot([*synthetic(), *older, *packed])[2] == picture
    assert plot(synthetic(), name="picture.png")[2].startswith(b"\x89PNG\r\n\x1a\n")


def test_picture_of_some_heads_or_machine(plot):
    both = [*synthetic(), *synthetic(heads=4)[:3]]
    assert "from 12 rows" in plot(both)[1]
    assert "from 3 rows" in plot(both, "--heads", 4)[1]
    assert "heads must be of 4, 16, got 5" in plot(both, "--heads", 5)[1]
    machines = [*synthetic(), *synthetic(gpu="GPU B")]
    status, said, _ = plot(machines, name="other.svg")
    assert (status, said) == (2, "error: gpu must be said where rows are of several, got GPU A, GPU B\n")
    assert plot(machines, "--gpu", "GPU B")[0] == 0
    assert "gpu must be of GPU A, GPU B, got C" in plot(machines, "--gpu", "C")[1]


@pytest.mark.parametrize(
    ("found", "name", "said"),
    [
        ([], "a.svg", "rows must hold times of one sequence, got none"),
        ([{**synthetic()[0], "graph_ms": None}], "a.svg", "rows must hold times of one sequence"),
        (synthetic(), "a.pdf", "output must be the name of an .svg or .png file"),
        (synthetic(), "rows.jsonl", "output must be the name of an .svg or .png file"),
        ([{"suite": "cp"}], "a.svg", "rows must be those of flash-kda bench, got one without 'gpu'"),
        ([{"no": "suite"}], "a.svg", "must be a JSON object with a suite"),
    ],
)
def test_nothing_to_draw(plot, found, name, said):
    status, out, picture = plot(found, name=name)
    assert status == 2
    assert said in out
    assert picture is None or name == "rows.jsonl"


def test_plot_needs_matplotlib_and_a_file(command, monkeypatch, tmp_path):
    status, _, err = command("plot", tmp_path / "none.jsonl", "--output", tmp_path / "a.svg")
    assert status == 2
    assert "none.jsonl must be readable" in err or "matplotlib" in err
    monkeypatch.setattr("flash_kda.cli.plot.find_spec", lambda name: None)
    status, _, err = command("plot", tmp_path / "none.jsonl", "--output", tmp_path / "a.svg")
    assert status == 2
    assert 'pip install "flash-kda[plot]"' in err


def test_a_smoke_run_can_be_drawn(command, plot, tmp_path):
    output = tmp_path / "smoke.jsonl"
    assert command("bench", "cp", "--only", "none*", "--smoke", "--device", "cpu", "--output", output)[0] == 0
    assert "from 4 rows" in plot(rows.read([output]))[1]
