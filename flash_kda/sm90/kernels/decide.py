"""Whether sequences are cut, where the host does not know their lengths: one CTA looks for a long one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WHOLE = gl.constexpr(2**30)  # a piece length that cuts nothing
LANES = gl.constexpr(1024)  # sequences looked at together


@gluon.jit(do_not_specialize=("cu_words", "t_total", "n_seqs", "seg_len", "only_if_longer"))
def kda_decide(cu_ptr, cut_ptr, cu_words, t_total, n_seqs, seg_len, only_if_longer):
    """Store seg_len to cut_ptr if some sequence has more than only_if_longer tokens, else WHOLE. Launch one CTA.

    Args:
        cu_ptr, cu_words, t_total, n_seqs: offsets as in forward.py.
        cut_ptr: one int32.
        seg_len, only_if_longer: tokens.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    longest = gl.zeros([LANES], gl.int32, L)
    for first in range(0, n_seqs, LANES):
        sequence = first + gl.arange(0, LANES, L)
        inside = sequence < n_seqs
        begin = gl.load(cu_ptr + sequence * cu_words, mask=inside, other=0)
        end = gl.load(cu_ptr + (sequence + 1) * cu_words, mask=inside, other=0)
        longest = gl.maximum(longest, gl.minimum(end, t_total) - gl.maximum(begin, 0))
    gl.store(cut_ptr, gl.where(gl.max(longest, 0) > only_if_longer, seg_len, WHOLE))
