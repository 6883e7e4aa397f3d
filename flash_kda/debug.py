"""What FLASH_KDA_DEBUG looks for: contents of device tensors, read on the host, and the offender named.

Everything here waits for the device, and cannot be used while a CUDA graph is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .constants import CHUNK

if TYPE_CHECKING:
    from .validation import Problem


def check_call(
    problem: Problem, initial_state: Tensor | None = None, final_state: Tensor | None = None, shared: bool = False
) -> None:
    """Slot indices, write strengths and finite inputs of a call; offsets have been checked.

    Args:
        problem: the call.
        initial_state, final_state: states or pools.
        shared: the two share memory.

    Raises:
        ValueError: names the argument, the value and its position. Nothing has been written.
    """
    inputs = problem.inputs
    if "bounds" in problem.debug:
        reads = _check_indices("initial_state", initial_state, problem.initial_state_indices)
        writes = _check_indices("final_state", final_state, problem.final_state_indices)
        _check_owners(problem.num_sequences, reads, writes, shared)
        if inputs.beta_is_activated:
            beta = _covered(problem, inputs.beta)
            outside = ~((beta >= 0) & (beta <= 2)) & beta.isfinite()
            if bool(outside.any()):
                at = outside.nonzero()[0].tolist()
                raise ValueError(f"beta must be in [0, 2] with beta_is_activated, got {beta[tuple(at)].item()} at {at}")
    if "finite" in problem.debug:
        # g first: where there is nothing else, the others are views of it.
        tokens = {"g": inputs.g, "q": inputs.q, "k": inputs.k, "v": inputs.v, "beta": inputs.beta}
        _check_finite({name: None if x is None else _covered(problem, x) for name, x in tokens.items()})
        _check_finite({"A_log": inputs.A_log, "dt_bias": inputs.dt_bias})
        _check_finite({"initial_state": initial_state}, rows=problem.initial_state_indices)


def check_checkpoints(problem: Problem) -> None:
    """Checkpoint offsets that are asked for are multiples of 16 and not beyond their sequences.

    Raises:
        ValueError: names the first that is not.
    """
    offsets = problem.checkpoint_offsets
    assert offsets is not None
    lengths = problem.offsets().diff().tolist()
    for n, row in enumerate((offsets if offsets.dim() == 2 else offsets[:, None]).tolist()):
        for c, offset in enumerate(row):
            at = [n] if offsets.dim() == 1 else [n, c]
            if offset > 0 and offset % CHUNK:
                raise ValueError(
                    f"checkpoint_offsets must be multiples of {CHUNK}, or 0 or less for none, got {offset} at {at}"
                )
            if offset > lengths[n]:
                raise ValueError(
                    f"checkpoint_offsets must lie within their sequences, got {offset} at {at} of {lengths[n]} tokens"
                )


def check_results(problem: Problem, out: Tensor, final_state: Tensor | None) -> None:
    """That the device has come through the call, and left finite outputs and states if ``finite`` was asked for.

    Raises:
        RuntimeError: the device reports an error.
        ValueError: names the first value that is not finite. The results are as they were computed.
    """
    if out.device.type == "cuda":
        torch.cuda.synchronize(out.device)
    if "finite" in problem.debug:
        _check_finite({"out": _covered(problem, out)})
        _check_finite({"final_state": final_state}, rows=problem.final_state_indices)


def _covered(problem: Problem, x: Tensor) -> Tensor:
    """The tokens that some sequence has."""
    return x if problem.cu_seqlens is None else x[:, : max(int(problem.cu_seqlens[-1]), 0)]


def _check_indices(name: str, state: Tensor | None, indices: Tensor | None) -> list[int] | None:
    """The slot of each sequence, or None where sequence n has row n."""
    if state is None or indices is None:
        return None
    slots = indices.tolist()
    for n, slot in enumerate(slots):
        if not -1 <= slot < state.shape[0]:
            raise ValueError(
                f"{name}_indices must be -1 or name one of the {state.shape[0]} slots of {name}, got {slot} at position {n}"
            )
    return slots


def _check_owners(sequences: int, reads: list[int] | None, writes: list[int] | None, shared: bool) -> None:
    """Each slot is written once, and not by one sequence while another reads it."""
    owner: dict[int, int] = {}
    for n, slot in enumerate(range(sequences) if writes is None else writes):
        if slot >= 0 and owner.setdefault(slot, n) != n:
            raise ValueError(f"final_state_indices must name a slot once, got {slot} at positions {owner[slot]} and {n}")
    if not shared or (reads is None and writes is None):
        return
    for n, slot in enumerate(range(sequences) if reads is None else reads):
        if slot >= 0 and owner.get(slot, n) != n:
            raise ValueError(
                f"final_state_indices must not name a slot that another sequence reads, got {slot} at position {owner[slot]}, "
                f"which sequence {n} reads"
            )


def _check_finite(tensors: dict[str, Tensor | None], rows: Tensor | None = None) -> None:
    """Every value is finite, in the rows that ``rows`` names if given."""
    for name, x in tensors.items():
        if x is None or (rows is None and bool(x.isfinite().all())):
            continue
        for row in [None] if rows is None else [r for r in rows.tolist() if 0 <= r < x.shape[0]]:
            part = x if row is None else x[row]
            if not bool(part.isfinite().all()):
                at = (~part.isfinite()).nonzero()[0].tolist()
                value = part[tuple(at)].item()
                where = at if row is None else [row, *at]
                raise ValueError(f"{name} must be finite, got {value} at {where} (FLASH_KDA_DEBUG)")
