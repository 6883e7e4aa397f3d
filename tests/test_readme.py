"""The examples of README.md run as they stand."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).resolve().parents[1] / "README.md"


def test_examples(capsys):
    if not README.exists():
        pytest.skip("the installed package has no README.md beside its tests")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    made = {}
    for block in blocks:
        exec(block, made)
    difference = re.search(r"tensor\(([^)]*)\)", capsys.readouterr().out)
    assert difference
    assert float(difference[1]) < 1e-3  # fwd_cp against fwd
    assert made["saved"][[0, 2]].isfinite().all()
    assert made["pool"][[3, 7]].flatten(1).any(1).all()
    assert not made["pool"][[0, 15]].any()
    assert torch.is_tensor(made["state_cp"])
