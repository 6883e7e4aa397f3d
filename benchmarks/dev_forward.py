"""Check and time configurations of the forward kernel through Triton's JIT.

    PYTHONPATH=. python benchmarks/dev_forward.py [check] [adversarial] [drift] [random] [time] CR,PR,NP,SP,VSPLIT,LAG ...

Outputs and states are poisoned with NaN first and compared with an fp64 token recurrence; times are CUDA-graph medians.
"""

from __future__ import annotations

import functools
import statistics
import sys

import torch
from jit import ForwardConfig, forward_args, launch_forward

DEV = "cuda"


def random_inputs(t, h, seed=0, **kw):
    gen = torch.Generator(device=DEV).manual_seed(seed)

    def n(*s):
        return torch.randn(*s, device=DEV, generator=gen)

    x = {
        "q": n(t, h, 128).bfloat16(),
        "k": n(t, h, 128).bfloat16(),
        "v": n(t, h, 128).bfloat16(),
        "g": n(t, h, 128).bfloat16(),
        "beta": n(t, h).bfloat16(),
        "a_log": -0.2 * torch.rand(h, device=DEV, generator=gen),
        "dt_bias": n(h, 128),
    }
    x.update(kw)
    return x


@torch.no_grad()
def reference(x, lens, h0=None, lower_bound=-5.0, scale=128**-0.5):
    """fp64 token recurrence, all (segment, head) items at once; -> out [T,H,128], final state [NS,H,V,K], fp64."""
    t_total, heads, _ = x["v"].shape
    ns, longest = len(lens), max(lens)
    f = {n: x[n].double() for n in ("q", "k", "v", "g", "beta")}
    q = f["q"] * torch.rsqrt((f["q"] ** 2).sum(-1, keepdim=True) + 1e-6) * scale
    k = f["k"] * torch.rsqrt((f["k"] ** 2).sum(-1, keepdim=True) + 1e-6)
    alpha = torch.exp(lower_bound * torch.sigmoid(torch.exp(x["a_log"].double())[:, None] * (f["g"] + x["dt_bias"].double())))
    beta = torch.sigmoid(f["beta"])
    starts = torch.tensor([sum(lens[:i]) for i in range(ns)], device=DEV)
    lengths = torch.tensor(lens, device=DEV)
    S = torch.zeros(ns, heads, 128, 128, dtype=torch.float64, device=DEV) if h0 is None else h0.double().clone()
    out = torch.full((t_total, heads, 128), float("nan"), dtype=torch.float64, device=DEV)
    live = list(range(ns))
    for t in range(longest):
        now = [i for i in live if lens[i] > t]
        idx = starts[now] + t if len(now) < ns else starts + t
        Sx = S[now] if len(now) < ns else S
        kt, bt = k[idx], beta[idx][..., None]
        Sx = Sx * alpha[idx][:, :, None, :]
        r = bt * (f["v"][idx] - (Sx @ kt[..., None])[..., 0])
        Sx = Sx + r[..., :, None] * kt[..., None, :]
        out[idx] = (Sx @ q[idx][..., None])[..., 0]
        if len(now) < ns:
            S[now] = Sx
        else:
            S = Sx
    del lengths
    return out, S


def rel(a, b):
    """Worst relative L2 over heads (dim 1); NaN if anything is not finite."""
    d = ((a.double() - b) ** 2).sum((0, 2)) if a.dim() == 3 else ((a.double() - b) ** 2).sum((0, 2, 3))
    n = (b**2).sum((0, 2)) if a.dim() == 3 else (b**2).sum((0, 2, 3))
    return (d / n.clamp_min(1e-60)).sqrt().max().item()


def forward(x, cfg, lens=None, *, ctas=None, out=None, final=None, cu_dtype=torch.int32, **kw):
    if out is None:
        out = torch.full(x["v"].shape, float("nan"), dtype=torch.bfloat16, device=DEV)
    if lens is not None:
        cu = torch.tensor([0, *lens], dtype=torch.int64).cumsum(0).to(cu_dtype).to(DEV)
        kw = dict(kw, cu_seqlens=cu)
        n_items = len(lens) * out.shape[1]
    else:
        n_items = kw["n_segments"] * out.shape[1]
    args = forward_args(**x, out=out, final_state=final, **kw)
    launch_forward(args, n_items, cfg, ctas)
    return out


def nan_state(n, h, dtype=torch.float32):
    return torch.full((n, h, 128, 128), float("nan"), dtype=dtype, device=DEV)


class Report:
    def __init__(self):
        self.rows = []

    def __call__(self, name, ok, note=""):
        self.rows.append((name, ok))
        print(f"{'ok  ' if ok else 'FAIL'} {name} {note}", flush=True)


