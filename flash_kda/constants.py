"""Numbers that more than one module must agree on; each is defined here and nowhere else."""

CHUNK = 16
"""Tokens per chunk. With ``|lower_bound| <= 5`` a chunk spans at most e^80, inside the fp32 and bf16 range."""

STEP = 32
"""Splitting a call at multiples of STEP tokens, with an fp32 state, does not change a bit (docs/numerics.md)."""

HEAD_DIM = 128
"""K = V: the head dimension of queries, keys and values."""

L2_EPS = 1e-6
"""Added to the sum of squares before the reciprocal square root that normalises q and k."""

LOWER_BOUND_MIN = -5.0
"""Smallest accepted ``lower_bound``: the log decay of one token is in [lower_bound, 0]."""

EXIT_EPS = 2.0**-20
"""Default of the measured exit: the backward scan stops once ``||M||_F <= EXIT_EPS`` (docs/numerics.md)."""

MIN_SEGMENT_LEN = 256
"""The planner never cuts shorter segments than this by itself: a shorter one does not pay for its summary."""

FIXED_SEGMENT_LEN = 1024
"""Segment length of ``fixed_plan=True``: a constant, so that a sequence's cut does not depend on its batch."""
