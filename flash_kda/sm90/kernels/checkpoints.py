"""States on the way: where in a sequence the forward kernel stores its state, and to which rows.

Either every so many tokens (`every` > 0, one column), or at the offsets [n_seqs, columns] of each sequence, in any order.
Offsets that cannot be served, because they are no multiple of 16 or lie beyond their sequence, get rows of NaN.

Called seldom, between steps whose registers are all taken: what is needed is found anew from the item.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import flags as bits
from .prep import kept_here
from .segments import locate, offset, scalar

NEVER = gl.constexpr(2**31 - 1)  # no multiple of 16

SAVED_BF16 = gl.constexpr(bits.SAVED_BF16)
SAVED_AT_INT64 = gl.constexpr(bits.SAVED_AT_INT64)


@gluon.jit
def kept_here_64(x):
    """`kept_here` of 64 bits."""
    return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def place(layout, item, heads):
    """-> sequence and head of an item, first token of the sequence, tokens of it before this piece."""
    item = kept_here(item)
    begin, length, sequence, before, first = locate(item // heads, layout)
    start = 0 * begin
    if before >= 0:
        start = (before - first + 1) * scalar(layout[6])
    return sequence, item % heads, begin - start, start


@gluon.jit
def asked(saving, sequence, column, flags):
    """An offset that was asked for; one beyond 32 bits becomes 0 (none) or 1 (refused)."""
    saved_ptr, saved_at_ptr, every, columns, rows, stride, at_n, at_c = saving
    address = saved_at_ptr + (sequence.to(gl.int64) * at_n + column.to(gl.int64) * at_c)
    at = gl.load(address)
    if (flags & SAVED_AT_INT64) != 0:
        high = gl.load(address + 1)
        at = gl.where(high == (at >> 31), at, gl.where(high < 0, 0, 1))
    return at


@gluon.jit
def next_checkpoint(after, saving, sequence, flags):
    """The first checkpoint of a sequence behind `after` of its tokens; one that is never met if there is none."""
    saved_ptr, saved_at_ptr, every, columns, rows, stride, at_n, at_c = saving
    found = after * 0 + NEVER
    if every > 0:
        found = (after // every + 1) * every
    else:
        for column in range(columns):
            at = asked(saving, sequence, column, flags)
            found = gl.where((at > after) & (at % 16 == 0), gl.minimum(found, at), found)
    return found


@gluon.jit
def first_checkpoint(saving, layout, item, heads, flags):
    """The first checkpoint in an item's piece, in its tokens."""
    sequence, head, begin, start = place(layout, item, heads)
    return next_checkpoint(start, saving, sequence, flags) - start


@gluon.jit
def store_row(S, factor: gl.constexpr, saving, row, head, vchan, s_off, flags):
    """Store S times `factor`, a power of two."""
    saved_ptr, saved_at_ptr, every, columns, rows, stride, at_n, at_c = saving
    if (row >= 0) & (row < rows):
        at = row.to(gl.int64) * (stride // 4 * 4) + (head.to(gl.int64) * 16384 + vchan * 128)
        if factor != 1.0:
            S = S * kept_here(gl.to_tensor(factor))  # here: before the loop over columns it would take the registers of S again
        if (flags & SAVED_BF16) != 0:
            gl.store(saved_ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True) + at + s_off, S.to(gl.bfloat16))
        else:
            gl.store(saved_ptr + at + s_off, S)


@gluon.jit
def save(S, factor: gl.constexpr, at, saving, layout, item, heads, vchan, s_off, flags):
    """Store S times `factor`, the state after `at` tokens of an item's piece, where it was asked for; -> the next one."""
    saved_ptr, saved_at_ptr, every, columns, rows, stride, at_n, at_c = saving
    sequence, head, begin, start = place(layout, item, heads)
    at += start
    for column in range(columns):
        row = sequence * columns + column
        here = every > 0
        if every > 0:
            row = begin // every + at // every - 1
        else:
            here = asked(saving, sequence, column, flags) == at
        if here:
            store_row(S, factor, saving, row, head, vchan, s_off, flags)
    return next_checkpoint(at, saving, sequence, flags) - start


@gluon.jit
def refuse(S, saving, layout, item, n_slots, heads, vchan, s_off, flags):
    """Store S, which is NaN, to the rows of a sequence that cannot be served, if this is its last piece."""
    saved_ptr, saved_at_ptr, every, columns, rows, stride, at_n, at_c = saving
    cu_ptr, seq_len, cu_words, t_total, n_seqs, slots, seg_s = layout
    if (every == 0) & (item >= n_slots * heads):
        sequence, head, begin, start = place(layout, item, heads)
        length = offset(cu_ptr, sequence + 1, seq_len, cu_words, t_total) - begin
        for column in range(columns):
            at = asked(saving, sequence, column, flags)
            if (at > 0) & ((at % 16 != 0) | (at > length)):
                store_row(S, 1.0, saving, sequence * columns + column, head, vchan, s_off, flags)
