"""A small kernel that uses everything a launch has to get right: y = bf16(x * scale + bias[head]) on [T, H, 128].

One CTA owns ROWS tokens of one head. It loads its tile by TMA into one shared buffer (64 KB, more than a kernel gets
without asking), changes it, stores it by TMA, and writes `first_row + tile` as int64 to marks[tile * n_heads + head].
One barrier: the load's arrival, waited for by all warps.
"""

from tile_shape import LANES, ROWS
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
TILE_ROWS = gl.constexpr(ROWS)
TILE_LANES = gl.constexpr(LANES)


@gluon.jit
def scale_tile(x_desc, y_desc, bias_ptr, marks_ptr, n_heads, first_row, scale, WITH_BIAS: gl.constexpr):
    tile = gl.program_id(0)
    head = gl.program_id(1)
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [2, 1, 16], [gl.num_warps(), 1, 1], [2, 1, 0])
    shared = gl.allocate_shared_memory(gl.bfloat16, [TILE_ROWS, 1, TILE_LANES], x_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    mbarrier.expect(arrived, TILE_ROWS * TILE_LANES * 2)
    tma.async_copy_global_to_shared(x_desc, [tile * TILE_ROWS, head, 0], arrived, shared)
    mbarrier.wait(arrived, 0)
    mbarrier.invalidate(arrived)
    y = shared.load(layout).to(gl.float32) * scale
    if WITH_BIAS:
        y += gl.load(bias_ptr + head)
    shared.store(y.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [tile * TILE_ROWS, head, 0], shared)
    gl.store(marks_ptr + tile * n_heads + head, first_row + tile)
    tma.store_wait(0)
