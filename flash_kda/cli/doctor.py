"""What is installed and what will run here, and why. For broken machines: standard library only, exit status always 0.

Versions come from package metadata, which nothing has to be imported for. PyTorch is imported in a child process with a
time limit, because a bad installation can also crash or hang instead of raising.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from .._version import __version__
from .streams import silence_stdout

PACKAGES = ("torch", "numpy", "safetensors", "typer", "rich", "matplotlib", "triton", "cuda-bindings")
USES = {
    "matplotlib": "inspect --plot and plot",
    "triton": "only to build GPU kernels",
    "cuda-bindings": "only to launch GPU kernels",
}
"""What the optional ones among :data:`PACKAGES` are for."""

VARIABLES = ("FLASH_KDA_IMPL", "FLASH_KDA_DEBUG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")

TIMEOUT = 120.0
"""Seconds for the child process; a cold import of PyTorch from a network disk takes tens of seconds."""

# Prints one JSON object as its last line. Every part is guarded for itself, so that the others are still reported.
_PROBE = r"""
import json, sys
sys.path[:] = json.loads(sys.argv[1])
found = {"imports": {}, "devices": []}
def attempt(name, function):
    try:
        return function()
    except BaseException as error:
        found["imports"][name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
def imported(name):
    attempt(name, lambda: __import__(name))
for name in ("numpy", "safetensors", "typer", "rich"):
    imported(name)
torch = attempt("torch", lambda: __import__("torch"))
if torch is not None and attempt("torch", lambda: torch.zeros(1)) is not None:
    def look():
        from flash_kda.dispatch import why_not_sm90
        found["torch"] = torch.__version__
        found["built_for"] = torch.version.cuda
        found["threads"] = torch.get_num_threads()
        found["devices"].append({"device": "cpu", "why_not": why_not_sm90(torch.device("cpu"))})
        if torch.cuda.is_available():
            for i in range(torch.cuda.device_count()):
                at = torch.cuda.get_device_properties(i)
                found["devices"].append({
                    "device": f"cuda:{i}", "name": at.name, "capability": f"{at.major}.{at.minor}",
                    "why_not": why_not_sm90(torch.device("cuda", i)),
                })
    attempt("flash_kda", look)
print()
print(json.dumps(found))
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the report; always 0."""
    if any(a in ("-h", "--help") for a in arguments):
        _print(["Usage: flash-kda doctor", "", "What is installed and what will run here, and why. Always exits with 0."])
        return 0
    found = _probe()
    sections: tuple[tuple[str, Callable[[], list[str]]], ...] = (
        ("Versions", lambda: _versions(found)),
        ("Machine", _machine),
        ("GPUs", lambda: _gpus(found)),
        ("What runs", lambda: _paths(found)),
        ("Environment variables", _variables),
        ("Verdict", lambda: [_verdict(found)]),
    )
    report = [f"(doctor takes no arguments; ignored: {' '.join(arguments)})", ""] if arguments else []
    for title, section in sections:
        try:
            lines = section()
        except Exception as error:
            lines = [f"could not be found out: {type(error).__name__}: {error}"]
        report += [title, *(f"  {line}" for line in lines)]
    _print(report)
    return 0


def _print(lines: Sequence[str]) -> None:
    """To a stdout that may be closed, full or unread, which is no failure of what was looked at."""
    try:
        print("\n".join(lines).encode("ascii", "backslashreplace").decode(), flush=True)
    except OSError:
        silence_stdout()


def _probe() -> dict[str, Any]:
    """What a child process found when it imported PyTorch, or ``{"crash": reason}``."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE, json.dumps(sys.path)], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        last = (child.stdout.strip().splitlines() or [""])[-1]
        if child.returncode == 0:
            found: dict[str, Any] = json.loads(last)
            return found
    except subprocess.TimeoutExpired:
        return {"crash": f"importing PyTorch took more than {TIMEOUT:.0f} s"}
    except (OSError, ValueError) as error:
        return {"crash": f"importing PyTorch could not be tried: {error}"}
    how = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
    message = (child.stderr.strip().splitlines() or ["no message"])[-1]
    return {"crash": f"importing PyTorch ended the process with {how}: {message}"}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions(found: dict[str, Any]) -> list[str]:
    broken = found.get("imports", {})
    lines = [_row("python", f"{platform.python_version()} ({sys.executable})"), _row("flash_kda", __version__)]
    for package in PACKAGES:
        version = _version(package)
        if package in broken:
            state = f"{version or 'not installed'}, DOES NOT IMPORT: {broken[package]}"
        elif version is None:
            state = f"not installed (optional: {USES[package]})" if package in USES else "NOT INSTALLED"
        else:
            state = version
        lines.append(_row(package, state))
    if "crash" in found:
        lines.append(found["crash"])
    return lines


def _machine() -> list[str]:
    lines = [_row("os", platform.platform()), _row("processor", f"{_processor()}, {_cpu_count()} usable of {os.cpu_count()}")]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        lines.append(_row("memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"))
    return lines


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus(found: dict[str, Any]) -> list[str]:
    """By the driver's own tool and by PyTorch: where the two differ, one of them cannot see the GPU."""
    lines = []
    tool = shutil.which("nvidia-smi")
    if tool is None:
        lines.append(_row("driver", "no nvidia-smi: no NVIDIA driver, or not on PATH"))
    else:
        query = [tool, "--query-gpu=index,name,compute_cap,driver_version,memory.total", "--format=csv,noheader"]
        try:
            child = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
            output = (child.stdout if child.returncode == 0 else child.stderr or child.stdout).strip()
            lines += [_row("driver", text) for text in output.splitlines()] or [_row("driver", "nvidia-smi printed nothing")]
        except (OSError, subprocess.TimeoutExpired) as error:
            lines.append(_row("driver", f"nvidia-smi failed: {error}"))
    seen = [x for x in found.get("devices", []) if x["device"] != "cpu"]
    lines += [_row("torch", f"{x['device']}: {x['name']}, compute capability {x['capability']}") for x in seen]
    if not seen and "torch" in found:
        built = found.get("built_for")
        build = f"built for CUDA {built}" if built else "a CPU build"
        lines.append(_row("torch", f"sees no CUDA device; it is {build}"))
    return lines


def _paths(found: dict[str, Any]) -> list[str]:
    from .. import settings

    if not found.get("devices"):
        return ["nothing: PyTorch does not work here"]
    lines = []
    for x in found["devices"]:
        if x["why_not"] is None:
            lines.append(_row(x["device"], "sm90 kernels"))
        else:
            lines.append(_row(x["device"], f"PyTorch reference, because {x['why_not']}"))
    asked = settings.impl()
    if asked != "auto":
        lines.append(f"FLASH_KDA_IMPL={asked} overrides this choice")
    return lines


def _variables() -> list[str]:
    others = sorted(name for name in os.environ if name.startswith("FLASH_KDA_") and name not in VARIABLES)
    lines = [_row(name, os.environ.get(name, "not set")) for name in VARIABLES]
    return lines + [_row(name, f"{os.environ[name]} (UNKNOWN: not read by flash_kda)") for name in others]


def _verdict(found: dict[str, Any]) -> str:
    from .. import settings

    problems = []
    if "crash" in found:
        problems.append(found["crash"])
    for package, error in found.get("imports", {}).items():
        remedy = "reinstall flash-kda" if package == "flash_kda" else f"pip install --force-reinstall {package}"
        problems.append(f"{package} does not import ({error}); {remedy}")
    for read in (settings.impl, settings.debug):
        try:
            read()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        return "NOT READY: " + "; ".join(problems)
    kernels = [x["device"] for x in found["devices"] if x["why_not"] is None]
    if kernels:
        return f"READY: sm90 kernels on {', '.join(kernels)}, the PyTorch reference elsewhere"
    return "READY: the PyTorch reference computes everything here, exactly and slowly; 'flash-kda run' shows it"


def _row(name: str, value: str) -> str:
    return f"{name:<{max(map(len, VARIABLES)) + 1}}{value}"
