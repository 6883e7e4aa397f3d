"""What compute-sanitizer's racecheck says of the Hopper kernels, and of controls whose answer is known.

    PYTHONPATH=. python benchmarks/races.py build DIR                     cubins with line tables; no GPU
    PYTHONPATH=. python benchmarks/races.py told DIR                      which synchronisation they tell a tool of; no GPU
    PYTHONPATH=. python benchmarks/races.py check DIR OUT [--sanitizer PATH ...]    run all, logs in OUT, then the report
    PYTHONPATH=. python benchmarks/races.py report DIR OUT                the report again

docs/measured.md, "Races", says how to read it. Triton's pinned version must be installed: nvdisasm and cuobjdump are its own.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from flash_kda.sm90 import build as compiler
from flash_kda.sm90.variants import VARIANTS, Limits, Variant

HERE = Path(__file__).resolve().parent


def _control(function: str, name: str, **constexprs: int) -> Variant:
    tile = {"x_desc": "tensordesc<bf16[{STEP_ROWS},{COLUMNS}],{BOX!r}>"} if function == "relay" else {}
    return Variant(
        name=name,
        module="race_controls",
        function=function,
        signature={**tile, "out_ptr": "*fp32", "steps": "i32"},
        limits=Limits(registers=255),
        constexprs=constexprs,
    )


# name -> the races that are there. `relay_unsynced` has some by the letter of PTX: the lanes of a warp exchange tiles through
# shared memory without a bar.warp.sync between.
CONTROLS = {
    "block": (_control("block", "block", EARLY=0), "none"),
    "pair": (_control("pair", "pair", EARLY=0), "none"),
    "pair_early": (_control("pair", "pair_early", EARLY=1), "full"),
    "relay": (_control("relay", "relay", EARLY=0, SYNC=1), "none"),
    "relay_unsynced": (_control("relay", "relay_unsynced", EARLY=0, SYNC=0), "in a warp"),
    "relay_early_full": (_control("relay", "relay_early_full", EARLY=1, SYNC=1), "full"),
    "relay_early_half": (_control("relay", "relay_early_half", EARLY=2, SYNC=1), "half"),
    "relay_early_empty": (_control("relay", "relay_early_empty", EARLY=3, SYNC=1), "empty"),
}
CALLS = ("split_v", "whole", "cp")
OPTIONS = {"": [], "+barriers": ["--num-cuda-barriers", "64"]}


def build(folder: Path) -> None:
    jobs = os.cpu_count() or 1
    compiler.build(folder / "product", VARIANTS, jobs=jobs, line_info=True)
    compiler.build(folder / "controls", [variant for variant, _ in CONTROLS.values()], jobs=jobs, line_info=True)


# The targets: what runs under the tool


def run_target(folder: Path, name: str) -> None:
    import torch

    from flash_kda.sm90 import launch

    if name in CONTROLS:
        variant = CONTROLS[name][0]
        library = launch.KernelLibrary(folder / "controls", [variant], HERE)
        steps = 6
        rows = steps * (32 if variant.function == "relay" else 1)
        x = torch.arange(rows * 64, device="cuda").remainder(7).bfloat16().view(rows, 64)
        out = torch.empty(rows * (64 if variant.function == "relay" else 128), device="cuda")
        tile = [(x.data_ptr(), x.shape, x.stride())] if variant.function == "relay" else []
        library.kernel(name).launch(0, (1, 1, 1), *tile, out.data_ptr(), steps)
        torch.cuda.synchronize()
        if CONTROLS[name][1] in ("none", "in a warp"):
            step = torch.arange(steps, device="cuda")[:, None]
            if variant.function == "relay":
                first, second = (x.float() + 1).view(steps, 2, 16, 64).unbind(1)
                want = torch.stack((first, second + first), 1) + step[..., None, None]
            else:
                want = 1000.0 * step + torch.arange(128, device="cuda")
            print("right:", torch.equal(out, want.flatten()))
        print("kernels:", name)
        return

    import flash_kda
    from flash_kda import samples

    library = launch.KernelLibrary(folder / "product", VARIANTS)
    launch.library.cache_clear()
    launch.library = lambda: library
    lengths = (33, 0, 1, 64, 47) * (10 if name == "whole" else 1)
    sample = samples.make("random", sum(lengths), 3, device="cuda")
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    state = torch.randn(len(lengths), 3, 128, 128, device="cuda")
    call = sample.arguments() | {"cu_seqlens": offsets, "initial_state": state, "output_final_state": True, "impl": "sm90"}
    if name == "cp":
        out, final = flash_kda.fwd_cp(**call, segment_len=32)[:2]
    else:
        out, final = flash_kda.fwd(**call)
    torch.cuda.synchronize()
    print("right:", bool(out.isfinite().all()) and final is not None and bool(final.isfinite().all()))
    print("kernels:", *library._kernels)


def check(folder: Path, out: Path, sanitizers: list[str], only: list[str], at_once: int, limit: float, first_port: int) -> None:
    """Every target under every sanitizer, several at a time; each log ends with what the target printed."""
    out.mkdir(parents=True, exist_ok=True)
    jobs = []
    for number, sanitizer in enumerate(sanitizers):
        told = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False).stdout
        version = (re.findall(r"Version (\S+)", told) or [f"unknown{number}"])[0]
        for suffix, options in OPTIONS.items():
            for name in only or (*CALLS, *CONTROLS):
                jobs.append((f"{version}{suffix}--{name}", [sanitizer, *options], name))
        if not only or "split_v" in only:
            jobs.append((f"{version}+hazards--split_v", [sanitizer, "--racecheck-report", "all"], "split_v"))
    ports = list(range(first_port, first_port + 10 * len(jobs), 10))
    jobs.sort(key=lambda job: job[2] in CONTROLS)  # the long ones first
    running: list[tuple[subprocess.Popen[bytes], Path, float]] = []
    while jobs or running:
        while jobs and len(running) < at_once:
            stem, start, name = jobs.pop(0)
            tool = [*start, "--tool", "racecheck", "--print-level", "info", "--print-limit", "20000"]
            tool += ["--target-processes", "application-only", "--show-backtrace", "no", "--log-file", str(out / f"{stem}.log")]
            tool += ["--port", str(ports.pop())]  # the tool's ten default ports would be too few
            command = [*tool, sys.executable, str(Path(__file__).resolve()), "target", str(folder), name]
            (out / f"{stem}.command").write_text(" ".join(command) + "\n")
            said = (out / f"{stem}.out").open("wb")
            process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
            running.append((process, out / f"{stem}.out", time.monotonic()))
        for job in list(running):
            process, said_path, begun = job
            late = time.monotonic() - begun > limit
            if late:
                os.killpg(process.pid, signal.SIGKILL)  # the tool and what it runs
            if process.wait() if late else process.poll() is not None:
                running.remove(job)
                with said_path.open("a") as said:
                    said.write(f"\nexit: {'out of time' if late else process.returncode}, {time.monotonic() - begun:.0f} s\n")
        time.sleep(0.1)
    summary, details = report(folder, out)
    (out / "report.txt").write_text(f"{summary}\n{details}\n")
    print(summary)


# What is known of a cubin: where an offset is, and which synchronisation it tells tools of


@dataclass(frozen=True)
class Place:
    """A machine instruction: its part of the kernel, the source function and line it comes from, and what it is."""

    part: str
    function: str
    line: str
    instruction: str

    def __str__(self) -> str:
        part = "" if self.part == self.function else f"{self.part}: "
        return f"{part}{self.function} {self.line} {self.instruction.split()[0] if self.instruction else '?'}"


@functools.cache
def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


@functools.cache
def _functions(path: str) -> list[tuple[int, int, str]]:
    """First line, last line and name of every function of a source file."""
    name = Path(path).name  # line tables hold the path of the tree that was compiled
    here = [p for p in (Path(path), HERE / name, Path(compiler.__file__).parent / "kernels" / name) if p.is_file()]
    if not here:
        return []
    tree = ast.parse(here[0].read_text(encoding="utf-8"))
    return [
        (node.lineno, node.end_lineno or node.lineno, node.name) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    ]


@functools.cache
def information(cubin: Path) -> str:
    return subprocess.run([_tool("cuobjdump"), "-elf", str(cubin)], capture_output=True, text=True, check=True).stdout


@functools.cache
def disassembly(cubin: Path) -> str:
    return subprocess.run([_tool("nvdisasm"), "-g", "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


@functools.cache
def labels(cubin: Path) -> dict[str, int]:
    """Offset of every label and function."""
    found, waiting = {}, []
    for row in disassembly(cubin).splitlines():
        if match := re.match(r"([$.\w]+):$", row):
            waiting.append(match[1])
        elif match := re.match(r"\s+/\*([0-9a-f]{4,})\*/", row):
            found.update(dict.fromkeys(waiting, int(match[1], 16)))
            waiting = []
    return found


@functools.cache
def places(cubin: Path) -> dict[int, Place]:
    """Offset -> place, by line tables and by the branches that send warps to their partitions."""
    text = disassembly(cubin)
    starts = [(0, "entry")]
    targets = re.search(r"Targets: ([0-9a-fx ]+)", information(cubin))
    if targets:
        starts += [(int(at, 16), f"partition {n}") for n, at in enumerate(targets[1].split())]
        # the first branch is the default partition's: the other warps stay and wait to be told
        starts.append((labels(cubin)[re.findall(r"BRA `\((\S+)\)", text)[0]], "default"))
    # behind the last instruction of the default partition the compiler keeps what it moved away: loops of waits
    ends = re.search(r"EIATTR_EXIT_INSTR_OFFSETS.*?Value:\s+(0x[0-9a-f]+)", information(cubin), re.DOTALL)
    starts.append((int(ends[1], 16) + 1 if ends and targets else sys.maxsize, "waits"))
    starts += [(at, re.sub(r".*_\$_", "", name.split("__MD")[0])) for name, at in labels(cubin).items() if name[0] == "$"]
    found: dict[int, Place] = {}
    source, line = "", 0
    for row in text.splitlines():
        if match := re.search(r'//## File "([^"]+)", line (\d+)', row):
            source, line = match[1], int(match[2])
        elif match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", row):
            at = int(match[1], 16)
            inside = [function for function in _functions(source) if function[0] <= line <= function[1]]
            part = max(start for start in starts if start[0] <= at)[1]
            found[at] = Place(part, max(inside)[2] if inside else "?", f"{Path(source).name}:{line}", match[2])
    return found


def told(folder: Path) -> str:
    """For each kernel, what its cubin says of synchronisation (.nv.info), and the barrier instructions that it leaves out.

    A bar.warp.sync becomes a NOP; its offset in .nv.info is all that is left of it.
    """
    lines = ["| kernel | mbarriers | operations on them | of these told to tools | not told | warp barriers told, by part |"]
    lines.append("|---|---|---|---|---|---|")
    for cubin in sorted(folder.glob("*/*.cubin")):
        text = information(cubin)
        number = re.search(r"EIATTR_NUM_MBARRIERS.*?Value:\s+(0x[0-9a-f]+)", text, re.S)
        if number is None:
            continue
        known = {int(at, 16) for at in re.findall(r"(0x[0-9a-f]+)\s+:\s+Instruction Kind : MBARRIER", text)}
        where = places(cubin)
        operations = {at for at, place in where.items() if re.search(r"SYNCS\.(ARRIVE|PHASECHK|EXCH)", place.instruction)}
        missing = Counter(
            re.sub(r"^@\S+ | \w+,.*", "", where[at].instruction) + f" ({where[at].line})" for at in operations - known
        )
        listed = re.search(r"EIATTR_COOP_GROUP_INSTR_OFFSETS.*?Value:\s+([0-9a-fx ]+)", text, re.S)
        offsets = [int(at, 16) for at in listed[1].split()] if listed else []
        barriers = Counter(where[at].part for at in offsets if re.search(r"NOP|WARPSYNC", where[at].instruction))
        row = (cubin.stem, int(number[1], 16), len(operations), len(operations & known))
        rest = (
            "; ".join(f"{n} {what}" for what, n in missing.items()) or "-",
            ", ".join(f"{p} {n}" for p, n in barriers.items()),
        )
        lines.append("| " + " | ".join(map(str, (*row, *rest))) + " |")
    return "\n".join(lines)


# What the tool said


_HEAD = re.compile(r"(Error|Warning|Info)\w*: Race reported between (Read|Write) access at (.*)")
_REST = re.compile(r"and (Read|Write) access at (.*?)\[(\d+) hazards?\]")
_OFFSET = re.compile(r"([\w$]+)[^\s+]*\+0x([0-9a-f]+)|0x([0-9a-f]+) in ([\w$]+)")
_HAZARD = re.compile(r"(\w+): .*?Potential (\w+) hazard detected at __shared__")
_THREAD = re.compile(r"(Read|Write) Thread \((\d+), ?\d+, ?\d+\) at (.*)")


def _place(text: str, folder: Path, kernels: list[str]) -> Place:
    """The place that a report names; kernels that share a symbol are told apart by which of them ran."""
    match = _OFFSET.search(text)
    if match is None:
        return Place("?", "?", text[:60].strip(), "")
    symbol, offset = (match[1], int(match[2], 16)) if match[2] else (match[4], int(match[3], 16))
    for name in kernels:
        for cubin in folder.glob(f"*/{name}.cubin"):
            function = next((label for label in labels(cubin) if label == symbol or label.endswith(f"${symbol}")), None)
            if function is not None and labels(cubin)[function] + offset in places(cubin):
                return places(cubin)[labels(cubin)[function] + offset]
    return Place("?", symbol, f"+0x{offset:x}", "")


def report(folder: Path, out: Path) -> tuple[str, str]:
    """A table of what each run reported, and for each pair of source lines how often."""
    summary = [
        "| sanitizer | target | races in it | right | errors | warnings | infos | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    pairs: dict[str, Counter[tuple[str, ...]]] = {}
    hazards: dict[str, Counter[tuple[str, ...]]] = {}
    for log in sorted(out.glob("*--*.log")):
        tool, target = log.stem.split("--")
        said = log.with_suffix(".out").read_text(errors="replace")
        kernels = (re.findall(r"^kernels: (.*)$", said, re.M) or [target])[-1].split()
        levels: Counter[str] = Counter()
        head = first = None
        kind = None
        threads: list[tuple[str, int, Place]] = []
        for row in log.read_text(errors="replace").splitlines():
            if match := _HEAD.search(row):
                head, first = match, _place(match[3], folder, kernels)
                levels[match[1]] += 1
            elif head and first and (match := _REST.search(row)):
                key = (head[1], f"{head[2]} {first}", f"{match[1]} {_place(match[2], folder, kernels)}")
                pairs.setdefault(log.stem, Counter())[key] += int(match[3])
            elif match := _HAZARD.search(row):
                kind, threads = f"{match[1]} {match[2]}", []
            elif kind and (match := _THREAD.search(row)):
                threads.append((match[1], int(match[2]), _place(match[3], folder, kernels)))
                if len(threads) == 2:
                    (_, t1, p1), (_, t2, p2) = threads
                    key = (kind, "same warp" if t1 // 32 == t2 // 32 else "other warp", str(p1), str(p2))
                    hazards.setdefault(log.stem, Counter())[key] += 1
                    kind = None
        end = re.search(r"exit: (.*), (\d+) s", said)
        right = (re.findall(r"^right: (\w+)$", said, re.M) or [f"no answer, exit {end[1] if end else '?'}"])[-1]
        known = CONTROLS[target][1] if target in CONTROLS else "?"
        row_ = (tool, target, known, right, levels["Error"], levels["Warning"], levels["Info"], end[2] if end else "?")
        summary.append("| " + " | ".join(map(str, row_)) + " |")
    text = ""
    for title, found in (("Pairs of accesses, with hazards", pairs), ("Single hazards", hazards)):
        for stem, counter in found.items():
            text += f"\n\n{title}: {stem}\n" + "\n".join(f"{n:8d}  " + "  |  ".join(key) for key, n in counter.most_common(80))
    return "\n".join(summary), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "told", "check", "report", "target"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--sanitizer", action="append")
    parser.add_argument("--only", nargs="*", default=[], help="these targets instead of all")
    parser.add_argument("--at-once", type=int, default=max(2, (os.cpu_count() or 2) - 2))
    parser.add_argument("--first-port", type=int, default=40000)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each target")
    given = parser.parse_args()
    if given.what == "build":
        build(given.folder)
    elif given.what == "told":
        print(told(given.folder))
    elif given.what == "target":
        run_target(given.folder, given.out)
    elif given.what == "check":
        check(
            given.folder,
            Path(given.out),
            given.sanitizer or ["compute-sanitizer"],
            given.only,
            given.at_once,
            given.limit,
            given.first_port,
        )
    else:
        print(*report(given.folder, Path(given.out)), sep="\n")


if __name__ == "__main__":
    main()
