"""State summary for Hopper: raw k, v, g, beta of a segment to its effect on the state, S_out = M S_in + H, in one launch.

A CTA owns one (segment, head) item. It walks the item's steps of 32 tokens from the last to the first and stops once
||M||_F <= eps, when nothing before can matter. With the factors of a step that forward.py defines, K~ = [Kr1; m2], and M = I,
H = 0 at the end of the segment:

    M <- M diag(gamma2)     P = M K~^T b     Y = P T     M <- M diag(gamma1) - Y D^     H <- H + Y v

M is rounded to bf16 for its product, and so is Y, once: M and H take the same Y, so that what its rounding does to the two
cancels in S_out as far as the state predicts v. (Rounded apart, states chained over 256 collinear segments erred ten times
more than serial ones.) For that D^ has normalised keys. P and T are fp16, which nothing in them can leave: neither exceeds 2.

Factors and barriers are those of forward.py without q.

Warp roles
    consumers   8 warps, 16 rows of M and H each, fp32, in their wgmma accumulators (H negated, so that Y is needed in
                one sign only, and times P_SCALE)
    producer    1 warp: TMA of the raw tiles, SP steps deep
    prep        NP warps: turns as in prep.py

Shared memory, for each of SP stages (factors replace raw inputs in place)
    tile 3 x [32, 128] bf16   k, then d, then D^ / P_SCALE; g, then m, the first 16 rows then Kr1; v; with fp32 g (G32) a
                              fourth tile, its channels 64-127
    vec [512] fp32            0-415 and META at 416-419 as in forward.py, but the tokens left count to 32 at most and the
                              scale is not there; 420 the norm test: the largest scaled squared norm that stops, below -1: none
    t 3 x [16, 16] fp16       the blocks of T
and norm, the scaled squared norm at the last test; loops, the trips of prep's loops: 2, after the stop 0.

Exit. The norm is taken after steps 1, 2, 4, 8, 16, 24, ... and the last one. A reduction over the partition gives all warps
one number, hence one verdict. The consumers then clear `loops` and arrive once more at the barrier that the producer waits for
next. From then on the producer issues nothing more and waits for prep (`full`) instead of the consumers (`empty`) before it
marks the end; prep warps drop the rest of their tile and pass others on without work. They wait for the bytes of every stage
that was issued, so no TMA write outlives the CTA. A pass takes no time, hence the order that the producer keeps (see there).

Tokens past the end of a segment and ranges of keys: as in forward.py. A forced number of chunks only moves the start of the
segment, so the first step that is processed is the only partial one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import flags as bits
from .overlap import let_next_start
from .prep import LOG2E, P_SCALE, gate_slope, halves, kept_here, prep_warp
from .segments import CHAINED, locate, scalar
from .strength import load_beta, strength

STEP = gl.constexpr(32)  # tokens a step: two tiles
BOX_CHANNELS = gl.constexpr(64)  # channels of a TMA box: a 128-byte swizzle holds no more
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
FINE = gl.constexpr(128)  # tokens of a segment up to which P is taken in two fp16 terms: the shorter, the longer the chains
BOX_CHANNELS_FP32 = gl.constexpr(32)
BOX_FP32 = gl.constexpr(gl.NVMMASharedLayout(128, 32, 3))
NORM_SCALE = gl.constexpr(2.0**32)  # of M before it is squared: entries down to 2^-95 count

CUT_ON_DEVICE = gl.constexpr(bits.CUT_ON_DEVICE)
HAS_MT = gl.constexpr(bits.HAS_MT)
FILL = gl.constexpr(bits.FILL)
HAS_NUM_CHUNKS = gl.constexpr(bits.HAS_NUM_CHUNKS)
HAS_EFFECTS = gl.constexpr(bits.HAS_EFFECTS)


@gluon.jit
def extent(work):
    """-> first token to replay, tokens to replay, tokens of the segment, head of this CTA's item, pieces before it."""
    layout, heads, flags, num_chunks_ptr = work
    cu_ptr, seq_len, cu_words, t_total, n_seqs, n_slots, seg_s = layout
    item = gl.program_id(0)
    heads = kept_here(heads)
    flags = kept_here(flags)
    layout = (cu_ptr, kept_here(seq_len), cu_words, t_total, kept_here(n_seqs), n_slots, seg_s)
    begin, length, sequence, before, first = locate(item // heads, layout)
    kept = length
    if (flags & HAS_NUM_CHUNKS) != 0:
        chunks = (length + 15) // 16
        kept = length - 16 * (chunks - gl.maximum(gl.minimum(gl.load(num_chunks_ptr + item), chunks), 0))
        kept = gl.maximum(kept, 0)
    return begin + (length - kept), kept, length, item % heads, item // heads - first


@gluon.jit
def producer_warp(
    work, smem, words, k_desc, v_desc, g_desc, params, NP: gl.constexpr, SP: gl.constexpr, LAG: gl.constexpr, G32: gl.constexpr
):
    """Fill stages with steps, last to first, until all are issued or the consumers stop; then mark the end for prep."""
    layout, heads, flags, num_chunks_ptr = work
    tile_s, vec_s, t_s, bars = smem
    loops_s, norm_s = words
    rfull, half, full, empty = bars
    beta_ptr, a_log_ptr, dt_ptr, beta_t, beta_h, lower_bound, eps, qk_group = params
    # the tiles as the six (G32: eight) [32, 64] swizzled boxes a stage that TMA writes
    BOXES: gl.constexpr = 8 if G32 else 6
    boxes = tile_s._reinterpret(gl.bfloat16, [BOXES * SP, 32, 1, 64], gl.NVMMASharedLayout(128, 16, 3))
    if G32:
        g_boxes = tile_s._reinterpret(gl.float32, [BOXES * SP, 32, 1, 32], gl.NVMMASharedLayout(128, 32, 3))
    V1: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    V4: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    lane = gl.arange(0, 32, V1)
    ch = gl.arange(0, 128, V4)
    field = gl.arange(0, 4, V1)
    inv_bound = 1.0 / (gl.minimum(kept_here(lower_bound), -1e-30) * LOG2E)
    begin, kept, length, head, piece = extent(work)
    qk_head = head // qk_group
    neg_rate = 0.0
    bias = gl.zeros([128], gl.float32, V4)
    # the stop as a bound of the scaled, squared norm; nothing is at most -1, and below that there is no test
    bound = kept_here(eps) * NORM_SCALE
    bound = gl.where((flags & HAS_NUM_CHUNKS) != 0, -1.0, bound * bound)
    beta_head = head.to(gl.int64) * beta_h
    # A prep warp goes from a turn at step i to one at most JUMP steps on, in the stage that step i - GAP had. A wait that comes
    # before that step's bytes takes the phase before for the one it wants (seen as a hang), so stages must fill in that order.
    JUMP: gl.constexpr = NP // 2 + 1 + LAG
    GAP: gl.constexpr = SP - JUMP
    s = 0
    phase = 1
    b = 0
    b_phase = 0
    done = 0
    first = (kept + 31) // 32 * 32 - 32  # of the step, counted from `begin`
    some = (lane < kept - first) & (kept > 0)  # a slot that nobody owns begins anywhere
    next_beta = load_beta(beta_ptr, beta_head + (begin + first + lane).to(gl.int64) * beta_t, some, flags)
    while first >= 0:
        t = begin + first
        left = kept - first
        beta = next_beta
        next_beta = load_beta(beta_ptr, beta_head + (t - 32 + lane).to(gl.int64) * beta_t, lane < first, flags)
        bar = rfull.index(s)
        mbarrier.wait(empty.index(s), phase)
        if scalar(loops_s) == 0:  # written before the arrival that ended the wait
            first = -1
        else:
            mbarrier.expect(bar, 32 * 128 * BOXES)
            for j in gl.static_range(2):
                if G32:
                    tma.async_copy_global_to_shared(g_desc, [t, head, 32 * j], bar, g_boxes.index(BOXES * s + j + 2))
                    tma.async_copy_global_to_shared(g_desc, [t, head, 32 * j + 64], bar, g_boxes.index(BOXES * s + j + 6))
                else:
                    tma.async_copy_global_to_shared(g_desc, [t, head, 64 * j], bar, boxes.index(BOXES * s + j + 2))
                tma.async_copy_global_to_shared(k_desc, [t, qk_head, 64 * j], bar, boxes.index(BOXES * s + j))
                tma.async_copy_global_to_shared(v_desc, [t, head, 64 * j], bar, boxes.index(BOXES * s + j + 4))
            if done == 0:  # after the first loads, lest they wait for this one
                neg_rate, bias = gate_slope(a_log_ptr, dt_ptr, head, ch, flags)
            vec = vec_s.index(s)
            vec.slice(0, 128).store(bias)
            vec.slice(384, 32).store(strength(beta, flags))
            vec.slice(416, 4).store(
                gl.where(field == 0, gl.minimum(left, 32).to(gl.float32), gl.where(field == 1, neg_rate, inv_bound))
            )
            done += 1
            first -= 32
            test = (first < 0) | (done % 8 == 0) | ((done & (done - 1)) == 0)
            vec.slice(420, 4).store(gl.full([4], 0.0, gl.float32, V1) + gl.where(test, bound, -2.0))
            if done > GAP:
                mbarrier.wait(rfull.index(b), b_phase)
                b += 1
                if b == SP:
                    b = 0
                    b_phase ^= 1
            mbarrier.arrive(bar, count=1)
            s += 1
            if s == SP:
                s = 0
                phase ^= 1
    for _ in range((NP + 1) // 2 + LAG):  # at most SP
        # a stage is free for a mark once prep is past the step before in it, which every prep warp has then seen
        mbarrier.wait(full.index(s), phase)
        done += 1
        if done > GAP:
            mbarrier.wait(rfull.index(b), b_phase)
            b += 1
            if b == SP:
                b = 0
                b_phase ^= 1
        vec_s.index(s).slice(416, 4).store(gl.full([4], 0.0, gl.float32, V1))
        mbarrier.arrive(rfull.index(s), count=2)
        s += 1
        if s == SP:
            s = 0
            phase ^= 1


@gluon.jit
def quarter(M, c: gl.constexpr, L: gl.constexpr):
    """bf16 columns 32 c .. 32 c + 31 of M, in layout L, which must hold them in the same registers."""
    a, b = gl.split(gl.permute(gl.reshape(M.to(gl.bfloat16), [128, 2, 64]), [0, 2, 1]))
    if c >= 2:
        a = b
    a, b = gl.split(gl.permute(gl.reshape(a, [128, 2, 32]), [0, 2, 1]))
    if c % 2 == 1:
        a = b
    return gl.convert_layout(a, L, assert_trivial=True)


@gluon.jit
def consumer(work, smem, words, outputs, SP: gl.constexpr, G32: gl.constexpr):
    """The scan, 16 rows of M and H a warp."""
    layout, heads, flags, num_chunks_ptr = work
    tile_s, vec_s, t_s, bars = smem
    loops_s, norm_s = words
    rfull, half, full, empty = bars
    TILES: gl.constexpr = 4 if G32 else 3
    ht_ptr, mt_ptr, effects_ptr, needs_mt_ptr, chunks_ptr, norm_ptr = outputs
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16])
    P_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16])
    A_M: gl.constexpr = gl.DotOperandLayout(0, P_L, 2)
    T_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 16, 16])
    A_T: gl.constexpr = gl.DotOperandLayout(0, T_L, 2)
    A_P: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    V1: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    row = gl.arange(0, 128, gl.SliceLayout(1, S_L))[:, None]
    col = gl.arange(0, 128, gl.SliceLayout(0, S_L))[None, :]
    zero = gl.zeros([128, 32], gl.float32, P_L)
    zero16 = gl.zeros([128, 16], gl.float32, T_L)
    M = gl.where(row == col, 1.0, 0.0)
    H = gl.zeros([128, 128], gl.float32, S_L)
    begin, kept, length, head, piece = extent(work)
    remaining = (kept + 31) // 32
    fine = length <= FINE
    norm_s.store(gl.full([1], 128.0 * NORM_SCALE * NORM_SCALE, gl.float32, V1))
    s = 0
    phase = 0
    while remaining > 0:
        mbarrier.wait(full.index(s), phase)
        vec = vec_s.index(s)
        M = M * vec.slice(256, 128).load(gl.SliceLayout(0, S_L))[None, :]
        # a quarter of K at a time: 8 registers of bf16 M are alive instead of 32
        P = zero
        for c in gl.static_range(4):
            A = gl.convert_layout(quarter(M, c, P_L), A_M, assert_trivial=True)
            B = tile_s.index(TILES * s + 1).slice(32 * c, 32, dim=1).permute([1, 0])
            P = warpgroup_mma(A, B, P, use_acc=c > 0, is_async=True)
            if c < 3:
                P, M = warpgroup_mma_wait(0, deps=(P, M))
        M = M * vec.slice(128, 128).load(gl.SliceLayout(0, S_L))[None, :]
        P = warpgroup_mma_wait(0, deps=(P,)) * (vec.slice(384, 32).load(gl.SliceLayout(0, P_L)) * -P_SCALE)[None, :]
        P1, P2 = halves(P.to(gl.float16), T_L)
        P1 = gl.convert_layout(P1, A_T, assert_trivial=True)
        P2 = gl.convert_layout(P2, A_T, assert_trivial=True)
        Y1 = zero16
        Y2 = zero16
        if fine:
            lo1, lo2 = halves((P - P.to(gl.float16).to(gl.float32)).to(gl.float16), T_L)
            lo1 = gl.convert_layout(lo1, A_T, assert_trivial=True)
            lo2 = gl.convert_layout(lo2, A_T, assert_trivial=True)
            Y1 = warpgroup_mma(lo1, t_s.index(3 * s), Y1, is_async=True)
            Y1 = warpgroup_mma(lo2, t_s.index(3 * s + 1), Y1, is_async=True)
            Y2 = warpgroup_mma(lo2, t_s.index(3 * s + 2), Y2, is_async=True)
            Y1, Y2 = warpgroup_mma_wait(0, deps=(Y1, Y2))
        Y1 = warpgroup_mma(P1, t_s.index(3 * s), Y1, is_async=True)
        Y1 = warpgroup_mma(P2, t_s.index(3 * s + 1), Y1, is_async=True)
        Y2 = warpgroup_mma(P2, t_s.index(3 * s + 2), Y2, is_async=True)
        Y1, Y2 = warpgroup_mma_wait(0, deps=(Y1, Y2))
        d = tile_s.index(TILES * s)
        v = tile_s.index(TILES * s + 2)
        Y1 = gl.convert_layout(Y1.to(gl.bfloat16), A_P, assert_trivial=True)
        Y2 = gl.convert_layout(Y2.to(gl.bfloat16), A_P, assert_trivial=True)
        M = warpgroup_mma(Y1, d.slice(0, 16), M, is_async=True)
        M = warpgroup_mma(Y2, d.slice(16, 16), M, is_async=True)
        H = warpgroup_mma(Y1, v.slice(0, 16), H, is_async=True)
        H = warpgroup_mma(Y2, v.slice(16, 16), H, is_async=True)
        M, H = warpgroup_mma_wait(0, deps=(M, H))
        bound = scalar(vec.slice(420, 1))
        mbarrier.arrive(empty.index(s), count=1)
        remaining -= 1
        if bound >= -1.0:
            norm2 = gl.sum(gl.sum(M * (M * (NORM_SCALE * NORM_SCALE)), 1), 0)
            norm_s.store(gl.full([1], 0.0, gl.float32, V1) + norm2)
            if norm2 <= bound:
                remaining = -remaining
        s += 1
        if s == SP:
            s = 0
            phase ^= 1
    loops_s.store(gl.full([1], 0, gl.int32, V1))
    mbarrier.arrive(empty.index(s), count=1)  # the producer may wait here
    item = gl.program_id(0)
    begin, kept, length, head, piece = extent(work)
    chunks = (kept + 15) // 16 - 2 * gl.maximum(remaining, -remaining)
    whole = chunks == (length + 15) // 16
    fill = (flags & FILL) != 0
    base = item.to(gl.int64) * 16384
    if fill | (length > 0):
        gl.store(ht_ptr + base + col * 128 + row, H * (-1.0 / P_SCALE))
    if ((flags & HAS_EFFECTS) != 0) & (piece % CHAINED == CHAINED - 1) & whole & (length > 0):
        aside = (item // heads // CHAINED * heads + head).to(gl.int64) * 16384
        gl.store(effects_ptr + aside + col * 128 + row, H * (-1.0 / P_SCALE))
    if ((flags & HAS_MT) != 0) & (fill | (whole & (length > 0))):
        gl.store(mt_ptr + base + row * 128 + col, gl.where(whole, M, 0.0))
    # last: before the other stores their addresses cost a spill
    gl.store(chunks_ptr + item, chunks)
    gl.store(needs_mt_ptr + item, whole.to(gl.int32))
    gl.store(norm_ptr + item, gl.sqrt(scalar(norm_s)) * (1.0 / NORM_SCALE))


@gluon.jit(
    do_not_specialize=(
        "heads",
        "qk_group",
        "t_total",
        "seq_len",
        "cu_words",
        "n_seqs",
        "n_slots",
        "seg_len",
        "flags",
        "beta_t",
        "beta_h",
    )
)
def kda_summary(
    k_desc,
    v_desc,
    g_desc,
    beta_ptr,
    a_log_ptr,
    dt_ptr,
    cu_ptr,
    cut_ptr,
    num_chunks_ptr,
    ht_ptr,
    mt_ptr,
    effects_ptr,
    needs_mt_ptr,
    chunks_ptr,
    norm_ptr,
    heads,
    qk_group,
    t_total,
    seq_len,
    cu_words,
    n_seqs,
    n_slots,
    seg_len,
    flags,
    beta_t,
    beta_h,
    lower_bound,
    eps,
    CR: gl.constexpr,
    PR: gl.constexpr,
    NP: gl.constexpr,
    SP: gl.constexpr,
    LAG: gl.constexpr,
    G32: gl.constexpr,
):
    """Launch with a CTA of 512 threads an item on grid axis x: num_warps = 8. Items: rows * heads, row * heads + head.

    Rows are the n_slots slots of segments.py, or with n_slots = 0 the n_seqs sequences.

    Args:
        k_desc, v_desc, g_desc, beta_ptr, beta_t, beta_h, a_log_ptr, dt_ptr, heads, qk_group, t_total, lower_bound: as in
            kda_forward.
        cu_ptr, seq_len, cu_words, n_seqs, n_slots, seg_len, cut_ptr: as there; find the segments.
        num_chunks_ptr: [rows, heads] int32, trailing chunks to replay whatever the norm is (at most all), read if `flags`
            says so.
        ht_ptr: [rows, heads, 128 (V), 128 (K)] fp32, the state at the segment's end from zeros at its start.
        mt_ptr: [rows, heads, 128, 128] fp32, d S_out[i, :] / d S_in[j, :], written if `flags` says HAS_MT and the scan reached
            the segment's start.
        effects_ptr: [n_slots / CHAINED and one, heads, 128 (V), 128 (K)] fp32, ht of the slots behind which a chain may begin
            anew (chain.py), written if `flags` says HAS_EFFECTS.
        needs_mt_ptr, chunks_ptr: [rows, heads] int32: 1 if the scan reached the start, else 0; chunks of 16 replayed.
        norm_ptr: [rows, heads] fp32, ||M||_F at the last test.
        flags: HAS_A_LOG, HAS_DT_BIAS, HAS_NUM_CHUNKS, HAS_MT, BETA_*; FILL: write ht and mt everywhere, mt = 0 after an exit,
            ht = 0 and mt = I for rows without tokens (else left alone).
        eps: fp32, the scan stops at ||M||_F <= eps.
        CR, PR: registers of consumer and of other warps. NP, SP: prep warps, stages. LAG: as in kda_forward.
        G32: g_desc is fp32, boxes of [32, 1, 32].
    """
    let_next_start()
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VEC: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    tile_s = gl.allocate_shared_memory(gl.bfloat16, [(4 if G32 else 3) * SP, 32, 128], TILE)
    vec_s = gl.allocate_shared_memory(gl.float32, [SP, 512], VEC)
    t_s = gl.allocate_shared_memory(gl.float16, [3 * SP, 16, 16], gl.NVMMASharedLayout(32, 16, 2))
    loops_s = gl.allocate_shared_memory(gl.int32, [1], VEC)
    norm_s = gl.allocate_shared_memory(gl.float32, [1], VEC)
    V1: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    loops_s.store(gl.full([1], 2, gl.int32, V1))
    rfull = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    half = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SP, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(SP):
        mbarrier.init(rfull.index(j), count=2)
        mbarrier.init(half.index(j), count=1)
        mbarrier.init(full.index(j), count=2)
        mbarrier.init(empty.index(j), count=1)
    fence_async_shared()
    seg_s = gl.allocate_shared_memory(gl.int32, [1], VEC)
    zero1 = gl.full([1], 0, gl.int32, V1)
    on_device = (flags & CUT_ON_DEVICE) != 0
    seg_s.store(gl.where(on_device, gl.load(cut_ptr + zero1, mask=(zero1 == 0) & on_device, other=0), seg_len + zero1))
    layout = (cu_ptr, seq_len, cu_words, t_total, n_seqs, n_slots, seg_s)
    work = (layout, heads, flags, num_chunks_ptr)
    smem = (tile_s, vec_s, t_s, (rfull, half, full, empty))
    words = (loops_s, norm_s)
    params = (beta_ptr, a_log_ptr, dt_ptr, beta_t, beta_h, lower_bound, eps, qk_group)
    outputs = (ht_ptr, mt_ptr, effects_ptr, needs_mt_ptr, chunks_ptr, norm_ptr)
    gl.warp_specialize(
        [
            (consumer, (work, smem, words, outputs, SP, G32)),
            (producer_warp, (work, smem, words, k_desc, v_desc, g_desc, params, NP, SP, LAG, G32)),
            (prep_warp, (smem, loops_s, 0, NP, SP, LAG, False, G32)),
            (prep_warp, (smem, loops_s, 1, NP, SP, LAG, False, G32)),
            (prep_warp, (smem, loops_s, 2, NP, SP, LAG, False, G32)),
            (prep_warp, (smem, loops_s, 3, NP, SP, LAG, False, G32)),
            (prep_warp, (smem, loops_s, 4, NP, SP, LAG, False, G32)),
            (prep_warp, (smem, loops_s, 5, NP, SP, LAG, False, G32)),
            (prep_warp, (smem, loops_s, 6, NP, SP, LAG, False, G32)),
        ],
        [1, 1, 1, 1, 1, 1, 1, 1],
        [PR, PR, PR, PR, PR, PR, PR, PR],
    )
