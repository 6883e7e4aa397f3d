"""States along the pieces of each sequence from their effects: h[s] = h[s - 1] mt[s]^T + ht[s], V-first, fp32.

    slots     out is ht: each slot's ht becomes the state at the end of its piece (what `forward.py` reads)
    entering  out[s] is the state that enters segment s, out[s + 1] what its product makes

Where it can, a chain also begins anew every CHAINED slots: if ||mt[s]|| ||mt[s - 1]|| <= eps, then h[s] is the same to eps
whether h[s - 1] or ht[s - 1] enters it. So many pieces of few heads do not wait for each other.

A slot whose mt does not matter (its scan exited, or nothing entered its sequence) cuts the chain: ht is its state, and its mt
is not read. So the work is made of *runs* of products that begin behind such a slot, or at a sequence's first, and do not
depend on each other. Every CTA finds the runs of all (slot, head) entries from the flags and offsets, 256 entries at a time,
and takes those whose rank is its own group's; a group is the 128 / ROWS CTAs that share a head's V rows.

A product is three of bf16 terms, hi hi + hi lo + lo hi, accumulated in fp32 onto ht: at most 2^-16 of relative error for each
term of a sum. It is transposed, h^T[i, v] = sum_j mt[i, j] h^T[j, v], so that mt, split by the threads that read it, is an A
operand in registers, and h, which is small, the B operand in shared memory.

Warp roles
    products  two partitions of 8 warps take turns: one splits the next mt while the other's product runs
    producer  4 warps: find the runs, describe each product and start the copy of its mt, STAGES products ahead

Shared memory
    mt [STAGES][4 panels of [128, 32]] fp32, 128-byte swizzle; meta [STAGES][4] int32: 1 product, 0 copy only, -1 end;
    slot; head; where the state that enters comes from
    h [128 (K), ROWS] bf16, high and low terms, handed from one partition to the other

Barriers
    told         for each stage: what it is for stands in meta
    full, empty  for each stage: mt is there; it has been read
    handed       phase c ends when product c has stored its h

Rows of mt go through wgmma in the order 0 2 4 6 1 3 5 7 of each eight: with it the threads read the swizzled panels without
bank conflicts.
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
from .overlap import let_next_start, wait_for_previous
from .prep import add, kept_here, scalar
from .segments import CHAINED, offset, state_slot

ENTRIES = gl.constexpr(256)  # looked at together
PANEL = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
PANEL_COLUMNS = gl.constexpr(32)  # fp32 in a row of 128 bytes
ENTRY_L = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# A [128, 32] panel with lane bits 2, 3, 4 on rows 2, 4, 1: a half-warp's 8-byte reads cover all chunks of the swizzle.
READ_L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0], [0, 8], [0, 16]],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [1, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 32],
    )
)

HAS_INITIAL = gl.constexpr(bits.HAS_INITIAL)
CUT_ON_DEVICE = gl.constexpr(bits.CUT_ON_DEVICE)
INITIAL_BF16 = gl.constexpr(bits.INITIAL_BF16)
HAS_IN_INDEX = gl.constexpr(bits.HAS_IN_INDEX)
HAS_MT = gl.constexpr(bits.HAS_MT)
HAS_NEEDS = gl.constexpr(bits.HAS_NEEDS)
ENTERING = gl.constexpr(bits.ENTERING)
HAS_EFFECTS = gl.constexpr(bits.HAS_EFFECTS)

# where the state that enters a product comes from: the effect of the slot before alone, the product before, the slot before,
# nowhere, or (>= 0) a row of h0
ANEW = gl.constexpr(-4)
CONTINUED = gl.constexpr(-3)
SLOT_BEFORE = gl.constexpr(-2)


@gluon.jit
def greater(key, a, b, c, key2, a2, b2, c2):
    """The tuple with the larger key."""
    second = key2 > key
    return gl.where(second, key2, key), gl.where(second, a2, a), gl.where(second, b2, b), gl.where(second, c2, c)


@gluon.jit
def needed(needs, slot, head, mask):
    """Whether the mt of these slots matter, as far as their flags say."""
    needs_ptr, needs_slot, needs_head, heads, flags = needs
    need = mask & ((flags & HAS_MT) != 0)
    if (flags & HAS_NEEDS) != 0:
        need = gl.load(needs_ptr + slot.to(gl.int64) * needs_slot + head * needs_head, mask=need, other=0) != 0
    return need


@gluon.jit
def anew(norms, slot, first, head, heads, flags, mask):
    """Whether a chain may begin at these slots although the one before has a product: what that drops is below eps."""
    norm_ptr, eps = norms
    mask = mask & (slot > first) & ((slot - first) % CHAINED == 0) & ((flags & HAS_EFFECTS) != 0)
    at = norm_ptr + slot * heads + head
    return mask & (gl.load(at, mask=mask, other=1.0) * gl.load(at - heads, mask=mask, other=1.0) <= eps)


@gluon.jit
def runs(needs, norms, layout, states, slot, head, inside):
    """For each entry: whether a run starts there, 1 if with a product, and its sequence's first slot, products' end, h0 row."""
    needs_ptr, needs_slot, needs_head, heads, flags = needs
    map_ptr, seq_len, map_words, total, n_seqs, n_slots, seg_len = layout
    index_ptr, index_words, in_slots = states
    entering = (flags & ENTERING) // ENTERING
    need = needed(needs, slot, head, inside)
    before = needed(needs, slot - 1, head, inside & (slot > 0))
    # the last sequence whose first slot is not behind this one; any will do where there is nothing to start
    sequence = slot * 0
    if n_seqs > 1:  # noqa: SIM102 (apart, so that one sequence waits for no reduction)
        if (entering != 0) | (gl.max(need.to(gl.int32), 0) > 0):
            top = sequence + (n_seqs - 1)
            span = n_seqs - 1
            while span > 0:
                middle = (sequence + top + 1) // 2
                reached = offset(map_ptr, middle, seq_len, map_words, total) // seg_len <= slot
                sequence = gl.where(reached, middle, sequence)
                top = gl.where(reached, top, middle - 1)
                span = span // 2
    begin = offset(map_ptr, sequence, seq_len, map_words, total)
    length = gl.maximum(offset(map_ptr, sequence + 1, seq_len, map_words, total) - begin, 0)
    first = begin // seg_len
    last = first + gl.maximum(length - 1 + entering, 0) // seg_len
    owned = (first <= slot) & (slot < last)
    initial = slot * 0 - 1
    if (flags & HAS_INITIAL) != 0:
        initial = gl.maximum(state_slot(index_ptr, index_words, sequence, flags & HAS_IN_INDEX, in_slots), -1)
    # a segment that nobody owns is entered by zeros
    first = gl.where(owned, first, slot)
    last = gl.where(owned, last - entering, slot)
    initial = gl.where(owned, initial, -1)
    given = initial >= 0
    before = before & (given | (slot - 1 != first)) & (slot != first)
    product = need & (given | (slot != first)) & (slot < last)
    again = anew(norms, slot, first, head, heads, flags, product & before)
    initial = gl.where(again, ANEW, initial)
    start = ((inside & (entering != 0)) | product) & ((before == 0) | again)
    return start, product.to(gl.int32), first, last, initial


@gluon.jit
def split_pairs(x):
    """x as two bf16 terms, both rounded to nearest; six instructions a pair where the compiler's own conversions take more."""
    return gl.inline_asm_elementwise(
        """{.reg .b32 t, u; .reg .f32 a, b;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        shl.b32 t, $0, 16; and.b32 u, $0, 0xffff0000;
        sub.f32 a, $2, t; sub.f32 b, $3, u;
        cvt.rn.bf16x2.f32 $1, b, a;}""",
        "=&r,=r,r,r",
        [x],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=False,
        pack=2,
    )


