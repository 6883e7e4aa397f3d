"""Stand in for kernels where there is no GPU: one takes note of the arguments, one also computes, with the reference.

That one knows nothing but the arguments (flash_kda/sm90/kernels/forward.py documents them) and reads and writes memory through
their addresses, so a wrong stride, slot, flag or offset shows in the results.
"""

from __future__ import annotations

import ctypes
import itertools

import torch
from cases import D

from flash_kda.reference import Inputs, forward
from flash_kda.sm90.kernels import flags
from flash_kda.sm90.launch import Launched
from flash_kda.sm90.stages import FP32_GATE
from flash_kda.sm90.variants import VARIANTS

SIGNATURES = {v.name: v.signature for v in VARIANTS}


class KernelDouble:
    """What stages and programs ask of a kernel. ``launched`` gets each launch, whether it is repeated or not."""

    def __init__(self, name):
        self.name = name
        kinds = list(SIGNATURES[name].values())
        self.descriptors = sum(kind.startswith("tensordesc") for kind in kinds)
        self.pointers = {i for i, kind in enumerate(kinds) if kind.startswith("*")}

    def launched(self, grid, given, overlap, repeated):
        """One launch, its arguments by name."""
        raise NotImplementedError

    def launch(self, device, grid, *arguments, overlap=False, record=None):
        self._launched(grid, arguments, overlap, False)
        if record is not None:
            record.append(Launched(self, device, grid, arguments, overlap))

    def block(self, _device, views):
        return views

    def repeat(self, _device, grid, block, arguments, overlap):
        self._launched(grid, (*block, *arguments), overlap, True)

    def _launched(self, grid, arguments, overlap, repeated):
        self.launched(grid, dict(zip(SIGNATURES[self.name], arguments, strict=True)), overlap, repeated)


class Recorder(KernelDouble):
    """Computes nothing; ``launches`` collects the arguments of every launch by name, with ``kernel`` and ``grid``."""

    def __init__(self, name, launches):
        super().__init__(name)
        self.launches = launches

    def launched(self, grid, given, overlap, repeated):
        self.launches.append({"kernel": self.name, "grid": grid, "overlap": overlap, "repeated": repeated, **given})


def memory(address, dtype, shape, strides):
    """The tensor at an address, sharing its memory."""
    if not address or 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    elements = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    buffer = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)


def save(given, inputs, offsets, state):
    """Checkpoints: each by a run that stops there. Before the call itself, which may write over initial states."""
    heads, every, columns = given["heads"], given["every"], given["columns"]
    dtype = torch.bfloat16 if given["flags"] & flags.SAVED_BF16 else torch.float32
    shape, strides = (given["saved_rows"], heads, D, D), (given["saved_stride"], D * D, D, 1)
    saved = memory(given["saved_ptr"], dtype, shape, strides)
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if every:
            asked = [(begin // every + j - 1, j * every) for j in range(1, (end - begin) // every + 1)]
        else:
            words = memory(
                given["saved_at_ptr"], torch.int32, (n + 1, columns, 2), (given["saved_at_n"], given["saved_at_c"], 1)
            )
            at = [int(low) for low, _ in words[n].tolist()]
            if given["flags"] & flags.SAVED_AT_INT64:
                at = [low % 2**32 + (high << 32) for low, high in words[n].tolist()]
            asked = [(n * columns + c, tokens) for c, tokens in enumerate(at) if tokens > 0]
        for row, tokens in asked:
            if tokens % 16 or tokens > end - begin:
                saved[row] = torch.nan
                continue
            index = state["in_index"][n : n + 1] if "in_index" in state else torch.tensor([n])
            stop, scratch = torch.tensor([begin, begin + tokens]), torch.zeros(inputs.tokens, heads, D, dtype=torch.bfloat16)
            final = torch.zeros(1, heads, D, D)
            forward(
                inputs,
                stop,
                scratch,
                max_len=tokens,
                initial_state=state.get("initial_state"),
                in_index=index,
                final_state=final,
            )
            saved[row] = final[0].to(dtype)


class ForwardDouble(Recorder):
    """Also computes."""

    def launched(self, grid, given, overlap, repeated):
        super().launched(grid, given, overlap, repeated)
        has = given["flags"]
        assert not overlap
        assert given["n_slots"] == 0, "cutting inside the kernel is not emulated"
        heads, tokens, sequences = given["heads"], given["t_total"], given["n_seqs"]
        tensors = {}
        for name in "qkvg":
            address, shape, strides = given[f"{name}_desc"]
            assert shape[1] * (given["qk_group"] if name in "qk" else 1) == heads
            dtype = torch.float32 if name == "g" and self.name.endswith(FP32_GATE) else torch.bfloat16
            tensors[name] = memory(address, dtype, shape, strides)[:tokens]
        beta = torch.float32 if has & flags.BETA_FP32 else torch.bfloat16
        tensors["beta"] = memory(given["beta_ptr"], beta, (tokens, heads), (given["beta_t"], given["beta_h"]))
        out = memory(given["out_ptr"], torch.bfloat16, (tokens, heads, D), (given["out_t"], given["out_h"], 1))
        if given["seq_len"] >= 0:
            offsets = torch.arange(sequences + 1) * given["seq_len"]
        else:
            offsets = memory(given["cu_ptr"], torch.int32, (sequences + 1,), (given["cu_words"],)).long()
        state = {}
        for name, there, bf16, index, pointer, slots, stride in (
            ("initial_state", flags.HAS_INITIAL, flags.INITIAL_BF16, "in_index", "h0_ptr", "in_slots", "h0_stride"),
            ("final_state", flags.HAS_FINAL, flags.FINAL_BF16, "out_index", "ht_ptr", "out_slots", "ht_stride"),
        ):
            if has & there:
                dtype = torch.bfloat16 if has & bf16 else torch.float32
                shape, strides = (given[slots], heads, D, D), (given[stride], D * D, D, 1)
                state[name] = memory(given[pointer], dtype, shape, strides)
            if has & (flags.HAS_IN_INDEX if index == "in_index" else flags.HAS_OUT_INDEX):
                state[index] = memory(given[f"{index}_ptr"], torch.int32, (sequences,), (given[f"{index[:-5]}words"],))
        parameters = {
            "A_log": memory(given["a_log_ptr"], torch.float32, (heads,), (1,)) if has & flags.HAS_A_LOG else None,
            "dt_bias": memory(given["dt_ptr"], torch.float32, (heads, D), (D, 1)) if has & flags.HAS_DT_BIAS else None,
        }
        activated = bool(has & flags.BETA_ACTIVATED)
        numbers = {name: given[name] for name in ("lower_bound", "scale")}
        inputs = Inputs(**tensors, **parameters, **numbers, beta_is_activated=activated)
        assert self.name.startswith("forward_checkpoints") == bool(given["saved_ptr"])
        if given["saved_ptr"]:
            save(given, inputs, offsets.clamp(0, tokens).tolist(), state)
        packed = out.contiguous()
        forward(inputs, offsets.clamp(0, tokens), packed, max_len=tokens, **state)
        out.copy_(packed)
