"""Reading activations and writing results; every way in which a file can be bad gets its own sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import validation
from ..constants import CHUNK, HEAD_DIM
from ..plan import plan_segments
from ..samples import PARAMETERS, TOKEN_TENSORS, Sample
from .console import UserError

LAYOUTS = {
    "q": "[B,T,H,128]",
    "k": "[B,T,H,128]",
    "v": "[B,T,H,128]",
    "g": "[B,T,H,128]",
    "beta": "[B,T,H]",
    "A_log": "[H]",
    "dt_bias": "[H,128]",
}
OPTIONAL = ("initial_state", "cu_seqlens")


def read(path: Path, *, lower_bound: float, scale: float | None, cu_seqlens: str | None) -> Sample:
    """The sample in a safetensors file. Which names and dtypes it holds is checked here, the rest by :func:`check`.

    Raises:
        UserError: no such file, no safetensors file, a tensor missing.
    """
    tensors = _load(path)
    missing = [name for name in (*TOKEN_TENSORS, *PARAMETERS) if name not in tensors]
    if missing:
        wanted = ", ".join(f"{name} {LAYOUTS[name]}" for name in missing)
        there = ", ".join(f"{name} {list(x.shape)} {_dtype(x)}" for name, x in sorted(tensors.items())) or "no tensors"
        raise UserError(f"{path} must hold {wanted}, got {there}; the names are q, k, v, g, beta, A_log, dt_bias")
    known: dict[str, Any] = {name: tensors[name] for name in (*TOKEN_TENSORS, *PARAMETERS, *OPTIONAL) if name in tensors}
    if cu_seqlens is not None:
        known["cu_seqlens"] = parse_offsets(cu_seqlens)
    return Sample(**known, lower_bound=lower_bound, scale=HEAD_DIM**-0.5 if scale is None else scale)


def parse_offsets(text: str) -> Tensor:
    """``"0,100,300"`` as an int64 tensor."""
    try:
        return torch.tensor([int(part) for part in text.split(",")])
    except (ValueError, OverflowError):
        raise UserError(f'cu_seqlens must be whole numbers with commas between, like "0,100,300", got {text!r}') from None


def check(sample: Sample, origin: str, *, segment_len: int | None = None) -> None:
    """The contract of ``fwd_cp``, before work begins, and that there are tokens and that all of them are finite.

    Raises:
        UserError: names the tensor, what is expected and what was found.
    """
    x = sample
    try:
        validation.check_forward(
            x.q, x.k, x.v, x.g, x.beta, x.scale, None, x.A_log, x.dt_bias, x.lower_bound, x.initial_state, None, x.cu_seqlens
        )
        if segment_len is not None:
            plan_segments(torch.zeros(1, dtype=torch.int64), 0, 1, segment_len=segment_len)
    except TypeError as error:
        remedy = "; convert it before saving" if " must be " in str(error) and "got" in str(error) else ""
        raise UserError(f"{origin}: {error}{remedy}") from None
    except ValueError as error:
        raise UserError(f"{origin}: {error}") from None
    if sample.q.shape[0] * sample.q.shape[1] == 0:
        raise UserError(f"{origin}: q must hold at least one token, got shape {tuple(sample.q.shape)} of [B,T,H,K]")
    for name in (*TOKEN_TENSORS, *PARAMETERS, "initial_state"):
        tensor = getattr(sample, name)
        if tensor is None or bool(tensor.isfinite().all()):
            continue
        bad = (~tensor.isfinite()).nonzero()
        where = bad[0].tolist()
        raise UserError(
            f"{origin}: {name} must be finite, got {tensor[tuple(where)].item()} at {where} "
            f"({len(bad)} of {tensor.numel()} values are not finite)"
        )


def check_output(path: Path, source: Path | None) -> None:
    """That results can be written to ``path``, found out before the work rather than after."""
    if path.is_dir():
        raise UserError(f"output must be a file, got the folder {path}")
    if source is not None and path.exists() and path.samefile(source):
        raise UserError(f"output must not be the input, got {path} for both; choose another name")
    if not path.parent.is_dir():
        raise UserError(f"output must lie in a folder that exists, got {path}; create {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"output must lie in a writable folder, got {path}")


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """All of the file or nothing: under another name in the same folder, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file({name: x.contiguous().cpu() for name, x in tensors.items()}, temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"output could not be written to {path}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def whole_chunks(tokens: int) -> int:
    """Chunks that ``tokens`` tokens take, the last one possibly partial."""
    return -(-tokens // CHUNK)


def _load(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise UserError(f"{path} must be a safetensors file, got no such file")
    if path.is_dir():
        raise UserError(f"{path} must be a safetensors file, got a folder")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path} must be a safetensors file, got an empty file (0 bytes)")
        return load_file(path)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise UserError(
            f"{path} must be a safetensors file, got {path.stat().st_size} bytes that are not ({error}); "
            "save with safetensors.torch.save_file"
        ) from None
    except OSError as error:
        raise UserError(f"{path} must be readable, got {error.strerror or error}") from None


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