def check(cfg, say):
    lens = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 0, 200, 0]
    t, h, ns = sum(lens), 3, len(lens)
    gen = torch.Generator(device=DEV).manual_seed(5)
    x = random_inputs(t, h)
    h0 = torch.randn(ns, h, 128, 128, device=DEV, generator=gen)
    ref, ref_s = reference(x, lens, h0)
    s = nan_state(ns, h)
    o = forward(x, cfg, lens, initial_state=h0, final=s)
    torch.cuda.synchronize()
    say("ragged with states", rel(o, ref) < 6e-3 and rel(s, ref_s) < 6e-3, f"out {rel(o, ref):.3e} state {rel(s, ref_s):.3e}")
    bits = (o.clone(), s.clone())
    for name, kw in {"again": {}, "persistent": {"ctas": 5}, "int64": {"cu_dtype": torch.int64}}.items():
        s = nan_state(ns, h)
        o = forward(x, cfg, lens, initial_state=h0, final=s, **kw)
        say(f"bitwise {name}", torch.equal(o, bits[0]) and torch.equal(s, bits[1]))
    ref0, ref_s0 = reference(x, lens)
    s = nan_state(ns, h)
    o = forward(x, cfg, lens, final=s)
    say("zero state", rel(o, ref0) < 6e-3 and rel(s, ref_s0) < 6e-3, f"out {rel(o, ref0):.3e} state {rel(s, ref_s0):.3e}")
    o2 = forward(x, cfg, lens)
    say("no final state", torch.equal(o, o2))
    # in place, indices, bf16
    pool = torch.randn(ns + 5, h, 128, 128, device=DEV, generator=gen)
    index = torch.randperm(ns + 5, device=DEV, generator=gen)[:ns].to(torch.int32)
    pool[index.long()] = h0
    before = pool.clone()
    o = forward(x, cfg, lens, initial_state=pool, in_index=index, final=pool, out_index=index)
    want = before.clone()
    want[index.long()] = bits[1]
    say("pool in place", torch.equal(o, bits[0]) and torch.equal(pool, want))
    skip = index.clone()
    skip[3] = -1
    skip[5] = ns + 7
    pool = before.clone()
    s = nan_state(ns + 5, h)
    o = forward(x, cfg, lens, initial_state=pool, in_index=skip, final=s, out_index=skip)
    h0z = h0.clone()
    h0z[[3, 5]] = 0
    s2 = nan_state(ns, h)
    o2 = forward(x, cfg, lens, initial_state=h0z, final=s2)
    good = [i for i in range(ns) if i not in (3, 5)]
    rest = [i for i in range(ns + 5) if i not in index[good].tolist()]
    say(
        "negative and large indices",
        torch.equal(o, o2) and torch.equal(s[index[good].long()], s2[good]) and s[rest].isnan().all().item(),
    )
    hb = h0.bfloat16()
    sb = nan_state(ns, h, torch.bfloat16)
    o = forward(x, cfg, lens, initial_state=hb, final=sb)
    s = nan_state(ns, h)
    o2 = forward(x, cfg, lens, initial_state=hb.float(), final=s)
    say("bf16 states", torch.equal(o, o2) and torch.equal(sb, s.bfloat16()))
    # strided inputs, odd beta view, guard rows, NaN around
    big = torch.full((t + 40, h, 4 * 128 + 64), float("nan"), dtype=torch.bfloat16, device=DEV)
    bb = torch.full((t + 40, 41), float("nan"), dtype=torch.bfloat16, device=DEV)
    y = dict(x)
    for i, n in enumerate("qkvg"):
        big[:t, :, 128 * i : 128 * i + 128] = x[n]
        y[n] = big[:, :, 128 * i : 128 * i + 128]
    bb[:t, 7 : 7 + h] = x["beta"]
    y["beta"] = bb[:, 7 : 7 + h]
    ob = torch.full((t + 40, h, 256), float("nan"), dtype=torch.bfloat16, device=DEV)
    s = nan_state(ns, h)
    forward(y, cfg, lens, out=ob[:, :, 128:], initial_state=h0, final=s)
    say(
        "strided, guarded",
        torch.equal(ob[:t, :, 128:], bits[0])
        and torch.equal(s, bits[1])
        and ob[t:].isnan().all().item()
        and ob[:, :, :128].isnan().all().item(),
    )
    # a NaN sequence leaves its neighbours alone
    bad = 10
    a = sum(lens[:bad])
    b = a + lens[bad]
    y = {n: v.clone() for n, v in x.items()}
    for n in ("k", "v", "g", "q", "beta"):
        y[n][a:b] = float("nan")
    s = nan_state(ns, h)
    o = forward(y, cfg, lens, initial_state=h0, final=s)
    keep = [i for i in range(ns) if i != bad]
    say(
        "NaN neighbour",
        torch.equal(o[:a], bits[0][:a]) and torch.equal(o[b:], bits[0][b:]) and torch.equal(s[keep], bits[1][keep]),
    )
    # prefixes
    x40 = random_inputs(40, 4, 7)
    full = forward(x40, cfg, [40])
    good = True
    for tt in range(1, 41):
        cut = forward({n: (v[:tt] if n in "qkvgbeta" else v) for n, v in x40.items()}, cfg, [tt])
        good &= torch.equal(cut, full[:tt])
        z = {n: v.clone() for n, v in x40.items()}
        for n in ("q", "k", "v", "g", "beta"):
            z[n][tt - 1 :] = 3 * torch.randn_like(z[n][tt - 1 :].float()).bfloat16()
        good &= torch.equal(forward(z, cfg, [40])[: tt - 1], full[: tt - 1])
    say("prefix independence", good)
    # split at multiples of 32
    x5 = random_inputs(1000, 2, 9)
    s1 = nan_state(1, 2)
    o1 = forward(x5, cfg, [1000], final=s1)
    st, parts = None, []
    for a, b in ((0, 32), (32, 512), (512, 928), (928, 1000)):
        s = nan_state(1, 2)
        y = {n: (v[a:b] if n in ("q", "k", "v", "g", "beta") else v) for n, v in x5.items()}
        parts.append(forward(y, cfg, [b - a], initial_state=st, final=s))
        st = s
    say("split at 32", torch.equal(torch.cat(parts), o1) and torch.equal(st, s1))
    # dense
    xd = random_inputs(3 * 100, 2, 11)
    od = forward(xd, cfg, seq_len=100, n_segments=3)
    say("dense", torch.equal(od, forward(xd, cfg, [100, 100, 100])))
    # many one-token sequences; last offset past the end
    xm = random_inputs(70000, 2, 13)
    om = forward(xm, cfg, [1] * 70000)
    omp = forward(xm, cfg, [1] * 70000, ctas=132)
    rm, _ = reference({n: (v[:2000] if n in ("q", "k", "v", "g", "beta") else v) for n, v in xm.items()}, [1] * 2000)
    say("70,000 sequences", rel(om[:2000], rm) < 6e-3 and torch.isfinite(om).all().item() and torch.equal(om, omp))
    o = forward(x5, cfg, [500, 900])
    say("offset past the end", torch.equal(o, forward(x5, cfg, [500, 500])))


