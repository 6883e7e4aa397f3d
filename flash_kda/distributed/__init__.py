"""Context parallelism over the ranks of ``torch.distributed``: the same exact states, from GPU to GPU.

::

    from flash_kda import distributed

    context = distributed.ContextParallel(group, cu_seqlens, heads)  # once a batch: who holds which tokens
    out, _ = distributed.fwd_cp(q, k, v, g, beta, scale, None, A_log, dt_bias, -5.0, context=context)  # once a layer

NCCL on GPUs, gloo on CPUs, by the same code. docs/distributed.md has the rest.
"""

from .context import ContextParallel
from .forward import fwd_cp
from .layout import even_shards
from .ranks import RankError

__all__ = ["ContextParallel", "RankError", "even_shards", "fwd_cp"]
