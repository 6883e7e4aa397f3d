"""Inputs with names: what each test runs on, the oracle's answer to it, and how far an honest evaluation may err."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import flash_kda
from flash_kda.reference import Inputs, recurrent_kda

D = 128
SCALE = D**-0.5
REAL = Path(flash_kda.__file__).parent / "data" / "kda_layer0_1k.safetensors"
TOKEN_INPUTS = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True)
class Case:
    """One call's inputs: q, k ``[B, T, H, 128]``; v, g ``[B, T, HV, 128]``, ``beta`` ``[B, T, HV]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float = -5.0
    scale: float = SCALE
    beta_is_activated: bool = False

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def heads(self) -> int:
        """Value heads."""
        return self.v.shape[2]

    def fwd(self, **changes) -> dict:
        """Keyword arguments of ``fwd``; ``out`` is a fresh NaN-filled buffer."""
        arguments = dict(vars(self), out=nan_like(self.v))
        return arguments | changes

    def summary(self, **changes) -> dict:
        """Keyword arguments of ``state_only``."""
        names = ("k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound", "beta_is_activated")
        return {name: getattr(self, name) for name in names} | {"cu_seqlens": None} | changes

    def gates(self, **changes) -> dict:
        """Keyword arguments of ``get_warmup_chunks``."""
        names = ("g", "A_log", "dt_bias", "lower_bound")
        return {name: getattr(self, name) for name in names} | {"cu_seqlens": None} | changes

    def map(self, function: Callable[[Tensor], Tensor]) -> Case:
        """The case with ``function`` applied to q, k, v, g and beta."""
        return replace(self, **{name: function(getattr(self, name)) for name in TOKEN_INPUTS})

    def cut(self, start: int, end: int) -> Case:
        """Tokens ``[start, end)`` of every row."""
        return self.map(lambda x: x[:, start:end])

    def packed(self) -> Case:
        """Batch rows one after the other in a single row."""
        return self.map(lambda x: x.flatten(0, 1)[None])

    def inputs(self, dtype: torch.dtype | None = None) -> Inputs:
        """For the reference stages; B = 1."""
        tensors = {name: getattr(self, name)[0] for name in TOKEN_INPUTS}
        if dtype is not None:
            tensors = {name: x.to(dtype) for name, x in tensors.items()}
        names = ("A_log", "dt_bias", "lower_bound", "scale", "beta_is_activated")
        return Inputs(**tensors, **{name: getattr(self, name) for name in names})

    def oracle(self, initial_state=None, cu_seqlens=None, dtype=torch.float64) -> tuple[Tensor, Tensor]:
        return recurrent_kda(**vars(self), initial_state=initial_state, cu_seqlens=cu_seqlens, dtype=dtype)


def random(tokens: int, heads: int, *, batch: int = 1, lower_bound: float = -5.0, seed: int = 0) -> Case:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).bfloat16()

    q, k, v, g = (normal(batch, tokens, heads, D) for _ in range(4))
    beta = normal(batch, tokens, heads)
    dt_bias = torch.randn(heads, D, generator=rng)
    return Case(q, k, v, g, beta, -0.2 * torch.rand(heads, generator=rng), dt_bias, lower_bound)


def grouped(case: Case, group: int) -> Case:
    """One query and key head for each ``group`` value heads."""
    return replace(case, q=case.q[:, :, ::group], k=case.k[:, :, ::group])


def repeated(case: Case) -> Case:
    """Query and key heads repeated so that every value head has its own."""
    group = case.heads // case.q.shape[2]
    return replace(case, q=case.q.repeat_interleave(group, 2), k=case.k.repeat_interleave(group, 2))


def negative(case: Case) -> Case:
    """Activated write strengths up to 2: the transition of a token has negative eigenvalues."""
    return replace(case, beta=2 * torch.sigmoid(case.beta.float()), beta_is_activated=True)


def plain(case: Case) -> Case:
    """No gate parameters, so that ``g`` alone decides."""
    return replace(case, A_log=torch.zeros_like(case.A_log), dt_bias=torch.zeros_like(case.dt_bias))


def slow_eighth(case: Case) -> Case:
    dt_bias = case.dt_bias.clone()
    dt_bias[:, ::8] = -9
    return replace(case, dt_bias=dt_bias)


def log_uniform(case: Case) -> Case:
    rng = torch.Generator().manual_seed(1)
    tau = 10 ** (5 * torch.rand(case.dt_bias.shape, generator=rng))
    return replace(plain(case), dt_bias=torch.logit(1 / (5 * tau)), g=case.g * 0.25)


def gate(case: Case, value: float) -> Case:
    return replace(plain(case), g=torch.full_like(case.g, value))


def one_slow_channel(case: Case) -> Case:
    g = torch.full_like(case.g, 20)
    g[..., 37] = -20
    return replace(plain(case), g=g)


def every_16th(case: Case, value: float) -> Case:
    """Gate ``value`` at tokens 15 mod 16, the opposite elsewhere: rules that sample one token in 16 see only ``value``."""
    g = torch.full_like(case.g, -value)
    g[:, 15::16] = value
    return replace(plain(case), g=g)