@gluon.jit
def terms(panel, A_L: gl.constexpr):
    """A panel of mt as two bf16 A operands."""
    x = panel.load(READ_L)
    # true row 8 a + 2 b + c is row 8 a + 4 c + b of the operand
    x = gl.reshape(gl.permute(gl.reshape(x, [16, 4, 2, PANEL_COLUMNS]), [0, 2, 1, 3]), [128, PANEL_COLUMNS])
    hi, lo = split_pairs(x)
    return gl.convert_layout(hi, A_L, assert_trivial=True), gl.convert_layout(lo, A_L, assert_trivial=True)


@gluon.jit
def split(mt_s, stage, A_L: gl.constexpr):
    a, b = terms(mt_s.index(4 * stage), A_L)
    c, d = terms(mt_s.index(4 * stage + 1), A_L)
    e, f = terms(mt_s.index(4 * stage + 2), A_L)
    g, h = terms(mt_s.index(4 * stage + 3), A_L)
    return a, b, c, d, e, f, g, h


@gluon.jit
def advance(s, phase, by: gl.constexpr, STAGES: gl.constexpr):
    s += by
    wrapped = s >= STAGES
    return gl.where(wrapped, s - STAGES, s), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def put(smem, s, phase, kind, slot, head, source):
    """Say what a stage is for, once it is free."""
    mt_s, meta_s, hi_s, lo_s, told, full, empty, handed = smem
    META_L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    field = gl.arange(0, 4, META_L)
    mbarrier.wait(empty.index(s), phase)
    meta_s.index(s).store(gl.where(field == 0, kind, gl.where(field == 1, slot, gl.where(field == 2, head, source))))
    mbarrier.arrive(told.index(s), count=1)


