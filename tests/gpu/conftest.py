"""GPU tests need a Hopper and this tree's cubins; they skip only for the lack of the former."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # cases.py and budget.py

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def pytest_collection_modifyitems(items):
    if not HOPPER:
        for item in items:
            if "gpu" in Path(item.fspath).parts:
                item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))


@pytest.fixture(autouse=True, scope="session")
def _full_precision():
    torch.backends.cuda.matmul.allow_tf32 = False
