"""Bits of the kernels' ``flags`` arguments; plain numbers, shared by kernels and launchers."""

HAS_INITIAL = 1
INITIAL_BF16 = 2
HAS_IN_INDEX = 4
HAS_FINAL = 8
FINAL_BF16 = 16
HAS_OUT_INDEX = 32
HAS_A_LOG = 64
HAS_DT_BIAS = 128
HAS_MT = 256
HAS_NEEDS = 512
ENTERING = 1024
