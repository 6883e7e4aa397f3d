"""A call spread over the ranks of a pool, as it would be made in one process: split, run, put together."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import Case, nan_state
from pool import Pool
from torch import Tensor

from flash_kda import distributed
from flash_kda.distributed.layout import Layout


@dataclass(frozen=True)
class Share:
    """What one rank is told to do; ``before`` is run first, e.g. to break something."""

    case: Case
    context: dict[str, Any]
    initial_state: Tensor | None
    final_state: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)
    before: Callable[[], Any] | None = None
    sleep: float = 0.0


PARAMETERS = tuple(inspect.signature(distributed.fwd_cp).parameters)


def arguments(case: Case, **changes: Any) -> dict[str, Any]:
    """Those of ``distributed.fwd_cp``; ``out`` is a fresh NaN-filled buffer."""
    return {name: value for name, value in case.fwd(**changes).items() if name in PARAMETERS}


def work(group: Any, share: Share) -> tuple[Tensor, Tensor | None]:
    """In a rank: one call into poisoned buffers."""
    context = distributed.ContextParallel(group, **share.context)
    time.sleep(share.sleep)
    undo = share.before() if share.before else None
    try:
        out, final = distributed.fwd_cp(
            **arguments(share.case, initial_state=share.initial_state, final_state=share.final_state),
            context=context,
            **share.options,
        )
    finally:
        if undo is not None:
            undo()
    return out, final


def shares(
    case: Case,
    lengths: Sequence[int],
    shard_lens: Sequence[int],
    *,
    initial_state: Tensor | None = None,
    final_dtype: torch.dtype = torch.float32,
    context: dict[str, Any] | None = None,
    **rest: Any,
) -> list[Share]:
    """One for each rank; ``context`` and ``rest`` as in :class:`Share`."""
    offsets = [0, *itertools.accumulate(lengths)]
    layout = Layout.of(offsets, shard_lens, len(shard_lens))
    told = {"cu_seqlens": offsets, "shard_lens": list(shard_lens), "heads": case.heads} | (context or {})
    made = []
    for rank in range(len(shard_lens)):
        parts = layout.parts(rank)
        part = case.cut(layout.shards[rank], layout.shards[rank + 1])
        starts = [p.sequence for p in parts if p.first]
        ends = len(lengths) if told.get("final_state") == "all" else sum(p.last for p in parts)
        state = None if initial_state is None else initial_state[starts].clone()
        made.append(Share(part, told, state, nan_state(ends, case.heads, final_dtype), **rest))
    return made


def sharded(pool: Pool, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """``(out [1, T, H, V], final_state [N, H, V, K])`` of :func:`shares`, from where the ranks left them."""
    told = shares(*given, **options)
    results = pool.run(work, [(share,) for share in told])
    out = torch.cat([out for out, _ in results], 1)
    if told[0].context.get("final_state") == "all":
        first = results[0][1]
        assert all(torch.equal(first, final) for _, final in results)
        return out, first
    return out, torch.cat([final for _, final in results])
