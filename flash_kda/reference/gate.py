"""The gate: inputs to decays and write strengths.

Written with ``exp``, sums and quotients only. On CPUs PyTorch evaluates ``sigmoid`` and ``exp2`` of the last few elements
of a thread's share by another routine than the rest, so that their bits depend on where an element lies in the batch;
these operations do not (tests/test_invariance.py).
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor, slope: Tensor | float = 1.0) -> Tensor:
    """``1 / (1 + exp(-slope x))``. Where the exponent passes 80 the value stays at e^-80, which keeps derivatives finite."""
    return ((x * -slope).clamp(max=80.0).exp() + 1.0).reciprocal()


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float) -> Tensor:
    """Natural log of alpha: ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``, in [lower_bound, 0].

    Args:
        g: gate before activation, ``[..., K]``, already in the working dtype.
        A_log: ``[...]``, broadcastable to g without its last axis, or None for 0. A slope beyond the largest finite number
            saturates the gate and never makes inf * 0.
        dt_bias: broadcastable to g, or None for 0.
        lower_bound: lower end of the range.
    """
    if dt_bias is not None:
        g = g + dt_bias.to(g.dtype)
    slope: Tensor | float = 1.0
    if A_log is not None:
        slope = A_log.to(g.dtype).exp().clamp(max=torch.finfo(g.dtype).max)[..., None]
    return sigmoid(g, slope) * lower_bound
