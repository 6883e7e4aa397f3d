"""Small kernels with known answers, to find out what compute-sanitizer's racecheck understands; `races.py` runs them.

They hand tiles on as the product's kernels do: `gl.warp_specialize`, partitions of one warp, a producer that loads by TMA and
stores beside it, prep warps that change a tile in place inside a noinline function, consumers of four warps, and the barriers
`rfull`, `half`, `full` and `empty` of forward.py. EARLY moves one access in front of the wait that orders it, and nothing
else: every barrier still completes, so that a wrong kernel ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

STEP_ROWS = gl.constexpr(32)
COLUMNS = gl.constexpr(64)
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
STAGES = gl.constexpr(2)

NEVER = gl.constexpr(0)
FULL = gl.constexpr(1)  # the consumers read before they wait for `full`
HALF = gl.constexpr(2)  # the second prep warp reads the first one's rows before it waits for `half`
EMPTY = gl.constexpr(3)  # the consumers read after they have arrived at `empty`


@gluon.jit
def warp_sync():
    """Order what the lanes of a warp do in shared memory before and after."""
    gl.inline_asm_elementwise("bar.warp.sync -1; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pair_reader(smem, out_ptr, steps, EARLY: gl.constexpr):
    vec_s, full, empty = smem
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, L)
    s = 0
    phase = 0
    for step in range(steps):
        if EARLY == FULL:
            x = vec_s.index(s).load(L)
            mbarrier.wait(full.index(s), phase)
        else:
            mbarrier.wait(full.index(s), phase)
            x = vec_s.index(s).load(L)
        mbarrier.arrive(empty.index(s), count=1)
        gl.store(out_ptr + step * 128 + at, x)
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1


@gluon.jit
def pair_writer(smem, steps):
    vec_s, full, empty = smem
    L: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    at = gl.arange(0, 128, L)
    s = 0
    phase = 1
    for step in range(steps):
        mbarrier.wait(empty.index(s), phase)
        vec_s.index(s).store((at + 1000 * step).to(gl.float32))
        mbarrier.arrive(full.index(s), count=1)
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1


@gluon.jit
def pair(out_ptr, steps, EARLY: gl.constexpr):
    """A warp writes 128 numbers a step, four other warps read them: out[step, i] = 1000 step + i."""
    vec_s = gl.allocate_shared_memory(gl.float32, [STAGES, 128], gl.NVMMASharedLayout(0, 32, 1))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(STAGES):
        mbarrier.init(full.index(j), count=1)
        mbarrier.init(empty.index(j), count=1)
    fence_async_shared()
    smem = (vec_s, full, empty)
    gl.warp_specialize([(pair_reader, (smem, out_ptr, steps, EARLY)), (pair_writer, (smem, steps))], [1], [64])


@gluon.jit
def block(out_ptr, steps, EARLY: gl.constexpr):
    """The same without partitions: four warps write, wait for each other at an mbarrier and read what others wrote."""
    vec_s = gl.allocate_shared_memory(gl.float32, [128], gl.NVMMASharedLayout(0, 32, 1))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    writer: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    reader: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, 128, writer)
    for step in range(steps):
        vec_s.store((at + 1000 * step).to(gl.float32))
        mbarrier.arrive(full, count=1)
        mbarrier.wait(full, step % 2)
        x = vec_s.load(reader)
        gl.store(out_ptr + step * 128 + gl.arange(0, 128, reader), x)


@gluon.jit
def relay_producer(x_desc, smem, steps):
    tile_s, vec_s, bars = smem
    rfull, half, full, empty = bars
    L: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    s = 0
    phase = 1
    for step in range(steps):
        bar = rfull.index(s)
        mbarrier.wait(empty.index(s), phase)
        mbarrier.expect(bar, 32 * 64 * 2)
        tma.async_copy_global_to_shared(x_desc, [step * 32, 0], bar, tile_s.index(s))
        vec_s.index(s).store(gl.full([64], 0.0, gl.float32, L) + step)
        mbarrier.arrive(bar, count=1)
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1


@gluon.jit(noinline=True)
def relay_tile(tile_s, rfull, half, s, phase, T: gl.constexpr, EARLY: gl.constexpr, SYNC: gl.constexpr):
    """Sixteen rows, in place: twice through shared memory in two layouts, so that lanes read what other lanes wrote."""
    A: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    B: gl.constexpr = gl.BlockedLayout([8, 2], [1, 32], [1, 1], [1, 0])
    mbarrier.wait(rfull, phase)
    rows = tile_s.index(s).slice(16 * T, 16)
    x = rows.load(A) + 1.0
    if SYNC:
        warp_sync()
    rows.store(x.to(gl.bfloat16))
    if SYNC:
        warp_sync()
    y = rows.load(B)
    if T == 1:
        if EARLY == HALF:
            first = tile_s.index(s).slice(0, 16).load(B)
            mbarrier.wait(half, phase)
        else:
            mbarrier.wait(half, phase)
            first = tile_s.index(s).slice(0, 16).load(B)
        y = y + first
    if SYNC:
        warp_sync()
    rows.store(y.to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def relay_prep(smem, steps, T: gl.constexpr, EARLY: gl.constexpr, SYNC: gl.constexpr):
    tile_s, vec_s, bars = smem
    rfull, half, full, empty = bars
    s = 0
    phase = 0
    for _step in range(steps):
        relay_tile(tile_s, rfull.index(s), half.index(s), s, phase, T, EARLY, SYNC)
        if T == 0:
            mbarrier.arrive(half.index(s), count=1)
        mbarrier.arrive(full.index(s), count=1)
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1


@gluon.jit
def relay_consumer(smem, out_ptr, steps, EARLY: gl.constexpr):
    tile_s, vec_s, bars = smem
    rfull, half, full, empty = bars
    L: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, 32, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    s = 0
    phase = 0
    for step in range(steps):
        if EARLY == FULL:
            x = tile_s.index(s).load(L).to(gl.float32)
            v = vec_s.index(s).load(gl.SliceLayout(0, L))
            mbarrier.wait(full.index(s), phase)
            mbarrier.arrive(empty.index(s), count=1)
        elif EARLY == EMPTY:
            mbarrier.wait(full.index(s), phase)
            mbarrier.arrive(empty.index(s), count=1)
            x = tile_s.index(s).load(L).to(gl.float32)
            v = vec_s.index(s).load(gl.SliceLayout(0, L))
        else:
            mbarrier.wait(full.index(s), phase)
            x = tile_s.index(s).load(L).to(gl.float32)
            v = vec_s.index(s).load(gl.SliceLayout(0, L))
            mbarrier.arrive(empty.index(s), count=1)
        gl.store(out_ptr + (step * 32 + row) * 64 + column, x + v[None, :])
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1


@gluon.jit
def relay(x_desc, out_ptr, steps, EARLY: gl.constexpr, SYNC: gl.constexpr):
    """x [32 steps, 64] -> out: rows 0-15 of a step x + 1 + step; rows 16-31 the same plus rows 0-15's x + 1."""
    tile_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 32, 64], BOX)
    vec_s = gl.allocate_shared_memory(gl.float32, [STAGES, 64], gl.NVMMASharedLayout(0, 32, 1))
    rfull = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    half = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(STAGES):
        mbarrier.init(rfull.index(j), count=2)
        mbarrier.init(half.index(j), count=1)
        mbarrier.init(full.index(j), count=2)
        mbarrier.init(empty.index(j), count=1)
    fence_async_shared()
    smem = (tile_s, vec_s, (rfull, half, full, empty))
    gl.warp_specialize(
        [
            (relay_consumer, (smem, out_ptr, steps, EARLY)),
            (relay_producer, (x_desc, smem, steps)),
            (relay_prep, (smem, steps, 0, EARLY, SYNC)),
            (relay_prep, (smem, steps, 1, EARLY, SYNC)),
        ],
        [1, 1, 1],
        [64, 64, 64],
    )
