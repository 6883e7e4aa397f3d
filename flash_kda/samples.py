"""Inputs to try things on, by name: what documents, benchmarks and ``inspect`` mean when they say ``slow_eighth``.

Gates (:data:`GATES`):

random       q, k, v, g, beta, dt_bias ~ N(0, 1), A_log = -0.2 U(0, 1): a typical benchmark; forgets within a few chunks
slow_eighth  random, with dt_bias -9 on every eighth channel: one channel in eight hardly decays
log_uniform  dt_bias = logit(1 / (5 tau)), tau log-uniform in 1 .. 1e5 tokens, g scaled by 0.25, A_log = 0
none         random, with g = -20: no decay at all
real         activations of a KDA layer on real text (flash_kda/data), repeated in time and heads

Hard inputs (:data:`HARD`):

full         random, with g = +20: every channel decays by lower_bound
collinear    one key and query repeated for every token, 16 values repeated, g = -12, beta logit 8
slow_9999    random keys and values, a decay of 0.9999 for each token, beta logit -4
saturated    random, with A_log = 20, g = +-30 and beta logit = +-30
rotating     keys that turn while nothing decays and rest while all channels but one decay
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from typing import Any

import torch
from torch import Tensor

from .constants import HEAD_DIM

GATES = ("random", "slow_eighth", "log_uniform", "none", "real")
HARD = ("full", "collinear", "slow_9999", "saturated", "rotating")
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
        gates: one of :data:`GATES` or :data:`HARD`.
        tokens: T.
        heads: H.
        lower_bound: of the gate, negative for ``slow_9999``. The time constants that ``log_uniform`` is named for hold at -5.
        seed: of the random numbers; values depend on the kind of device that draws them. Unused by ``real``.
        device: where the tensors are made.

    Raises:
        ValueError: no such gates.
    """
    if gates not in GATES + HARD:
        raise ValueError(f"gates must be one of {', '.join(GATES + HARD)}, got {gates!r}")
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
    elif gates in ("none", "full"):
        g = torch.full_like(g, -20.0 if gates == "none" else 20.0)
    elif gates == "collinear":
        q = k = normal(1, 1, heads, HEAD_DIM).bfloat16().expand_as(q).contiguous()
        v = normal(1, 16, heads, HEAD_DIM).bfloat16()[:, torch.arange(tokens, device=device) % 16]
        g, beta = torch.full_like(g, -12.0), torch.full_like(beta, 8.0)
        A_log, dt_bias = torch.zeros_like(A_log), torch.zeros_like(dt_bias)
    elif gates == "slow_9999":
        # The whole gate sits in the fp32 dt_bias, where it is not rounded to bf16.
        share = math.log(0.9999) / lower_bound
        g, A_log, dt_bias = (
            torch.zeros_like(g),
            torch.zeros_like(A_log),
            torch.full_like(dt_bias, math.log(share / (1 - share))),
        )
        beta = torch.full_like(beta, -4.0)
    elif gates == "saturated":
        A_log, g, beta = torch.full_like(A_log, 20.0), 30 * g.sign(), 30 * beta.sign()
    elif gates == "rotating":
        k, g = (x.to(device)[None, :, None].expand(1, tokens, heads, HEAD_DIM).contiguous() for x in _rotating(tokens))
        A_log, dt_bias, beta = torch.zeros_like(A_log), torch.zeros_like(dt_bias), torch.full_like(beta, 30.0)
    return Sample(q, k, v, g, beta, A_log, dt_bias, lower_bound)


def _rotating(tokens: int) -> tuple[Tensor, Tensor]:
    """``[T, K]`` keys and gates: four blocks of 16 tokens, over and over (docs/algorithm.md, section 5).

    Only channel 0 keeps; the key turns from channel 1 to 0; only channel 1 keeps; it turns back. While nothing decays, each
    turn of the key carries what the state holds from the channel ahead of it to the one behind.
    """
    k, g = torch.zeros(64, HEAD_DIM), torch.full((64, HEAD_DIM), 20.0)
    turn = torch.arange(1, 17) * (math.pi / 32)
    k[:16, 1], g[:16, 0] = 1, -20
    k[16:32, 0], k[16:32, 1], g[16:32] = turn.sin(), turn.cos(), -20
    k[32:48, 0], g[32:48, 1] = 1, -20
    k[48:, 0], k[48:, 1], g[48:] = turn.cos(), turn.sin(), -20
    at = torch.arange(tokens) % 64
    return k[at].bfloat16(), g[at].bfloat16()
