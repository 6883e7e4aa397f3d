"""Every test starts without this package's environment variables; hypothesis repeats the same examples each time.

One thread: the tensors are small, and a busy machine then slows the suite in proportion only. What must not depend on the
number of threads is tested with several (test_invariance.py).
"""

import sys

import pytest
import torch
from hypothesis import settings

from flash_kda import cli
from flash_kda.sm90 import repeat

torch.set_num_threads(1)

settings.register_profile("flash_kda", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("flash_kda")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("FLASH_KDA_IMPL", "FLASH_KDA_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _nothing_to_repeat(monkeypatch):
    """A test may put other kernels, stages or plans in place of those that an earlier call of its kind has used."""
    monkeypatch.setattr(repeat, "_kept", {})


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs flash-kda in this process; returns status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flash-kda", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run
