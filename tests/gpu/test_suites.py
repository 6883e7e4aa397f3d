"""flash-kda bench on a GPU: graph replays are timed, and by the kernels."""

import json
import sys

import pytest

from flash_kda import cli


@pytest.mark.parametrize("suite", ["forward", "cp", "recipe", "sweep", "host", "accuracy"])
def test_suite(suite, monkeypatch, tmp_path):
    output = tmp_path / "rows.jsonl"
    arguments = ["flash-kda", "bench", suite, "--smoke", "--peers", "none", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code in (0, None)
    rows = [json.loads(text) for text in output.read_text().splitlines()]
    for row in rows:
        assert row["gpu"]
        if row["impl"] in ("flash_kda.fwd", "flash_kda.fwd_cp"):
            assert row["path"] == "sm90"
            if suite not in ("host", "accuracy"):
                assert 0 < row["graph_ms_p10"] <= row["graph_ms"] <= row["graph_ms_p90"]
                assert row["graph_ms"] < row["eager_ms"] + 0.05
