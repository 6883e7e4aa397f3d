"""``get_warmup_chunks`` on the GPU, against the reference in fp64."""

import math

import cases
import pytest
import torch
from cases import D, packed_offsets

import flash_kda
from flash_kda.constants import EXIT_EPS
from flash_kda.reference import stages

CLOSE = 1e-4
"""Relative distance of a sum from its target within which fp32 may decide otherwise."""


def gates(tokens, heads, lower_bound=-5.0, seed=0, batch=1):
    case = cases.random(1, heads, batch=batch, lower_bound=lower_bound, seed=seed)
    gen = torch.Generator(device="cuda").manual_seed(seed)
    g = torch.randn(batch, tokens, heads, D, device="cuda", generator=gen).bfloat16()
    return {"g": g, "A_log": case.A_log.cuda(), "dt_bias": case.dt_bias.cuda(), "lower_bound": lower_bound}


def run(arguments, cu_seqlens, eps=EXIT_EPS):
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        num, fallback = flash_kda.get_warmup_chunks(**arguments, cu_seqlens=cu_seqlens, eps=eps, impl="sm90")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (num.dtype, fallback.dtype) == (torch.int32, torch.bool)
    return num, fallback


def check(arguments, lengths, cu_seqlens, eps=EXIT_EPS):
    """Equal to fp64, or one chunk off where the sum is at the target. Returns how many (segment, head) pairs were off."""
    num, fallback = (x.cpu() for x in run(arguments, cu_seqlens, eps))
    g = arguments["g"].flatten(0, 1).double()
    parameters = [arguments["A_log"], arguments["dt_bias"]]
    offsets = packed_offsets(*lengths)
    want, unmet = (
        x.cpu()
        for x in stages.warmup_bound(
            g, *parameters, arguments["lower_bound"], offsets.cuda(), max_len=max(lengths, default=0), eps=eps
        )
    )
    target = math.log(eps) - 0.5 * math.log(D)
    slowest = stages.log_decay(g, *parameters, arguments["lower_bound"]).amax(-1).cpu()
    off = ((num != want) | (fallback != unmet)).nonzero().tolist()
    for s, h in off:
        assert abs(int(num[s, h]) - int(want[s, h])) <= 1
        begin, end = int(offsets[s]), int(offsets[s + 1])
        chunks = -(-(end - begin) // 16)
        total = slowest[begin + 16 * (chunks - min(int(num[s, h]), int(want[s, h]))) : end, h].sum()
        assert abs(total - target) <= CLOSE * abs(target)
    return len(off)


LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 0, 127, 1500, 4000, 0)


@pytest.mark.parametrize("heads", [1, 3, 16, 70])
@pytest.mark.parametrize("lower_bound", [-5.0, -0.5, -0.01, 0.0])
def test_ragged(heads, lower_bound):
    arguments = gates(sum(LENGTHS), heads, lower_bound)
    off = sum(check(arguments, LENGTHS, packed_offsets(*LENGTHS, dtype=dtype).cuda()) for dtype in (torch.int32, torch.int64))
    assert off <= 2


@pytest.mark.parametrize("eps", [0.0, 2.0**-30, 0.5])
def test_targets(eps):
    if eps == 0.0:
        num, fallback = run(gates(500, 2), packed_offsets(100, 400).cuda(), eps)
        assert num.tolist() == [[7, 7], [25, 25]]
        assert fallback.all()
    else:
        check(gates(500, 2), (100, 400), packed_offsets(100, 400).cuda(), eps)


@pytest.mark.parametrize("name", cases.NAMES)
def test_named_gates(name):
    case = cases.make(name, 2000, 2)
    arguments = {k: v.cuda() if torch.is_tensor(v) else v for k, v in case.gates().items() if k != "cu_seqlens"}
    check(arguments, (2000,), None)


def test_a_long_slow_sum_does_not_drift():
    """Equal small terms for 100,000 tokens."""
    arguments = gates(120_000, 1, -0.01) | {"A_log": None, "dt_bias": None}
    arguments["g"] = torch.full_like(arguments["g"], -4.0)
    num, fallback = run(arguments, None)
    each = -0.01 / (1 + math.exp(4.0))
    want = math.ceil((math.log(EXIT_EPS) - 0.5 * math.log(D)) / each / 16)
    assert not fallback.any()
    assert abs(int(num) - want) <= 1


def test_dense_batch_and_strides():
    arguments = gates(300, 2, batch=3)
    plain = run(arguments, None)
    check(arguments, (300,) * 3, None)
    wide = torch.randn(3, 300, 2, 4 * D, device="cuda").bfloat16()
    wide[..., D : 2 * D] = arguments["g"]
    strided = run(arguments | {"g": wide[..., D : 2 * D]}, None)
    assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))
    without = run(arguments | {"A_log": None, "dt_bias": None}, None)
    zero = run(arguments | {"A_log": torch.zeros(2).cuda(), "dt_bias": torch.zeros(2, D).cuda()}, None)
    assert all(torch.equal(a, b) for a, b in zip(without, zero, strict=True))


def test_extreme_gates():
    arguments = gates(400, 4, -5.0)
    for value, a_log in ((3e38, 20.0), (-3e38, 20.0), (torch.inf, 0.0), (-torch.inf, 0.0), (60.0, 80.0), (-60.0, -80.0)):
        extreme = arguments | {"g": torch.full_like(arguments["g"], value), "A_log": torch.full((4,), a_log).cuda()}
        assert check(extreme, (400,), None) == 0


def test_nan_is_never_forgotten_and_stays_in_its_head():
    arguments = gates(400, 4, -0.5)
    clean = run(arguments, packed_offsets(200, 200).cuda())
    arguments["g"][0, 390, 2, 77] = torch.nan
    num, fallback = run(arguments, packed_offsets(200, 200).cuda())
    assert fallback[1, 2]
    assert num[1, 2] == 13
    num[1, 2], fallback[1, 2] = clean[0][1, 2], clean[1][1, 2]
    assert torch.equal(num, clean[0])
    assert torch.equal(fallback, clean[1])


def test_tokens_outside_are_not_read():
    arguments = gates(400, 2, -0.5)
    arguments["g"][0, 300:] = torch.nan
    arguments["g"][0, :100] = torch.nan
    num, fallback = run(arguments, torch.tensor([100, 200, 300]).cuda())
    assert not num.eq(0).any()
    check(arguments | {"g": arguments["g"][:, 100:300]}, (100, 100), packed_offsets(100, 100).cuda())
    again = run(arguments | {"g": arguments["g"][:, 100:300]}, packed_offsets(100, 100).cuda())
    assert torch.equal(num, again[0])
    assert torch.equal(fallback, again[1])


def test_graph_replays_with_other_offsets():
    arguments = gates(2048, 4, -0.5)
    cu = packed_offsets(1024, 1024).cuda()
    with torch.cuda.stream(torch.cuda.Stream()):
        flash_kda.get_warmup_chunks(**arguments, cu_seqlens=cu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        num, fallback = flash_kda.get_warmup_chunks(**arguments, cu_seqlens=cu)
    for lengths in ((1024, 1024), (100, 1948), (0, 2048)):
        cu.copy_(packed_offsets(*lengths))
        graph.replay()
        want = run(arguments, packed_offsets(*lengths).cuda())
        assert torch.equal(num, want[0])
        assert torch.equal(fallback, want[1])


def test_many_segments():
    arguments = gates(70_000, 1)
    assert check(arguments, (1,) * 70_000, packed_offsets(*(1,) * 70_000).cuda()) == 0
