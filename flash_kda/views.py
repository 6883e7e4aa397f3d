"""Which bytes two views of tensors have in common. Metadata only."""

from __future__ import annotations

import math

from torch import Tensor


def extent(x: Tensor) -> int:
    """Bytes from the first element of a view to the end of its last."""
    if x.numel() == 0 or x.is_meta:
        return 0
    return (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views may share memory. Interleaved slices of one buffer, as of a fused projection, do not."""
    if a.numel() == 0 or b.numel() == 0 or a.is_meta:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
    spans = []
    for x in (a, b):
        reach = sum((n - 1) * abs(s) for n, s in zip(x.shape, x.stride(), strict=True))
        spans.append((x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()))
    if spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]:
        return False
    # Modulo the common period of all strides but those of the contiguous last axes, each view is one run of bytes.
    period = 0
    runs = []
    for x in (a, b):
        axes = [(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
        run = 1
        while axes and axes[-1][1] == run:
            run *= axes.pop()[0]
        for _, s in axes:
            period = math.gcd(period, s * x.element_size())
        runs.append(run * x.element_size())
    if period == 0:
        return True
    shift = (b.data_ptr() - a.data_ptr()) % period
    return not (shift >= runs[0] and shift + runs[1] <= period)


def same_view(a: Tensor, b: Tensor) -> bool:
    """The same elements in the same order; strides of axes of size 1 mean nothing."""
    strides = (tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1) for x in (a, b))
    return (a.data_ptr(), a.shape, next(strides), a.dtype) == (b.data_ptr(), b.shape, next(strides), b.dtype)
