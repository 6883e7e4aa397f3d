"""KDA in plain PyTorch: the token recurrence (the oracle) and the chunked stages (the specification of every kernel)."""

from ..inputs import Inputs
from .recurrent import recurrent_kda
from .stages import Summary, chain, forward, state_summary, warmup_bound

__all__ = ["Inputs", "Summary", "chain", "forward", "recurrent_kda", "state_summary", "warmup_bound"]
