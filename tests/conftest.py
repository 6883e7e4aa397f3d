"""Every test starts without this package's environment variables; hypothesis repeats the same examples each time.

One thread: the tensors are small, and a busy machine then slows the suite in proportion only. What must not depend on the
number of threads is tested with several (test_invariance.py).
"""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("flash_kda", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("flash_kda")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("FLASH_KDA_IMPL", "FLASH_KDA_DEBUG"):
        monkeypatch.delenv(name, raising=False)
