"""Trailing chunks after which the a-priori bound sqrt(K) exp(sum_t max_i log alpha[t, i]) is at most eps, from the gates alone.

A CTA owns one (segment, head) and walks it from its end in blocks of CHUNKS chunks until the sum of its
tokens' largest log alpha has fallen to the target. log alpha falls with the gate's argument, so a token's largest is that of
its smallest g + dt_bias: one sigmoid for 128 channels. Sums inside a block are fp32, over blocks fp64: thousands of equal
small terms would drift in fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import flags as bits
from .prep import add
from .segments import offset

HAS_A_LOG = gl.constexpr(bits.HAS_A_LOG)
HAS_DT_BIAS = gl.constexpr(bits.HAS_DT_BIAS)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def smaller(a, b):
    """Minimum that keeps a NaN."""
    return gl.inline_asm_elementwise("min.NaN.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit(do_not_specialize=("heads", "total", "seq_len", "map_words", "flags", "g_t", "g_h"))
def kda_warmup(
    g_ptr,
    a_log_ptr,
    dt_ptr,
    map_ptr,
    num_ptr,
    fallback_ptr,
    heads,
    total,
    seq_len,
    map_words,
    flags,
    g_t,
    g_h,
    lower_bound,
    target,
    CHUNKS: gl.constexpr,
):
    """Launch with a CTA for each (segment, head), heads first, on grid axis x; num_warps divides 8 * CHUNKS.

    Args:
        g_ptr: bf16 or fp32, token and head strides g_t, g_h in elements, multiples of 16 bytes.
        a_log_ptr [heads], dt_ptr [heads, 128]: fp32, read if `flags` says so (else exp(A_log) = 1, dt_bias = 0).
        map_ptr, total, seq_len, map_words: segment offsets in tokens, as in segments.py.
        num_ptr: [segments, heads] int32. fallback_ptr: the same, one byte each.
        target: log(eps) - log(128) / 2.
    """
    # 16 threads hold a token, 8 channels each
    L: gl.constexpr = gl.BlockedLayout([8 * CHUNKS // gl.num_warps(), 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    ALL: gl.constexpr = gl.BlockedLayout([CHUNKS], [32], [gl.num_warps()], [0])
    segment = gl.program_id(0) // heads
    head = gl.program_id(0) % heads
    begin = offset(map_ptr, segment, seq_len, map_words, total)
    length = gl.maximum(offset(map_ptr, segment + 1, seq_len, map_words, total) - begin, 0)
    chunks = (length + 15) // 16
    ch = gl.arange(0, 128, gl.SliceLayout(0, L))
    row = gl.arange(0, 16 * CHUNKS, gl.SliceLayout(1, L))
    place = gl.arange(0, CHUNKS, ALL)
    dt = gl.load(dt_ptr + head * 128 + ch, mask=(ch >= 0) & ((flags & HAS_DT_BIAS) != 0), other=0.0)[None, :]
    slope = 1.0
    if (flags & HAS_A_LOG) != 0:
        slope = gl.minimum(gl.exp(gl.load(a_log_ptr + head)), 3.4028234663852886e38)
    UNIT: gl.constexpr = 128 // g_ptr.dtype.element_ty.primitive_bitwidth
    g_t = g_t // UNIT * UNIT  # tells the compiler that rows are 16-byte aligned
    g_ptr += begin.to(gl.int64) * g_t + head.to(gl.int64) * (g_h // UNIT * UNIT)
    sum_before = gl.to_tensor(0.0).to(gl.float64)
    num = chunks
    left = chunks
    while left > 0:
        t = (left - CHUNKS) * 16 + row
        inside = (t >= 0) & (t < length)
        x = gl.load(g_ptr + t.to(gl.int64)[:, None] * g_t + ch[None, :], mask=inside[:, None], other=0.0)
        least = gl.reduce(x.to(gl.float32) + dt, 1, smaller)
        # e^80 at most, as in the reference, and NaN stays
        e = smaller(least * -slope, gl.full([16 * CHUNKS], 80.0, gl.float32, gl.SliceLayout(1, L)))
        slowest = gl.where(inside, lower_bound / (gl.exp(e) + 1.0), 0.0)
        by_chunk = gl.convert_layout(gl.sum(gl.reshape(slowest, [CHUNKS, 16]), 1), ALL).to(gl.float64)
        sums = sum_before + gl.associative_scan(by_chunk, 0, add, reverse=True)
        met = gl.max(gl.where((sums <= target) & (left - CHUNKS + place >= 0), place, -1), 0)
        if met >= 0:
            num = chunks - left + CHUNKS - met
            left = -1
        else:
            sum_before += gl.sum(by_chunk, 0)
            left = gl.maximum(left - CHUNKS, 0)
    gl.store(num_ptr + gl.program_id(0), num)
    gl.store(fallback_ptr + gl.program_id(0), (left == 0).to(gl.int8))
