"""Fused KDA forward for Hopper: raw q, k, v, g, beta to outputs and final states in one launch.

A CTA owns one (segment, head) work item at a time, or one half of its V channels (VSPLIT = 2), and walks it in steps of
32 tokens, two 16-token tiles with their own anchors. With tile 1 the earlier and 2 the later one, d = k E, m = k / E,
z = q E (E = exp(G), G the cumulative sum of log alpha in the tile), gamma the last row of E, b = beta, and T the unit
lower triangular (I + tril(k^ E (k^ / E)^T, -1) diag(b))^-1 of the normalised keys k^ = k / |k|:

    D = [d1; d2 gamma1]     Q = [z1; z2 gamma1]     Kr1 = m1 gamma1
    T = [[T1, 0], [-T2 (d2 Kr1^T) b T1, T2]]        Z = [[tril(z1 m1^T), 0], [z2 Kr1^T, tril(z2 m2^T)]]
    X = v - D S      R = b T X      out = Q S + Z R      S <- gamma2 (gamma1 S + [Kr1; m2]^T R)

Prep makes everything in the first two lines; the consumers do the third. That they apply T to X, instead of being given b T D
and b T v, takes a fifth of prep's instructions away and two roundings out of R.

Every exponent but the one of m is <= 0, and the one of m is at most 16 |lower_bound|. E carries a common factor
2^SHIFT that cancels in every product: it keeps m of large raw keys, and d of small ones, inside the range of bf16.
Keys and queries are never normalised: |k|^2 is the diagonal of d m^T; 1/|k| multiplies D S, b / |k| makes R come out as R/|k|,
so that m and Kr need no factor, and T has powers of it; 1/|q|, the scale and 2^-SHIFT multiply the outputs.

Warp roles
    consumers   4 warps for each 64 V channels: the state St[v, k], fp32, lives in their wgmma accumulators
    producer    1 warp: TMA of the raw tiles, SP steps deep
    prep        NP warps: warp w takes tiles w, w + NP, ... of the CTA's running tile count; NP is odd, so each warp
                alternates first and second tiles

Shared memory, for each of SP stages (factors replace raw inputs in place)
    tile [128, 128] bf16   rows 0-31 k, then d, then D; 32-63 q, then z, then Q (with D one N = 64 wgmma operand), and
                           last the outputs on their way; 64-95 g, then m, the first 16 then Kr1; 96-127 v (VSPLIT = 2:
                           columns 0-63 only)
    vec [512] fp32         0-127 dt_bias META[1]; 128-255 gamma1; 256-383 gamma2; 384-415 beta, then 2^SHIFT b / |k|;
                           448-479 scale 2^-SHIFT / |q|; 480-511 2^-SHIFT / |k|; 416-419 META: tokens left,
                           -exp(A_log) log2(e), 1 / (lower_bound log2(e)), scale 2^-SHIFT
    t 6 x [16, 16] bf16    the three blocks of T that are not zero, first row first; those of Z
and the stride of the loop over items.

G32: a stage holds channels 0-63 of fp32 g where m will be, 64-127 lie in one of SP - 1 places of [32, 64] behind the last
stage, free as soon as prep is done with the step; vec 420 says which. Elsewhere nothing differs.

Barriers, for each stage
    rfull  the producer: TMA bytes, and its own arrival for `vec` or the end mark
    half   prep of the first tile, to prep of the second: Kr1, T1, gamma1 and b / |k| are there
    full   both prep warps, to the consumers: all factors are there
    empty  the consumers, to the producer: the stage may be overwritten, its outputs have left (one step later)
The producer alone tells prep what to do: a prep warp keeps nothing but its tile count across tiles, because registers
that live across the call into `prep_turn` are registers that it cannot use.

Rows past the end of a segment may hold a neighbour's tokens. Before anything reads them they are replaced, by selection:
zeros in k, v and -inf in g, which makes their decay exactly 1. What comes of q (z, Q, Z, 1/|q|) stays in the row of its
token, and the rows past the end are never stored.

Ranges: the promises hold for |k| up to 6e9 and |q|, |v| up to about 1e27; beyond, a token may overflow into its step.
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
from .checkpoints import first_checkpoint, kept_here_64, refuse, save
from .overlap import wait_for_previous
from .prep import INV_SHIFT, LOG2E, gate_slope, halves, kept_here, prep_warp, to_fp32
from .segments import locate, scalar, state_slot
from .strength import load_beta, strength

STEP = gl.constexpr(32)  # tokens a step: two tiles
BOX_CHANNELS = gl.constexpr(64)  # channels of a TMA box: a 128-byte swizzle holds no more
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
BOX_CHANNELS_FP32 = gl.constexpr(32)
BOX_FP32 = gl.constexpr(gl.NVMMASharedLayout(128, 32, 3))

HAS_INITIAL = gl.constexpr(bits.HAS_INITIAL)
INITIAL_BF16 = gl.constexpr(bits.INITIAL_BF16)
HAS_IN_INDEX = gl.constexpr(bits.HAS_IN_INDEX)
HAS_FINAL = gl.constexpr(bits.HAS_FINAL)
FINAL_BF16 = gl.constexpr(bits.FINAL_BF16)
HAS_OUT_INDEX = gl.constexpr(bits.HAS_OUT_INDEX)
IN_PLACE = gl.constexpr(bits.IN_PLACE)
CUT_ON_DEVICE = gl.constexpr(bits.CUT_ON_DEVICE)


@gluon.jit
def producer_warp(
    work,
    smem,
    q_desc,
    k_desc,
    v_desc,
    g_desc,
    params,
    NP: gl.constexpr,
    SP: gl.constexpr,
    VSPLIT: gl.constexpr,
    LAG: gl.constexpr,
    G32: gl.constexpr,
):
    """Fill stages item by item, then mark enough stages as the end that every prep warp meets one."""
    layout, heads, n_items, ctas_s, flags = work
    tile_s, vec_s, t_s, bars = smem
    rfull, half, full, empty = bars
    beta_ptr, a_log_ptr, dt_ptr, beta_t, beta_h, lower_bound, scale, qk_group = params
    # a [128, 128] tile as the eight [32, 64] swizzled boxes that TMA writes
    boxes = tile_s._reinterpret(gl.bfloat16, [8 * SP, 32, 1, 64], gl.NVMMASharedLayout(128, 16, 3))
    if G32:
        g_boxes = tile_s._reinterpret(gl.float32, [8 * SP + 8, 32, 1, 32], gl.NVMMASharedLayout(128, 32, 3))
        place = gl.program_id(0) * 0
    V1: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    V4: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    lane = gl.arange(0, 32, V1)
    ch = gl.arange(0, 128, V4)
    field = gl.arange(0, 4, V1)
    part = gl.program_id(0) % VSPLIT
    # log2(alpha) = bound / (1 + 2^x), written 1 / (inv + inv 2^x); a bound of 0 becomes one too small to matter
    inv_bound = 1.0 / (gl.minimum(kept_here(lower_bound), -1e-30) * LOG2E)
    scale = kept_here(scale)
    two = 2 + (gl.program_id(0) >> 30)  # 2, but the compiler cannot know and unroll
    # A prep warp goes from a turn at step i to one at most NP // 2 + 1 + LAG steps on, in the stage that step i - GAP had. A
    # wait that comes before that step's bytes takes the phase before for the one it wants, so stages must fill in that order
    # (with GAP = 0 that step is the turn's own).
    GAP: gl.constexpr = SP - (NP // 2 + 1 + LAG)
    s = 0
    phase = 1
    b = 0
    b_phase = 0
    done = 0
    for item in range(gl.program_id(0) // VSPLIT, n_items, scalar(ctas_s)):
        head = item % heads
        qk_head = head // qk_group
        begin, length, sequence, before, first = locate(item // heads, layout)
        neg_rate, bias = gate_slope(a_log_ptr, dt_ptr, head, ch, flags)
        meta = gl.where(field == 1, neg_rate, gl.where(field == 2, inv_bound, scale * INV_SHIFT))
        beta_head = head.to(gl.int64) * beta_h
        for left in range(length, 0, -32):
            t = begin + (length - left)
            beta = load_beta(beta_ptr, beta_head + (t + lane).to(gl.int64) * beta_t, lane < left, flags)
            bar = rfull.index(s)
            mbarrier.wait(empty.index(s), phase)
            if G32:
                # the place was that of the step SP - 1 before, whose stage is the next one
                following = gl.where(s == SP - 1, 0, s + 1)
                mbarrier.wait(full.index(following), gl.where(s == SP - 1, phase ^ 1, phase))
            mbarrier.expect(bar, 32 * 256 * (4 if G32 else 3) + 32 * 256 // VSPLIT)
            for j in range(two):
                if G32:
                    tma.async_copy_global_to_shared(g_desc, [t, head, 32 * j], bar, g_boxes.index(8 * s + 4 * j + 2))
                    tma.async_copy_global_to_shared(g_desc, [t, head, 64 + 32 * j], bar, g_boxes.index(8 * SP + 4 * j + place))
                else:
                    tma.async_copy_global_to_shared(g_desc, [t, head, 64 * j], bar, boxes.index(8 * s + 4 * j + 2))
                tma.async_copy_global_to_shared(q_desc, [t, qk_head, 64 * j], bar, boxes.index(8 * s + 4 * j + 1))
                tma.async_copy_global_to_shared(k_desc, [t, qk_head, 64 * j], bar, boxes.index(8 * s + 4 * j))
                if j < 2 // VSPLIT:
                    tma.async_copy_global_to_shared(v_desc, [t, head, 64 * (part + j)], bar, boxes.index(8 * s + 4 * j + 3))
            vec = vec_s.index(s)
            vec.slice(0, 128).store(bias)
            vec.slice(384, 32).store(strength(beta, flags))
            vec.slice(416, 4).store(gl.where(field == 0, left.to(gl.float32), meta))
            if G32:
                vec.slice(420, 4).store(gl.full([4], 0.0, gl.float32, V1) + place.to(gl.float32))
                place = gl.where(place == SP - 2, 0, place + 1)
            done += 1
            if (GAP > 0) & (done > GAP):
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
    for _ in range((NP + 1) // 2 + LAG):  # at most SP: nobody empties these stages
        mbarrier.wait(empty.index(s), phase)
        done += 1
        if (GAP > 0) & (done > GAP):
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
def consumer(
    work,
    smem,
    out_desc,
    outputs,
    states,
    pieces,
    saving,
    SP: gl.constexpr,
    VSPLIT: gl.constexpr,
    PROBE: gl.constexpr,
    CHECKPOINTS: gl.constexpr,
):
    """The recurrence, 4 warps for each 64 V channels: P|O = St [D|Q]^T is one N = 64 product, then T, then S and O take R.

    One partition, not one for each warpgroup: a second copy of this code would not fit the instruction cache.
    """
    layout, heads, n_items, ctas_s, flags = work
    tile_s, vec_s, t_s, bars = smem
    rfull, half, full, empty = bars
    out_ptr, out_t, out_h = outputs
    h0_ptr, ht_ptr, in_index_ptr, out_index_ptr, in_words, out_words, in_slots, out_slots, h0_stride, ht_stride = states
    slots_ptr, n_slots, taken_ptr, chunks_ptr, entering_ptr = pieces
    MV: gl.constexpr = 128 // VSPLIT
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [MV // 16, 1], [16, 128, 16])
    R_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [MV // 16, 1], [16, 32, 16])
    PQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [MV // 16, 1], [16, 64, 16])
    T_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [MV // 16, 1], [16, 16, 16])
    A_T: gl.constexpr = gl.DotOperandLayout(0, T_L, 2)
    A_P: gl.constexpr = gl.DotOperandLayout(0, PQ_L, 2)
    A_S: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    zero = gl.zeros([MV, 64], gl.float32, PQ_L)
    zero16 = gl.zeros([MV, 16], gl.float32, T_L)
    boxes = tile_s._reinterpret(gl.bfloat16, [8 * SP, 32, 1, 64], gl.NVMMASharedLayout(128, 16, 3))
    vchan = 64 * (gl.program_id(0) % VSPLIT)  # first V channel of the CTA
    sv = gl.arange(0, MV, gl.SliceLayout(1, S_L))[:, None]
    sk = gl.arange(0, 128, gl.SliceLayout(0, S_L))[None, :]
    s_off = (vchan + sv) * 128 + sk
    ov = gl.arange(0, MV, gl.SliceLayout(1, T_L))[:, None]
    ot = gl.arange(0, 16, gl.SliceLayout(0, T_L))[None, :]
    wait_for_previous()  # only these warps read what the chain writes; the others begin without it
    s = 0
    phase = 0
    kept = -1  # the stage whose rows of q hold outputs that are on their way
    for item in range(gl.program_id(0) // VSPLIT, n_items, scalar(ctas_s)):
        head = item % heads
        begin, length, sequence, before, first = locate(item // heads, layout)
        if CHECKPOINTS:
            due = first_checkpoint(saving, layout, item, heads, flags)  # in tokens of this piece
        S = gl.zeros([MV, 128], gl.float32, S_L)
        if before >= 0:
            S = gl.load(slots_ptr + (before.to(gl.int64) * heads + head) * 16384 + s_off)
        elif (flags & HAS_INITIAL) != 0:
            slot = state_slot(in_index_ptr, in_words, sequence, flags & HAS_IN_INDEX, in_slots)
            if slot >= 0:
                off = slot.to(gl.int64) * (h0_stride // 4 * 4) + head.to(gl.int64) * 16384
                if (flags & INITIAL_BF16) != 0:
                    S = gl.load(h0_ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True) + off + s_off).to(gl.float32)
                else:
                    S = gl.load(h0_ptr + off + s_off)
        if ((flags & IN_PLACE) != 0) & (item < n_slots * heads) & (before < 0) & (length > 0):
            gl.thread_barrier()
            gl.atomic_add(taken_ptr + item, 1, sem="release", scope="gpu")
        if PROBE:
            probe = -1  # tokens before the replayed suffix, if the scan of this piece exited
            if item < n_slots * heads:
                probe = ((length + 15) // 16 - gl.load(chunks_ptr + item)) * 16
        left = length
        while left > 0:
            if PROBE:  # noqa: SIM102  (a constant)
                if (length - left == probe) & (probe > 0):
                    gl.store(entering_ptr + item, gl.sqrt(gl.sum(gl.sum(S * S, 1), 0)))
            mbarrier.wait(full.index(s), phase)
            tile = tile_s.index(s)
            vec = vec_s.index(s)
            Sb = gl.convert_layout(S.to(gl.bfloat16), A_P, assert_trivial=True)
            PQ = warpgroup_mma(Sb, tile.slice(0, 64).permute([1, 0]), zero, use_acc=False, is_async=True)
            S = S * vec.slice(128, 128).load(gl.SliceLayout(0, S_L))[None, :]
            v = tile.slice(96, 32).slice(0, MV, dim=1).permute([1, 0]).load(R_L)
            PQ = warpgroup_mma_wait(0, deps=(PQ,))
            v = to_fp32(v)
            tma.store_wait(0)
            gl.thread_barrier()
            mbarrier.arrive(empty.index(gl.maximum(kept, 0)), count=1, pred=kept >= 0)
            rk = vec.slice(480, 32).load(gl.SliceLayout(0, R_L))
            P, O = halves(PQ, R_L)
            X1, X2 = halves((v - P * rk[None, :]).to(gl.bfloat16), T_L)
            X1 = gl.convert_layout(X1, A_T, assert_trivial=True)
            X2 = gl.convert_layout(X2, A_T, assert_trivial=True)
            R1 = warpgroup_mma(X1, t_s.index(6 * s).permute([1, 0]), zero16, use_acc=False, is_async=True)
            R2 = warpgroup_mma(X1, t_s.index(6 * s + 1).permute([1, 0]), zero16, use_acc=False, is_async=True)
            R2 = warpgroup_mma(X2, t_s.index(6 * s + 2).permute([1, 0]), R2, is_async=True)
            row1 = vec.slice(384, 16).load(gl.SliceLayout(0, T_L))
            row2 = vec.slice(400, 16).load(gl.SliceLayout(0, T_L))
            R1, R2 = warpgroup_mma_wait(0, deps=(R1, R2))
            R1 = (R1 * row1[None, :]).to(gl.bfloat16)
            R2 = (R2 * row2[None, :]).to(gl.bfloat16)
            S = warpgroup_mma(gl.convert_layout(R1, A_S, assert_trivial=True), tile.slice(64, 16), S, is_async=True)
            if CHECKPOINTS:
                S = warpgroup_mma_wait(0, deps=(S,))
                if (due == length - left + 16) & (left >= 16):
                    due = save(S, 1.0, due, saving, layout, item, heads, vchan, sv * 128 + sk, flags)
            S = warpgroup_mma(gl.convert_layout(R2, A_S, assert_trivial=True), tile.slice(80, 16), S, is_async=True)
            R1 = gl.convert_layout(R1, A_T, assert_trivial=True)
            R2 = gl.convert_layout(R2, A_T, assert_trivial=True)
            Z1 = warpgroup_mma(R1, t_s.index(6 * s + 3).permute([1, 0]), zero16, use_acc=False, is_async=True)
            Z2 = warpgroup_mma(R1, t_s.index(6 * s + 4).permute([1, 0]), zero16, use_acc=False, is_async=True)
            Z2 = warpgroup_mma(R2, t_s.index(6 * s + 5).permute([1, 0]), Z2, is_async=True)
            S, Z1, Z2 = warpgroup_mma_wait(0, deps=(S, Z1, Z2))
            rq1 = vec.slice(448, 16).load(gl.SliceLayout(0, T_L))
            rq2 = vec.slice(464, 16).load(gl.SliceLayout(0, T_L))
            O1, O2 = halves(O, T_L)
            O1 += Z1
            O2 += Z2
            S = S * vec.slice(256, 128).load(gl.SliceLayout(0, S_L))[None, :]
            O1 = (O1 * rq1[None, :]).to(gl.bfloat16)
            O2 = (O2 * rq2[None, :]).to(gl.bfloat16)
            token = begin + (length - left)
            if left >= 32:
                # through the rows of q, which every warp has read
                o_s = tile.slice(32, 32).slice(0, MV, dim=1).permute([1, 0])
                o_s.slice(0, 16, dim=1).store(O1)
                o_s.slice(16, 16, dim=1).store(O2)
                fence_async_shared()
                for j in gl.static_range(MV // 64):
                    tma.async_copy_shared_to_global(out_desc, [token, head, vchan + 64 * j], boxes.index(8 * s + 4 * j + 1))
            else:
                # rows past the end belong to someone else
                if CHECKPOINTS:
                    out_t = kept_here_64(out_t)
                row = out_ptr + token.to(gl.int64) * out_t + head.to(gl.int64) * out_h + vchan + ot * out_t + ov
                gl.store(row, O1, mask=(ot < left) & (ov >= 0))
                gl.store(row + 16 * out_t, O2, mask=(ot < left - 16) & (ov >= 0))
            if CHECKPOINTS:  # noqa: SIM102  (a constant)
                if (due == length - left + 32) & (left >= 32):
                    due = save(S, 1.0, due, saving, layout, item, heads, vchan, sv * 128 + sk, flags)
            kept = s
            left -= 32
            s += 1
            if s == SP:
                s = 0
                phase ^= 1
        if ((flags & HAS_FINAL) != 0) & (item >= n_slots * heads):
            slot = state_slot(out_index_ptr, out_words, sequence, flags & HAS_OUT_INDEX, out_slots)
            if slot >= 0:
                if ((flags & IN_PLACE) != 0) & (before >= 0):
                    # The initial state may lie where the final one goes: the first piece must have taken it. Its item comes
                    # before this one, so it runs or has run.
                    while gl.atomic_add(taken_ptr + first * heads + head, 0, sem="acquire", scope="gpu") < VSPLIT:
                        pass
                off = slot.to(gl.int64) * (ht_stride // 4 * 4) + head.to(gl.int64) * 16384
                if (flags & FINAL_BF16) != 0:
                    gl.store(ht_ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True) + off + s_off, S.to(gl.bfloat16))
                else:
                    gl.store(ht_ptr + off + s_off, S)
        if CHECKPOINTS:
            S = gl.full([MV, 128], float("nan"), gl.float32, S_L)
            refuse(S, saving, layout, item, n_slots, heads, vchan, sv * 128 + sk, flags)
    tma.store_wait(0)
    if kept >= 0:
        mbarrier.arrive(empty.index(kept), count=1)


@gluon.jit(
    do_not_specialize=(
        "heads",
        "qk_group",
        "n_items",
        "t_total",
        "seq_len",
        "cu_words",
        "n_seqs",
        "n_slots",
        "seg_len",
        "flags",
        "in_slots",
        "out_slots",
        "in_words",
        "out_words",
        "beta_t",
        "beta_h",
        "out_t",
        "out_h",
        "h0_stride",
        "ht_stride",
        "every",
        "columns",
        "saved_rows",
        "saved_stride",
        "saved_at_n",
        "saved_at_c",
    )
)
def kda_forward(
    q_desc,
    k_desc,
    v_desc,
    g_desc,
    out_desc,
    beta_ptr,
    out_ptr,
    a_log_ptr,
    dt_ptr,
    cu_ptr,
    h0_ptr,
    ht_ptr,
    slots_ptr,
    taken_ptr,
    chunks_ptr,
    entering_ptr,
    cut_ptr,
    in_index_ptr,
    out_index_ptr,
    saved_ptr,
    saved_at_ptr,
    heads,
    qk_group,
    n_items,
    t_total,
    seq_len,
    cu_words,
    n_seqs,
    n_slots,
    seg_len,
    flags,
    in_slots,
    out_slots,
    in_words,
    out_words,
    beta_t,
    beta_h,
    out_t,
    out_h,
    h0_stride,
    ht_stride,
    every,
    columns,
    saved_rows,
    saved_stride,
    saved_at_n,
    saved_at_c,
    lower_bound,
    scale,
    CR: gl.constexpr,
    PR: gl.constexpr,
    NP: gl.constexpr,
    SP: gl.constexpr,
    VSPLIT: gl.constexpr,
    LAG: gl.constexpr,
    PROBE: gl.constexpr,
    G32: gl.constexpr,
    CHECKPOINTS: gl.constexpr,
):
    """Launch with min(n_items, any number) * VSPLIT CTAs of 512 threads on grid axis x: num_warps = 8 / VSPLIT.

    Fewer CTAs than items loop over them; that is faster for many short segments, and the bits are the same.

    Args:
        q_desc, k_desc, v_desc, g_desc, out_desc: [T_total, heads, 128] bf16, boxes of [32, 1, 64], 128-byte swizzle.
        beta_ptr, out_ptr: bf16, or (`flags`) beta fp32 behind the same pointer type; logits, or (`flags`) strengths in [0, 2];
            token and head strides beta_t, beta_h, out_t, out_h in elements.
        a_log_ptr [heads], dt_ptr [heads, 128]: fp32, read if `flags` says so (else exp(A_log) = 1, dt_bias = 0).
        cu_ptr: [n_seqs + 1] offsets as 32-bit words, cu_words apart (1: int32; 2: low words of int64), read if
            seq_len < 0; otherwise sequence n is tokens n * seq_len and on. Offsets are clipped to t_total.
        h0_ptr, ht_ptr: states [slots, heads, 128 (V), 128 (K)], fp32 or (`flags`) bf16 behind the same pointer type, slot
            strides h0_stride, ht_stride in elements of their dtype, multiples of 4.
        slots_ptr: [n_slots, heads, 128 (V), 128 (K)] fp32, the state at the end of each piece that has a successor.
        taken_ptr: [n_slots, heads] int32 zeros, used if `flags` says IN_PLACE: some initial state lies where a final one goes.
        chunks_ptr, entering_ptr: (PROBE) [n_slots, heads] int32, trailing chunks that the scan of each piece replayed; fp32,
            Frobenius norm of the state that enters them, stored where there are tokens before.
        in_index_ptr, out_index_ptr: int32 row of each sequence, in_words, out_words apart, read if `flags` says so (else
            row = sequence). Rows < 0 or >= in_slots, out_slots: the state starts from zeros, or is not stored.
        saved_ptr: (CHECKPOINTS) [saved_rows, heads, 128 (V), 128 (K)], states on the way as ht_ptr holds final ones, dtype
            by `flags`, rows saved_stride elements apart, a multiple of 4: that after the j-th `every` tokens of a sequence
            that begins at token t in row t // every + j - 1 (columns = 1), or, every = 0, that after the tokens of
            saved_at_ptr[n, c] in row n * columns + c.
        saved_at_ptr: [n_seqs, columns], strides saved_at_n, saved_at_c in 32-bit words, int32 or (`flags`) int64: multiples of
            16 up to the sequence's length; 0 or less for none; NaN is stored where it is anything else.
        heads, qk_group: value heads; value heads that share a q, k head.
        n_items: (n_slots + n_seqs) * heads. t_total: tokens.
        n_slots, seg_len: pieces that have a successor, at most, and their tokens (segments.py); 0 leaves sequences whole.
        cut_ptr: one int32, read instead of seg_len if `flags` says so (decide.py).
        flags: of flags.py.
        lower_bound in [-5, 0], scale: fp32.
        CR, PR: registers of consumer and of other warps. NP, SP: prep warps, stages. VSPLIT: CTAs an item, 1 or 2.
        G32: g_desc is fp32, boxes of [32, 1, 32]. SP is 5 then: SP - 1 places of [32, 64] fp32 are as large as a stage.
        PROBE: store norms of states on the way; costs time and instruction cache, so a variant of its own.
        CHECKPOINTS: the same of states.
        LAG: steps by which second tiles trail first ones in the order of prep.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VEC: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    tile_s = gl.allocate_shared_memory(gl.bfloat16, [SP + G32, 128, 128], TILE)
    vec_s = gl.allocate_shared_memory(gl.float32, [SP, 512], VEC)
    t_s = gl.allocate_shared_memory(gl.bfloat16, [6 * SP, 16, 16], gl.NVMMASharedLayout(32, 16, 2))
    # the stride of the loop over items, in shared memory lest it hold a register of every partition
    ctas_s = gl.allocate_shared_memory(gl.int32, [1], VEC)
    V1: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ctas_s.store(gl.full([1], 0, gl.int32, V1) + gl.num_programs(0) // VSPLIT)
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
    work = (layout, heads, n_items, ctas_s, flags)
    smem = (tile_s, vec_s, t_s, (rfull, half, full, empty))
    params = (beta_ptr, a_log_ptr, dt_ptr, beta_t, beta_h, lower_bound, scale, qk_group)
    outputs = (out_ptr, out_t, out_h)
    states = (h0_ptr, ht_ptr, in_index_ptr, out_index_ptr, in_words, out_words, in_slots, out_slots, h0_stride, ht_stride)
    pieces = (slots_ptr, n_slots, taken_ptr, chunks_ptr, entering_ptr)
    saving = (saved_ptr, saved_at_ptr, every, columns, saved_rows, saved_stride, saved_at_n, saved_at_c)
    # Registers: (2 CR + 2 PR) 128 <= 65,536, or (CR + 3 PR) 128 with VSPLIT = 2; beyond, setmaxnreg is dropped silently.
    if VSPLIT == 1:
        gl.warp_specialize(
            [
                (consumer, (work, smem, out_desc, outputs, states, pieces, saving, SP, VSPLIT, PROBE, CHECKPOINTS)),
                (producer_warp, (work, smem, q_desc, k_desc, v_desc, g_desc, params, NP, SP, VSPLIT, LAG, G32)),
                (prep_warp, (smem, t_s, 0, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 1, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 2, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 3, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 4, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 5, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 6, NP, SP, LAG, True, G32)),
            ],
            [1, 1, 1, 1, 1, 1, 1, 1],
            [PR, PR, PR, PR, PR, PR, PR, PR],
        )
    elif NP == 9:
        gl.warp_specialize(
            [
                (consumer, (work, smem, out_desc, outputs, states, pieces, saving, SP, VSPLIT, PROBE, CHECKPOINTS)),
                (producer_warp, (work, smem, q_desc, k_desc, v_desc, g_desc, params, NP, SP, VSPLIT, LAG, G32)),
                (prep_warp, (smem, t_s, 0, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 1, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 2, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 3, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 4, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 5, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 6, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 7, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 8, NP, SP, LAG, True, G32)),
            ],
            [1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
            [PR, PR, PR, PR, PR, PR, PR, PR, PR, PR],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (work, smem, out_desc, outputs, states, pieces, saving, SP, VSPLIT, PROBE, CHECKPOINTS)),
                (producer_warp, (work, smem, q_desc, k_desc, v_desc, g_desc, params, NP, SP, VSPLIT, LAG, G32)),
                (prep_warp, (smem, t_s, 0, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 1, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 2, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 3, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 4, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 5, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 6, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 7, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 8, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 9, NP, SP, LAG, True, G32)),
                (prep_warp, (smem, t_s, 10, NP, SP, LAG, True, G32)),
            ],
            [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
            [PR, PR, PR, PR, PR, PR, PR, PR, PR, PR, PR, PR],
        )
