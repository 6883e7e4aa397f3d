"""How many chunks the published context-parallel recipe would replay, to show what measuring changes.

Never used to compute anything. docs/recipe.md says why the rule is unsound: it looks at a mean, of one token in 16, where the
slowest channel decides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..constants import CHUNK

LOG2E = math.log2(math.e)
THRESHOLD = -10.0
"""Of the summed log2 decay: 2^-10 counts as forgotten."""
TYPICAL_SIGMOID = 0.25
"""What the fast path takes the gate's sigmoid to be at least."""


def fast_path(lower_bound: float) -> bool:
    """Whether the recipe replays one chunk without looking at the gates: lower_bound < -1.73."""
    return lower_bound * LOG2E * TYPICAL_SIGMOID * CHUNK < THRESHOLD


def mean_scan(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> int | None:
    """Trailing chunks until every head's estimate falls below the threshold, None if never.

    ::

        estimate of a chunk = 16 lower_bound log2(e) sigmoid(exp(A_log) (mean_D g[last token] + mean_D dt_bias))

    Args:
        g: ``[T, H, K]`` of one segment.
        A_log, dt_bias, lower_bound: of the gate; ``[H]`` and ``[H, K]``.
    """
    end = torch.arange(-(-g.shape[0] // CHUNK), 0, -1, device=g.device) * CHUNK
    sampled = g[end.clamp(max=g.shape[0]) - 1].float().mean(-1) + dt_bias.float().mean(-1)
    decay = CHUNK * lower_bound * LOG2E * torch.sigmoid(A_log.float().exp() * sampled)
    forgotten = decay.cumsum(0).amax(1) < THRESHOLD
    return int(forgotten.int().argmax()) + 1 if bool(forgotten.any()) else None
