"""flash-kda bench: every suite end to end on tiny shapes, what may be timed, who runs beside it, what rows hold."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types

import pytest
import torch

from flash_kda import api, samples
from flash_kda.bench import gate, impls, rows, suites, timing
from flash_kda.bench.inputs import ALIKE, Source
from flash_kda.bench.suites import DENSE, FWD, FWD_CP, KNOWN, PACKED, STATE_ONLY, WARMUP_CHUNKS, Case
from flash_kda.reference import recurrent_kda

CPU = torch.device("cpu")
TIMED = [name for name in suites.SUITES if name not in ("host", "accuracy")]
CUT = "real-5/h2/320"
"""A smoke case of suite cp that fwd_cp cuts on a CPU."""


@pytest.fixture
def bench(command, tmp_path):
    """Runs flash-kda bench --smoke on a CPU; returns status, stdout and the rows."""

    def run(*arguments: object) -> tuple[int, str, list[dict]]:
        output = tmp_path / "rows.jsonl"
        output.unlink(missing_ok=True)
        status, out, err = command("bench", *arguments, "--smoke", "--device", "cpu", "--output", output)
        assert err == ""
        found = [json.loads(text) for text in output.read_text().splitlines()] if output.exists() else []
        return status, out, found

    return run


# The suites


@pytest.mark.parametrize("name", suites.SUITES)
def test_every_suite_runs(bench, name):
    status, out, found = bench(name)
    assert status == 0, out
    assert "fla.chunk_kda, needs a CUDA device, got cpu" in out or name not in ("forward", "cp", "accuracy")
    cases = suites.cases([name], smoke=True)
    assert {row["suite"] for row in found} == {case.suite for case in cases}
    for row in found:
        assert tuple(row)[: len(rows.FIELDS)] == rows.FIELDS
        assert set(row) <= {*rows.FIELDS, *rows.EXTRAS}
        assert row["gpu"] is None
        assert row["cpu"]
        assert row["graph_ms"] is None
        assert row["command"] == f"flash-kda bench {name} --smoke --device cpu"
        assert row["torch"] == torch.__version__
        if name in TIMED:
            assert row["eager_ms"] > 0
            assert row["floor_ms"] > 0
            assert row["path"] == "reference"
        if row["impl"] in (FWD, FWD_CP):
            assert 1e-3 < row["rel_l2_out"] < 2e-3  # what rounding to bf16 costs
    for case in cases:
        of_case = [row for row in found if row["gates"] == case.gates and rows.seq_lens(row) == lengths(case)]
        assert {row["impl"] for row in of_case} >= {impl for impl in case.impls if impl != STATE_ONLY}


def lengths(case: Case) -> str:
    return rows.seq_lens({"seq_lens": rows.written(case.lengths)})


def test_what_is_cut_and_its_summary(bench):
    _, _, found = bench("recipe", "--only", "random-5/h2/320", "--only", "random-5/h2/64")
    cut = [(row["impl"], row["tokens"], row["segments"]) for row in found]
    assert cut == [(FWD, 64, 1), (FWD_CP, 64, 1), (FWD, 320, 1), (FWD_CP, 320, 2), (STATE_ONLY, 320, 2)]
    floors = [row["floor_ms"] for row in found[2:]]
    assert floors[0] == floors[1]
    # Three of the five vectors of the 256 tokens that are handed on.
    assert floors[2] / floors[0] == pytest.approx(256 * (3 * 128 + 1) / (320 * (5 * 128 + 1)))


def test_sweep_measures_with_and_without_the_lengths(bench):
    _, out, found = bench("sweep", "--only", "none*/320")
    assert [(row["impl"], row["layout"]) for row in found] == [(FWD, PACKED), (FWD_CP, PACKED), (FWD_CP, KNOWN)]
    over = sum(suites.slower(row, found[0]) for row in found[1:])
    assert f"in {over} of 2 cases" in out
    assert out.count("none, H=2, 320") == over


def test_a_slow_case_is_measured_twice(bench, monkeypatch):
    calls = []

    def measure(call, device, seconds):
        calls.append(call)
        # fwd, fwd_cp, then both again; only the first time of fwd_cp is slow.
        eager = [1.0, 2.0, 1.1, 1.2, 1.0][len(calls) - 1]
        return timing.Times(None, None, None, eager)

    monkeypatch.setattr(timing, "measure", measure)
    _, out, found = bench("sweep", "--only", "random*/320")
    assert [row["eager_ms"] for row in found] == [1.1, 1.2, 1.0]
    assert calls[2] is calls[0]
    assert calls[3] is calls[1]
    assert "exceeds max(3 %, 8 us) (lengths on the host: 1 us) beside fwd in 1 of 2 cases" in out


def test_what_is_too_slow():
    assert suites.allowed_ms(0.1, PACKED) == pytest.approx(0.108)
    assert suites.allowed_ms(0.1, KNOWN) == pytest.approx(0.103)
    assert suites.allowed_ms(0.01, KNOWN) == pytest.approx(0.011)
    assert suites.allowed_ms(10.0, PACKED) == pytest.approx(10.3)


def test_the_full_suites_are_what_was_asked_for():
    sweep = suites.sweep(False)
    assert {case.heads for case in sweep} == {1, 4, 8, 12, 16, 32, 64, 96}
    assert max(case.tokens for case in sweep) == 2**20
    assert max(case.tokens * case.heads for case in sweep) == 2**25
    assert {(65536, *[1024] * 5), (65537,), (1023, 1025)} <= {case.lengths for case in sweep}
    batches = {(len(case.lengths), case.lengths[0]) for case in suites.recipe(False) if case.suite == "recipe"}
    assert {(b, t) for b in (1, 8, 16, 32) for t in (8192, 16384, 65536)} | {(1, 262144), (1, 524288)} <= batches
    assert {case.gates for case in suites.accuracy(False)} == {*samples.GATES, *samples.HARD}
    assert len(suites.cases(["recipe", "warmup"])) == len(suites.cases(["recipe"]))
    names = [case.name for case in suites.cases(suites.SUITES)]
    assert len(set(names)) == len(names)


def test_cases_compare_no_more_than_they_have():
    assert {case.checked for case in suites.cases(["accuracy"], smoke=True)} == {320}
    assert {case.checked for case in suites.cases(["cp"])} == {2048}


class Gpu:
    """As much of a GPU as timing asks for: a clock that replays, ordinary calls and sleeps move on."""

    def __init__(self, monkeypatch, captures: bool) -> None:
        self.now, self.captures, self.capturing, self.replays, self.slept = 0.0, captures, False, 0, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = gpu.now

            def elapsed_time(self, end):
                return end.at - self.at

        class Graph:
            def capture_begin(self):
                gpu.capturing = True

            def capture_end(self):
                gpu.capturing = False

            def replay(self):
                gpu.replays += 1
                gpu.now += 1 + gpu.replays / 100

        def sleep(cycles):
            gpu.slept += 1
            gpu.now += 1000

        for name, value in (("Event", Event), ("CUDAGraph", Graph), ("Stream", object), ("_sleep", sleep)):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def call(self):
        if self.capturing and not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.now += 0 if self.capturing else 5


def test_replays_are_timed_without_the_host(monkeypatch):
    gpu = Gpu(monkeypatch, captures=True)
    times = timing.measure(gpu.call, torch.device("cuda"), seconds=0.11)
    # 0.055 s are 11 calls of 5 ms; the first replay warms up, replay n takes 1 + n / 100.
    assert (gpu.replays, gpu.slept) == (12, 11)
    assert times.graph_ms == pytest.approx(1.07)
    assert (times.graph_ms_p10, times.graph_ms_p90) == (pytest.approx(1.03), pytest.approx(1.11))
    assert times.eager_ms == pytest.approx(5)
    assert timing.measure(gpu.call, torch.device("cuda"), seconds=0.0).eager_ms == pytest.approx(5)
    assert gpu.replays == 12 + 1 + timing.FEWEST


def test_what_cannot_be_captured_has_ordinary_times_only(monkeypatch):
    times = timing.measure(Gpu(monkeypatch, captures=False).call, torch.device("cuda"), seconds=0.0)
    assert times == timing.Times(None, None, None, pytest.approx(5))


# The gate


def wrong(function, monkeypatch, change):
    """Lets a public function return something else."""
    right = getattr(api, function)

    def changed(*args, **kwargs):
        return change(right, args, kwargs)

    monkeypatch.setattr(api, function, changed)


def spoil(at, value):
    def change(right, args, kwargs):
        returned = right(*args, **kwargs)
        returned[0][at] = value(returned[0][at]) if callable(value) else value
        return returned

    return change


WRONG = {
    "a wrong scale": (FWD, lambda right, a, k: right(*a, **{**k, "scale": k["scale"] * 1.02})),
    "nothing written": (FWD, lambda right, a, k: (k["out"], None)),
    "one inf": (FWD, spoil((0, 317, 1, 5), float("inf"))),
    "initial states of segments lost": (FWD_CP, lambda right, a, k: right(*a, **{**k, "eps": 0.9})),
    "the last tokens of a head": (FWD_CP, spoil((0, slice(300, None), 1), lambda x: 1.3 * x)),
    "a neighbour's bits": (FWD_CP, spoil((0, slice(64)), lambda x: x.roll(1, 0))),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_not_timed(bench, monkeypatch, case):
    impl, change = WRONG[case]
    monkeypatch.setattr(timing, "measure", forbid(timing.measure, impl, monkeypatch))
    wrong(impl.split(".")[1], monkeypatch, change)
    status, out, found = bench("cp", "--only", CUT)
    assert status == 1
    assert f"cp/{CUT}: {impl} not measured, WRONG: " in out
    assert impl not in {row["impl"] for row in found}
    assert "1 results were wrong or missing; none of them was timed" in out
    assert (FWD in {row["impl"] for row in found}) == (impl == FWD_CP)


def forbid(measure, impl, monkeypatch):
    """Lets only what is not ``impl`` be timed."""
    function = impl.split(".")[1]

    def checked(call, device, seconds):
        before = getattr(api, function)
        used = []
        with monkeypatch.context() as patch:
            patch.setattr(api, function, lambda *a, **k: used.append(1) or before(*a, **k))
            times = measure(call, device, seconds)
        assert not used, f"{impl} was timed"
        return times

    return checked


def test_what_the_oracle_did_not_see_is_compared_with_fwd(bench, monkeypatch):
    case = Case("cp", 3, (320,), "real", checked=64)
    monkeypatch.setitem(suites.SUITES, "cp", lambda smoke: [case])
    assert bench("cp")[0] == 0
    wrong("fwd_cp", monkeypatch, spoil((0, slice(300, None), 1), lambda x: 1.3 * x))
    status, out, found = bench("cp")
    assert status == 1
    assert "flash_kda.fwd_cp not measured, WRONG: relative difference" in out
    assert [row["impl"] for row in found] == [FWD]


def test_wrong_summary_is_not_timed(bench, monkeypatch):
    def no_transition(right, args, kwargs):
        ht, mt = right(*args, **kwargs)
        return ht, torch.zeros_like(mt)

    wrong("state_only", monkeypatch, no_transition)
    case = Case("recipe", 2, (320,), "none", impls=(FWD, FWD_CP, STATE_ONLY))
    monkeypatch.setitem(suites.SUITES, "recipe", lambda smoke: [case])
    status, out, found = bench("recipe")
    assert status == 1
    assert "flash_kda.state_only not measured, WRONG: relative error" in out
    assert "of mt against fp64 must be below" in out
    assert [row["impl"] for row in found] == [FWD, FWD_CP]


@pytest.mark.parametrize("off", [-2, "fallback"])
def test_wrong_counts_are_not_timed(bench, monkeypatch, off):
    def change(right, args, kwargs):
        chunks, fallback = right(*args, **kwargs)
        return (chunks, ~fallback) if off == "fallback" else (chunks + off, fallback)

    case = Case("warmup", 2, (320,), lower_bound=-5.0, layouts=(PACKED,), impls=(WARMUP_CHUNKS,), segments=1)
    monkeypatch.setitem(suites.SUITES, "warmup", lambda smoke: [case])
    assert bench("warmup")[0] == 0
    wrong("get_warmup_chunks", monkeypatch, change)
    status, out, found = bench("warmup")
    assert (status, found) == (1, [])
    assert "counts and fallback must be those of the bound" in out


def test_not_finite_is_no_accuracy(bench, monkeypatch):
    wrong("fwd", monkeypatch, spoil((0, 3, 0, 0), float("nan")))
    status, out, found = bench("accuracy", "--only", "real*")
    assert status == 1
    assert "flash_kda.fwd not measured, WRONG: outputs must be finite" in out
    assert [row["impl"] for row in found] == ["bf16 rounding", FWD_CP]


def test_the_rest_goes_on_after_an_error(bench, monkeypatch):
    def change(right, args, kwargs):
        if args or kwargs["q"].shape[1] == 64:
            raise RuntimeError("CUDA out of memory. Tried to allocate\nmore")
        return right(*args, **kwargs)

    wrong("fwd_cp", monkeypatch, change)
    status, out, found = bench("cp", "--only", "real-5/h2")
    assert status == 1
    assert "cp/real-5/h2/64: flash_kda.fwd_cp not measured, RuntimeError: CUDA out of memory. Tried to allocate\n" in out
    assert [(row["impl"], row["tokens"]) for row in found] == [(FWD, 320), (FWD_CP, 320), (FWD, 64)]


def test_a_difference_hides_in_no_average():
    exact = torch.randn(3000, 8, 16)
    out = exact.clone()
    out[2100:2200, 5] *= 1.2
    assert gate.relative(out, exact) < gate.APART
    with pytest.raises(gate.WrongError, match="relative difference"):
        gate.check_apart(out, exact)
    gate.check_apart(exact.clone(), exact)


def test_recurrence_in_pieces_is_the_recurrence(monkeypatch):
    monkeypatch.setattr(gate, "PIECE", 37)
    sample = samples.make("real", 100, 2)
    whole = recurrent_kda(**{name: x for name, x in sample.arguments().items() if name != "out"})
    assert all(gate.relative(a, b) < 1e-14 for a, b in zip(gate.recurrence(sample), whole, strict=True))


# Inputs


@pytest.mark.parametrize("gates", samples.GATES + samples.HARD)
def test_inputs_are_views_of_one_and_begin_alike(gates):
    cases = [Case("cp", 3, (200,), gates), Case("cp", 3, (130, 37), gates), Case("cp", 2, (250,), gates)]
    source = Source(cases, CPU)
    longest, shorter, other = (source.sample(case) for case in cases)
    for name in samples.TOKEN_TENSORS:
        assert getattr(longest, name).is_contiguous()
        assert torch.equal(getattr(longest, name)[:, :167], getattr(shorter, name))
    assert (longest.k.data_ptr() == shorter.k.data_ptr() == other.k.data_ptr()) == (gates in ALIKE)
    assert longest.dt_bias.shape == (3, 128)
    assert torch.equal(longest.dt_bias, shorter.dt_bias)
    made = samples.make(gates, 200, 3)
    for name in ("g", "dt_bias", "A_log"):
        drawn, given = getattr(made, name).float(), getattr(longest, name).float()
        spread = 0.05 + 0.2 * float(drawn.std())
        assert float(given.mean()) == pytest.approx(float(drawn.mean()), abs=spread)
        assert float(given.std()) == pytest.approx(float(drawn.std()), abs=spread)


def test_problems_are_handed_over_as_the_case_says():
    sample = samples.make("random", 96, 2)
    dense = impls.problem(sample, (32, 32, 32), DENSE, "auto")
    assert dense.sample.q.shape == (3, 32, 2, 128)
    assert dense.sample.q.data_ptr() == sample.q.data_ptr()
    assert dense.offsets is None
    packed = impls.problem(sample, (60, 36), PACKED, "auto")
    assert packed.offsets.tolist() == [0, 60, 96]
    outs = [impls.FORWARD[FWD].prepare(impls.problem(sample, (32,) * 3, x, "auto"))()[0] for x in (DENSE, PACKED)]
    assert torch.equal(outs[0].view(96, 2, 128), outs[1][0])


def test_the_planner_is_told_the_lengths_only_where_the_case_says(monkeypatch):
    given = []
    wrong("fwd_cp", monkeypatch, lambda right, a, k: given.append(k.get("cu_seqlens_cpu")) or right(*a, **k))
    sample = samples.make("random", 96, 2)
    for layout in (DENSE, PACKED, KNOWN):
        impls.FORWARD[FWD_CP].prepare(impls.problem(sample, (48, 48), layout, "auto"))()
    assert given[:2] == [None, None]
    assert given[2].tolist() == [0, 48, 96]


# Other packages


class Other:
    """Stands for another package: the reference with an error of its own."""

    name, version = "other", "1.2"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def prepare(self, problem, *, state=False):
        def call():
            out, final = api.fwd(**problem.arguments(state))
            return out * self.factor, None if final is None else final * self.factor

        return call


@pytest.fixture
def beside(monkeypatch):
    def put(peer):
        monkeypatch.setattr("flash_kda.cli.bench.installed", lambda device: ([peer], {"fla.chunk_kda": "not here"}))

    return put


def test_another_package_in_the_same_run(bench, beside):
    beside(Other(1.004))
    status, out, found = bench("cp", "accuracy", "--only", "real*")
    assert status == 0
    assert "beside it: other 1.2" in out
    assert "not beside it: fla.chunk_kda, not here" in out
    theirs = [row for row in found if row["impl"] == "other"]
    assert [(row["suite"], row["version"], row["segments"]) for row in theirs] == [
        *[("cp", "1.2", None)] * 3,
        ("accuracy", "1.2", None),
    ]
    assert all(row["eager_ms"] > 0 for row in theirs[:3])
    assert "path" not in theirs[0]
    ours = next(row for row in found if row["suite"] == "accuracy" and row["impl"] == FWD)
    ratios = [a / b for a, b in zip(ours["head_rel_l2_out"], theirs[3]["head_rel_l2_out"], strict=True)]
    assert theirs[3]["ratio_out"] == pytest.approx(max(ratios))
    assert theirs[3]["ratio_state"] < 1e-3
    assert theirs[3]["rel_l2_state"] == pytest.approx(4e-3, rel=1e-3)


def test_another_package_that_is_wrong_or_raises_is_named_only(bench, beside):
    beside(Other(1.2))
    status, out, found = bench("cp", "--only", CUT)
    assert status == 0
    assert f"cp/{CUT}: other not measured, WRONG: relative error 0.2 " in out
    assert "other" not in {row["impl"] for row in found}

    class Broken(Other):
        def prepare(self, problem, *, state=False):
            raise AssertionError("head dim")

    beside(Broken(1.0))
    status, out, _ = bench("cp", "--only", CUT)
    assert status == 0
    assert "other not measured, AssertionError: head dim" in out


def test_infinite_result_of_another_package_is_a_row_without_errors(bench, beside):
    beside(Other(float("nan")))
    status, _, found = bench("accuracy", "--only", "real*")
    assert status == 0
    row = found[-1]
    assert (row["impl"], row["rel_l2_out"], "head_rel_l2_out" in row, row["ratio_out"]) == ("other", None, False, None)


def test_no_peers(bench, beside):
    beside(Other(1.0))
    _, out, found = bench("cp", "--only", CUT, "--peers", "none")
    assert "beside it" not in out
    assert {row["impl"] for row in found} == {FWD, FWD_CP}


def fake_modules(monkeypatch, seen):
    """Modules with the names and signatures of the other packages, computing by the recurrence."""

    def chunk_kda(*, safe_gate, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, **k):
        assert safe_gate
        assert use_qk_l2norm_in_kernel
        assert use_gate_in_kernel
        assert use_beta_sigmoid_in_kernel
        seen.append(os.environ.get("FLA_FLASH_KDA"))
        state = k.pop("output_final_state")
        k["dt_bias"] = k["dt_bias"].view(k["q"].shape[2], 128)
        out, final = recurrent_kda(**k)
        return out.bfloat16(), final.mT if state else None

    def kimi_delta_attention(q, k, v, g, beta, cu_seqlens, **o):
        assert cu_seqlens.dtype == torch.int32
        assert g.dtype == beta.dtype == torch.float32
        assert o["safe_gate"]
        assert o["use_qk_l2norm_in_kernel"]
        assert o["use_beta_sigmoid_in_kernel"]
        assert o["plan_name"] == "kda_hopper_cuda"
        tokens = (x[None] for x in (q, k, v, g, beta))
        out, final = recurrent_kda(*tokens, o["scale"], o["a_log"], o["dt_bias"], o["gate_lower_bound"], cu_seqlens=cu_seqlens)
        return out[0].bfloat16(), final if o["output_final_state"] else final.new_empty(0)

    def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens):
        o, final = recurrent_kda(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state, cu_seqlens)
        out.copy_(o)
        if final_state is not None:
            final_state.copy_(final)

    for name, attributes in (
        ("fla", {}),
        ("fla.ops", {}),
        ("fla.ops.kda", {"chunk_kda": chunk_kda}),
        ("cudnn", {}),
        ("cudnn.linear_attention", {"kimi_delta_attention": kimi_delta_attention}),
        ("flash_kda_moonshot", {"fwd": fwd, "__version__": "3"}),
    ):
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("flash_kda.bench.impls.metadata.version", lambda name: f"version of {name}")


@pytest.mark.parametrize(("lengths", "layout"), [((32, 32), DENSE), ((40, 24), PACKED)])
def test_other_packages_are_called_by_their_own_rules(monkeypatch, lengths, layout):
    monkeypatch.setenv("FLA_FLASH_KDA", "1")
    seen: list[str | None] = []
    fake_modules(monkeypatch, seen)
    found, missing = impls.installed(torch.device("cuda"))
    assert missing == {}
    assert [(peer.name, peer.version) for peer in found] == [
        ("fla.chunk_kda", "version of fla-core"),
        ("cudnn.kda_hopper_cuda", "version of nvidia-cudnn-frontend"),
        ("FlashKDA", "3"),
    ]
    sample = samples.make("real", 64, 2, lower_bound=-2.0)
    problem = impls.problem(sample, lengths, layout, "auto")
    want = impls.FORWARD[FWD].prepare(problem, state=True)()
    for peer in found:
        out, final = peer.prepare(problem, state=True)()
        assert gate.relative(out.float(), want[0].float()) < 1e-4, peer.name
        assert gate.relative(final.float(), want[1]) < 1e-5, peer.name
        out, final = peer.prepare(problem)()
        assert gate.relative(out.float(), want[0].float()) < 1e-4
        assert final is None
    assert set(seen) == {"0"}


def test_what_is_not_installed_says_why(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}\nand more")

    monkeypatch.setattr("flash_kda.bench.impls.import_module", missing)
    found, reasons = impls.installed(torch.device("cuda"))
    assert found == []
    assert reasons["cudnn.kda_hopper_cuda"] == "ModuleNotFoundError: No module named 'cudnn.linear_attention'"


# The command


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("cq",), "suites must be of forward, cp, recipe, "),
        (("cp", "--only", "h17"), "only must match the name of a case, got h17"),
        (("cp", "--smoke", "--impl", "sm90", "--device", "cpu"), "impl='sm90' must be able to run"),
        (("cp", "--smoke", "--output", "/nowhere/rows.jsonl"), "output must lie in a folder that exists"),
        (("cp", "--device", "cpu"), "device must be a GPU for suites that time, got cpu; --smoke"),
        (("accuracy", "cp", "--device", "cpu"), "device must be a GPU for suites that time"),
    ],
)
def test_bad_options(command, options, said):
    status, out, err = command("bench", *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {said}")
    assert err.count("\n") == 1


def test_rows_are_appended(command, tmp_path):
    output = tmp_path / "rows.jsonl"
    output.write_text('{"suite": "old"}\n')
    for _ in range(2):
        arguments = ("bench", "cp", "--only", "none*/64", "--smoke", "--device", "cpu", "--commit", "abc", f"--output={output}")
        assert command(*arguments)[0] == 0
    found = rows.read([output])
    assert [row["suite"] for row in found] == ["old", *["cp"] * 4]
    assert {row["commit"] for row in found[1:]} == {"abc"}
    assert found[1]["command"] == "flash-kda bench cp --only 'none*/64' --smoke --device cpu"


# Rows


def test_lengths_of_sequences():
    for of, short, shown in (
        ([8192], [8192], "8,192"),
        ([1024] * 8, [1024] * 8, "8 x 1,024"),
        ([1300, 547], [1300, 547], "1,300 + 547"),
        ([33] * 4096, "4096 x 33", "4,096 x 33"),
        ([1023, 1025] * 512, "512 x (1023 + 1025)", "512 x (1,023 + 1,025)"),
        ([7] * 16 + [8], "1 x (" + "7 + " * 16 + "8)", "1 x (" + "7 + " * 16 + "8)"),
    ):
        assert rows.written(of) == short
        assert rows.seq_lens({"seq_lens": short}) == shown
    assert rows.seq_lens({"seq_lens": None, "tokens": 2048}) == "2,048"


def test_a_row_has_every_field_and_no_other():
    made = rows.make(suite="cp", heads=3, layout=DENSE)
    assert tuple(made) == (*rows.FIELDS, "layout")
    assert (made["suite"], made["graph_ms"]) == ("cp", None)
    with pytest.raises(ValueError, match="got graph"):
        rows.make(graph=1)


def test_rows_must_be_numbers_that_json_knows(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        rows.append(rows.make(floor_ms=float("nan")), tmp_path / "rows.jsonl")
