"""Fused KDA forward for Hopper: raw q, k, v, g, beta to outputs and final states in one launch.

A CTA owns one (segment, head) work item at a time, or one half of its V channels (VSPLIT = 2), and walks it in steps of
32 tokens, two 16-token tiles with their own anchors. With tile 1 the earlier and 2 the later one, d = k E, m = k / E,
z = q E (E = exp(G), G the cumulative sum of log alpha in the tile), gamma the last row of E, b = beta, and T the unit
lower triangular (I + tril(k^ E (k^ / E)^T, -1) diag(b))^-1 of the normalised keys k^ = k / |k|:

    W1 = b T1 d1                                U1 = b T1 v1            Kr1 = m1 gamma1
    W2 = b (T2 d2 gamma1 - C W1)                U2 = b (T2 v2 - C U1)   C = T2 (d2 Kr1^T)
    Q = [z1; z2 gamma1]                         Z = [[tril(z1 m1^T), 0], [z2 Kr1^T, tril(z2 m2^T)]]
    R = U - W S      out = Q S + Z R      S <- gamma2 (gamma1 S + [Kr1; m2]^T R)

Every exponent but the one of m is <= 0, and the one of m is at most 16 |lower_bound|. E carries a common factor
2^SHIFT that cancels in every product: it keeps m of large raw keys, and d of small ones, inside the range of bf16.
Keys and queries are never normalised: |k|^2 is the diagonal of d m^T, and powers of 1/|k| on the 16 x 16 matrices make R
come out as R/|k|, so that m and Kr need none; 1/|q|, the scale and 2^-SHIFT multiply the outputs.

Warp roles
    consumers   4 warps for each 64 V channels: the state St[v, k], fp32, lives in their wgmma accumulators
    producer    1 warp: TMA of the raw tiles, SP steps deep
    prep        NP warps: warp w takes tiles w, w + NP, ... of the CTA's running tile count; NP is odd, so each warp
                alternates first and second tiles

Shared memory, for each of SP stages (factors replace raw inputs in place)
    tile [128, 128] bf16   rows 0-31 k, then d, then W; 32-63 q, then z, then Q (with W one N = 64 wgmma operand);
                           64-95 g, then m, the first 16 then Kr1; 96-127 v, then U (VSPLIT = 2: columns 0-63 only)
    vec [512] fp32         0-127 dt_bias META[1], then gamma1 2^-SHIFT; 128-255 gamma1; 256-383 gamma2 2^SHIFT;
                           384-415 beta; 448-479 scale 2^-SHIFT / |q|; 416-419 META: tokens left,
                           -exp(A_log) log2(e), 1 / (lower_bound log2(e)), scale 2^-SHIFT
    z [32, 32] bf16        Z; its upper right quadrant is zeroed once
and rk [NP, 16] (1/|k|, private to a prep warp), out [32, 128 / VSPLIT] bf16, and the stride of the loop over items.

Barriers, for each stage
    rfull  the producer: TMA bytes, and its own arrival for `vec` or the end mark
    half   prep of the first tile, to prep of the second: Kr1, W1, U1 and gamma1 are there
    full   both prep warps, to the consumers: all factors are there
    empty  the consumers, to the producer: the stage may be overwritten
The producer alone tells prep what to do: a prep warp keeps nothing but its tile count across tiles, because registers
that live across the call into `prep_tile` are registers that it cannot use.

Rows past the end of a segment may hold a neighbour's tokens. Before anything reads them they are replaced, by selection:
zeros in k, q, v and -inf in g, which makes their decay exactly 1. They are never stored.

Ranges: the promises hold for |k| up to 6e9 and |q|, |v| up to about 1e30; beyond, a token may overflow into its step.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait)

from . import flags as bits

LOG2E = gl.constexpr(1.4426950408889634)
L2_EPS = gl.constexpr(1e-6)
# E carries 2^20: 16 tokens at lower_bound -5 span e^-80, so E is in 2^-96 .. 2^20 and 1/E in 2^-20 .. 2^96
SHIFT = gl.constexpr(20.0)
INV_SHIFT = gl.constexpr(2.0 ** -20)

STEP = gl.constexpr(32)             # tokens a step: two tiles
BOX_CHANNELS = gl.constexpr(64)     # channels of a TMA box: a 128-byte swizzle holds no more
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))

HAS_INITIAL = gl.constexpr(bits.HAS_INITIAL)
INITIAL_BF16 = gl.constexpr(bits.INITIAL_BF16)
HAS_IN_INDEX = gl.constexpr(bits.HAS_IN_INDEX)
HAS_FINAL = gl.constexpr(bits.HAS_FINAL)
FINAL_BF16 = gl.constexpr(bits.FINAL_BF16)
HAS_OUT_INDEX = gl.constexpr(bits.HAS_OUT_INDEX)
HAS_A_LOG = gl.constexpr(bits.HAS_A_LOG)
HAS_DT_BIAS = gl.constexpr(bits.HAS_DT_BIAS)


@gluon.jit
def ex2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def ex2_neg(x):
    """2^-x; the negation is free in the instruction."""
    return gl.inline_asm_elementwise("{.reg .f32 t; neg.f32 t, $1; ex2.approx.ftz.f32 $0, t;}", "=f,f", [x],
                                     dtype=gl.float32, is_pure=True, pack=1)


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
        "{.reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t;}", "=r,r,r,r", [x, hi, lo],
        dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def square(x):
    """bf16 squares, rounded."""
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $1;", "=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def to_fp32(x):
    """bf16 -> fp32, two instructions a pair (the compiler's own conversion takes three)."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b;}",
        "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def kept_here(x):
    """x; what is computed from it stays where it is written, and holds no register of the other partitions."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def either(a, b):
    """Reduction of equal values."""
    return a


@gluon.jit
def segment_bounds(cu_ptr, segment, seq_len, cu_words, t_total):
    """First token and length of a segment: cu_seqlens (int32, or the low words of int64), or dense if seq_len >= 0."""
    begin = segment * seq_len
    end = begin + seq_len
    if seq_len < 0:
        begin = gl.load(cu_ptr + segment * cu_words)
        end = gl.load(cu_ptr + (segment + 1) * cu_words)
    end = gl.minimum(end, t_total)
    begin = gl.maximum(gl.minimum(begin, end), 0)
    return begin, end - begin


@gluon.jit
def state_slot(index_ptr, segment, has_index, n_slots):
    """Slot of a segment in a state buffer; negative: none."""
    slot = segment
    if has_index != 0:
        slot = gl.load(index_ptr + segment)
    return gl.where(slot < n_slots, slot, -1)


@gluon.jit
def scalar(mem):
    """The value of a one-element shared-memory view."""
    return gl.sum(mem.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit(noinline=True)
def mask_tile(tile, valid):
    """Replace rows >= valid of the raw tile that starts a view of bf16 pairs; once a segment, so a function of its own."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0])
    keep = (gl.arange(0, 16, gl.SliceLayout(1, L)) < valid)[:, None]
    zero = gl.zeros([16, 64], gl.int32, L)
    # -inf in g: decay 1. A tile without any token: zeros at once, since what is left there is Kr.
    none = zero + gl.where(valid > 0.0, -0x007f0080, 0)
    for i in gl.static_range(4):
        rows = tile.slice(32 * i, 16)
        if i == 2:
            rows.store(gl.where(keep, rows.load(L), none))
        else:
            rows.store(gl.where(keep, rows.load(L), zero))


@gluon.jit
def transposed(x, L: gl.constexpr):
    """x^T in layout L, which must hold it in the same registers."""
    return gl.convert_layout(gl.permute(x, [1, 0]), L, assert_trivial=True)


@gluon.jit
def gate_rows(block, bias, neg_rate, inv_bound, carry, total, X_L: gl.constexpr):
    """d, z and m of eight tokens and 64 channels, in place; -> cumulative sum with SHIFT, and sum without."""
    rows = block._reinterpret(gl.bfloat16, [128, 64], gl.NVMMASharedLayout(128, 16, 2))
    kh = rows.slice(0, 8)
    qh = rows.slice(32, 8)
    gh = rows.slice(64, 8)
    re = gl.arange(0, 8, gl.SliceLayout(1, X_L))[:, None]
    g = gh.load(X_L)
    k = kh.load(X_L)
    q = qh.load(X_L)
    x = gl.fma(to_fp32(g), neg_rate, bias)
    lg = rcp(gl.fma(ex2(x), inv_bound, inv_bound))
    G = gl.associative_scan(gl.where(re == 0, lg + carry[None, :], lg), 0, add)
    carry = gl.sum(gl.where(re == 7, G, 0.0), 0)
    total += gl.sum(lg, 0)
    E = ex2(G)
    kf = to_fp32(k)
    kh.store((kf * E).to(gl.bfloat16))
    qh.store((to_fp32(q) * E).to(gl.bfloat16))
    gh.store((kf * ex2_neg(G)).to(gl.bfloat16))
    return carry, total


@gluon.jit
def two_products(blocks, row, row_m, two, zero, A_L: gl.constexpr, B_L: gl.constexpr):
    """k m^T and q m^T of the tiles that start at 8-row blocks `row` and (m) `row_m`, 64 channels at a time."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    A = zero
    Z = zero
    for j in range(two):
        panel = blocks.index(row + 16 * j)._reinterpret(gl.bfloat16, [128, 64], TILE)
        m = blocks.index(row_m + 16 * j)._reinterpret(gl.bfloat16, [128, 64], TILE).slice(64, 16)
        b = m.permute([1, 0]).load(B_L)
        A = mma_v2(panel.slice(0, 16).load(A_L), b, A)
        Z = mma_v2(panel.slice(32, 16).load(A_L), b, Z)
    return A, Z


# One function for both tiles, with loops that stay loops: the hot code of all warps has to fit the instruction cache
# (two unrolled copies, 68 KB, cost three times the time of the arithmetic).
@gluon.jit(noinline=True)
def prep_tile(tile_s, vec_s, z_s, rk_s, half, s, T, phase, two, VC: gl.constexpr):
    """Factors of tile T (0 or 1) of the step in stage s, in place; one warp."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    VEC: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    M2: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A_L: gl.constexpr = gl.DotOperandLayout(0, M2, 2)
    B_L: gl.constexpr = gl.DotOperandLayout(1, M2, 2)
    rm = gl.arange(0, 16, gl.SliceLayout(1, M2))[:, None]
    cm = gl.arange(0, 16, gl.SliceLayout(0, M2))[None, :]
    z16 = gl.zeros([16, 16], gl.float32, M2)
    # Views with a run-time first row: a stage is two column panels of sixteen 8-row blocks of [8, 64]; a block may be
    # looked at as the [128, 128] or [128, 64] tile that starts at it, of which only rows that exist are touched.
    blocks = tile_s._reinterpret(gl.bfloat16, [tile_s.shape[0] * 32, 8, 64], TILE)
    row0 = 32 * s + 2 * T
    X_L: gl.constexpr = gl.BlockedLayout([8, 2], [1, 32], [1, 1], [1, 0])
    vec_64 = vec_s._reinterpret(gl.float32, [vec_s.shape[0] * 8, 64], VEC)
    vec_16 = vec_s._reinterpret(gl.float32, [vec_s.shape[0] * 32, 16], VEC)
    vec = vec_s.index(s)
    row_s = vec_16.index(32 * s + 24 + T)
    z_b = z_s._reinterpret(gl.bfloat16, [z_s.shape[0] * 4, 16, 16], gl.NVMMASharedLayout(32, 16, 2))
    valid = scalar(vec.slice(416, 1)) - 16.0 * T
    if valid < 16.0:
        mask_tile(blocks.index(row0)._reinterpret(gl.int32, [128, 64], PAIRS), valid)
    beta = row_s.load(gl.SliceLayout(1, M2))
    beta_col = row_s.load(gl.SliceLayout(0, M2))
    # |q|^2 on the tensor cores: squares times ones. A square's rounding is 2^-9 of it, of the sum an eleventh of that.
    ones = gl.full([64, 8], 1.0, gl.bfloat16, B_L)
    z8 = gl.zeros([16, 8], gl.float32, M2)
    q0 = blocks.index(row0)._reinterpret(gl.bfloat16, [128, 64], TILE).slice(32, 16).load(A_L)
    q1 = blocks.index(row0 + 16)._reinterpret(gl.bfloat16, [128, 64], TILE).slice(32, 16).load(A_L)
    Qn = mma_v2(square(q0), ones, z8) + mma_v2(square(q1), ones, z8)
    vec_16.index(32 * s + 28 + T).store(gl.rsqrt(gl.reduce(Qn, 1, either) + L2_EPS) * scalar(vec.slice(419, 1)))
    # gate, cumulative sum and exponentials: a lane owns its channels of all 16 tokens, eight tokens at a time
    neg_rate = scalar(vec.slice(417, 1))
    inv_bound = scalar(vec.slice(418, 1))
    gamma_scale = gl.where(T == 0, 1.0, 1.0 / INV_SHIFT)
    for j in range(two):
        bias = vec_64.index(8 * s + j).load(gl.SliceLayout(0, X_L))[None, :]
        carry = gl.full([64], SHIFT, gl.float32, gl.SliceLayout(0, X_L))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(0, X_L))
        for h in range(two):
            carry, total = gate_rows(blocks.index(row0 + 16 * j + h), bias, neg_rate, inv_bound, carry, total, X_L)
        # gamma1, or gamma2 2^SHIFT; of a sum without SHIFT, whose rounding would bias slow decays over many tiles
        vec_64.index(8 * s + 2 + 2 * T + j).store(ex2(total) * gamma_scale)
    A, Z = two_products(blocks, row0, row0, two, z16, A_L, B_L)
    z_b.index(4 * s + 3 * T).store(gl.where(rm >= cm, Z * (1.0 / INV_SHIFT), 0.0).to(gl.bfloat16))
    rk = gl.rsqrt(gl.sum(gl.where(rm == cm, A, 0.0), 1) + L2_EPS)
    rk_s.store(rk)
    rkc = rk_s.load(gl.SliceLayout(0, M2))
    # The inverse T = (I - N)^-1 by block substitution 1 -> 2 -> 4 -> 8 -> 16: bounded blocks, fp32 accumulation. An
    # accumulator is an A operand as it stands and its transpose a B operand, so T is kept together with its transpose.
    N = gl.where(rm > cm, A * (-rk)[:, None] * (beta_col * rkc)[None, :], 0.0)
    Nt = gl.convert_layout(gl.permute(N, [1, 0]), M2)
    NB = transposed(Nt.to(gl.bfloat16), B_L)
    x = rm ^ cm
    xb = gl.arange(0, 16, gl.SliceLayout(1, B_L))[:, None] ^ gl.arange(0, 16, gl.SliceLayout(0, B_L))[None, :]
    inv = gl.where(x == 0, 1.0, gl.where(x == 1, N, 0.0))
    inv_t = gl.where(x == 0, 1.0, gl.where(x == 1, Nt, 0.0))
    zb = gl.zeros([16, 16], gl.bfloat16, B_L)
    for l in gl.static_range(1, 4):
        ib = inv.to(gl.bfloat16)
        itb = inv_t.to(gl.bfloat16)
        Y = mma_v2(gl.convert_layout(ib, A_L), gl.where((xb >> l) == 1, NB, zb), z16).to(gl.bfloat16)
        inv = mma_v2(gl.convert_layout(Y, A_L), transposed(itb, B_L), inv)
        if l < 3:
            inv_t = mma_v2(gl.convert_layout(itb, A_L), transposed(Y, B_L), inv_t)
    # T has a unit diagonal, so U takes it before beta / |k|, its row factor: bf16 rounds only what is off the diagonal
    row = beta * rk
    TU = gl.convert_layout(inv.to(gl.bfloat16), A_L)
    TW = gl.convert_layout((inv * row[:, None] * (rkc * INV_SHIFT)[None, :]).to(gl.bfloat16), A_L)
    CU = gl.zeros([16, 16], gl.bfloat16, A_L)
    CW = CU
    if T == 1:
        mbarrier.wait(half, phase)
        L21, Z21 = two_products(blocks, row0, 32 * s, two, z16, A_L, B_L)
        z_b.index(4 * s + 1).store((Z21 * (1.0 / INV_SHIFT)).to(gl.bfloat16))
        C = mma_v2(TU, gl.convert_layout((L21 * (-rk)[:, None]).to(gl.bfloat16), B_L), z16)
        CU = gl.convert_layout(C.to(gl.bfloat16), A_L)
        CW = gl.convert_layout((C * row[:, None]).to(gl.bfloat16), A_L)
    zero = gl.zeros([16, 64], gl.float32, M2)
    for j in range(two):
        panel = blocks.index(row0 + 16 * j)._reinterpret(gl.bfloat16, [128, 64], TILE)
        tile1 = blocks.index(32 * s + 16 * j)._reinterpret(gl.bfloat16, [128, 64], TILE)
        # m of the first tile becomes Kr1, z of the second Q; the second tile's m meets the state before its own decay
        # does, and needs no factor
        gamma1 = vec_64.index(8 * s + 2 + j)
        f = gamma1.load(gl.SliceLayout(0, X_L))
        if T == 1:
            vec_64.index(8 * s + j).store(f * INV_SHIFT)
        hi, lo = split_bf16(f[None, :].broadcast_to([8, 64]))
        for h in gl.static_range(2):
            rows = blocks.index(32 * s + 16 * j + 8 - 2 * T + h)._reinterpret(gl.bfloat16, [128, 64], TILE).slice(0, 8)
            rows.store(mul_split(rows.load(X_L), hi, lo))
        kj = panel.slice(0, 16)
        W = mma_v2(TW, kj.load(B_L), zero)
        if T == 1:
            W = W * gamma1.load(gl.SliceLayout(0, M2))[None, :]
            W = mma_v2(CW, tile1.slice(0, 16).load(B_L), W)
        kj.store(W.to(gl.bfloat16))
        if 64 * j < VC:
            vj = panel.slice(96, 16)
            U = mma_v2(TU, vj.load(B_L), zero)
            if T == 1:
                U = mma_v2(CU, tile1.slice(96, 16).load(B_L), U)
            vj.store((U * row[:, None]).to(gl.bfloat16))


