"""Bits of the kernels' ``flags`` arguments, and another plain number that kernels and their launcher share."""

HAS_INITIAL = 1
INITIAL_BF16 = 2
HAS_IN_INDEX = 4
HAS_FINAL = 8
FINAL_BF16 = 16
HAS_OUT_INDEX = 32
HAS_A_LOG = 64
HAS_DT_BIAS = 128
CUT_ON_DEVICE = 256
HAS_MT = 512
FILL = 1024
HAS_NUM_CHUNKS = 2048
HAS_NEEDS = 4096
ENTERING = 8192
IN_PLACE = 16384
BETA_FP32 = 32768
BETA_ACTIVATED = 65536
SAVED_BF16 = 131072
SAVED_AT_INT64 = 262144
HAS_EFFECTS = 524288

CHAINED = 8
"""Pieces of a sequence after which a chain of states may begin anew (chain.py)."""
