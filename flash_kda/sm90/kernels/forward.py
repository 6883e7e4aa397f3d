"""Fused KDA forward for Hopper: raw q, k, v, g, beta to outputs and final states in one launch.

A CTA owns one (segment, head) work item at a time, or one half of its V channels (VSPLIT = 2), and walks it in steps of
32 tokens, two 16-token tiles with their own anchors. With tile 1 the earlier and tile 2 the later one, d = k E, m = k / E,
z = q E (E = exp(G)), gamma = E_last, and Kr = m gamma:

    [W1]   [      T1       0 ] [ d1        ]     [U1]   [      T1       0 ] [v1]     T = (I + tril(beta d m^T, -1))^-1 beta
    [W2] = [-T2 L21 T1    T2 ] [ d2 gamma1 ]     [U2] = [-T2 L21 T1    T2 ] [v2]     L21 = d2 Kr1^T
    Q = [z1; z2 gamma1]   Z = [[tril(z1 m1^T), 0], [z2 Kr1^T, tril(z2 m2^T)]]   Kr = [Kr1 gamma2; Kr2]
    R = U - W S      out = Q S + Z R      S <- gamma1 gamma2 S + Kr^T R

Every exponent but the one of m is <= 0, and the one of m is at most 16 |lower_bound|. E carries a common factor
2^SHIFT that cancels in every product: it keeps m of large raw keys, and d of small ones, inside the range of bf16.
Keys and queries are never normalised: |k|^2 is the diagonal of d m^T, 1/|k| is folded into T so that R comes out as
R/|k| and Kr needs no factor; 1/|q|, the scale and 2^-SHIFT multiply the outputs.

Warp roles
    consumers   4 warps for each 64 V channels: the state St[v, k], fp32, lives in their wgmma accumulators
    producer    1 warp: TMA of the raw tiles, SP steps deep
    prep        NP warps: warp w takes tiles w, w + NP, ... of the CTA's running tile count; NP is odd, so each warp
                alternates first and second tiles

Shared memory, for each of SP stages (factors replace raw inputs in place)
    kq [64, 128] bf16   rows 0-31 k, then W; rows 32-63 q, then Q: one N = 64 wgmma operand
    gv [64, 128] bf16   rows 0-31 g, then m, then Kr; rows 32-63 v, then U (VSPLIT: columns 0-63 only)
    z  [32, 32] bf16    Z; its upper right quadrant is zeroed once
    a, a1 [128] fp32    gamma of the step; gamma1
    rq [32] fp32        scale 2^-SHIFT / |q|
and rk [NP, 16] (1/|k|, private to a prep warp), out [32, 64] bf16 per consumer.

Barriers, for each stage
    rfull  the producer's TMA bytes: raw tiles are there
    half   prep of the first tile, to prep of the second: Kr1, W1, U1 and gamma1 are there
    full   both prep warps, to the consumers: all factors are there
    empty  the consumers, to the producer: the stage may be overwritten

Rows past the end of a segment may hold a neighbour's tokens. Before anything reads them they are replaced, by selection:
zeros in k, q, v and -inf in g, which makes their decay exactly 1. They are never stored.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait)

LOG2E = gl.constexpr(1.4426950408889634)
L2_EPS = gl.constexpr(1e-6)
# E carries 2^20: with |G| <= 80 its range is 2^-96 .. 2^20 and that of 1/E 2^-20 .. 2^96, inside fp32 and bf16
SHIFT = gl.constexpr(20.0)
INV_SHIFT = gl.constexpr(2.0 ** -20)

# bits of the `flags` argument
HAS_INITIAL = gl.constexpr(1)
INITIAL_BF16 = gl.constexpr(2)
HAS_IN_INDEX = gl.constexpr(4)
HAS_FINAL = gl.constexpr(8)
FINAL_BF16 = gl.constexpr(16)
HAS_OUT_INDEX = gl.constexpr(32)
HAS_A_LOG = gl.constexpr(64)
HAS_DT_BIAS = gl.constexpr(128)


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
def mul_bf16(x, y):
    """bf16 product, two elements an instruction."""
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def to_fp32(x):
    """bf16 -> fp32, two instructions a pair (the compiler's own conversion takes three)."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b;}",
        "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def sigmoid(x):
    return rcp(1.0 + ex2(x * -LOG2E))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def segment_bounds(cu_ptr, segment, seq_len, cu_words, t_total):
    """First token and length of a segment: cu_seqlens (int32, or the low words of int64), or dense if seq_len >= 0."""
    begin = segment * seq_len
    end = begin + seq_len
    if seq_len < 0:
        p = cu_ptr + segment.to(gl.int64) * cu_words
        begin = gl.load(p)
        end = gl.load(p + cu_words)
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


@gluon.jit(noinline=True)
def mask_tile(ks, qs, gs, vs, valid):
    """Replace rows >= valid of a raw tile by selection; once a segment, so not in the code that every tile runs."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    keep = (gl.arange(0, 16, gl.SliceLayout(1, L)) < valid)[:, None]
    zero = gl.zeros([16, 128], gl.bfloat16, L)
    none = gl.full([16, 128], float("-inf"), gl.bfloat16, L)
    ks.store(gl.where(keep, ks.load(L), zero))
    qs.store(gl.where(keep, qs.load(L), zero))
    vs.store(gl.where(keep, vs.load(L), zero))
    gs.store(gl.where(keep, gs.load(L), none))


@gluon.jit
def prep_body(kq, gv, rq_s, z_s, a_s, a1_s, rk_s, half, phase, beta_ptr, beta_stride, dt_ptr, has_dt, valid,
              neg_rate, inv_bound, q_scale, T: gl.constexpr, VC: gl.constexpr, P32: gl.constexpr):
    """Factors of tile T (0 or 1) of a step, in place; one warp."""
    M2: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A_L: gl.constexpr = gl.DotOperandLayout(0, M2, 2)
    B_L: gl.constexpr = gl.DotOperandLayout(1, M2, 2)
    E_L: gl.constexpr = gl.BlockedLayout([8, 4], [1, 32], [1, 1], [1, 0])
    rm = gl.arange(0, 16, gl.SliceLayout(1, M2))[:, None]
    cm = gl.arange(0, 16, gl.SliceLayout(0, M2))[None, :]
    z16 = gl.zeros([16, 16], gl.float32, M2)
    ks = kq.slice(16 * T, 16)
    qs = kq.slice(32 + 16 * T, 16)
    gs = gv.slice(16 * T, 16)
    vs = gv.slice(32 + 16 * T, 16)
    # global loads first: their latency hides behind the exponentials
    rows = gl.arange(0, 16, gl.SliceLayout(1, M2))
    beta_logit = gl.load(beta_ptr + rows.to(gl.int64) * beta_stride, mask=rows < valid, other=0.0)
    ch = gl.arange(0, 128, gl.SliceLayout(0, E_L))
    dt = gl.load(dt_ptr + ch, mask=(ch >= 0) & (has_dt != 0), other=0.0)[None, :]
    # |q|^2 on the tensor cores: the diagonal of q q^T
    Qn = mma_v2(qs.load(A_L), qs.permute([1, 0]).load(B_L), z16)
    rq = gl.rsqrt(gl.sum(gl.where(rm == cm, Qn, 0.0), 1) + L2_EPS)
    rq_s.slice(16 * T, 16).store(rq * q_scale)
    # gate, cumulative sum and exponentials: each lane owns four channels of all 16 tokens, eight at a time
    re = gl.arange(0, 8, gl.SliceLayout(1, E_L))[:, None]
    for h in gl.static_range(2):
        kh = ks.slice(8 * h, 8)
        qh = qs.slice(8 * h, 8)
        gh = gs.slice(8 * h, 8)
        # sigmoid's argument as a sum, then a product: the sum is 0 exactly where it should be, whatever the rate
        x = (to_fp32(gh.load(E_L)) + dt) * neg_rate
        lg = rcp(gl.fma(ex2(x), inv_bound, inv_bound))
        if h == 0:
            lg = gl.where(re == 0, lg + SHIFT, lg)
        else:
            lg = gl.where(re == 0, lg + carry[None, :], lg)
        G = gl.associative_scan(lg, 0, add)
        carry = gl.sum(gl.where(re == 7, G, 0.0), 0)
        E = ex2(G)
        k = kh.load(E_L)
        q = qh.load(E_L)
        if P32:
            kf = to_fp32(k)
            kh.store((kf * E).to(gl.bfloat16))
            qh.store((to_fp32(q) * E).to(gl.bfloat16))
            km = (kf * ex2_neg(G)).to(gl.bfloat16)
        else:
            Eb = E.to(gl.bfloat16)
            kh.store(mul_bf16(k, Eb))
            qh.store(mul_bf16(q, Eb))
            km = mul_bf16(k, ex2_neg(G).to(gl.bfloat16))
        gh.store(km)
        if h == 0:
            km0 = km
        else:
            km1 = km
    gamma_shifted = ex2(carry)
    gamma = gamma_shifted * INV_SHIFT
    # 16x16 products; Kr replaces m once its fragments are in registers
    kB = gs.permute([1, 0]).load(B_L)
    if P32:
        gm = gamma_shifted[None, :]
        gs.slice(0, 8).store((to_fp32(km0) * gm).to(gl.bfloat16))
        gs.slice(8, 8).store((to_fp32(km1) * gm).to(gl.bfloat16))
    else:
        gm = gamma_shifted.to(gl.bfloat16)[None, :].broadcast_to([8, 128])
        gs.slice(0, 8).store(mul_bf16(km0, gm))
        gs.slice(8, 8).store(mul_bf16(km1, gm))
    if T == 0:
        a1_s.store(gamma)
    A = mma_v2(ks.load(A_L), kB, z16)
    Z = mma_v2(qs.load(A_L), kB, z16) * (1.0 / INV_SHIFT)
    z_s.slice(16 * T, 16).slice(16 * T, 16, dim=1).store(gl.where(rm >= cm, Z, 0.0).to(gl.bfloat16))
    rk = gl.rsqrt(gl.sum(gl.where(rm == cm, A, 0.0), 1) + L2_EPS)
    rk_s.store(rk)
    rkc = rk_s.load(gl.SliceLayout(0, M2))
    beta = sigmoid(beta_logit.to(gl.float32))
    beta_col = gl.convert_layout(beta, gl.SliceLayout(0, M2))
    # (I + N)^-1 by block substitution 1 -> 2 -> 4 -> 8 -> 16: bounded blocks, fp32 accumulation
    N = gl.where(rm > cm, A * (-beta * rk)[:, None] * rkc[None, :], 0.0)
    NB = gl.convert_layout(N.to(gl.bfloat16), B_L)
    x = rm ^ cm
    xb = gl.arange(0, 16, gl.SliceLayout(1, B_L))[:, None] ^ gl.arange(0, 16, gl.SliceLayout(0, B_L))[None, :]
    inv = gl.where(x == 0, 1.0, gl.where(x == 1, N, 0.0))
    zb = gl.zeros([16, 16], gl.bfloat16, B_L)
    for l in gl.static_range(1, 4):
        ib = inv.to(gl.bfloat16)
        Y = mma_v2(gl.convert_layout(ib, A_L), gl.where((xb >> l) == 1, NB, zb), z16)
        inv = mma_v2(gl.convert_layout(Y.to(gl.bfloat16), A_L), gl.convert_layout(ib, B_L), inv)
    tu = inv * beta_col[None, :] * rk[:, None]
    TW = gl.convert_layout((tu * (rkc * INV_SHIFT)[None, :]).to(gl.bfloat16), A_L)
    TU = gl.convert_layout(tu.to(gl.bfloat16), A_L)
    if T == 1:
        mbarrier.wait(half, phase)
        g1 = gv.slice(0, 16)
        kB1 = g1.permute([1, 0]).load(B_L)
        L21 = mma_v2(ks.load(A_L), kB1, z16)
        Z21 = mma_v2(qs.load(A_L), kB1, z16)
        z_s.slice(16, 16).slice(0, 16, dim=1).store(Z21.to(gl.bfloat16))
        C = mma_v2(TW, gl.convert_layout(L21.to(gl.bfloat16), B_L), z16)
        C = gl.convert_layout((-C).to(gl.bfloat16), A_L)
        gamma1 = a1_s.load(gl.SliceLayout(0, E_L))
        a_s.store(gamma1 * gamma)
        if P32:
            f1 = gamma1[None, :]
            f2 = gamma[None, :]
        else:
            f1 = gamma1.to(gl.bfloat16)[None, :].broadcast_to([8, 128])
            f2 = gamma.to(gl.bfloat16)[None, :].broadcast_to([8, 128])
        for h in gl.static_range(2):
            kh = ks.slice(8 * h, 8)
            qh = qs.slice(8 * h, 8)
            gh = g1.slice(8 * h, 8)
            if P32:
                kh.store((to_fp32(kh.load(E_L)) * f1).to(gl.bfloat16))
                qh.store((to_fp32(qh.load(E_L)) * f1).to(gl.bfloat16))
                gh.store((to_fp32(gh.load(E_L)) * f2).to(gl.bfloat16))
            else:
                kh.store(mul_bf16(kh.load(E_L), f1))
                qh.store(mul_bf16(qh.load(E_L), f1))
                gh.store(mul_bf16(gh.load(E_L), f2))
    zero = gl.zeros([16, 64], gl.float32, M2)
    for j in gl.static_range(2):
        W = mma_v2(TW, ks.slice(64 * j, 64, dim=1).load(B_L), zero)
        if T == 1:
            W = mma_v2(C, kq.slice(0, 16).slice(64 * j, 64, dim=1).load(B_L), W)
        ks.slice(64 * j, 64, dim=1).store(W.to(gl.bfloat16))
        if 64 * j < VC:
            U = mma_v2(TU, vs.slice(64 * j, 64, dim=1).load(B_L), zero)
            if T == 1:
                U = mma_v2(C, gv.slice(32, 16).slice(64 * j, 64, dim=1).load(B_L), U)
            vs.slice(64 * j, 64, dim=1).store(U.to(gl.bfloat16))


# noinline: a copy of this code in each prep warp would not fit the instruction cache
@gluon.jit(noinline=True)
def prep_tile(kq, gv, rq_s, z_s, a_s, a1_s, rk_s, half, phase, beta_ptr, beta_stride, dt_ptr, has_dt, valid,
              neg_rate, inv_bound, q_scale, T: gl.constexpr, VC: gl.constexpr, P32: gl.constexpr):
    prep_body(kq, gv, rq_s, z_s, a_s, a1_s, rk_s, half, phase, beta_ptr, beta_stride, dt_ptr, has_dt, valid,
              neg_rate, inv_bound, q_scale, T, VC, P32)


@gluon.jit
def prep_warp(work, smem, params, WID: gl.constexpr, NP: gl.constexpr, SP: gl.constexpr, VSPLIT: gl.constexpr,
              P32: gl.constexpr):
    cu_ptr, heads, n_items, t_total, seq_len, cu_words, flags = work
    kq_s, gv_s, z_s, a_s, a1_s, rq_s, rk_s, rfull, half, full, empty = smem
    beta_ptr, a_log_ptr, dt_ptr, beta_t, beta_h, lower_bound, scale = params
    # log2(alpha) = bound / (1 + 2^x), written 1 / (inv + inv 2^x); a bound of 0 becomes one too small to matter
    inv_bound = 1.0 / (gl.minimum(lower_bound, -1e-30) * LOG2E)
    q_scale = scale * INV_SHIFT
    first = 0      # running index of the item's first tile in this CTA
    mine = WID     # running index of this warp's next tile
    for item in range(gl.program_id(0) // VSPLIT, n_items, gl.num_programs(0) // VSPLIT):
        segment = item // heads
        head = item % heads
        begin, length = segment_bounds(cu_ptr, segment, seq_len, cu_words, t_total)
        last = first + 2 * ((length + 31) // 32)
        if mine < last:
            rate = 1.0
            if (flags & HAS_A_LOG) != 0:
                rate = ex2(gl.load(a_log_ptr + head) * LOG2E)
            # finite and not 0, so that neither inf * 0 nor 0 * inf (a masked row) can arise
            neg_rate = -gl.minimum(gl.maximum(rate * LOG2E, 1e-37), 3e38)
            for i in range(mine, last, NP):
                p = i // 2
                s = p % SP
                ph = (p // SP) & 1
                token = (i - first) * 16
                valid = length - token
                bp = beta_ptr + (begin + token).to(gl.int64) * beta_t + head * beta_h
                kq = kq_s.index(s)
                gv = gv_s.index(s)
                mbarrier.wait(rfull.index(s), ph)
                if i % 2 == 0:
                    if valid < 16:
                        mask_tile(kq.slice(0, 16), kq.slice(32, 16), gv.slice(0, 16), gv.slice(32, 16), valid)
                    prep_tile(kq, gv, rq_s.index(s), z_s.index(s), a_s.index(s), a1_s.index(s), rk_s.index(WID),
                              half.index(s), ph, bp, beta_t, dt_ptr + head * 128, flags & HAS_DT_BIAS, valid,
                              neg_rate, inv_bound, q_scale, 0, 128 // VSPLIT, P32)
                    fence_async_shared()
                    mbarrier.arrive(half.index(s), count=1)
                else:
                    if valid < 16:
                        mask_tile(kq.slice(16, 16), kq.slice(48, 16), gv.slice(16, 16), gv.slice(48, 16), valid)
                    prep_tile(kq, gv, rq_s.index(s), z_s.index(s), a_s.index(s), a1_s.index(s), rk_s.index(WID),
                              half.index(s), ph, bp, beta_t, dt_ptr + head * 128, flags & HAS_DT_BIAS, valid,
                              neg_rate, inv_bound, q_scale, 1, 128 // VSPLIT, P32)
                    fence_async_shared()
                mbarrier.arrive(full.index(s), count=1)
                mine += NP
        first = last


@gluon.jit
def producer_warp(work, smem, q_desc, k_desc, v_desc, g_desc, qk_group, SP: gl.constexpr, VSPLIT: gl.constexpr):
    cu_ptr, heads, n_items, t_total, seq_len, cu_words, flags = work
    kq_s, gv_s, z_s, a_s, a1_s, rq_s, rk_s, rfull, half, full, empty = smem
    # the [64, 128] operand tiles as the four [32, 64] swizzled boxes that TMA writes
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    kq_b = kq_s._reinterpret(gl.bfloat16, [4 * SP, 32, 1, 64], BOX)
    gv_b = gv_s._reinterpret(gl.bfloat16, [4 * SP, 32, 1, 64], BOX)
    part = gl.program_id(0) % VSPLIT
    s = 0
    phase = 1
    for item in range(gl.program_id(0) // VSPLIT, n_items, gl.num_programs(0) // VSPLIT):
        segment = item // heads
        head = item % heads
        qk_head = head // qk_group
        begin, length = segment_bounds(cu_ptr, segment, seq_len, cu_words, t_total)
        for t in range(begin, begin + length, 32):
            bar = rfull.index(s)
            mbarrier.wait(empty.index(s), phase)
            mbarrier.expect(bar, 32 * 256 * 3 + 32 * 256 // VSPLIT)
            for j in gl.static_range(2):
                tma.async_copy_global_to_shared(g_desc, [t, head, 64 * j], bar, gv_b.index(4 * s + 2 * j))
                tma.async_copy_global_to_shared(k_desc, [t, qk_head, 64 * j], bar, kq_b.index(4 * s + 2 * j))
                tma.async_copy_global_to_shared(q_desc, [t, qk_head, 64 * j], bar, kq_b.index(4 * s + 2 * j + 1))
                if j < 2 // VSPLIT:
                    tma.async_copy_global_to_shared(v_desc, [t, head, 64 * (part + j)], bar, gv_b.index(4 * s + 2 * j + 1))
            s += 1
            if s == SP:
                s = 0
                phase ^= 1


@gluon.jit
def consumer(work, smem, o_s, out_desc, outputs, states, WG: gl.constexpr, SP: gl.constexpr, VSPLIT: gl.constexpr):
    """64 V channels of the recurrence: P|O = St [W|Q]^T is one N = 64 product a step, then S and out take R."""
    cu_ptr, heads, n_items, t_total, seq_len, cu_words, flags = work
    kq_s, gv_s, z_s, a_s, a1_s, rq_s, rk_s, rfull, half, full, empty = smem
    out_ptr, out_t, out_h = outputs
    h0_ptr, ht_ptr, in_index_ptr, out_index_ptr, in_slots, out_slots, h0_stride, ht_stride = states
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    R_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    PQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A_R: gl.constexpr = gl.DotOperandLayout(0, R_L, 2)
    A_P: gl.constexpr = gl.DotOperandLayout(0, PQ_L, 2)
    A_S: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    zero = gl.zeros([64, 64], gl.float32, PQ_L)
    zero32 = gl.zeros([64, 32], gl.float32, R_L)
    o_box = o_s._reinterpret(gl.bfloat16, [32, 1, 64], gl.NVMMASharedLayout(128, 16, 3))
    vchan = 64 * (gl.program_id(0) % VSPLIT + WG)    # first V channel of this warpgroup
    sv = gl.arange(0, 64, gl.SliceLayout(1, S_L))[:, None]
    sk = gl.arange(0, 128, gl.SliceLayout(0, S_L))[None, :]
    s_off = (vchan + sv) * 128 + sk
    ov = gl.arange(0, 64, gl.SliceLayout(1, R_L))[:, None]
    ot = gl.arange(0, 32, gl.SliceLayout(0, R_L))[None, :]
    s = 0
    phase = 0
    for item in range(gl.program_id(0) // VSPLIT, n_items, gl.num_programs(0) // VSPLIT):
        segment = item // heads
        head = item % heads
        begin, length = segment_bounds(cu_ptr, segment, seq_len, cu_words, t_total)
        S = gl.zeros([64, 128], gl.float32, S_L)
        if (flags & HAS_INITIAL) != 0:
            slot = state_slot(in_index_ptr, segment, flags & HAS_IN_INDEX, in_slots)
            if slot >= 0:
                off = slot.to(gl.int64) * h0_stride + head.to(gl.int64) * 16384
                if (flags & INITIAL_BF16) != 0:
                    S = gl.load(h0_ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True) + off + s_off).to(gl.float32)
                else:
                    S = gl.load(h0_ptr + off + s_off)
        for left in range(length, 0, -32):
            mbarrier.wait(full.index(s), phase)
            gv = gv_s.index(s)
            Sb = gl.convert_layout(S.to(gl.bfloat16), A_P, assert_trivial=True)
            PQ = warpgroup_mma(Sb, kq_s.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
            S = S * a_s.index(s).load(gl.SliceLayout(0, S_L))[None, :]
            PQ = warpgroup_mma_wait(0, deps=(PQ,))
            u = gv.slice(32, 32).slice(64 * WG, 64, dim=1).permute([1, 0]).load(R_L).to(gl.float32)
            rq = rq_s.index(s).load(gl.SliceLayout(0, R_L))
            P, O = gl.split(gl.permute(gl.reshape(PQ, [64, 2, 32]), [0, 2, 1]))
            P = gl.convert_layout(P, R_L, assert_trivial=True)
            O = gl.convert_layout(O, R_L, assert_trivial=True)
            R = (u - P).to(gl.bfloat16)
            S = warpgroup_mma(gl.convert_layout(R, A_S, assert_trivial=True), gv.slice(0, 32), S, is_async=True)
            OZ = warpgroup_mma(gl.convert_layout(R, A_R, assert_trivial=True), z_s.index(s).permute([1, 0]), zero32,
                               use_acc=False, is_async=True)
            S, OZ = warpgroup_mma_wait(0, deps=(S, OZ))
            mbarrier.arrive(empty.index(s), count=1)
            out = ((O + OZ) * rq[None, :]).to(gl.bfloat16)
            token = begin + (length - left)
            if left >= 32:
                tma.store_wait(0)
                o_s.permute([1, 0]).store(out)
                fence_async_shared()
                tma.async_copy_shared_to_global(out_desc, [token, head, vchan], o_box)
            else:
                row = out_ptr + token.to(gl.int64) * out_t + head.to(gl.int64) * out_h + vchan
                gl.store(row + ot * out_t + ov, out, mask=(ot < left) & (ov >= 0))
            s += 1
            if s == SP:
                s = 0
                phase ^= 1
        if (flags & HAS_FINAL) != 0:
            slot = state_slot(out_index_ptr, segment, flags & HAS_OUT_INDEX, out_slots)
            if slot >= 0:
                off = slot.to(gl.int64) * ht_stride + head.to(gl.int64) * 16384
                if (flags & FINAL_BF16) != 0:
                    gl.store(ht_ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True) + off + s_off, S.to(gl.bfloat16))
                else:
                    gl.store(ht_ptr + off + s_off, S)
    tma.store_wait(0)


@gluon.jit
def kda_forward(q_desc, k_desc, v_desc, g_desc, out_desc, beta_ptr, out_ptr, a_log_ptr, dt_ptr, cu_ptr, h0_ptr, ht_ptr,
                in_index_ptr, out_index_ptr, heads, qk_group, n_items, t_total, seq_len, cu_words, flags, in_slots,
                out_slots, beta_t, beta_h, out_t, out_h, h0_stride, ht_stride, lower_bound, scale,
                CR: gl.constexpr, PR: gl.constexpr, NP: gl.constexpr, SP: gl.constexpr, VSPLIT: gl.constexpr,
                P32: gl.constexpr):
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VEC: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    kq_s = gl.allocate_shared_memory(gl.bfloat16, [SP, 64, 128], TILE)
    gv_s = gl.allocate_shared_memory(gl.bfloat16, [SP, 64, 128], TILE)
    z_s = gl.allocate_shared_memory(gl.bfloat16, [SP, 32, 32], gl.NVMMASharedLayout(32, 16, 2))
    a_s = gl.allocate_shared_memory(gl.float32, [SP, 128], VEC)
    a1_s = gl.allocate_shared_memory(gl.float32, [SP, 128], VEC)
    rq_s = gl.allocate_shared_memory(gl.float32, [SP, 32], VEC)
    rk_s = gl.allocate_shared_memory(gl.float32, [NP, 16], VEC)
    o0 = gl.allocate_shared_memory(gl.bfloat16, [32, 64], TILE)
    rfull = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    half = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    ZL: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    for j in gl.static_range(SP):
        z_s.index(j).slice(0, 16).slice(16, 16, dim=1).store(gl.zeros([16, 16], gl.bfloat16, ZL))
        mbarrier.init(rfull.index(j), count=1)
        mbarrier.init(half.index(j), count=1)
        mbarrier.init(full.index(j), count=2)
        mbarrier.init(empty.index(j), count=2 // VSPLIT)
    fence_async_shared()
    work = (cu_ptr, heads, n_items, t_total, seq_len, cu_words, flags)
    smem = (kq_s, gv_s, z_s, a_s, a1_s, rq_s, rk_s, rfull, half, full, empty)
    params = (beta_ptr, a_log_ptr, dt_ptr, beta_t, beta_h, lower_bound, scale)
    outputs = (out_ptr, out_t, out_h)
    states = (h0_ptr, ht_ptr, in_index_ptr, out_index_ptr, in_slots, out_slots, h0_stride, ht_stride)
    # Registers: (2 CR + 2 PR) 128 <= 65,536, or (CR + 3 PR) 128 with VSPLIT = 2; beyond that setmaxnreg is dropped silently.
    if VSPLIT == 1:
        o1 = gl.allocate_shared_memory(gl.bfloat16, [32, 64], TILE)
        gl.warp_specialize([
            (consumer, (work, smem, o0, out_desc, outputs, states, 0, SP, VSPLIT)),
            (consumer, (work, smem, o1, out_desc, outputs, states, 1, SP, VSPLIT)),
            (producer_warp, (work, smem, q_desc, k_desc, v_desc, g_desc, qk_group, SP, VSPLIT)),
            (prep_warp, (work, smem, params, 0, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 1, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 2, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 3, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 4, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 5, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 6, NP, SP, VSPLIT, P32)),
        ], [4, 1, 1, 1, 1, 1, 1, 1, 1], [CR, PR, PR, PR, PR, PR, PR, PR, PR])
    else:
        gl.warp_specialize([
            (consumer, (work, smem, o0, out_desc, outputs, states, 0, SP, VSPLIT)),
            (producer_warp, (work, smem, q_desc, k_desc, v_desc, g_desc, qk_group, SP, VSPLIT)),
            (prep_warp, (work, smem, params, 0, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 1, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 2, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 3, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 4, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 5, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 6, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 7, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 8, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 9, NP, SP, VSPLIT, P32)),
            (prep_warp, (work, smem, params, 10, NP, SP, VSPLIT, P32)),
        ], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [PR, PR, PR, PR, PR, PR, PR, PR, PR, PR, PR, PR])
