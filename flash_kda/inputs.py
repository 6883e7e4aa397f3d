"""What every stage is given: the packed tokens and the parameters that turn them into decays and strengths."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Packed inputs of one call; sequences follow each other on the token axis.

    Token tensors may also carry a batch axis in front, whose rows then follow each other.

    Attributes:
        q: ``[T, H, K]`` queries, or None for the stages that need no outputs.
        k: ``[T, H, K]`` keys; q and k are l2-normalised inside. Value head h reads query and key head ``h // (HV / H)``.
        v: ``[T, HV, V]`` values.
        g: ``[T, HV, K]`` gate before activation.
        beta: ``[T, HV]`` logits of the write strength, or the write strength itself.
        A_log: ``[HV]`` fp32, log of the gate's slope; None for 0.
        dt_bias: ``[HV, K]`` fp32, added to g; None for 0.
        lower_bound: log decay of a token is in [lower_bound, 0].
        scale: multiplies the outputs, usually K^-0.5.
        beta_is_activated: beta is the write strength, in [0, 2], and not its logit.
    """

    q: Tensor | None
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    lower_bound: float
    scale: float = 1.0
    beta_is_activated: bool = False

    @property
    def tokens(self) -> int:
        shape = self.k.shape
        return shape[0] if len(shape) == 3 else shape[0] * shape[1]

    @property
    def heads(self) -> int:
        """HV, the heads that have a state."""
        return self.v.shape[-2]

    def contiguous(self, *, with_q: bool = True) -> Inputs:
        """The same values in contiguous tensors without batch axis, copied only where needed; without q if not wanted."""

        def packed(x: Tensor, rank: int) -> Tensor:
            return (x if x.dim() == rank else x.flatten(0, 1)).contiguous()

        q = None if self.q is None or not with_q else packed(self.q, 3)
        k, v, g = (packed(x, 3) for x in (self.k, self.v, self.g))
        return self._replace(q=q, k=k, v=v, g=g, beta=packed(self.beta, 2))
