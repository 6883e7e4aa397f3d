"""Reading activations and writing results; every way in which a file can be bad gets its own sentence."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from .streams import complain

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
MAX_NAMED = 8
"""Unknown tensors named one by one."""


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
    _warn_of_unknown(path, tensors)
    known: dict[str, Any] = {name: tensors[name] for name in (*TOKEN_TENSORS, *PARAMETERS, *OPTIONAL) if name in tensors}
    if cu_seqlens is not None:
        known["cu_seqlens"] = parse_offsets(cu_seqlens)
    return Sample(**known, lower_bound=lower_bound, scale=HEAD_DIM**-0.5 if scale is None else scale)


def parse_offsets(text: str) -> Tensor:
    """``"0,100,300"`` as an int64 tensor."""
    parts = [part.strip() for part in text.split(",")]
    # int() would also take "1_0", "+1" and digits of other scripts; 18 digits always fit into int64.
    if not all(re.fullmatch("[0-9]{1,18}", part) for part in parts):
        raise UserError(f'cu_seqlens must be whole numbers with commas between, like "0,100,300", got {text!r}')
    return torch.tensor([int(part) for part in parts])


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
    if sample.v.shape[2] != sample.heads:
        raise UserError(
            f"{origin}: v must have the H = {sample.heads} heads of q, got shape {tuple(sample.v.shape)}; "
            "the command line does not take grouped value heads"
        )
    if sample.q.shape[0] * sample.q.shape[1] == 0:
        raise UserError(f"{origin}: q must hold at least one token, got shape {tuple(sample.q.shape)} of [B,T,H,K]")
    if sample.cu_seqlens is not None and int(sample.cu_seqlens[-1]) == 0:
        raise UserError(f"{origin}: cu_seqlens must cover at least one token, got {sample.cu_seqlens.tolist()}")
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


def check_output(path: Path, source: Path | None, what: str = "output") -> Path:
    """The file that writing to ``path`` makes or replaces, past symbolic links; found out before the work rather than after.

    Args:
        path: as typed.
        source: the input, which must not be overwritten.
        what: the option.

    Raises:
        UserError: there is something other than a regular file, or no file can be made there.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        found = None
    except OSError as error:
        # Among them names that are too long, and links that lead round in circles.
        raise UserError(f"{what} must be a name that a file can have, got {path}: {error.strerror or error}") from None
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise UserError(f"{what} must be a file, got the folder {path}")
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise UserError(f"{what} must be a regular file or a new one, got {path}, which is {_kind(found.st_mode)}")
    if source is not None and found is not None and os.path.exists(source) and path.samefile(source):
        raise UserError(f"{what} must not be the input, got {path} for both; choose another name")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise UserError(f"{what} must lie in a folder that exists, got {path}; create {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise UserError(f"{what} must lie in a writable folder, got {path}")
    return target


@contextmanager
def replacing(path: Path, what: str) -> Iterator[Path]:
    """A new file in the folder of ``path`` to write to, that takes the name if all goes well: all of the file or nothing.

    Its name is its own and short, as a name made from another could be longer than the file system allows. What ``path`` is
    was checked before the work and is looked at again: renaming would put a file in the place of a device or a pipe.
    """
    target = check_output(path, None, what)
    temporary = target.with_name(f".{secrets.token_hex(6)}.part")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield temporary
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{what} could not be written to {path}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """All of the file or nothing."""
    with replacing(path, "output") as temporary:
        save_file({name: x.contiguous().cpu() for name, x in tensors.items()}, temporary)


def whole_chunks(tokens: int) -> int:
    """Chunks that ``tokens`` tokens take, the last one possibly partial."""
    return -(-tokens // CHUNK)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise UserError(f"{path} must be a safetensors file, got a folder")
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} must be a safetensors file, got {_kind(found.st_mode)}")
        if found.st_size == 0:
            raise UserError(f"{path} must be a safetensors file, got an empty file (0 bytes)")
        return load_file(path)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise UserError(
            f"{path} must be a safetensors file, got {found.st_size} bytes that are not ({error}); "
            "save with safetensors.torch.save_file"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} must be a safetensors file, got no such file") from None
    except OSError as error:
        raise UserError(f"{path} must be readable, got {error.strerror or error}") from None


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _kind(mode: int) -> str:
    """What a file is that is neither regular nor a folder."""
    if stat.S_ISFIFO(mode):
        return "a pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "no regular file"


def _warn_of_unknown(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A misspelt optional tensor would be missing without a word."""
    unknown = sorted(set(tensors) - {*LAYOUTS, *OPTIONAL})
    if unknown:
        names = ", ".join(ascii(name) for name in unknown[:MAX_NAMED])
        more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
        complain(f"warning: {path} holds tensors that are not used: {names}{more}; the optional ones are {', '.join(OPTIONAL)}")
