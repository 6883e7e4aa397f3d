"""Chunk factors on Hopper: what the prep warps of the kernels do with a step of raw tokens in shared memory.

forward.py says what the factors are and how a stage of shared memory is laid out. With Q = False (summary.py) there is
no q and no Z, a stage is three tiles of [32, 128] for k, g and v, and a word says 2, or 0 once factors are no longer wanted,
which empties the loops that ask it for their trips.

G32: g is fp32 as it comes, twice the bytes. A [8, 64] block of bf16 m holds [8, 32] of it, so channels 0-31 lie where m of
0-63 will be, 32-63 where m of 64-127 will be, and the others outside: with q in places of their own behind the last stage,
without q in a fourth tile of the stage. The warp that makes m of channels 0-63 of some rows has read their first half of g by
then, and reads the second before it makes the rest. Products and bits are those of bf16 g of the same values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from . import flags as bits
from .segments import scalar

LOG2E = gl.constexpr(1.4426950408889634)
L2_EPS = gl.constexpr(1e-6)
# E carries 2^20: 16 tokens at lower_bound -5 span e^-80, so E is in 2^-96 .. 2^20 and 1/E in 2^-20 .. 2^96
SHIFT = gl.constexpr(20.0)
INV_SHIFT = gl.constexpr(2.0**-20)
P_SCALE = gl.constexpr(2.0**14)  # of P in summary.py, so that fp16 holds it where M is near the exit; unscaled it is at most 2

HAS_A_LOG = gl.constexpr(bits.HAS_A_LOG)
HAS_DT_BIAS = gl.constexpr(bits.HAS_DT_BIAS)


@gluon.jit
def ex2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def ex2_neg(x):
    """2^-x; the negation is free in the instruction."""
    return gl.inline_asm_elementwise(
        "{.reg .f32 t; neg.f32 t, $1; ex2.approx.ftz.f32 $0, t;}", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def rcp(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def split_bf16(f):
    """fp32 factors as two bf16 terms, for `mul_split`: the first truncated, so that nothing has to be unpacked."""
    bits = f.to(gl.int32, bitcast=True)
    hi = (bits & -65536).to(gl.float32, bitcast=True)
    return hi.to(gl.bfloat16), (f - hi).to(gl.bfloat16)


@gluon.jit
def mul_split(x, hi, lo):
    """bf16 x times hi + lo, rounded once: two packed instructions where unpacking to fp32 takes five."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t;}",
        "=r,r,r,r",
        [x, hi, lo],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def square(x):
    """bf16 squares, rounded."""
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $1;", "=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def to_fp32(x):
    """bf16 -> fp32, two instructions a pair (the compiler's own conversion takes three)."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b;}",
        "=f,=f,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def kept_here(x):
    """x; what is computed from it stays where it is written, and holds no register of the other partitions."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def warp_sync():
    """Order what the lanes of a warp did in shared memory before and after it.

    The compiler places such barriers, but not for shared memory that a noinline function is given.
    """
    gl.inline_asm_elementwise("bar.warp.sync -1; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def either(a, b):
    """Reduction of equal values."""
    return a


@gluon.jit
def gate_slope(a_log_ptr, dt_ptr, head, ch, flags):
    """-exp(A_log) log2(e) of a head, and that times dt_bias of channels `ch`: log alpha = bound / (1 + 2^(slope g + bias))."""
    dt = gl.load(dt_ptr + head * 128 + ch, mask=(ch >= 0) & ((flags & HAS_DT_BIAS) != 0), other=0.0)
    rate = 1.0
    if (flags & HAS_A_LOG) != 0:
        rate = ex2(gl.load(a_log_ptr + head) * LOG2E)
    # Kept away from inf and 0, so that no inf * 0, 0 * inf (a masked row) or inf - inf can arise, and cut to 16 bits:
    # products with bf16 values are then exact, and rate (g + dt_bias) in one fma is 0 where g = -dt_bias.
    rate = gl.minimum(gl.maximum(rate * LOG2E, 1e-30), 1e18)
    neg_rate = -((rate.to(gl.int32, bitcast=True) + 128) & -256).to(gl.float32, bitcast=True)
    return neg_rate, gl.minimum(gl.maximum(dt, -1e18), 1e18) * neg_rate


@gluon.jit(noinline=True)
def mask_tile(tile_s, block, valid, two, Q: gl.constexpr = True, G32: gl.constexpr = False):
    """Replace rows >= valid of the raw tile whose k starts at 8-row block `block`; q keeps them, and they stay in their rows.

    Run once a segment, it is seldom in the instruction cache: a small loop, not fast code.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    blocks = tile_s._reinterpret(gl.bfloat16, [tile_s.shape[0] * (32 if Q else 8), 8, 64], gl.NVMMASharedLayout(128, 16, 2))
    row = gl.arange(0, 8, gl.SliceLayout(1, L)).to(gl.float32)[:, None]
    # k, g, v and (G32, without q) the rest of g, two blocks each; q lies between k and g
    for i in range((4 if G32 and not Q else 3) * two):
        at = (4 * (i // 2 + gl.where(i >= 2, 1, 0)) if Q else 8 * (i // 2)) + i % 2
        rows = blocks.index(block + at)._reinterpret(gl.int32, [128 if Q else 32, 64], PAIRS).slice(0, 8)
        # -inf in g: decay 1. A tile without any token: zeros at once, since what is left there is Kr.
        if G32:
            fill = gl.where((i // 2 % 2 == 1) & (valid > 0.0), -0x00800000, 0)
        else:
            fill = gl.where((i // 2 == 1) & (valid > 0.0), -0x007F0080, 0)
        rows.store(gl.where(row + (8 * (i % 2)).to(gl.float32) < valid, rows.load(L), fill))
    warp_sync()


@gluon.jit(noinline=True)
def mask_gate(tile_s, block, valid, two):
    """The same of channels 64-127 of fp32 g at block `block`, where there is q."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0])
    row = gl.arange(0, 8, gl.SliceLayout(1, L)).to(gl.float32)[:, None]
    for i in range(two):
        rows = fp32_rows(tile_s, block + i, True)
        rows.store(gl.where(row + (8 * i).to(gl.float32) < valid, rows.load(L), float("-inf")))
    warp_sync()


@gluon.jit
def fp32_rows(tile_s, block, Q: gl.constexpr):
    """Eight rows of 64 fp32 channels: 32 in 8-row block `block`, 32 in the block one column panel behind it."""
    blocks = tile_s._reinterpret(gl.bfloat16, [tile_s.shape[0] * (32 if Q else 8), 8, 64], gl.NVMMASharedLayout(128, 16, 2))
    pairs = blocks.index(block)._reinterpret(gl.float32, [128 if Q else 32, 64], gl.NVMMASharedLayout(128, 32, 2))
    return pairs.slice(0, 8)


@gluon.jit
def transposed(x, L: gl.constexpr):
    """x^T in layout L, which must hold it in the same registers."""
    return gl.convert_layout(gl.permute(x, [1, 0]), L, assert_trivial=True)


@gluon.jit
def halves(x, L: gl.constexpr):
    """Left and right half of the columns, in layout L, which must hold them in the same registers."""
    left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
    return gl.convert_layout(left, L, assert_trivial=True), gl.convert_layout(right, L, assert_trivial=True)


@gluon.jit
def gate_rows(
    block, gate, bias, neg_rate, inv_bound, carry, total, X_L: gl.constexpr, Q: gl.constexpr = True, G32: gl.constexpr = False
):
    """d, z and m of eight tokens and 64 channels, in place; -> cumulative sum with SHIFT, and sum without.

    fp32 g is read from `gate`. m then lands where other lanes read from: all have read before any writes.
    """
    rows = block._reinterpret(gl.bfloat16, [128, 64], gl.NVMMASharedLayout(128, 16, 2))
    kh = rows.slice(0, 8)
    qh = rows.slice(32, 8)
    gh = rows.slice(64, 8)
    re = gl.arange(0, 8, gl.SliceLayout(1, X_L))[:, None]
    g = gate.load(X_L) if G32 else gh.load(X_L)
    k = kh.load(X_L)
    if Q:
        q = qh.load(X_L)
    if not G32:
        g = to_fp32(g)
    x = gl.fma(g, neg_rate, bias)
    lg = rcp(gl.fma(ex2(x), inv_bound, inv_bound))
    G = gl.associative_scan(gl.where(re == 0, lg + carry[None, :], lg), 0, add)
    carry = gl.sum(gl.where(re == 7, G, 0.0), 0)
    total += gl.sum(lg, 0)
    E = ex2(G)
    kf = to_fp32(k)
    warp_sync()
    kh.store((kf * E).to(gl.bfloat16))
    if Q:
        qh.store((to_fp32(q) * E).to(gl.bfloat16))
    gh.store((kf * ex2_neg(G)).to(gl.bfloat16))
    return carry, total


@gluon.jit
def two_products(blocks, row, row_m, two, zero, A_L: gl.constexpr, B_L: gl.constexpr, Q: gl.constexpr = True):
    """k m^T and (Q) q m^T of the tiles that start at 8-row blocks `row` and (m) `row_m`, 64 channels at a time."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    A = zero
    Z = zero
    for j in range(two):
        panel = blocks.index(row + (16 if Q else 4) * j)._reinterpret(gl.bfloat16, [128, 64], TILE)
        m = blocks.index(row_m + (16 if Q else 4) * j)._reinterpret(gl.bfloat16, [128, 64], TILE).slice(64, 16)
        b = m.permute([1, 0]).load(B_L)
        A = mma_v2(panel.slice(0, 16).load(A_L), b, A)
        if Q:
            Z = mma_v2(panel.slice(32, 16).load(A_L), b, Z)
    return A, Z


# One function for both tiles, with loops that stay loops: the hot code of all warps has to fit the instruction cache
# (two unrolled copies, 68 KB, cost three times the time of the arithmetic).
@gluon.jit
def tile_factors(tile_s, vec_s, t_s, loops_s, half, s, T, phase, two, Q: gl.constexpr = True, G32: gl.constexpr = False):
    """Factors of tile T (0 or 1) of the step in stage s, in place; one warp."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VEC: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    M2: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A_L: gl.constexpr = gl.DotOperandLayout(0, M2, 2)
    B_L: gl.constexpr = gl.DotOperandLayout(1, M2, 2)
    rm = gl.arange(0, 16, gl.SliceLayout(1, M2))[:, None]
    cm = gl.arange(0, 16, gl.SliceLayout(0, M2))[None, :]
    z16 = gl.zeros([16, 16], gl.float32, M2)
    # Views with a run-time first row: a stage is two column panels of sixteen 8-row blocks of [8, 64]; a block may be
    # looked at as the [128, 128] or [128, 64] tile that starts at it, of which only rows that exist are touched.
    blocks = tile_s._reinterpret(gl.bfloat16, [tile_s.shape[0] * (32 if Q else 8), 8, 64], TILE)
    STAGE: gl.constexpr = 32 if Q or G32 else 24  # blocks of a stage, and of a column panel
    PANEL: gl.constexpr = 16 if Q else 4
    SMALL: gl.constexpr = 6 if Q else 3  # [16, 16] matrices of a stage
    row0 = STAGE * s + 2 * T
    small0 = SMALL * s
    X_L: gl.constexpr = gl.BlockedLayout([8, 2], [1, 32], [1, 1], [1, 0])
    vec_64 = vec_s._reinterpret(gl.float32, [vec_s.shape[0] * 8, 64], VEC)
    vec_16 = vec_s._reinterpret(gl.float32, [vec_s.shape[0] * 32, 16], VEC)
    vec = vec_s.index(s)
    row_s = vec_16.index(32 * s + 24 + T)
    rk_s = vec_16.index(32 * s + 30 + T)
    valid = scalar(vec.slice(416, 1)) - 16.0 * T
    if valid < 16.0:
        mask_tile(tile_s, row0, valid, two, Q, G32)
    gate_row = row0 + 8  # block of g: channels 0-63, then (G32) 64-127
    gate_row2 = gate_row
    if G32:
        if Q:
            gate_row2 = STAGE * (tile_s.shape[0] - 1) + 4 * scalar(vec.slice(420, 1)).to(gl.int32) + 2 * T
            if valid < 16.0:
                mask_gate(tile_s, gate_row2, valid, two)
        else:
            gate_row2 = row0 + 24
    if Q:
        # |q|^2 on the tensor cores: squares times ones. A square's rounding is 2^-9 of it, of the sum an eleventh of that.
        ones = gl.full([64, 8], 1.0, gl.bfloat16, B_L)
        z8 = gl.zeros([16, 8], gl.float32, M2)
        q0 = blocks.index(row0)._reinterpret(gl.bfloat16, [128, 64], TILE).slice(32, 16).load(A_L)
        q1 = blocks.index(row0 + 16)._reinterpret(gl.bfloat16, [128, 64], TILE).slice(32, 16).load(A_L)
        Qn = mma_v2(square(q0), ones, z8) + mma_v2(square(q1), ones, z8)
    # gate, cumulative sum and exponentials: a lane owns its channels of all 16 tokens, eight tokens at a time
    neg_rate = scalar(vec.slice(417, 1))
    inv_bound = scalar(vec.slice(418, 1))
    if not Q:
        two = scalar(loops_s) & 2
    for j in range(two):
        bias = vec_64.index(8 * s + j).load(gl.SliceLayout(0, X_L))[None, :]
        carry = gl.full([64], SHIFT, gl.float32, gl.SliceLayout(0, X_L))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(0, X_L))
        for h in range(two):
            block = blocks.index(row0 + PANEL * j + h)
            gate = block
            if G32:
                gate = fp32_rows(tile_s, gl.where(j == 0, gate_row, gate_row2) + h, Q)
            carry, total = gate_rows(block, gate, bias, neg_rate, inv_bound, carry, total, X_L, Q, G32)
        # gamma, of a sum without SHIFT, whose rounding would bias slow decays over many tiles
        vec_64.index(8 * s + 2 + 2 * T + j).store(ex2(total))
    warp_sync()
    if not Q:
        two = scalar(loops_s) & 2
    A, Z = two_products(blocks, row0, row0, two, z16, A_L, B_L, Q)
    if Q:
        t_s.index(small0 + 3 + 2 * T).store(gl.where(rm >= cm, Z, 0.0).to(gl.bfloat16))
        # here, not where Qn is begun: the gate does not wait for it
        vec_16.index(32 * s + 28 + T).store(gl.rsqrt(gl.reduce(Qn, 1, either) + L2_EPS) * scalar(vec.slice(419, 1)))
    rk = gl.rsqrt(gl.sum(gl.where(rm == cm, A, 0.0), 1) + L2_EPS)
    rk_s.store(rk * INV_SHIFT)
    beta = row_s.load(gl.SliceLayout(1, M2))
    beta_col = row_s.load(gl.SliceLayout(0, M2))
    warp_sync()
    rkc = rk_s.load(gl.SliceLayout(0, M2)) * (1.0 / INV_SHIFT)
    # The inverse T = (I - N)^-1 by block substitution 1 -> 2 -> 4 -> 8 -> 16: bounded blocks, fp32 accumulation. An
    # accumulator is an A operand as it stands and its transpose a B operand, so T is kept together with its transpose.
    N = gl.where(rm > cm, A * (-rk)[:, None] * (beta_col * rkc)[None, :], 0.0)
    row_s.store(beta * rk * (1.0 / INV_SHIFT))
    Nt = gl.convert_layout(gl.permute(N, [1, 0]), M2)
    # fp16 where nothing leaves its range (entries of T, N are at most a write strength): T then errs hardly more than in fp32
    TYPE: gl.constexpr = t_s.dtype
    NB = transposed(Nt.to(TYPE), B_L)
    x = rm ^ cm
    xb = gl.arange(0, 16, gl.SliceLayout(1, B_L))[:, None] ^ gl.arange(0, 16, gl.SliceLayout(0, B_L))[None, :]
    inv = gl.where(x == 0, 1.0, gl.where(x == 1, N, 0.0))
    inv_t = gl.where(x == 0, 1.0, gl.where(x == 1, Nt, 0.0))
    zb = gl.zeros([16, 16], TYPE, B_L)
    for l in gl.static_range(1, 4):
        ib = inv.to(TYPE)
        itb = inv_t.to(TYPE)
        Y = mma_v2(gl.convert_layout(ib, A_L), gl.where((xb >> l) == 1, NB, zb), z16).to(TYPE)
        inv = mma_v2(gl.convert_layout(Y, A_L), transposed(itb, B_L), inv)
        if l < 3:
            inv_t = mma_v2(gl.convert_layout(itb, A_L), transposed(Y, B_L), inv_t)
    # T has a unit diagonal: rounding changes only what is off it. The factors of rows and columns stay in fp32, with the
    # consumers.
    TT = inv.to(TYPE)
    t_s.index(small0 + 2 * T).store(TT)
    if T == 1:
        mbarrier.wait(half, phase)
        L21, Z21 = two_products(blocks, row0, STAGE * s, two, z16, A_L, B_L, Q)
        if Q:
            t_s.index(small0 + 4).store(Z21.to(gl.bfloat16))
        row1 = vec_16.index(32 * s + 24).load(gl.SliceLayout(0, M2)) * INV_SHIFT
        C = (L21 * (-rk)[:, None] * row1[None, :]).to(TYPE)
        C = mma_v2(gl.convert_layout(TT, A_L), gl.convert_layout(C, B_L), z16).to(TYPE)
        C = mma_v2(gl.convert_layout(C, A_L), t_s.index(small0).load(B_L), z16)
        t_s.index(small0 + 1).store(C.to(TYPE))
    warp_sync()
    if not Q:
        two = scalar(loops_s) & 2
    for j in range(two):
        # m of the first tile becomes Kr1, z of the second Q, d of the second meets the state before the first one's decay;
        # the second tile's m meets it before its own decay does, and needs no factor
        hi, lo = split_bf16(vec_64.index(8 * s + 2 + j).load(gl.SliceLayout(0, X_L))[None, :].broadcast_to([8, 64]))
        for h in gl.static_range(2):
            scale_rows(blocks.index(STAGE * s + PANEL * j + 8 - 6 * T + h), hi, lo, X_L)
            if not Q:
                # d of normalised keys: M and H can then take one and the same rounding of P
                f = rk_s.slice(8 * h, 8).load(gl.SliceLayout(1, X_L)) * (1.0 / P_SCALE)
                rhi, rlo = split_bf16(f[:, None].broadcast_to([8, 64]))
                warp_sync()
                scale_rows(blocks.index(row0 + PANEL * j + h), rhi, rlo, X_L)
            elif T == 1:
                scale_rows(blocks.index(STAGE * s + PANEL * j + 6 + h), hi, lo, X_L)