@gluon.jit
def put_product(mt_desc, smem, s, phase, slot, head, heads, source):
    """A product: say so and start the copy of its mt."""
    mt_s, meta_s, hi_s, lo_s, told, full, empty, handed = smem
    put(smem, s, phase, 1, slot, head, source)
    bar = full.index(s)
    mbarrier.expect(bar, 65536)
    for p in gl.static_range(4):
        tma.async_copy_global_to_shared(mt_desc, [(slot * heads + head) * 128, PANEL_COLUMNS * p], bar, mt_s.index(4 * s + p))


@gluon.jit
def producer(mt_desc, needs, norms, layout, states, smem, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """Fill stages run by run, then mark one stage for each partition as the end."""
    needs_ptr, needs_slot, needs_head, heads, flags = needs
    mt_s, meta_s, hi_s, lo_s, told, full, empty, handed = smem
    n_slots = layout[5]
    k = gl.arange(0, ENTRIES, ENTRY_L)
    groups = gl.num_programs(0) // GROUP
    mine = gl.program_id(0) // GROUP
    seen = mine * 0
    s = mine * 0
    phase = mine * 0 + 1
    for base in range(0, n_slots * heads, ENTRIES):
        entry = base + k
        start, product, firsts, lasts, initials = runs(
            needs, norms, layout, states, entry // heads, entry % heads, entry < n_slots * heads
        )
        rank = seen - 1 + gl.associative_scan(start.to(gl.int32), 0, add)
        seen += gl.sum(start.to(gl.int32), 0)
        while mine < seen:
            key = gl.where(start & (rank == mine), 2 * entry + product, -1)
            found, first, last, initial = gl.reduce((key, firsts, lasts, initials), 0, greater)
            slot = found // 2 // heads
            head = found // 2 % heads
            source = gl.where((slot > first) & (initial != ANEW), SLOT_BEFORE, initial)
            if found % 2 == 0:
                put(smem, s, phase, 0, slot, head, source)
                mbarrier.arrive(full.index(s), count=1)
                s, phase = advance(s, phase, 1, STAGES)
            else:
                # the first product at once; how many follow takes another look at the flags
                put_product(mt_desc, smem, s, phase, slot, head, heads, source)
                s, phase = advance(s, phase, 1, STAGES)
                steps = mine * 0 + ENTRIES
                while steps == ENTRIES:
                    ahead = slot + 1 + k
                    more = needed(needs, ahead, head, ahead < last)
                    more = more & (anew(norms, ahead, first, head, heads, flags, more) == 0)
                    steps = gl.min(gl.where(more, ENTRIES, k), 0)
                    for _ in range(steps):
                        slot += 1
                        put_product(mt_desc, smem, s, phase, slot, head, heads, CONTINUED)
                        s, phase = advance(s, phase, 1, STAGES)
            mine += groups
    for _ in range(2):
        put(smem, s, phase, -1, 0, 0, 0)
        mbarrier.arrive(full.index(s), count=1)
        s, phase = advance(s, phase, 1, STAGES)


@gluon.jit
def hand_on(h, hi_s, lo_s, ROWS: gl.constexpr):
    """h^T as two bf16 terms, rows in true order."""
    hi, lo = split_pairs(h)
    hi_s.store(gl.reshape(gl.permute(gl.reshape(hi, [16, 2, 4, ROWS]), [0, 2, 1, 3]), [128, ROWS]))
    lo_s.store(gl.reshape(gl.permute(gl.reshape(lo, [16, 2, 4, ROWS]), [0, 2, 1, 3]), [128, ROWS]))
    fence_async_shared()


@gluon.jit
def elements(slot, head, heads, ROWS: gl.constexpr, D_L: gl.constexpr):
    """Where this CTA's part of h^T lies in a [slots, heads, V, K] buffer. Made anew for each use, lest it hold registers."""
    m = gl.arange(0, 128, gl.SliceLayout(1, D_L))[:, None]
    v = gl.arange(0, ROWS, gl.SliceLayout(0, D_L))[None, :]
    base = (slot.to(gl.int64) * heads + head) * 16384 + gl.program_id(0) % (128 // ROWS) * (ROWS * 128)
    return base + (v * 128 + ((m & 120) + ((m & 3) << 1) + ((m >> 2) & 1)))


@gluon.jit
def entering_state(ht, effects, h0, slot, head, heads, source, flags, ROWS: gl.constexpr, D_L: gl.constexpr):
    """The first state of a run, from the slot before, the sequence's initial state, or zeros."""
    h0_ptr, h0_stride = h0
    h = gl.zeros([128, ROWS], gl.float32, D_L)
    if source == SLOT_BEFORE:
        h = gl.load(ht + elements(slot - 1, head, heads, ROWS, D_L))
    elif source == ANEW:
        h = gl.load(effects + elements((slot - 1) // CHAINED, head, heads, ROWS, D_L))
    elif source >= 0:
        at = source.to(gl.int64) * (h0_stride // 4 * 4) + elements(head, head * 0, 1, ROWS, D_L)
        if (flags & INITIAL_BF16) != 0:
            h = gl.load(h0_ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True) + at).to(gl.float32)
        else:
            h = gl.load(h0_ptr + at)
    return h


@gluon.jit
def products(
    ht_ptr, out_ptr, effects_ptr, h0, heads, flags, smem, WHICH: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr
):
    """Products WHICH, WHICH + 2, ... of the CTA."""
    mt_s, meta_s, hi_s, lo_s, told, full, empty, handed = smem
    D_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, D_L, 2)
    shift = (flags & ENTERING) // ENTERING
    s = gl.program_id(0) * 0 + WHICH
    phase = gl.program_id(0) * 0
    mbarrier.wait(told.index(s), phase)
    kind = scalar(meta_s.index(s).slice(0, 1))
    while kind >= 0:
        slot = scalar(meta_s.index(s).slice(1, 1))
        head = scalar(meta_s.index(s).slice(2, 1))
        source = scalar(meta_s.index(s).slice(3, 1))
        if source != CONTINUED:
            mbarrier.wait(handed, (WHICH + 1) % 2)
            h = entering_state(ht_ptr, effects_ptr, h0, slot, head, heads, source, flags, ROWS, D_L)
            hand_on(h, hi_s, lo_s, ROWS)
            if shift != 0:
                gl.store(out_ptr + elements(slot, head, heads, ROWS, D_L), h)
        if kind > 0:
            acc = gl.load(ht_ptr + elements(slot, head, heads, ROWS, D_L))
            mbarrier.wait(full.index(s), phase)
            a, b, c, d, e, f, g, i = split(mt_s, s, A_L)
            mbarrier.arrive(empty.index(s), count=1)
            mbarrier.wait(handed, (WHICH + 1) % 2)
            acc = three(a, b, hi_s, lo_s, 0, acc)
            acc = three(c, d, hi_s, lo_s, 1, acc)
            acc = three(e, f, hi_s, lo_s, 2, acc)
            acc = three(g, i, hi_s, lo_s, 3, acc)
            h = warpgroup_mma_wait(0, deps=(acc,))
            hand_on(h, hi_s, lo_s, ROWS)
            mbarrier.arrive(handed, count=1)
            gl.store(out_ptr + elements(kept_here(slot) + shift, head, heads, ROWS, D_L), h)
        else:
            mbarrier.arrive(empty.index(s), count=1)
            mbarrier.arrive(handed, count=1)
        s, phase = advance(s, phase, 2, STAGES)
        mbarrier.wait(told.index(s), phase)
        kind = scalar(meta_s.index(s).slice(0, 1))


@gluon.jit
def three(hi, lo, hi_s, lo_s, p: gl.constexpr, acc):
    """acc + one panel of mt times h, as products of terms."""
    acc = warpgroup_mma(lo, hi_s.slice(PANEL_COLUMNS * p, PANEL_COLUMNS), acc, is_async=True)
    acc = warpgroup_mma(hi, lo_s.slice(PANEL_COLUMNS * p, PANEL_COLUMNS), acc, is_async=True)
    return warpgroup_mma(hi, hi_s.slice(PANEL_COLUMNS * p, PANEL_COLUMNS), acc, is_async=True)


@gluon.jit(
    do_not_specialize=(
        "heads",
        "seq_len",
        "map_words",
        "total",
        "n_seqs",
        "n_slots",
        "seg_len",
        "flags",
        "in_slots",
        "index_words",
        "needs_slot",
        "needs_head",
        "h0_stride",
    )
)
def kda_chain(
    mt_desc,
    ht_ptr,
    out_ptr,
    effects_ptr,
    needs_ptr,
    norm_ptr,
    map_ptr,
    cut_ptr,
    h0_ptr,
    index_ptr,
    heads,
    seq_len,
    map_words,
    total,
    n_seqs,
    n_slots,
    seg_len,
    flags,
    in_slots,
    index_words,
    needs_slot,
    needs_head,
    h0_stride,
    eps,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Launch with a multiple of 128 / ROWS CTAs of 640 threads on grid axis x; no more than the SMs gain anything.

    Args:
        mt_desc: [n_slots * heads * 128, 128] fp32, boxes of [128, 32], 128-byte swizzle; anything if `flags` lacks HAS_MT.
        ht_ptr, out_ptr: [n_slots, heads, 128 (V), 128 (K)] fp32; the same unless `flags` has ENTERING.
        needs_ptr: [n_slots, heads] bytes, not 0 where mt matters, needs_slot and needs_head apart; read if `flags` has
            HAS_NEEDS (else all do).
        effects_ptr, norm_ptr, eps: ht of the slots behind which a chain may begin anew (summary.py), and [n_slots, heads] fp32
            ||mt||_F; read if `flags` has HAS_EFFECTS.
        map_ptr: [n_seqs + 1] as 32-bit words map_words apart, token offsets in the terms of segments.py (`total` tokens,
            pieces of seg_len, seq_len >= 0 if dense). ENTERING: offsets of segments, total = n_slots, seg_len = 1.
        cut_ptr: one int32, read instead of seg_len if `flags` says so (decide.py).
        h0_ptr: [in_slots, heads, 128, 128] fp32 or (`flags`) bf16 behind the same pointer type, slots h0_stride elements
            apart, a multiple of 4; index_ptr: [n_seqs] int32 row of each sequence, index_words apart, out
            of range for zeros. Read if `flags` say so.
    """
    let_next_start()
    wait_for_previous()
    if (flags & CUT_ON_DEVICE) != 0:
        seg_len = gl.load(cut_ptr)
    VEC: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    H_L: gl.constexpr = gl.NVMMASharedLayout(2 * ROWS, 16, 2)
    mt_s = gl.allocate_shared_memory(gl.float32, [4 * STAGES, 128, PANEL_COLUMNS], PANEL)
    meta_s = gl.allocate_shared_memory(gl.int32, [STAGES, 4], VEC)
    hi_s = gl.allocate_shared_memory(gl.bfloat16, [128, ROWS], H_L)
    lo_s = gl.allocate_shared_memory(gl.bfloat16, [128, ROWS], H_L)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(handed, count=1)
    for j in gl.static_range(STAGES):
        mbarrier.init(told.index(j), count=1)
        mbarrier.init(full.index(j), count=1)
        mbarrier.init(empty.index(j), count=1)
    fence_async_shared()
    needs = (needs_ptr, needs_slot, needs_head, heads, flags)
    layout = (map_ptr, seq_len, map_words, total, n_seqs, n_slots, seg_len)
    h0 = (h0_ptr, h0_stride)
    norms = (norm_ptr, eps)
    smem = (mt_s, meta_s, hi_s, lo_s, told, full, empty, handed)
    # Registers: 512 x 112 + 128 x 32 are the 640 x 96 that the CTA starts with.
    gl.warp_specialize(
        [
            (products, (ht_ptr, out_ptr, effects_ptr, h0, heads, flags, smem, 0, ROWS, STAGES)),
            (products, (ht_ptr, out_ptr, effects_ptr, h0, heads, flags, smem, 1, ROWS, STAGES)),
            (producer, (mt_desc, needs, norms, layout, (index_ptr, index_words, in_slots), smem, 128 // ROWS, STAGES)),
        ],
        [8, 4],
        [112, 32],
    )