def adversarial_cases():
    """{name: (inputs of one sequence, lower_bound)}"""
    cases = {}
    cases["random"] = (random_inputs(2048, 4), -5.0)
    for lb in (-0.1, -1.0, -2.5):
        cases[f"random lb {lb}"] = (random_inputs(1024, 4, 3), lb)
    x = random_inputs(2048, 4, 4)
    x["dt_bias"] = (
        torch.where(torch.arange(128, device=DEV) % 8 == 0, -9.0, 1.0) * torch.ones(4, 1, device=DEV) + 0 * x["dt_bias"]
    )
    cases["slow eighth"] = (x, -5.0)
    for shift in (-20.0, -12.0, -8.0, 8.0, 20.0):
        x = random_inputs(1024, 4, 5)
        x["g"] = (x["g"].float() * (abs(shift) < 12) + shift).bfloat16()
        x["dt_bias"] = 0.1 * x["dt_bias"]
        cases[f"g {shift:+.0f}"] = (x, -5.0)
    x = random_inputs(512, 4, 6)
    x["a_log"] = torch.tensor([20.0, 100.0, -30.0, 3.0], device=DEV)
    x["g"][::7] = 0
    x["dt_bias"][:, ::3] = 0
    cases["a_log 20, 100, -30, 3"] = (x, -5.0)
    x = random_inputs(512, 4, 6)
    x["beta"] = (30 * torch.sign(x["beta"].float())).bfloat16()
    cases["beta +-30"] = (x, -5.0)
    for m in (1e-3, 1e4, 1e-5):
        x = random_inputs(512, 4, 8)
        x["k"] = (x["k"].float() * m).bfloat16()
        x["q"] = (x["q"].float() * m).bfloat16()
        x["k"][100:103] = 0
        x["g"] += 3
        cases[f"q, k x {m}"] = (x, -5.0)
    cases["lower bound 0"] = (random_inputs(512, 4, 8), 0.0)
    for noise in (0.0, 1e-2):
        x = random_inputs(1024, 1, 9)
        key = torch.randn(128, device=DEV, generator=torch.Generator(device=DEV).manual_seed(3))
        kk = key + noise * x["k"].float()
        x["q"] = x["k"] = kk.bfloat16().contiguous()
        x["v"] = x["v"][:16].repeat(64, 1, 1)
        x["g"] = torch.full_like(x["g"], -12.0)
        x["beta"] = torch.full_like(x["beta"], 8.0)
        x["a_log"] = torch.zeros_like(x["a_log"])
        x["dt_bias"] = torch.zeros_like(x["dt_bias"])
        cases[f"collinear {noise}"] = (x, -5.0)
    return cases