@gluon.jit
def scale_rows(block, hi, lo, X_L: gl.constexpr):
    """Eight rows times a factor for each column, in place."""
    rows = block._reinterpret(gl.bfloat16, [128, 64], gl.NVMMASharedLayout(128, 16, 2)).slice(0, 8)
    x = rows.load(X_L)
    warp_sync()
    rows.store(mul_split(x, hi, lo))


@gluon.jit(noinline=True)
def skip_tile(tile_s, vec_s, t_s, s, two, Q: gl.constexpr = True, G32: gl.constexpr = False):
    """What the consumers need of a second tile without tokens: k, v, m and matrices of zeros, no decay.

    Z, Q and 1/|q| only reach outputs that nobody stores.
    """
    V: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    V1: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0])
    mask_tile(tile_s, (32 if Q or G32 else 24) * s + 2, 0.0, two, Q, G32)
    vec = vec_s.index(s)
    zero = gl.zeros([16], gl.float32, V1)
    vec.slice(400, 16).store(zero)
    vec.slice(496, 16).store(zero)
    vec.slice(256, 128).store(gl.full([128], 1.0, gl.float32, V))
    for i in range(two):
        t_s.index((6 if Q else 3) * s + 1 + i).store(gl.zeros([16, 16], t_s.dtype, L))


