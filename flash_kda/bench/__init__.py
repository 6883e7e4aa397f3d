"""What ``flash-kda bench`` measures, through the public functions only.

suites   the cases of every named suite; no PyTorch needed to list them
inputs   tokens made once at the largest size, and cut
impls    who can run a case: this package, and what is installed beside it
gate     whether a result may be timed at all
timing   graph replays, ordinary calls, copy bandwidth
rows     one JSON object for each measurement: written, read, and which of them count
run      a case from inputs to rows
"""