def adversarial(cfg, say, limit=5.5e-3):
    for name, (x, lb) in adversarial_cases().items():
        t, h, _ = x["v"].shape
        ref, ref_s = reference(x, [t], lower_bound=lb)
        s = nan_state(1, h)
        o = forward(x, cfg, [t], final=s, lower_bound=lb)
        eo, es = rel(o, ref), rel(s, ref_s)
        say(f"{name:22s}", eo < (0.2 if "collinear" in name else limit), f"out {eo:.3e} state {es:.3e}")


def drift(cfg, say):
    x = random_inputs(65536, 1, 21)
    x["g"] = torch.full_like(x["g"], -10.8)
    x["a_log"] = torch.zeros_like(x["a_log"])
    x["dt_bias"] = torch.zeros_like(x["dt_bias"])
    x["beta"] = torch.full_like(x["beta"], -4.0)
    notes = []
    for t in (1024, 8192):
        y = {n: (v[:t] if n in ("q", "k", "v", "g", "beta") else v) for n, v in x.items()}
        ref, ref_s = reference(y, [t])
        s = nan_state(1, 1)
        o = forward(y, cfg, [t], final=s)
        notes.append((rel(o, ref), rel(s, ref_s)))
    say("drift at decay 0.9999", notes[-1][1] < 1.3 * notes[0][1], " ".join(f"{a:.3e}/{b:.3e}" for a, b in notes))


def graph_ms(fn, reps=20):
    fn()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        fn()
    for _ in range(3):
        g.replay()
    torch.cuda.synchronize()
    ts = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        torch.cuda.synchronize()
        ts.append(a.elapsed_time(b))
    return statistics.median(ts)


BARS = {  # name: heads, lengths, must, aim, persistent
    "H16 8x8192": (16, [8192] * 8, 0.52, 0.40, None),
    "H96 1x8192": (96, [8192], 0.52, 0.34, None),
    "H96 8x1024": (96, [1024] * 8, 0.45, 0.32, None),
    "H96 ragged": (96, [1300, 547, 2048, 963, 271, 3063], 0.52, 0.36, None),
    "H32 8x1024": (32, [1024] * 8, 0.17, 0.11, None),
    "H12 4096x33": (12, [33] * 4096, 1.5, 1.0, None),
    "H16 1x65536": (16, [65536], 3.5, 2.2, None),
}


def timing(cfg, only=()):
    for name, (h, lens, must, aim, _) in BARS.items():
        if only and not any(o in name for o in only):
            continue
        if cfg.vsplit == 2 and "65536" not in name and "H96 1x" not in name:
            continue
        t = sum(lens)
        x = random_inputs(t, h)
        cu = torch.tensor([0, *lens], dtype=torch.int64).cumsum(0).to(torch.int32).to(DEV)
        out = torch.full(x["v"].shape, float("nan"), dtype=torch.bfloat16, device=DEV)
        args = forward_args(**x, out=out, cu_seqlens=cu)
        n_items = len(lens) * h
        ms = {
            c: graph_ms(functools.partial(launch_forward, args, n_items, cfg, c), 10 if t * h > 4e6 else 20)
            for c in ((None, 132) if n_items > 132 else (None,))
        }
        print(
            f"time {name:12s} must {must} aim {aim} | "
            + " ".join(f"{'grid' if c is None else c}: {m:.4f} ms" for c, m in ms.items())
            + f" | cycles/chunk {min(ms.values()) * 1.755e6 * min(132, n_items * cfg.vsplit) / cfg.vsplit / (t * h / 16):.0f}",
            flush=True,
        )


def main():
    words = [a for a in sys.argv[1:] if "," not in a]
    only = [w[5:].replace("_", " ") for w in words if w.startswith("only=")]
    for spec in [a for a in sys.argv[1:] if "," in a]:
        cfg = ForwardConfig(*map(int, spec.split(",")))
        say = Report()
        print("==", cfg, flush=True)
        if "check" in words:
            check(cfg, say)
        if "adversarial" in words:
            adversarial(cfg, say)
        if "drift" in words:
            drift(cfg, say)
        if "random" in words:
            x = random_inputs(2048, 16)
            ref, _ = reference(x, [2048])
            o = forward(x, cfg, [2048])
            d = ((o.double() - ref) ** 2).sum((0, 2)) / (ref**2).sum((0, 2))
            print(f"random: worst head {d.max().sqrt().item():.4e} mean {d.mean().sqrt().item():.4e}", flush=True)
        if "time" in words:
            timing(cfg, only)
        if say.rows:
            print(
                f"-- {sum(ok for _, ok in say.rows)}/{len(say.rows)} ok; failed: {[n for n, ok in say.rows if not ok]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
