"""How long heads remember, measured: the transition matrix of a sequence's end, walked back chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import api
from ..constants import CHUNK
from ..reference import Inputs, state_summary
from ..reference.gate import log_decay
from ..samples import Sample
from . import recipe

BATCH = 256
"""(chunk, head) pairs whose transition matrices are made at once: 16 MiB of them."""

FLOOR = 2.0**-26
"""Below this on every head nobody asks any more, and the walk stops."""


@dataclass(frozen=True)
class Memory:
    """What was found in the last tokens of one sequence.

    Attributes:
        norm: ``[NC + 1, H]`` fp32, ``||M||_F`` after j chunks walked back; row 0 is ``||I||_F``. Ends where it is below
            :data:`FLOOR` on every head, or with the tokens.
        time_constant: ``[H, K]`` tokens in which a channel decays by 1/e, ``-1 / mean log alpha``.
        sample: the tokens looked at.
    """

    norm: Tensor
    time_constant: Tensor
    sample: Sample

    @property
    def tokens(self) -> int:
        return self.sample.q.shape[1]

    def until(self, eps: float) -> list[int | None]:
        """Per head, chunks until ``||M||_F <= eps``: where the backward scan stops. None if it does not."""
        return [_first(row) for row in (self.norm[1:] <= eps).T]

    def bound(self, eps: float) -> list[int | None]:
        """Per head, the sound a-priori bound of that number; None if it is not met in the tokens looked at."""
        x = self.sample
        num, unmet = api.get_warmup_chunks(x.g, x.A_log, x.dt_bias, x.lower_bound, None, eps=eps)
        return [None if no else n for n, no in zip(num[0].tolist(), unmet[0].tolist(), strict=True)]

    def published(self) -> tuple[int | None, int | None]:
        """Chunks that the published recipe replays, and that its scan alone would: the same for all heads."""
        x = self.sample
        scan = recipe.mean_scan(x.g[0], x.A_log, x.dt_bias.view(x.heads, -1), x.lower_bound)
        return (1 if recipe.fast_path(x.lower_bound) else scan), scan


def measure(sample: Sample, begin: Callable[[str], None]) -> Memory:
    """Walks back over all of a sample that is one sequence.

    The scan of ``state_only`` forms M by rank-16 updates and stops. Here every chunk is a segment of its own, scanned whole, so
    that its transition is the reference's; their product from the end is the same M, after every chunk.

    Args:
        sample: ``[1, T, H, K]`` without cu_seqlens.
        begin: told of each step, about one per :data:`BATCH`.
    """
    tokens, heads = sample.q.shape[1], sample.heads
    x = sample
    bias = x.dt_bias.view(heads, -1)
    inputs = Inputs(None, x.k[0], x.v[0], x.g[0], x.beta[0], x.A_log, bias, x.lower_bound)
    count = -(-tokens // CHUNK)
    offsets = (torch.arange(count + 1) * CHUNK).clamp(max=tokens)
    k_dim = sample.k.shape[-1]
    m = torch.eye(k_dim).repeat(heads, 1, 1)
    norms = [torch.full((heads,), math.sqrt(k_dim))]
    with torch.no_grad():
        for chunk in batches(count, heads):
            begin(f"chunks {chunk[-1] + 1} to {chunk[0] + 1}, backward")
            summary = state_summary(inputs, offsets, max_len=CHUNK, segments=torch.tensor(chunk), eps=0.0)
            for transition in summary.mt:
                m = torch.bmm(m, transition)
                norms.append(torch.linalg.vector_norm(m, dim=(1, 2)))
            if bool((norms[-1] <= FLOOR).all()):
                break
        mean = torch.stack([_mean_log_decay(inputs, h) for h in range(heads)])
    return Memory(torch.stack(norms), -1 / mean, sample)


def batches(count: int, heads: int) -> Iterator[list[int]]:
    """Chunk numbers from the last to the first."""
    size = max(1, BATCH // heads)
    for last in range(count, 0, -size):
        yield list(range(last - 1, max(last - size, 0) - 1, -1))


def _mean_log_decay(inputs: Inputs, head: int) -> Tensor:
    """``[K]``; fp64, as a channel that hardly decays would drown in a sum of fp32."""
    A_log = None if inputs.A_log is None else inputs.A_log[head].double()
    bias = None if inputs.dt_bias is None else inputs.dt_bias[head].double()
    return log_decay(inputs.g[:, head].double(), A_log, bias, inputs.lower_bound).mean(0)


def _first(found: Tensor) -> int | None:
    return int(found.int().argmax()) + 1 if bool(found.any()) else None
