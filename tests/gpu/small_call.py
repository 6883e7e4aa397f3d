"""A small ragged call with states, for tools that watch every access:

compute-sanitizer --tool memcheck python tests/gpu/small_call.py
compute-sanitizer --tool racecheck python tests/gpu/small_call.py
"""

import torch

import flash_kda
from flash_kda import samples

lengths = (33, 0, 1, 64, 47)
sample = samples.make("random", sum(lengths), 3, device="cuda")
offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
state = torch.randn(len(lengths), 3, 128, 128, device="cuda")
out, final = flash_kda.fwd(
    **sample.arguments() | {"cu_seqlens": offsets, "initial_state": state}, output_final_state=True, impl="sm90"
)
torch.cuda.synchronize()
print("finite:", bool(out.isfinite().all()) and final is not None and bool(final.isfinite().all()))
