"""Exact, fast Kimi Delta Attention prefill with context parallelism; a drop-in for MoonshotAI's FlashKDA.

Importing does no work: it asks no GPU, compiles nothing and reads no environment variable.
"""

from ._version import __version__
from .api import (
    Certificate,
    SummaryInfo,
    correct_initial_states,
    fwd,
    fwd_cp,
    get_warmup_chunks,
    state_only,
)
from .dispatch import last_path
from .plan import SegmentPlan, plan_segments

__all__ = [
    "Certificate",
    "SegmentPlan",
    "SummaryInfo",
    "__version__",
    "correct_initial_states",
    "fwd",
    "fwd_cp",
    "get_warmup_chunks",
    "last_path",
    "plan_segments",
    "state_only",
]
