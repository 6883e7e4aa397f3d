"""The command line: what it prints, writes and returns, and what it says about bad input."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import flash_kda
from flash_kda import api, samples
from flash_kda.cli import files, memory, recipe
from flash_kda.cli.console import UserError

ROOT = Path(flash_kda.__file__).parents[1]
SMALL = ("run", "--tokens", "608", "--segment-len", "256")


@pytest.fixture(autouse=True)
def one_thread():
    """The inputs are too small to share, and threads that wait for each other on a busy machine take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """300 tokens of two heads of the packaged activations."""
    x = samples.packaged()
    part = {name: getattr(x, name)[:, :300, :2].contiguous() for name in samples.TOKEN_TENSORS}
    return {**part, "A_log": x.A_log[:2].clone(), "dt_bias": x.dt_bias[:2].clone()}


def child(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = [str(p) for p in (path, ROOT) if p is not None]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    env.pop("FLASH_KDA_IMPL", None)
    return subprocess.run([sys.executable, "-m", "flash_kda", *arguments], capture_output=True, text=True, env=env, timeout=120)


def shell(script: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs ``script`` with ``$*`` in it replaced by the command; the last line of stderr is its status."""
    called = shlex.join([sys.executable, "-m", "flash_kda", *arguments])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p) for p in (path, ROOT) if p is not None)}
    script = script.replace("$*", f"({called}; echo status $? >&2)")
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=env, timeout=120)


def broken_module(folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text('raise ImportError("broken on purpose")\n')


# run


def test_run_packaged(command):
    status, out, _ = command(*SMALL)
    assert status == 0
    assert "3 segments" in out
    assert "Backward scan of the 2 segments" in out
    assert "around the cut at 256" in out
    assert "around the cut at 512" in out
    assert out.rstrip().endswith("CHECK PASSED")
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 110
    table = out[out.index("values ") :].split("The oracle")[0].splitlines()
    assert max(map(len, table)) <= 80


def test_output_is_what_fwd_cp_returns(command, tmp_path, tensors):
    save_file(tensors, tmp_path / "in.safetensors")
    status, out, _ = command(
        "run",
        tmp_path / "in.safetensors",
        "--cu-seqlens",
        "0,200,290",
        "--segment-len",
        64,
        "--output",
        tmp_path / "out.safetensors",
    )
    assert status == 0, out
    written = load_file(tmp_path / "out.safetensors")
    offsets = torch.tensor([0, 200, 290])
    want_out, want_state = flash_kda.fwd_cp(
        *(tensors[x] for x in samples.TOKEN_TENSORS),
        128**-0.5,
        None,
        tensors["A_log"],
        tensors["dt_bias"],
        -5.0,
        cu_seqlens=offsets,
        segment_len=64,
        output_final_state=True,
    )
    assert set(written) == {"out", "final_state"}
    assert torch.equal(written["out"], want_out)
    assert torch.equal(written["final_state"], want_state)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]


def test_batch_rows_and_initial_state(command, tmp_path, tensors):
    rows = {k: x.repeat(2, *[1] * (x.dim() - 1)) if k in samples.TOKEN_TENSORS else x for k, x in tensors.items()}
    generator = torch.Generator().manual_seed(0)
    rows["initial_state"] = torch.randn(2, 2, 128, 128, generator=generator).bfloat16()
    save_file(rows, tmp_path / "in.safetensors")
    status, out, _ = command("run", tmp_path / "in.safetensors", "--segment-len", 128, "--output", tmp_path / "out.safetensors")
    assert status == 0, out
    assert load_file(tmp_path / "out.safetensors")["out"].shape == (2, 300, 2, 128)


@pytest.mark.parametrize("lost", ["initial states of segments", "a head", "finite values"])
def test_wrong_result_fails_the_check(command, monkeypatch, tmp_path, lost):
    right = api.fwd_cp

    def wrong(*args, **kwargs):
        if lost == "initial states of segments":
            kwargs["eps"] = 0.9
        returned = right(*args, **kwargs)
        if lost == "a head":
            returned[0][:, -1, 3] = 0
        if lost == "finite values":
            returned[0][:, 300, 1] = float("nan")
        return returned

    monkeypatch.setattr(api, "fwd_cp", wrong)
    status, out, _ = command(*SMALL, "--output", tmp_path / "out.safetensors")
    assert status == 1
    assert "CHECK FAILED; nothing was written" in out
    assert not list(tmp_path.iterdir())


def test_lost_state_of_one_short_sequence_fails_the_check(command, monkeypatch, tmp_path):
    """No window lies there, and the norm over all sequences would hide it."""
    lengths = [300, 80, 70, 60, 50, 2]
    x = samples.make("none", sum(lengths), 2)
    file = tmp_path / "in.safetensors"
    tensors = {name: getattr(x, name) for name in (*samples.TOKEN_TENSORS, *samples.PARAMETERS)}
    tensors["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    save_file(tensors, file)
    assert command("run", file, "--segment-len", 64)[0] == 0
    right = api.fwd_cp

    def wrong(*args, **kwargs):
        returned = right(*args, **kwargs)
        returned[1][-1, 1] *= 1.02
        return returned

    monkeypatch.setattr(api, "fwd_cp", wrong)
    status, out, _ = command("run", file, "--segment-len", 64)
    assert status == 1
    assert [x.split("  ")[0] for x in out.splitlines() if x.endswith("FAIL")] == ["all final states vs serial"]


def test_both_wrong_in_the_same_way_fails_the_check(command, monkeypatch):
    """Comparing the two with each other would not see it: the oracle must."""
    for name in ("fwd", "fwd_cp"):
        right = getattr(api, name)
        monkeypatch.setattr(api, name, lambda *a, right=right, **k: right(*a, **{**k, "scale": k["scale"] * 1.01}))
    assert command(*SMALL)[0] == 1


def _corrupt(name):
    def change(x):
        return {k: v for k, v in x.items() if k != name}

    return change


BAD = {
    "missing beta": (_corrupt("beta"), ("beta [B,T,H]", "k [1, 300, 2, 128] bfloat16")),
    "k in fp16": (lambda x: {**x, "k": x["k"].half()}, ("k must be bfloat16, got float16",)),
    "A_log in bf16": (lambda x: {**x, "A_log": x["A_log"].bfloat16()}, ("A_log must be float32, got bfloat16",)),
    "q of rank 3": (lambda x: {**x, "q": x["q"][0]}, ("q must have shape [B,T,H,K]", "(300, 2, 128)")),
    "v shorter": (lambda x: {**x, "v": x["v"][:, :299]}, ("v must have shape [B,T,HV,V]", "299")),
    "grouped heads": (lambda x: {**x, "q": x["q"][:, :, :1], "k": x["k"][:, :, :1]}, ("v must have the H = 1 heads of q",)),
    "a NaN in g": (
        lambda x: {**x, "g": x["g"].index_fill(1, torch.tensor([7]), float("nan"))},
        ("g must be finite", "[0, 7, 0, 0]"),
    ),
    "no tokens": (
        lambda x: {k: v[:, :0] if k in samples.TOKEN_TENSORS else v for k, v in x.items()},
        ("q must hold at least one token",),
    ),
    "offsets of nothing": (lambda x: {**x, "cu_seqlens": torch.tensor([0, 0])}, ("cu_seqlens must cover at least one token",)),
    "offsets too long": (lambda x: {**x, "cu_seqlens": torch.tensor([0, 400])}, ("cu_seqlens must end", "400")),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", ["run", "inspect"])
def test_bad_tensors_are_named(command, tmp_path, tensors, case, name):
    change, said = BAD[case]
    file = tmp_path / "in.safetensors"
    save_file({k: v.contiguous() for k, v in change(tensors).items()}, file)
    status, out, err = command(name, file)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for text in (str(file), *said):
        assert text in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"", "an empty file"),
        (b"PK\x03\x04 not a safetensors file at all", "bytes that are not"),
        ("truncated", "bytes that are not"),
    ],
)
def test_bad_files(command, tmp_path, tensors, content, said):
    file = tmp_path / "in.safetensors"
    if content == "truncated":
        save_file(tensors, file)
        content = file.read_bytes()[:5000]
    if content is not None:
        file.write_bytes(content)
    status, _, err = command("run", file)
    assert status == 2
    assert "must be a safetensors file" in err
    assert said in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cu-seqlens", "0,a"), "cu_seqlens must be whole numbers"),
        (("--cu-seqlens", "0,1_0,200"), "cu_seqlens must be whole numbers"),
        (("--cu-seqlens", "0,+10"), "cu_seqlens must be whole numbers"),
        (("--cu-seqlens", "0," + "9" * 30), "cu_seqlens must be whole numbers"),
        (("--cu-seqlens", "0"), "cu_seqlens must cover at least one token, got [0]"),
        (("--cu-seqlens", "0,0"), "cu_seqlens must cover at least one token, got [0, 0]"),
        (("--cu-seqlens", "0,700"), "cu_seqlens must end at or before the 608 tokens"),
        (("--lower-bound", "-6"), "lower_bound must be in [-5, 0], got -6.0"),
        (("--scale", "nan"), "scale must be finite"),
        (("--segment-len", "100"), "segment_len must be a multiple of 16, got 100"),
        (("--eps", "1.5"), "eps must be in [0, 1), got 1.5"),
        (("--impl", "sm90"), "impl='sm90' must be able to run"),
        (("--output", "/nowhere/at/all.safetensors"), "output must lie in a folder that exists"),
    ],
)
def test_bad_options(command, options, said):
    status, _, err = command(*SMALL, *options)
    assert status == 2
    assert said in err


def test_too_long_for_memory_is_no_traceback(command, monkeypatch):
    def repeat(self, tokens):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 102400000000 bytes.")

    monkeypatch.setattr(samples.Sample, "repeat", repeat)
    status, _, err = command("run", "--tokens", 100_000_000)
    assert status == 2
    assert err.startswith("error: the work must fit into memory")


def test_many_heads_and_nothing_to_cut(command, tmp_path):
    x = samples.make("random", 96, 20, lower_bound=-0.5)
    file = tmp_path / "in.safetensors"
    save_file({name: getattr(x, name) for name in (*samples.TOKEN_TENSORS, *samples.PARAMETERS)}, file)
    status, out, _ = command("run", file, "--lower-bound", "-0.5")
    assert status == 0
    assert "Nothing was cut: no sequence is longer than 256 tokens" in out
    assert "this checked the serial forward, and no boundary between segments" in out
    assert "of heads 0, 5, 10, 15 of 20" in out
    status, out, _ = command("run", file, "--lower-bound", "-0.5", "--segment-len", 32)
    assert status == 0
    assert "(the 16 of 20 heads that replay most)" in out


def test_output_must_not_be_the_input(command, tmp_path, tensors):
    file = tmp_path / "in.safetensors"
    save_file(tensors, file)
    before = file.read_bytes()
    (tmp_path / "link.safetensors").symlink_to(file)
    status, _, err = command("run", file, "--output", tmp_path / "link.safetensors")
    assert status == 2
    assert "output must not be the input" in err
    assert file.read_bytes() == before


@pytest.fixture
def no_work(monkeypatch):
    """Fails where the activations are looked at: the error was not found before the work."""
    monkeypatch.setattr(samples, "packaged", lambda: pytest.fail("the work began"))


TARGETS = ("output", "plot")


def writing(option: str, path: Path) -> tuple[object, ...]:
    if option == "plot":
        pytest.importorskip("matplotlib")
    return (*SMALL, "--output", path) if option == "output" else ("inspect", "--chunks", 4, "--heads", 1, "--plot", path)


@pytest.mark.parametrize("option", TARGETS)
@pytest.mark.parametrize("linked", [False, True])
def test_special_files_are_not_replaced(command, no_work, tmp_path, option, linked):
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    path = pipe
    if linked:
        path = tmp_path / "link.png"
        path.symlink_to(pipe)
    status, out, err = command(*writing(option, path))
    assert (status, out) == (2, "")
    assert err == f"error: {option} must be a regular file or a new one, got {path}, which is a pipe\n"
    assert pipe.is_fifo()


def test_special_file_that_appears_during_the_work_is_not_replaced(tmp_path):
    path = tmp_path / "out.safetensors"
    files.check_output(path, None)
    os.mkfifo(path)
    with pytest.raises(UserError, match="which is a pipe"):
        files.write(path, {"out": torch.zeros(1)})
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("option", TARGETS)
def test_folders_and_impossible_names_are_refused_before_the_work(command, no_work, tmp_path, option):
    folder, loop = tmp_path / "folder.png", tmp_path / "loop.png"
    folder.mkdir()
    loop.symlink_to(loop)
    long = tmp_path / ("x" * 300 + ".png")
    for path, said in ((folder, "must be a file, got the folder"), (loop, "got"), (long, "File name too long")):
        status, out, err = command(*writing(option, path))
        assert (status, out) == (2, "")
        assert err.startswith(f"error: {option} must be")
        assert said in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("option", TARGETS)
def test_links_are_written_through_and_the_longest_name_works(command, tmp_path, option):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    target, link = folder / ("x" * 251 + ".png"), tmp_path / "link.png"
    link.symlink_to(target)
    for _ in range(2):  # a link to nothing, then one to a file
        status, out, err = command(*writing(option, link))
        assert status == 0, out + err
        assert link.is_symlink()
        assert target.stat().st_size > 1000
        assert list(folder.iterdir()) == [target]


@pytest.mark.parametrize("name", ["run", "inspect"])
def test_input_name_too_long(command, tmp_path, name):
    existing = tmp_path / "there.png"
    existing.touch()
    options = ("--output", existing) if name == "run" else ()
    status, out, err = command(name, tmp_path / ("x" * 300), *options)
    assert (status, out) == (2, "")
    assert err.endswith("must be readable, got File name too long\n")
    assert err.count("\n") == 1


def test_input_that_is_a_pipe(command, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    status, _, err = command("run", tmp_path / "pipe")
    assert status == 2
    assert "must be a safetensors file, got a pipe" in err


@pytest.mark.parametrize("name", ["run", "inspect"])
def test_unknown_tensors_are_named(command, tmp_path, tensors, name):
    file = tmp_path / "in.safetensors"
    save_file(tensors, file)
    assert command(name, file)[2] == ""
    state = torch.zeros(1, 2, 128, 128)
    save_file({**tensors, "inital_state": state, **{f"w\n{i}": torch.zeros(1) for i in range(9)}}, file)
    status, _, err = command(name, file)
    assert status == 0
    assert err.startswith(f"warning: {file} holds tensors that are not used: 'inital_state', 'w\\n0', ")
    assert err.endswith(" and 2 more; the optional ones are initial_state, cu_seqlens\n")
    assert err.count("\n") == 1


def test_nothing_was_cut_says_why(command, monkeypatch, tmp_path, tensors):
    assert (
        "Nothing was cut: no sequence is longer than a segment of 608 tokens." in command(*SMALL[:3], "--segment-len", 608)[1]
    )
    x = samples.make("random", 300, 8)
    save_file({name: getattr(x, name) for name in (*samples.TOKEN_TENSORS, *samples.PARAMETERS)}, tmp_path / "in.safetensors")
    said = "Nothing was cut: the planner expects no gain from it with 8 heads; --segment-len cuts all the same."
    out = command("run", tmp_path / "in.safetensors")[1]
    assert said in out
    assert "this checked the serial forward" in out
    assert "Nothing was cut" not in command(*SMALL)[1]
    # As beside the kernels, whose automatic plan is the serial one.
    right = api.fwd_cp
    monkeypatch.setattr(api, "fwd_cp", lambda *a, **k: right(*a, **{**k, "auto_cp": False}))
    monkeypatch.setattr("flash_kda.dispatch.last_path", lambda: "sm90")
    out = command(*SMALL[:3])[1]
    assert "Nothing was cut: beside the sm90 kernels only --segment-len makes segments." in out


# run --distributed


def test_run_over_ranks_started_by_the_command(tmp_path, tensors):
    """Two rows of a batch, the second of which is on both ranks."""
    rows = {name: torch.stack([x[0, :150], x[0, 150:]]) for name, x in tensors.items() if x.dim() > 2}
    rows |= {name: tensors[name] for name in ("A_log", "dt_bias")}
    state = torch.randn(2, 2, 128, 128)
    save_file(rows | {"initial_state": state}, tmp_path / "in.safetensors")
    made = child(
        "run",
        str(tmp_path / "in.safetensors"),
        *("--distributed", "--ranks", "2", "--segment-len", "64", "--output", str(tmp_path / "out.safetensors")),
    )
    assert made.returncode == 0, made.stderr
    assert "on 2 ranks of gloo (cpu), computed by the PyTorch reference" in made.stdout
    assert [line.split() for line in made.stdout.splitlines() if line[:1] in ("0", "1")] == [
        ["0", "160", "0", "to", "1", "-", "1"],
        ["1", "140", "1", "0", "-"],
    ]
    assert made.stdout.rstrip().endswith("CHECK PASSED")
    assert made.stdout.count("CHECK PASSED") == 1
    assert made.stdout.isascii()
    written = load_file(tmp_path / "out.safetensors")
    names = ("q", "k", "v", "g", "beta")
    parameters = (128**-0.5, None, rows["A_log"], rows["dt_bias"], -5.0)
    want, final = flash_kda.fwd(*(rows[x] for x in names), *parameters, state, output_final_state=True)
    assert written["out"].shape == want.shape
    assert (written["out"].float() - want.float()).norm() / want.float().norm() < 1e-3
    assert (written["final_state"] - final).norm() / final.norm() < 1e-5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--ranks", "2"), "ranks must be given with --distributed only, got 2 without it"),
        (("--distributed", "--eps", "2"), "eps must be in [0, 1), got 2.0"),
        (("--distributed", "--tokens", "300", "--cu-seqlens", "0,400"), "cu_seqlens must end at or before the 300 tokens"),
        (("--distributed", "--impl", "sm90"), "impl='sm90' must be able to run"),
        (("--distributed", "--output", "/"), "output must be a file, got the folder /"),
    ],
)
def test_run_over_ranks_refuses_before_it_starts_any(command, arguments, text):
    status, out, err = command("run", *arguments)
    assert status == 2
    assert text in err
    assert out == ""


# inspect


@pytest.mark.parametrize("lower_bound", ["-1", "-5"])
def test_table_takes_no_lower_bound(command, lower_bound):
    status, _, err = command("inspect", "--table", f"--lower-bound={lower_bound}")
    assert status == 2
    assert "table must be asked for alone, got lower-bound" in err


def test_inspect_and_plot(command, tmp_path):
    pytest.importorskip("matplotlib")
    status, out, _ = command("inspect", "--chunks", 40, "--heads", 2, "--plot", tmp_path / "memory.png")
    assert status == 0
    assert "the last 640 tokens" in out
    assert "> 40" in out
    assert max(map(len, out.splitlines())) <= 100
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [p.name for p in tmp_path.iterdir()] == ["memory.png"]


def test_plot_without_matplotlib(command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("flash_kda.cli.inspect.find_spec", lambda name: None)
    status, _, err = command("inspect", "--plot", tmp_path / "memory.png")
    assert status == 2
    assert 'pip install "flash-kda[plot]"' in err


def test_table(command):
    status, out, _ = command("inspect", "--table", "--chunks", 20, "--heads", 2)
    assert status == 0
    rows = [x for x in out.splitlines() if x.startswith(samples.GATES)]
    assert [x.split("  ")[0] for x in rows] == [
        "random, -5",
        "random, -1",
        "random, -0.5",
        "slow_eighth, -5",
        "log_uniform, -5",
        "real, -5",
    ]
    assert max(map(len, rows)) <= 80


@pytest.mark.parametrize(("gates", "lower_bound"), [("random", -1.0), ("slow_eighth", -5.0), ("none", -5.0)])
def test_walk_stops_where_the_scan_does(gates, lower_bound):
    """The products of single chunks' transitions are the M of the backward scan."""
    x = samples.make(gates, 330, 2, lower_bound=lower_bound)
    walked = memory.measure(x, lambda _: None)
    for eps in (2.0**-4, 2.0**-16):
        _, info = flash_kda.state_only(x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, lower_bound, None, eps=eps, return_info=True)
        stops = walked.until(eps)
        for h in range(2):
            assert stops[h] == (None if info.norm[0, h] > eps else info.chunks[0, h])
            torch.testing.assert_close(walked.norm[info.chunks[0, h], h], info.norm[0, h], rtol=1e-4, atol=1e-9)
        bounds = walked.bound(eps)
        assert all(b is None or (s is not None and s <= b) for s, b in zip(stops, bounds, strict=True))


def test_published_rule():
    """By hand: sigmoid(0) = 1/2, so a chunk counts 16 * lower_bound * log2(e) / 2 on every head but the slow one."""
    g, a_log, bias = torch.zeros(100, 2, 128), torch.zeros(2), torch.zeros(2, 128)
    assert recipe.fast_path(-1.74)
    assert not recipe.fast_path(-1.73)
    assert recipe.mean_scan(g, a_log, bias, -0.5) == 2
    assert recipe.mean_scan(g, a_log, bias, -0.2) == 5
    assert recipe.mean_scan(g, a_log, bias, -0.1) is None
    slow = g.clone()
    slow[:, 1] = -2.0
    assert recipe.mean_scan(slow, a_log, bias, -0.5) is None
    assert recipe.mean_scan(slow.repeat(2, 1, 1), a_log, bias, -0.5) == 8
    # Only the last token of each chunk is looked at.
    sampled = g.clone()
    sampled[:95:16] = -100.0
    assert recipe.mean_scan(sampled, a_log, bias, -0.5) == 2


# doctor and the entry point


def test_doctor():
    done = child("doctor")
    assert done.returncode == 0
    assert done.stderr == ""
    assert f"flash_kda            {flash_kda.__version__}" in done.stdout
    assert "PyTorch reference, because" in done.stdout
    assert "READY" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", ["torch", "typer", "rich"])
def test_doctor_names_a_broken_import(tmp_path, name):
    for module in {name, "torch"}:
        broken_module(tmp_path, module)
    done = child("doctor", path=tmp_path)
    assert done.returncode == 0
    row = next(x for x in done.stdout.splitlines() if x.split()[:1] == [name])
    assert row.endswith("DOES NOT IMPORT: ImportError: broken on purpose")
    assert f"{name} does not import" in done.stdout.splitlines()[-1]
    assert "NOT READY" in done.stdout.splitlines()[-1]


STDOUTS = {
    "unread": "$* | true",
    "closed": "$* >&-",
    "not for writing": ": > {folder}/empty; $* 1< {folder}/empty",
    "full": "ulimit -f 0; $* > {folder}/full",
}
"""Ways in which standard output fails."""


@pytest.mark.parametrize("arguments", [(), ("--help",), ("ignored",)])
@pytest.mark.parametrize("stdout", STDOUTS)
def test_doctor_without_stdout(tmp_path, stdout, arguments):
    broken_module(tmp_path, "torch")
    done = shell(STDOUTS[stdout].format(folder=tmp_path), "doctor", *arguments, path=tmp_path)
    assert done.stderr == "status 0\n"


@pytest.mark.parametrize("arguments", [("run", "--tokens", "64"), ("run", "--help"), ("--version",)])
@pytest.mark.parametrize("stdout", ["closed", "not for writing", "full"])
def test_commands_without_stdout(tmp_path, stdout, arguments):
    done = shell(STDOUTS[stdout].format(folder=tmp_path), *arguments)
    error, status = done.stderr.splitlines()
    assert error.startswith(f"error: standard output must be {'open' if stdout == 'closed' else 'writable'}")
    assert status == "status 2"


def test_run_when_nobody_reads():
    assert shell(STDOUTS["unread"], *SMALL).stderr == "status 1\n"


def test_errors_without_stderr():
    assert child("run", "/nowhere/at/all").returncode == 2
    done = shell(f"{shlex.join([sys.executable, '-m', 'flash_kda', 'run', '/nowhere/at/all'])} 2>&-; echo status $?")
    assert done.stdout == "status 2\n"


def test_doctor_survives_a_crash(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    done = child("doctor", path=tmp_path)
    assert done.returncode == 0
    assert "signal 11" in done.stdout.splitlines()[-1]


def test_doctor_with_a_gpu_and_bad_settings(command, monkeypatch):
    cpu = {"device": "cpu", "why_not": "tensors are on cpu"}
    gpu = {"device": "cuda:0", "name": "NVIDIA H200", "capability": "9.0", "why_not": None}
    found = {"torch": "2.13.0", "built_for": "12.8", "imports": {}, "devices": [cpu, gpu]}
    monkeypatch.setattr("flash_kda.cli.doctor._probe", lambda: found)
    status, out, _ = command("doctor")
    assert status == 0
    assert "cuda:0: NVIDIA H200, compute capability 9.0" in out
    assert "READY: sm90 kernels on cuda:0" in out
    monkeypatch.setenv("FLASH_KDA_IMPL", "fast")
    status, out, _ = command("doctor")
    assert status == 0
    assert "NOT READY: FLASH_KDA_IMPL must be one of" in out


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_commands_say_what_is_missing(tmp_path, name):
    broken_module(tmp_path, name)
    done = child("run", path=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: flash-kda needs typer and rich")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["run", "inspect", "bench"])
@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_commands_point_to_doctor_if_torch_does_not_import(tmp_path, name, error):
    (tmp_path / "torch.py").write_text(f"raise {error}('libcudart.so: cannot open\\nshared object file')\n")
    done = child(name, path=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {name} must be able to import PyTorch")
    assert f"{error}: libcudart.so: cannot open; 'flash-kda doctor'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_does_not_import_torch(tmp_path):
    (tmp_path / "torch.py").write_text('raise SystemExit("torch was imported")\n')
    for arguments in (
        ("--help",),
        ("run", "--help"),
        ("inspect", "--help"),
        ("bench", "--help"),
        ("plot", "--help"),
        ("--version",),
    ):
        done = child(*arguments, path=tmp_path)
        assert done.returncode == 0, done.stderr


# samples


def test_packaged_sample():
    x = samples.packaged()
    assert x.q.shape == (1, 1024, 4, 128)
    repeated = x.repeat(2000, 6)
    assert repeated.q.shape == (1, 2000, 6, 128)
    assert torch.equal(repeated.g[:, 1024:], x.g[:, : 2000 - 1024, [0, 1, 2, 3, 0, 1]])
    assert torch.equal(repeated.dt_bias[4:], x.dt_bias[:2])


@pytest.mark.parametrize("gates", samples.GATES + samples.HARD)
def test_made_samples(gates):
    x = samples.make(gates, 40, 3, lower_bound=-2.0)
    again = samples.make(gates, 40, 3, lower_bound=-2.0)
    assert all(torch.equal(getattr(x, n), getattr(again, n)) for n in (*samples.TOKEN_TENSORS, *samples.PARAMETERS))
    out, _ = flash_kda.fwd(**x.arguments())
    assert out.isfinite().all()


def test_unknown_gates():
    with pytest.raises(ValueError, match="gates must be one of"):
        samples.make("slow", 16, 1)