def one_weak_head(case: Case) -> Case:
    g = torch.full_like(case.g, 20)
    g[:, :, case.heads // 2] = -20
    return replace(plain(case), g=g)


def rotating_keys(case: Case) -> Case:
    """The delta rule turns the state from channel 0 to 1 and back, each time past a gate that would have erased it."""
    k, g, beta = torch.zeros_like(case.k), torch.full_like(case.g, -20), torch.full_like(case.beta, 30)
    for t in range(case.tokens):
        block, j = t // 16 % 4, t % 16
        if block % 2 == 0:
            k[:, t, :, 2] = 1
            beta[:, t] = -30
            g[:, t] = 20
            g[:, t, :, block // 2] = -20
        else:
            angle = (j + 1) * math.pi / 32
            held, next_ = (0, 1) if block == 1 else (1, 0)
            k[:, t, :, held], k[:, t, :, next_] = -math.sin(angle), math.cos(angle)
    return replace(plain(case), k=k, g=g, beta=beta)


def collinear(case: Case, noise: float = 0.0) -> Case:
    key = case.k[:, :1].float() + noise * case.k.float()
    v = case.v[:, torch.arange(case.tokens) % 16]
    key = key.bfloat16().expand_as(case.k).contiguous()
    return replace(gate(case, -12), q=key, k=key.clone(), v=v, beta=torch.full_like(case.beta, 8))


def distinct_a_log(case: Case) -> Case:
    return replace(case, A_log=torch.linspace(-1, 20, case.heads))


def beta_ends(case: Case) -> Case:
    return replace(case, beta=torch.where(case.beta > 0, 30, -30).to(case.beta.dtype))


def real(tokens: int, heads: int, first: int = 0) -> Case:
    """Activations of a KDA layer on text, tiled in time and heads beyond their 1,024 tokens and 4 heads."""
    data = load_file(REAL)
    head = torch.arange(heads) % 4
    time = torch.arange(first, first + tokens) % 1024
    tensors = {name: data[name][:, time][:, :, head].contiguous() for name in TOKEN_INPUTS}
    return Case(**tensors, A_log=data["A_log"][head], dt_bias=data["dt_bias"][head], lower_bound=-5.0)


def _random(**options) -> Callable[[int, int], Case]:
    return lambda tokens, heads: random(tokens, heads, **options)


def _on_random(change: Callable[..., Case], *arguments) -> Callable[[int, int], Case]:
    return lambda tokens, heads: change(random(tokens, heads), *arguments)


MAKERS: dict[str, Callable[[int, int], Case]] = {
    "random_5": _random(lower_bound=-5.0),
    "random_1": _random(lower_bound=-1.0),
    "random_half": _random(lower_bound=-0.5),
    "slow_eighth": _on_random(slow_eighth),
    "log_uniform": _on_random(log_uniform),
    "no_decay": _on_random(gate, -20),
    "full_decay": _on_random(gate, 20),
    "one_slow_channel": _on_random(one_slow_channel),
    "strong_every_16th": _on_random(every_16th, 20),
    "weak_every_16th": _on_random(every_16th, -20),
    "one_weak_head": _on_random(one_weak_head),
    "rotating_keys": _on_random(rotating_keys),
    "collinear_keys": _on_random(collinear),
    "nearly_collinear_keys": _on_random(collinear, 1e-2),
    "distinct_a_log": _on_random(distinct_a_log),
    "beta_ends": _on_random(beta_ends),
    "real": lambda tokens, heads: real(tokens, heads, first=512),
    "real_tiled": real,
}
NAMES = tuple(MAKERS)


@functools.cache
def make(name: str, tokens: int, heads: int = 2) -> Case:
    return MAKERS[name](tokens, heads)


def state(sequences: int, heads: int, dtype: torch.dtype = torch.float32, seed: int = 7) -> Tensor:
    """A random initial state whose values bf16 holds exactly."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(sequences, heads, D, D, generator=rng).bfloat16().to(dtype)


def nan_like(x: Tensor) -> Tensor:
    return torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)


def nan_state(sequences: int, heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((sequences, heads, D, D), torch.nan, dtype=dtype)


def bits(x: Tensor) -> Tensor:
    """The raw bits, so that NaN equals itself and -0 differs from 0."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def rel(x: Tensor, want: Tensor, head_axis: int) -> Tensor:
    """Relative L2 error of each head; what is exactly zero must be exactly zero."""
    axes = [axis for axis in range(want.dim()) if axis != head_axis]
    error = (x.double() - want.double()).square().sum(axes).sqrt()
    size = want.double().square().sum(axes).sqrt()
    return torch.where(error == 0, 0, error / size)


def out_error(out: Tensor, want: Tensor) -> Tensor:
    return rel(out, want, 2)


def state_error(got: Tensor, want: Tensor) -> Tensor:
    return rel(got, want, 1)


def packed_offsets(*lengths: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)
