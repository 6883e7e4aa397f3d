"""Write strengths from beta as the caller has it: bf16 or fp32, logits or strengths themselves."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import flags as bits
from .prep import LOG2E, ex2, rcp

BETA_FP32 = gl.constexpr(bits.BETA_FP32)
BETA_ACTIVATED = gl.constexpr(bits.BETA_ACTIVATED)


@gluon.jit
def load_beta(beta_ptr, at, mask, flags):
    """Elements `at` of beta under the type that it may have and under the other, 0 where not loaded; waits for neither."""
    wide = (flags & BETA_FP32) != 0
    narrow = gl.load(beta_ptr + at, mask=mask & (wide == 0), other=0.0)
    return narrow, gl.load(beta_ptr.to(gl.pointer_type(gl.float32), bitcast=True) + at, mask=mask & wide, other=0.0)


@gluon.jit
def strength(beta, flags):
    """Of what `load_beta` returned: its sigmoid, or itself if `flags` says BETA_ACTIVATED."""
    narrow, wide = beta
    value = narrow.to(gl.float32) + wide
    return gl.where((flags & BETA_ACTIVATED) != 0, value, rcp(1.0 + ex2(value * -LOG2E)))