@gluon.jit(noinline=True)
def skip_tile(tile_s, vec_s, z_s, half, s, phase):
    """Factors of a second tile without tokens: zeros, and the first tile's decay."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    L: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [1, 1], [1, 0])
    V: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    blocks = tile_s._reinterpret(gl.bfloat16, [tile_s.shape[0] * 32, 8, 64], TILE)
    mask_tile(blocks.index(32 * s + 2)._reinterpret(gl.int32, [128, 64], PAIRS), 0.0)
    z = z_s.index(s).slice(16, 16)
    zero = gl.zeros([16, 16], gl.bfloat16, L)
    z.slice(0, 16, dim=1).store(zero)
    z.slice(16, 16, dim=1).store(zero)
    vec = vec_s.index(s)
    vec.slice(464, 16).store(gl.zeros([16], gl.float32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.wait(half, phase)
    vec.slice(0, 128).store(vec.slice(128, 128).load(V) * INV_SHIFT)
    vec.slice(256, 128).store(gl.full([128], 1.0 / INV_SHIFT, gl.float32, V))


@gluon.jit
def prep_warp(smem, WID: gl.constexpr, NP: gl.constexpr, SP: gl.constexpr, VSPLIT: gl.constexpr, LAG: gl.constexpr):
    """Turns WID, WID + NP, ...; even turns are first tiles in order, odd ones second tiles, LAG steps behind.

    The lag is there so that a second tile seldom has to wait for its first. NP is odd: first and second tiles alternate.
    """
    tile_s, vec_s, z_s, rk_s, bars = smem
    rfull, half, full, empty = bars
    two = 2 + (gl.program_id(0) >> 30)    # 2, but the compiler cannot know and unroll
    FIRST: gl.constexpr = WID + NP if WID % 2 == 1 and WID // 2 < LAG else WID
    T = FIRST % 2 + (two - 2)
    s = FIRST // 2 - LAG * (FIRST % 2) + (two - 2)
    phase = two - 2
    mbarrier.wait(rfull.index(s), phase)
    left = scalar(vec_s.index(s).slice(416, 1))
    while left > 0.0:
        if left > 16.0 * T:
            prep_tile(tile_s, vec_s, z_s, rk_s.index(WID), half.index(s), s, T, phase, two, 128 // VSPLIT)
        else:
            skip_tile(tile_s, vec_s, z_s, half.index(s), s, phase)
        fence_async_shared()
        # arrivals are the caller's: inside a noinline function no thread takes itself for the partition's first
        if T == 0:
            mbarrier.arrive(half.index(s), count=1)
        mbarrier.arrive(full.index(s), count=1)
        s += gl.where(T == 0, NP // 2 - LAG, NP // 2 + 1 + LAG)
        T ^= 1
        if s >= SP:
            s -= SP
            phase ^= 1
        mbarrier.wait(rfull.index(s), phase)
        left = scalar(vec_s.index(s).slice(416, 1))


@gluon.jit
def producer_warp(work, smem, q_desc, k_desc, v_desc, g_desc, params, NP: gl.constexpr, SP: gl.constexpr,
                  VSPLIT: gl.constexpr, LAG: gl.constexpr):
    """Fill stages item by item, then mark enough stages as the end that every prep warp meets one."""
    cu_ptr, heads, n_items, ctas_s, t_total, seq_len, cu_words, flags = work
    tile_s, vec_s, z_s, rk_s, bars = smem
    rfull, half, full, empty = bars
    beta_ptr, a_log_ptr, dt_ptr, beta_t, beta_h, lower_bound, scale, qk_group = params
    # a [128, 128] tile as the eight [32, 64] swizzled boxes that TMA writes
    boxes = tile_s._reinterpret(gl.bfloat16, [8 * SP, 32, 1, 64], gl.NVMMASharedLayout(128, 16, 3))
    V1: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    V4: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    lane = gl.arange(0, 32, V1)
    ch = gl.arange(0, 128, V4)
    field = gl.arange(0, 4, V1)
    part = gl.program_id(0) % VSPLIT
    # log2(alpha) = bound / (1 + 2^x), written 1 / (inv + inv 2^x); a bound of 0 becomes one too small to matter
    inv_bound = 1.0 / (gl.minimum(kept_here(lower_bound), -1e-30) * LOG2E)
    scale = kept_here(scale)
    s = 0
    phase = 1
    for item in range(gl.program_id(0) // VSPLIT, n_items, scalar(ctas_s)):
        segment = item // heads
        head = item % heads
        qk_head = head // qk_group
        begin, length = segment_bounds(cu_ptr, segment, seq_len, cu_words, t_total)
        dt = gl.load(dt_ptr + head * 128 + ch, mask=(ch >= 0) & ((flags & HAS_DT_BIAS) != 0), other=0.0)
        rate = 1.0
        if (flags & HAS_A_LOG) != 0:
            rate = ex2(gl.load(a_log_ptr + head) * LOG2E)
        # Kept away from inf and 0, so that no inf * 0, 0 * inf (a masked row) or inf - inf can arise, and cut to 16 bits:
        # products with bf16 values are then exact, and rate (g + dt_bias) in one fma is 0 where g = -dt_bias.
        rate = gl.minimum(gl.maximum(rate * LOG2E, 1e-30), 1e18)
        neg_rate = -((rate.to(gl.int32, bitcast=True) + 128) & -256).to(gl.float32, bitcast=True)
        bias = gl.minimum(gl.maximum(dt, -1e18), 1e18) * neg_rate
        meta = gl.where(field == 1, neg_rate, gl.where(field == 2, inv_bound, scale * INV_SHIFT))
        beta_head = beta_ptr + head.to(gl.int64) * beta_h
        for left in range(length, 0, -32):
            t = begin + (length - left)
            logit = gl.load(beta_head + (t + lane).to(gl.int64) * beta_t, mask=lane < left, other=0.0).to(gl.float32)
            bar = rfull.index(s)
            mbarrier.wait(empty.index(s), phase)
            mbarrier.expect(bar, 32 * 256 * 3 + 32 * 256 // VSPLIT)
            for j in gl.static_range(2):
                tma.async_copy_global_to_shared(g_desc, [t, head, 64 * j], bar, boxes.index(8 * s + 4 * j + 2))
                tma.async_copy_global_to_shared(q_desc, [t, qk_head, 64 * j], bar, boxes.index(8 * s + 4 * j + 1))
                tma.async_copy_global_to_shared(k_desc, [t, qk_head, 64 * j], bar, boxes.index(8 * s + 4 * j))
                if j < 2 // VSPLIT:
                    tma.async_copy_global_to_shared(v_desc, [t, head, 64 * (part + j)], bar,
                                                    boxes.index(8 * s + 4 * j + 3))
            vec = vec_s.index(s)
            vec.slice(0, 128).store(bias)
            vec.slice(384, 32).store(rcp(1.0 + ex2(logit * -LOG2E)))
            vec.slice(416, 4).store(gl.where(field == 0, left.to(gl.float32), meta))
            mbarrier.arrive(bar, count=1)
            s += 1
            if s == SP:
                s = 0
                phase ^= 1
    for _ in range((NP + 1) // 2 + LAG):    # at most SP: nobody empties these stages
        mbarrier.wait(empty.index(s), phase)
        vec_s.index(s).slice(416, 4).store(gl.full([4], 0.0, gl.float32, V1))
        mbarrier.arrive(rfull.index(s), count=2)
        s += 1
        if s == SP:
            s = 0
            phase ^= 1


@gluon.jit
def consumer(work, smem, o_s, out_desc, outputs, states, SP: gl.constexpr, VSPLIT: gl.constexpr):
    """The recurrence, 4 warps for each 64 V channels: P|O = St [W|Q]^T is one N = 64 product, then S and O take R.

    One partition, not one for each warpgroup: a second copy of this code would not fit the instruction cache.
    """
    cu_ptr, heads, n_items, ctas_s, t_total, seq_len, cu_words, flags = work
    tile_s, vec_s, z_s, rk_s, bars = smem
    rfull, half, full, empty = bars
    out_ptr, out_t, out_h = outputs
    h0_ptr, ht_ptr, in_index_ptr, out_index_ptr, in_slots, out_slots, h0_stride, ht_stride = states
    MV: gl.constexpr = 128 // VSPLIT
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [MV // 16, 1], [16, 128, 16])
    R_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [MV // 16, 1], [16, 32, 16])
    PQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [MV // 16, 1], [16, 64, 16])
    A_R: gl.constexpr = gl.DotOperandLayout(0, R_L, 2)
    A_P: gl.constexpr = gl.DotOperandLayout(0, PQ_L, 2)
    A_S: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    zero = gl.zeros([MV, 64], gl.float32, PQ_L)
    zero32 = gl.zeros([MV, 32], gl.float32, R_L)
    boxes = o_s._reinterpret(gl.bfloat16, [MV // 64, 32, 1, 64], gl.NVMMASharedLayout(128, 16, 3))
    vchan = 64 * (gl.program_id(0) % VSPLIT)    # first V channel of the CTA
    sv = gl.arange(0, MV, gl.SliceLayout(1, S_L))[:, None]
    sk = gl.arange(0, 128, gl.SliceLayout(0, S_L))[None, :]
    s_off = (vchan + sv) * 128 + sk
    ov = gl.arange(0, MV, gl.SliceLayout(1, R_L))[:, None]
    ot = gl.arange(0, 32, gl.SliceLayout(0, R_L))[None, :]
    s = 0
    phase = 0
    for item in range(gl.program_id(0) // VSPLIT, n_items, scalar(ctas_s)):
        segment = item // heads
        head = item % heads
        begin, length = segment_bounds(cu_ptr, segment, seq_len, cu_words, t_total)
        S = gl.zeros([MV, 128], gl.float32, S_L)
        if (flags & HAS_INITIAL) != 0:
            slot = state_slot(in_index_ptr, segment, flags & HAS_IN_INDEX, in_slots)
            if slot >= 0:
                off = slot.to(gl.int64) * (h0_stride // 4 * 4) + head.to(gl.int64) * 16384
                if (flags & INITIAL_BF16) != 0:
                    S = gl.load(h0_ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True) + off + s_off).to(gl.float32)
                else:
                    S = gl.load(h0_ptr + off + s_off)
        left = length
        while left > 0:
            mbarrier.wait(full.index(s), phase)
            tile = tile_s.index(s)
            vec = vec_s.index(s)
            Sb = gl.convert_layout(S.to(gl.bfloat16), A_P, assert_trivial=True)
            PQ = warpgroup_mma(Sb, tile.slice(0, 64).permute([1, 0]), zero, use_acc=False, is_async=True)
            S = S * vec.slice(0, 128).load(gl.SliceLayout(0, S_L))[None, :]
            PQ = warpgroup_mma_wait(0, deps=(PQ,))
            u = to_fp32(tile.slice(96, 32).slice(0, MV, dim=1).permute([1, 0]).load(R_L))
            rq = vec.slice(448, 32).load(gl.SliceLayout(0, R_L))
            P, O = gl.split(gl.permute(gl.reshape(PQ, [MV, 2, 32]), [0, 2, 1]))
            P = gl.convert_layout(P, R_L, assert_trivial=True)
            O = gl.convert_layout(O, R_L, assert_trivial=True)
            R = (u - P).to(gl.bfloat16)
            S = warpgroup_mma(gl.convert_layout(R, A_S, assert_trivial=True), tile.slice(64, 32), S, is_async=True)
            OZ = warpgroup_mma(gl.convert_layout(R, A_R, assert_trivial=True), z_s.index(s).permute([1, 0]), zero32,
                               use_acc=False, is_async=True)
            S, OZ = warpgroup_mma_wait(0, deps=(S, OZ))
            S = S * vec.slice(256, 128).load(gl.SliceLayout(0, S_L))[None, :]
            mbarrier.arrive(empty.index(s), count=1)
            out = ((O + OZ) * rq[None, :]).to(gl.bfloat16)
            token = begin + (length - left)
            if left >= 32:
                tma.store_wait(0)
                o_s.permute([1, 0]).store(out)
                fence_async_shared()
                for j in gl.static_range(MV // 64):
                    tma.async_copy_shared_to_global(out_desc, [token, head, vchan + 64 * j], boxes.index(j))
            else:
                # rows past the end belong to someone else
                row = out_ptr + token.to(gl.int64) * out_t + head.to(gl.int64) * out_h + vchan
                gl.store(row + ot * out_t + ov, out, mask=(ot < left) & (ov >= 0))
            left -= 32
            s += 1
            if s == SP:
                s = 0
                phase ^= 1
        if (flags & HAS_FINAL) != 0:
            slot = state_slot(out_index_ptr, segment, flags & HAS_OUT_INDEX, out_slots)
            if slot >= 0:
                off = slot.to(gl.int64) * (ht_stride // 4 * 4) + head.to(gl.int64) * 16384
                if (flags & FINAL_BF16) != 0:
                    gl.store(ht_ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True) + off + s_off, S.to(gl.bfloat16))
                else:
                    gl.store(ht_ptr + off + s_off, S)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("heads", "qk_group", "n_items", "t_total", "seq_len", "cu_words", "flags", "in_slots",
                              "out_slots", "beta_t", "beta_h", "out_t", "out_h", "h0_stride", "ht_stride"))
def kda_forward(q_desc, k_desc, v_desc, g_desc, out_desc, beta_ptr, out_ptr, a_log_ptr, dt_ptr, cu_ptr, h0_ptr, ht_ptr,
                in_index_ptr, out_index_ptr, heads, qk_group, n_items, t_total, seq_len, cu_words, flags, in_slots,
                out_slots, beta_t, beta_h, out_t, out_h, h0_stride, ht_stride, lower_bound, scale,
                CR: gl.constexpr, PR: gl.constexpr, NP: gl.constexpr, SP: gl.constexpr, VSPLIT: gl.constexpr,
                LAG: gl.constexpr):
    """Launch with min(n_items, any number) * VSPLIT CTAs of 512 threads on grid axis x: num_warps = 8 / VSPLIT.

    Fewer CTAs than items loop over them; that is faster for many short segments, and the bits are the same.

    Args:
        q_desc, k_desc, v_desc, g_desc, out_desc: [T_total, heads, 128] bf16, boxes of [32, 1, 64], 128-byte swizzle.
        beta_ptr, out_ptr: bf16, with token and head strides beta_t, beta_h, out_t, out_h in elements.
        a_log_ptr [heads], dt_ptr [heads, 128]: fp32, read if `flags` says so (else exp(A_log) = 1, dt_bias = 0).
        cu_ptr: [n_segments + 1] offsets as 32-bit words, cu_words apart (1: int32; 2: low words of int64), read if
            seq_len < 0; otherwise segment s is tokens s * seq_len and on. Offsets are clipped to t_total.
        h0_ptr, ht_ptr: states [slots, heads, 128 (V), 128 (K)], fp32 or (`flags`) bf16 behind the same pointer type, slot
            strides h0_stride, ht_stride in elements of their dtype, multiples of 4.
        in_index_ptr, out_index_ptr: int32 slot of each segment, read if `flags` says so (else slot = segment). Slots
            < 0 or >= in_slots, out_slots: the state starts from zeros, or is not stored.
        heads, qk_group: value heads; value heads that share a q, k head.
        n_items: segments * heads. t_total: tokens.
        flags: HAS_*, *_BF16 above.
        lower_bound in [-5, 0], scale: fp32.
        CR, PR: registers of consumer and of other warps. NP, SP: prep warps, stages. VSPLIT: CTAs an item, 1 or 2.
        LAG: steps by which second tiles trail first ones in the order of prep.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VEC: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    tile_s = gl.allocate_shared_memory(gl.bfloat16, [SP, 128, 128], TILE)
    vec_s = gl.allocate_shared_memory(gl.float32, [SP, 512], VEC)
    z_s = gl.allocate_shared_memory(gl.bfloat16, [SP, 32, 32], gl.NVMMASharedLayout(32, 16, 2))
    rk_s = gl.allocate_shared_memory(gl.float32, [NP, 16], VEC)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [32, 128 // VSPLIT], TILE)
    # the stride of the loop over items, in shared memory lest it hold a register of every partition
    ctas_s = gl.allocate_shared_memory(gl.int32, [1], VEC)
    V1: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ctas_s.store(gl.full([1], 0, gl.int32, V1) + gl.num_programs(0) // VSPLIT)
    rfull = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    half = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    ZL: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [gl.num_warps(), 1], [1, 0])
    for j in gl.static_range(SP):
        z_s.index(j).slice(0, 16).slice(16, 16, dim=1).store(gl.zeros([16, 16], gl.bfloat16, ZL))
        mbarrier.init(rfull.index(j), count=2)
        mbarrier.init(half.index(j), count=1)
        mbarrier.init(full.index(j), count=2)
        mbarrier.init(empty.index(j), count=1)
    fence_async_shared()
    work = (cu_ptr, heads, n_items, ctas_s, t_total, seq_len, cu_words, flags)
    smem = (tile_s, vec_s, z_s, rk_s, (rfull, half, full, empty))
    params = (beta_ptr, a_log_ptr, dt_ptr, beta_t, beta_h, lower_bound, scale, qk_group)
    outputs = (out_ptr, out_t, out_h)
    states = (h0_ptr, ht_ptr, in_index_ptr, out_index_ptr, in_slots, out_slots, h0_stride, ht_stride)
    # Registers: (2 CR + 2 PR) 128 <= 65,536, or (CR + 3 PR) 128 with VSPLIT = 2; beyond, setmaxnreg is dropped silently.
    if VSPLIT == 1:
        gl.warp_specialize([
            (consumer, (work, smem, o_s, out_desc, outputs, states, SP, VSPLIT)),
            (producer_warp, (work, smem, q_desc, k_desc, v_desc, g_desc, params, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 0, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 1, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 2, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 3, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 4, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 5, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 6, NP, SP, VSPLIT, LAG)),
        ], [1, 1, 1, 1, 1, 1, 1, 1], [PR, PR, PR, PR, PR, PR, PR, PR])
    else:
        gl.warp_specialize([
            (consumer, (work, smem, o_s, out_desc, outputs, states, SP, VSPLIT)),
            (producer_warp, (work, smem, q_desc, k_desc, v_desc, g_desc, params, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 0, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 1, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 2, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 3, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 4, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 5, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 6, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 7, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 8, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 9, NP, SP, VSPLIT, LAG)),
            (prep_warp, (smem, 10, NP, SP, VSPLIT, LAG)),
        ], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [PR, PR, PR, PR, PR, PR, PR, PR, PR, PR, PR, PR])
