"""Constants of `scale_tile`, in a file of their own: a kernel's hash has to cover what it imports."""

ROWS = 256
LANES = 128
