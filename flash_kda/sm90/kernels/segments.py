"""Which tokens and which states a work item has, found by each CTA for itself from the offsets of the sequences.

A sequence is cut at multiples of `seg_len` tokens from its start. The pieces that have a successor fill *slots*: sequence n,
which starts at token c(n), owns slots c(n) // seg_len and on, one for each piece. These ranges cannot overlap, whatever the
lengths are, so nobody has to count the pieces of the sequences before; some slots stay unused. At most
(T_total - 1) // seg_len slots exist.

Item numbers: the slots come first, then the last piece of each sequence. Uncut calls have no slots.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import flags

CHAINED = gl.constexpr(flags.CHAINED)


@gluon.jit
def offset(cu_ptr, sequence, seq_len, cu_words, t_total):
    """First token of a sequence: cu_seqlens (int32, or the low words of int64), or dense if seq_len >= 0."""
    at = sequence * seq_len
    if seq_len < 0:
        at = gl.load(cu_ptr + sequence * cu_words)
    return gl.maximum(gl.minimum(at, t_total), 0)


@gluon.jit
def scalar(mem):
    """The value of a one-element shared-memory view."""
    return gl.sum(mem.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def locate(item, layout):
    """-> first token, tokens, sequence, the slot of the piece before (-1: there is none), and the sequence's first slot.

    `layout` ends with the piece length in a shared-memory view of one element: it would hold a register of every partition.
    """
    cu_ptr, seq_len, cu_words, t_total, n_seqs, n_slots, seg_s = layout
    sequence = item - n_slots
    seg_len = 1
    if n_slots > 0:
        seg_len = scalar(seg_s)
    if item < n_slots:
        # the last sequence whose first slot is not behind this one
        sequence = 0
        last = n_seqs - 1
        while sequence < last:
            middle = (sequence + last + 1) // 2
            if offset(cu_ptr, middle, seq_len, cu_words, t_total) // seg_len <= item:
                sequence = middle
            else:
                last = middle - 1
    begin = sequence * seq_len
    end = begin + seq_len
    if seq_len < 0:  # both loads before either is waited for
        begin = gl.load(cu_ptr + sequence * cu_words)
        end = gl.load(cu_ptr + (sequence + 1) * cu_words)
    end = gl.minimum(end, t_total)
    begin = gl.maximum(gl.minimum(begin, end), 0)
    length = end - begin
    before = -1
    first = 0
    if n_slots > 0:
        first = begin // seg_len
        pieces = gl.maximum(length - 1, 0) // seg_len
        piece = pieces
        if item < n_slots:
            piece = item - first
            length = gl.where(piece < pieces, seg_len, 0)
        else:
            length -= pieces * seg_len
        begin += piece * seg_len
        before = gl.where(piece > 0, first + piece - 1, -1)
    return begin, length, sequence, before, first


@gluon.jit
def state_slot(index_ptr, words, sequence, has_index, n_slots):
    """Row of a sequence in a state buffer; negative: none."""
    slot = sequence
    if has_index != 0:
        slot = gl.load(index_ptr + sequence.to(gl.int64) * words)
    return gl.where(slot < n_slots, slot, -1)
