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


def log_decay(g: Tensor, slope: Tensor, bias: Tensor, lower_bound: float) -> Tensor:
    """Natural log of alpha: ``lower_bound * sigmoid(slope * (g + bias))``, in [lower_bound, 0].

    Args:
        g: gate before activation, ``[..., K]``, already in the working dtype.
        slope: ``gate_slope(A_log)``, broadcastable to g.
        bias: dt_bias, broadcastable to g.
        lower_bound: lower end of the range.
    """
    return sigmoid(g + bias, slope) * lower_bound


def gate_slope(A_log: Tensor, dtype: torch.dtype) -> Tensor:
    """``exp(A_log)``, at most the largest finite number: a huge slope saturates the gate and never makes inf * 0."""
    return A_log.to(dtype).exp().clamp(max=torch.finfo(dtype).max)
