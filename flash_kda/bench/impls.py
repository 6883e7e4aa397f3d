"""Who can run a case: ``fwd`` and ``fwd_cp`` of this package, and other packages where they are installed.

Other packages: fla's ``chunk_kda`` (https://github.com/fla-org/flash-linear-attention), the Hopper kernel of cuDNN's frontend
(https://github.com/NVIDIA/cudnn-frontend), and MoonshotAI's FlashKDA (https://github.com/MoonshotAI/FlashKDA) where it can be
imported beside this package, which has its name. Each is given the raw inputs and told to normalise, gate and squash itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from .. import api
from .._version import __version__
from ..constants import HEAD_DIM
from ..samples import TOKEN_TENSORS, Sample
from .suites import DENSE, FWD, FWD_CP, KNOWN

Call = Callable[[], tuple[Tensor, Tensor | None]]
"""``(out, final_state)``: out ``[B, T, H, V]`` of the problem, final_state ``[N, H, V, K]`` or None if not asked for."""

FLASHKDA_MODULE = "flash_kda_moonshot"
"""The name under which MoonshotAI's FlashKDA is looked for."""


@dataclass(frozen=True)
class Problem:
    """One call's inputs as they are handed over.

    Attributes:
        sample: ``[B, T, H, 128]`` if dense, else ``[1, T_total, H, 128]``.
        offsets: ``[N + 1]`` int64 on the device; None if dense.
        lengths: of the sequences, for those who may know them.
        impl: of this package's forward calls.
    """

    sample: Sample
    offsets: Tensor | None
    lengths: tuple[int, ...]
    impl: str
    layout: str

    @property
    def packed_offsets(self) -> Tensor:
        """Offsets also of a dense problem."""
        return _offsets(self.lengths, self.sample.q.device) if self.offsets is None else self.offsets

    def arguments(self, state: bool) -> dict[str, Any]:
        """Of ``fwd``, with outputs full of NaN."""
        q = self.sample.q
        shape = (len(self.lengths), q.shape[2], HEAD_DIM, HEAD_DIM)
        final_state = torch.full(shape, torch.nan, dtype=torch.float32, device=q.device) if state else None
        poisoned = {"out": torch.full_like(q, torch.nan), "final_state": final_state}
        return self.sample.arguments() | poisoned | {"cu_seqlens": self.offsets, "impl": self.impl}


def problem(sample: Sample, lengths: Sequence[int], layout: str, impl: str) -> Problem:
    """The tokens ``[1, T_total, H, 128]`` as sequences of these lengths, handed over as ``layout`` says; views."""
    if layout == DENSE:
        tokens = {name: getattr(sample, name)[0].unflatten(0, (len(lengths), lengths[0])) for name in TOKEN_TENSORS}
        return Problem(replace(sample, **tokens), None, tuple(lengths), impl, layout)
    return Problem(sample, _offsets(lengths, sample.q.device), tuple(lengths), impl, layout)


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device)


class Ours:
    """``fwd`` or ``fwd_cp``."""

    version = __version__

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, problem: Problem, *, state: bool = False, **options: Any) -> Call:
        """A call that writes into buffers of its own, full of NaN until then."""
        arguments = problem.arguments(state)
        if self.name == FWD:
            return lambda: api.fwd(**arguments)
        if problem.layout == KNOWN:
            options["cu_seqlens_cpu"] = problem.packed_offsets.cpu()

        def call() -> tuple[Tensor, Tensor | None]:
            returned = api.fwd_cp(**arguments, **options)
            return returned[0], returned[1]

        return call


FORWARD = {name: Ours(name) for name in (FWD, FWD_CP)}


class Fla:
    name = "fla.chunk_kda"

    def __init__(self) -> None:
        # Otherwise it would hand the call to whatever is called flash_kda: to us.
        os.environ["FLA_FLASH_KDA"] = "0"
        self.chunk_kda: Any = import_module("fla.ops.kda").chunk_kda
        self.version = metadata.version("fla-core")

    def prepare(self, problem: Problem, *, state: bool = False) -> Call:
        x = problem.sample
        arguments = {
            "q": x.q,
            "k": x.k,
            "v": x.v,
            "g": x.g,
            "beta": x.beta,
            "scale": x.scale,
            "A_log": x.A_log,
            "dt_bias": x.dt_bias.flatten(),
            "lower_bound": x.lower_bound,
            "safe_gate": True,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "output_final_state": state,
            "cu_seqlens": problem.offsets,
        }

        def call() -> tuple[Tensor, Tensor | None]:
            with torch.no_grad():
                out, final_state = self.chunk_kda(**arguments)
            return out, None if final_state is None else final_state.mT  # its states are K-first

        return call


class CudnnHopper:
    """g and beta are handed over in fp32, which its kernel reads: the conversion that it would make is not timed."""

    name = "cudnn.kda_hopper_cuda"

    def __init__(self) -> None:
        self.attention: Any = import_module("cudnn.linear_attention").kimi_delta_attention
        self.version = metadata.version("nvidia-cudnn-frontend")

    def prepare(self, problem: Problem, *, state: bool = False) -> Call:
        x = problem.sample
        q, k, v, g, beta = (tensor.flatten(0, 1) for tensor in (x.q, x.k, x.v, x.g.float(), x.beta.float()))
        offsets = problem.packed_offsets.int()
        arguments = {
            "scale": x.scale,
            "a_log": x.A_log,
            "dt_bias": x.dt_bias,
            "safe_gate": True,
            "gate_lower_bound": x.lower_bound,
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "output_final_state": state,
            "plan_name": "kda_hopper_cuda",
        }

        def call() -> tuple[Tensor, Tensor | None]:
            out, final_state = self.attention(q, k, v, g, beta, offsets, **arguments)
            return out.view_as(x.v), final_state if state else None

        return call


class FlashKDA:
    name = "FlashKDA"

    def __init__(self) -> None:
        module = import_module(FLASHKDA_MODULE)
        self.fwd: Any = module.fwd
        self.version = str(getattr(module, "__version__", "unknown"))

    def prepare(self, problem: Problem, *, state: bool = False) -> Call:
        arguments = problem.arguments(state)
        del arguments["impl"]

        def call() -> tuple[Tensor, Tensor | None]:
            self.fwd(**arguments)
            return arguments["out"], arguments["final_state"]

        return call


Peer = Fla | CudnnHopper | FlashKDA
PEERS: tuple[type[Peer], ...] = (Fla, CudnnHopper, FlashKDA)


def installed(device: torch.device) -> tuple[list[Peer], dict[str, str]]:
    """Other packages that can be imported here, and why the others cannot."""
    found: list[Peer] = []
    missing = {}
    for peer in PEERS:
        if device.type != "cuda":
            missing[peer.name] = f"needs a CUDA device, got {device}"
            continue
        try:
            found.append(peer())
        except Exception as error:  # whatever a foreign import raises is the reason
            missing[peer.name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return found, missing
