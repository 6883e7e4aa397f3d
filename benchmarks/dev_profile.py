"""One launch for a profiler: python benchmarks/dev_profile.py cr,pr,np,sp,vsplit,lag heads segments"""
import sys

import torch
from dev_forward import ForwardConfig, forward, random_inputs

cfg = ForwardConfig(*map(int, sys.argv[1].split(",")))
heads, segments = int(sys.argv[2]), int(sys.argv[3])
x = random_inputs(8192 * segments, heads)
for _ in range(2):
    forward(x, cfg, [8192] * segments)
torch.cuda.synchronize()