@gluon.jit(noinline=True)
def prep_turn(tile_s, vec_s, t_s, loops_s, rfull, half, s, T, phase, two, Q: gl.constexpr = True, G32: gl.constexpr = False):
    """Wait for stage s and do its tile T, if it has tokens: all that need not stand in the code of every warp."""
    mbarrier.wait(rfull, phase)
    left = scalar(vec_s.index(s).slice(416, 1))
    if not Q:  # noqa: SIM102  (a constant)
        if scalar(loops_s) == 0:
            left = -1.0
    if left > 16.0 * T:
        tile_factors(tile_s, vec_s, t_s, loops_s, half, s, T, phase, two, Q, G32)
    elif left > 0.0:
        skip_tile(tile_s, vec_s, t_s, s, two, Q)
    fence_async_shared()
    warp_sync()


@gluon.jit
def prep_warp(
    smem,
    loops_s,
    WID: gl.constexpr,
    NP: gl.constexpr,
    SP: gl.constexpr,
    LAG: gl.constexpr,
    Q: gl.constexpr = True,
    G32: gl.constexpr = False,
):
    """Turns WID, WID + NP, ...; even turns are first tiles in order, odd ones second tiles, LAG steps behind.

    The lag is there so that a second tile seldom has to wait for its first. NP is odd: first and second tiles alternate.
    """
    tile_s, vec_s, t_s, bars = smem
    rfull, half, full, empty = bars
    two = 2 + (gl.program_id(0) >> 30)  # 2, but the compiler cannot know and unroll
    FIRST: gl.constexpr = WID + NP if WID % 2 == 1 and WID // 2 < LAG else WID
    T = FIRST % 2 + (two - 2)
    s = FIRST // 2 - LAG * (FIRST % 2) + (two - 2)
    phase = two - 2
    left = 1.0
    while left > 0.0:
        prep_turn(tile_s, vec_s, t_s, loops_s, rfull.index(s), half.index(s), s, T, phase, two, Q, G32)
        left = scalar(vec_s.index(s).slice(416, 1))
        # Arrivals are the caller's: inside a noinline function no thread takes itself for the partition's first. At the
        # end mark they meet nobody.
        if T == 0:
            mbarrier.arrive(half.index(s), count=1)
        mbarrier.arrive(full.index(s), count=1)
        s += gl.where(T == 0, NP // 2 - LAG, NP // 2 + 1 + LAG)
        T ^= 1
        if s >= SP:
            s -= SP
            phase ^= 1
