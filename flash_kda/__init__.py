"""Exact, fast Kimi Delta Attention prefill with context parallelism; a drop-in for MoonshotAI's FlashKDA.

Importing does no work: it asks no GPU, compiles nothing and reads no environment variable. Not even PyTorch is imported
before a public name is first used, so that the command line starts at once and can say what is wrong with an installation.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from .api import (
        Certificate,
        SummaryInfo,
        correct_initial_states,
        fwd,
        fwd_cp,
        get_warmup_chunks,
        get_workspace_size,
        state_only,
    )
    from .chunk import chunk_kda
    from .dispatch import last_path
    from .plan import SegmentPlan, plan_segments

_HOME = {
    "Certificate": "api",
    "SegmentPlan": "plan",
    "SummaryInfo": "api",
    "chunk_kda": "chunk",
    "correct_initial_states": "api",
    "fwd": "api",
    "fwd_cp": "api",
    "get_warmup_chunks": "api",
    "get_workspace_size": "api",
    "last_path": "dispatch",
    "plan_segments": "plan",
    "state_only": "api",
}

__all__ = [
    "Certificate",
    "SegmentPlan",
    "SummaryInfo",
    "__version__",
    "chunk_kda",
    "correct_initial_states",
    "fwd",
    "fwd_cp",
    "get_warmup_chunks",
    "get_workspace_size",
    "last_path",
    "plan_segments",
    "state_only",
]


def __getattr__(name: str) -> object:
    """Imports a public name from its module at first use (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
