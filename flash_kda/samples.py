"""Inputs to try things on: the packaged real activations and the synthetic gates of tests, benchmarks and ``inspect``.

random       q, k, v, g, beta, dt_bias ~ N(0, 1), A_log = -0.2 U(0, 1): a typical benchmark; forgets within a few chunks
slow_eighth  random, with dt_bias -9 on every eighth channel: one channel in eight hardly decays
log_uniform  dt_bias = logit(1 / (5 tau)), tau log-uniform in 1 .. 1e5 tokens, g scaled by 0.25, A_log = 0
none         random, with g = -20: no decay at all
real         activations of a KDA layer on real text (flash_kda/data), repeated in time and heads
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from typing import Any

import torch
from torch import Tensor

from .constants import HEAD_DIM

GATES = ("random", "slow_eighth", "log_uniform", "none", "real")
TOKEN_TENSORS = ("q", "k", "v", "g", "beta")
PARAMETERS = ("A_log", "dt_bias")

DEFAULT_LOWER_BOUND = -5.0
PACKAGED_NAME = "kda_layer0_1k.safetensors"


@dataclass(frozen=True)
class Sample:
    """Arguments of one ``fwd`` or ``fwd_cp`` call; shapes and dtypes as there."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float = DEFAULT_LOWER_BOUND
    scale: float = HEAD_DIM**-0.5
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``fwd`` and ``fwd_cp``, with ``out`` left to them to allocate."""
        names = (*TOKEN_TENSORS, *PARAMETERS, "lower_bound", "scale", "initial_state", "cu_seqlens")
        return {"out": None, **{name: getattr(self, name) for name in names}}

    def to(self, device: torch.device) -> Sample:
        names = (*TOKEN_TENSORS, *PARAMETERS, "initial_state", "cu_seqlens")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if x is not None})

    def repeat(self, tokens: int, heads: int | None = None) -> Sample:
        """The same activations over and over: ``tokens`` in every batch row, ``heads`` heads (as there are, if None).

        Not for a sample with ``cu_seqlens``, whose offsets would no longer fit.
        """
        names: tuple[str, ...] = TOKEN_TENSORS
        # Rows and heads by index: one copy, whatever the ratio is.
        time = torch.arange(tokens, device=self.q.device) % max(self.q.shape[1], 1)
        changed = {name: getattr(self, name).index_select(1, time) for name in names}
        if heads is not None and heads != self.heads:
            head = torch.arange(heads, device=self.q.device) % self.heads
            changed = {name: x.index_select(2, head) for name, x in changed.items()}
            changed |= {"A_log": self.A_log[head], "dt_bias": self.dt_bias.view(self.heads, -1)[head]}
            if self.initial_state is not None:
                changed["initial_state"] = self.initial_state.index_select(1, head)
        return replace(self, **changed)


def packaged() -> Sample:
    """The packaged activations: 1,024 tokens, 4 heads of layer 0 of a small model with fla's initialisation, on a CPU."""
    from safetensors.torch import load_file

    with as_file(files("flash_kda") / "data" / PACKAGED_NAME) as path:
        tensors: dict[str, Any] = load_file(path)
    return Sample(**tensors)


def make(
    gates: str,
    tokens: int,
    heads: int,
    *,
    lower_bound: float = DEFAULT_LOWER_BOUND,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Sample:
    """One sequence with the gates asked for.

    Args:
        gates: one of :data:`GATES`.
        tokens: T.
        heads: H.
        lower_bound: of the gate. The time constants that ``log_uniform`` is named for hold at -5.
        seed: of the random numbers; values depend on the kind of device that draws them. Unused by ``real``.
        device: where the tensors are made.

    Raises:
        ValueError: no such gates.
    """
    if gates not in GATES:
        raise ValueError(f"gates must be one of {', '.join(GATES)}, got {gates!r}")
    device = torch.device(device)
    if gates == "real":
        return replace(packaged().to(device).repeat(tokens, heads), lower_bound=lower_bound)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    q, k, v, g = (normal(1, tokens, heads, HEAD_DIM).bfloat16() for _ in range(4))
    beta = normal(1, tokens, heads).bfloat16()
    dt_bias = normal(heads, HEAD_DIM)
    A_log = -0.2 * uniform(heads)
    if gates == "slow_eighth":
        dt_bias[:, ::8] = -9.0
    elif gates == "log_uniform":
        per_token = 1 / (5 * 10 ** (5 * uniform(heads, HEAD_DIM)))
        dt_bias, g, A_log = torch.logit(per_token), (0.25 * g).bfloat16(), torch.zeros_like(A_log)
    elif gates == "none":
        g = torch.full_like(g, -20.0)
    return Sample(q, k, v, g, beta, A_log, dt_bias, lower_bound)
