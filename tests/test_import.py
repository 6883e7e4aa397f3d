"""Importing the package does no work."""

import json
import subprocess
import sys

PROBE = """
import json, os, sys

read = set()


class Environment(type(os.environ)):
    def __getitem__(self, key):
        read.add(key)
        return super().__getitem__(key)


import torch  # the package may import it; what torch reads is its own affair

os.environ.__class__ = Environment
before = set(sys.modules)
import flash_kda

print(
    json.dumps(
        {
            "modules": sorted(set(sys.modules) - before),
            "read": sorted(key for key in read if "KDA" in key.upper()),
            "cuda": torch.cuda.is_initialized(),
            "path": flash_kda.last_path(),
        }
    )
)
"""


def probe():
    return json.loads(subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True).stdout)


def test_import_is_light_and_reads_nothing():
    seen = probe()
    heavy = ("triton", "matplotlib", "cuda", "typer", "rich", "safetensors", "fla", "hypothesis")
    assert not [name for name in seen["modules"] if name.split(".")[0] in heavy]
    assert seen["read"] == []
    assert seen["cuda"] is False
    assert seen["path"] is None


def test_public_names():
    import flash_kda

    assert all(hasattr(flash_kda, name) for name in flash_kda.__all__)
    functions = {"fwd", "fwd_cp", "state_only", "get_warmup_chunks", "correct_initial_states", "plan_segments", "last_path"}
    functions |= {"get_workspace_size"}
    assert functions <= set(flash_kda.__all__)
    assert all(getattr(flash_kda, name).__doc__ for name in functions)
