"""Small ragged calls with states, split over V and not, and cut, for tools that watch every access:

compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/small_call.py
compute-sanitizer --tool racecheck python tests/gpu/small_call.py
"""

import torch

import flash_kda
from flash_kda import samples

lengths = (33, 0, 1, 164, 47)
for heads in (3, 60):  # two CTAs for an item, and one
    sample = samples.make("random", sum(lengths), heads, device="cuda")
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    state = torch.randn(len(lengths), heads, 128, 128, device="cuda")
    arguments = sample.arguments() | {"cu_seqlens": offsets, "initial_state": state}
    for call, options in ((flash_kda.fwd, {}), (flash_kda.fwd_cp, {"segment_len": 64})):
        out, final = call(**arguments, **options, output_final_state=True, impl="sm90")
        torch.cuda.synchronize()
        finite = bool(out.isfinite().all()) and final is not None and bool(final.isfinite().all())
        print(call.__name__, heads, "heads: finite" if finite else "heads: NaN or inf")
