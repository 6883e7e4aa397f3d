"""Named inputs: the gates, keys and values that tables and benchmarks refer to by name.

random       q, k, v, g, beta, dt_bias ~ N(0, 1), A_log = -0.2 U(0, 1)
slow_eighth  random, with dt_bias = -9 on every eighth channel: one channel in eight is nearly lossless
log_uniform  dt_bias = logit(1 / (5 tau)) with tau log-uniform in 1 .. 1e5 tokens, g scaled by 0.25, A_log = 0
none         random with g = -20: no decay to speak of
full         random with g = +20: every channel decays by lower_bound
real         the packaged activations of a trained KDA layer, repeated in time and heads
collinear    one key and query repeated for every token, 16 values repeated, g = -12, beta logit 8
slow_9999    random keys and values, a decay of 0.9999 for each token, beta logit -4
saturated    random with A_log = 20, g = +-30 and beta logit = +-30
rotating     keys that turn while nothing decays and rest while one of two channels decays
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import flash_kda

DIM = 128
Inputs = dict[str, Any]


def make(name: str, tokens: int, heads: int, lower_bound: float = -5.0, seed: int = 0) -> Inputs:
    """Keyword arguments of ``flash_kda.fwd`` without ``out``: one sequence ``[1, tokens, heads, 128]``."""
    if name == "real":
        return _real(tokens, heads)
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    wide = (1, tokens, heads, DIM)
    q, k, v, g, beta = normal(*wide), normal(*wide), normal(*wide), normal(*wide), normal(1, tokens, heads)
    dt_bias = normal(heads, DIM)
    A_log = -0.2 * torch.rand(heads, generator=gen)
    if name == "slow_eighth":
        dt_bias[:, ::8] = -9.0
    elif name == "log_uniform":
        tau = 10 ** (5 * torch.rand(heads, DIM, generator=gen))
        dt_bias, g, A_log = torch.logit(1 / (5 * tau)), 0.25 * g, torch.zeros(heads)
    elif name in ("none", "full"):
        g = torch.full(wide, -20.0 if name == "none" else 20.0)
    elif name == "collinear":
        q = k = normal(1, 1, heads, DIM).expand(wide)
        v = normal(1, 16, heads, DIM).repeat(1, -(-tokens // 16), 1, 1)[:, :tokens]
        g, beta = torch.full(wide, -12.0), torch.full((1, tokens, heads), 8.0)
        A_log, dt_bias = torch.zeros(heads), torch.zeros(heads, DIM)
    elif name == "slow_9999":
        # The whole of g sits in the fp32 dt_bias, where it is not rounded to bf16.
        g, A_log = torch.zeros(wide), torch.zeros(heads)
        dt_bias = torch.full((heads, DIM), math.log((r := math.log(0.9999) / lower_bound) / (1 - r)))
        beta = torch.full((1, tokens, heads), -4.0)
    elif name == "saturated":
        A_log, g, beta = torch.full((heads,), 20.0), 30 * g.sign(), 30 * beta.sign()
    elif name == "rotating":
        k, g, beta = _rotating(tokens, heads)
        A_log, dt_bias = torch.zeros(heads), torch.zeros(heads, DIM)
    elif name != "random":
        raise ValueError(f"gates must be a name listed in benchmarks/gates.py, got {name!r}")
    bf16 = {n: x.bfloat16() for n, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items()}
    return bf16 | {"scale": DIM**-0.5, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}


def _rotating(tokens: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """A period of 64 tokens: only channel 0 keeps; the key turns from channel 1 to 0; only channel 1 keeps; it turns back.

    While nothing decays, each turn of the key carries what the state holds from the channel ahead of it to the one behind.
    """
    k = torch.zeros(64, DIM)
    g = torch.full((64, DIM), 20.0)
    turn = torch.arange(1, 17) * (math.pi / 32)
    k[:16, 1] = 1
    g[:16, 0] = -20
    k[16:32, 0], k[16:32, 1] = turn.sin(), turn.cos()
    g[16:32] = -20
    k[32:48, 0] = 1
    g[32:48, 1] = -20
    k[48:, 0], k[48:, 1] = turn.cos(), turn.sin()
    g[48:] = -20
    repeats = -(-tokens // 64)
    k, g = (x.repeat(repeats, 1)[None, :tokens, None].expand(1, tokens, heads, DIM) for x in (k, g))
    return k, g, torch.full((1, tokens, heads), 30.0)


def _real(tokens: int, heads: int) -> Inputs:
    file = load_file(Path(flash_kda.__file__).parent / "data" / "kda_layer0_1k.safetensors")
    have, have_heads = file["q"].shape[1:3]
    pick = torch.arange(heads) % have_heads
    when = torch.arange(tokens) % have
    inputs: Inputs = {n: file[n][:, when][:, :, pick] for n in ("q", "k", "v", "g", "beta")}
    return inputs | {"scale": DIM**-0.5, "A_log": file["A_log"][pick], "dt_bias": file["dt_bias"][pick], "lower_bound": -5.0}
