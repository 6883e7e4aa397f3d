"""Compile the kernel variants into cubins and a manifest that says how to launch them.

    sources + variants -> cubins/<name>.cubin, cubins/manifest.json

Runs when a wheel is built or a tree is installed for editing, with the pinned Triton, on any Linux machine: no GPU, no
nvcc, no torch. It sees no tensor and launches nothing. Triton is imported when something is compiled, not before.

The result depends on the sources, the variants and the compiler alone: environment variables that steer Triton or
ptxas are hidden while compiling, nothing is read from Triton's cache, and line tables, which hold paths and triple the
size, are left out unless asked for (the machine code is the same with them).

The launch ABI that `launch` relies on is checked, not assumed. Triton passes a tensor descriptor as a 128-byte
CUtensorMap, then its shape (int32 each) and strides (int64 each); pointers and scalars follow in order; two scratch
pointers, null here, come last. The parameter list of each kernel's PTX must say exactly that, or the build fails.

    python -m flash_kda.sm90.build             compile into this tree
    python -m flash_kda.sm90.build --check     is every variant here, whole and within its limits?
    python -m flash_kda.sm90.build --line-info --out DIR    for compute-sanitizer, nvdisasm and profilers
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import inspect
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .variants import ARCH, CUBINS, MANIFEST, SCHEMA, TRITON_VERSION, VARIANTS, Variant

# CUtensorMapDataType by Triton's number for an element type (8-10 are ordered differently on the host).
_ELEMENT_TYPES = {
    0: "UINT8", 1: "UINT16", 2: "UINT32", 3: "INT32", 4: "UINT64", 5: "INT64", 6: "FLOAT16", 7: "FLOAT32",
    8: "BFLOAT16", 9: "FLOAT32_FTZ", 10: "BFLOAT16",
}  # fmt: skip
_SWIZZLES = {0: "NONE", 1: "32B", 2: "64B", 3: "128B"}

_SCALAR_BYTES = {
    "i1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4, "fp64": 8,
}  # fmt: skip
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\],")
_TENSOR_MAP = (128, 64)  # bytes, alignment
_POINTER = (8, 8)
_PTX_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\{", re.DOTALL)
_PTX_PARAM = re.compile(r"\.param(?:\s+\.align\s+(\d+))?\s+\.([a-z]+)(\d+)\s+(?:\.ptr\s[^,]*?)?\w+(?:\[(\d+)\])?\s*$")

# What a compilation may see of the environment: enough to find the interpreter's packages and a place for temporaries.
_ENVIRONMENT = {"PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH"}


class BuildError(RuntimeError):
    """A variant cannot be built: the compiler refuses it, or what comes out is not what the launcher expects."""


@dataclass(frozen=True)
class _Compiled:
    cubin: bytes
    entry: dict[str, Any]


def compiler_problem() -> str | None:
    """Why this interpreter cannot compile the variants, or None if it can. Imports nothing."""
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return f"triton=={TRITON_VERSION} is not installed (it exists for Linux on x86-64 and aarch64, CPython 3.10-3.14)"
    if found != TRITON_VERSION:
        return f"triton {found} is installed, the kernels are built and measured with triton=={TRITON_VERSION} only"
    return None


def build(out_dir: Path, variants: Sequence[Variant] = VARIANTS, jobs: int = 1, line_info: bool = False) -> dict[str, Any]:
    """Compile `variants` into `out_dir` and write the manifest there; what an earlier build left is removed.

    Args:
        out_dir: created if missing. Holds nothing but `<name>.cubin` and `manifest.json` afterwards.
        variants: what to compile; kernel modules must be importable under their dotted names.
        jobs: compile this many variants at a time, in forked processes if more than one (so not from a process that
            runs threads); the result is the same.
        line_info: keep the tables that map code to lines of source.

    Returns:
        The manifest as written. With no variants it lists no kernels, and Triton is not needed.

    Raises:
        BuildError: the compiler is missing or another version, a kernel does not compile, its signature does not fit
            its function, or its parameter list is not the launch ABI.
    """
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names):
        raise BuildError(f"variant names must be unique, got {sorted(names)}; rename one in variants.py")
    if variants and (problem := compiler_problem()):
        raise BuildError(f"{problem}; install it: pip install triton=={TRITON_VERSION}")
    with _pinned_environment(line_info):
        compiled = dict(zip(names, _compile_all(variants, jobs), strict=True))
        manifest = _manifest({name: result.entry for name, result in compiled.items()})
        manifest["compiler"]["ptxas"] = _ptxas_version() if variants else None
    _write(out_dir, manifest, {name: result.cubin for name, result in compiled.items()})
    return manifest


def write_without_kernels(out_dir: Path, reason: str) -> dict[str, Any]:
    """Write a manifest that lists no kernels and says why, for a machine where the compiler does not exist."""
    manifest = _manifest({}, reason)
    _write(out_dir, manifest, {})
    return manifest


def source_hashes(module: str, module_file: Path) -> dict[str, str]:
    """SHA-256 of a kernel's source file and, transitively, of what it imports from its own source tree.

    Args:
        module: dotted name.
        module_file: its file; the tree's root is as many folders up as the name has parts.

    Returns:
        Path relative to the root (with '/') -> hash. The same on every machine that has the same text.
    """
    root = module_file.resolve().parents[module.count(".")]
    hashes: dict[str, str] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        path = _module_file(root, name)
        if path is None or (relative := path.relative_to(root).as_posix()) in hashes:
            continue
        text = path.read_bytes()
        hashes[relative] = hashlib.sha256(text).hexdigest()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        pending += _imports(ast.parse(text), package)
    return dict(sorted(hashes.items()))


def limit_violations(manifest: Mapping[str, Any], variants: Sequence[Variant] = VARIANTS) -> list[str]:
    """Everything in `manifest` that exceeds its variant's limits, one sentence each; empty if all is well.

    A variant without an entry is a violation too.
    """
    found = []
    for variant in variants:
        entry = manifest["kernels"].get(variant.name)
        if entry is None:
            found.append(f"{variant.name}: not in the manifest")
            continue
        limits = variant.limits
        if entry["registers"] > limits.registers:
            found.append(f"{variant.name}: {entry['registers']} registers, at most {limits.registers} allowed")
        if entry["spill_bytes"] > limits.spill_bytes:
            found.append(f"{variant.name}: {entry['spill_bytes']} bytes spilled, at most {limits.spill_bytes} allowed")
        for warning in entry["warnings"]:
            if warning["code"] not in limits.warnings:
                found.append(f"{variant.name}: ptxas {warning['code']}: {warning['text']}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the build; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flash_kda.sm90.build", description="Compile the Hopper kernels.")
    parser.add_argument("--out", type=Path, default=CUBINS, help="folder for cubins and manifest")
    parser.add_argument(
        "--check", action="store_true", help="compile nothing; check that every variant is there, whole and within its limits"
    )
    parser.add_argument(
        "--allow-no-compiler",
        action="store_true",
        help=f"without triton=={TRITON_VERSION}, write a manifest that lists no kernels and says why",
    )
    parser.add_argument("--line-info", action="store_true", help="keep the tables that map code to lines of source")
    options = parser.parse_args(arguments)
    if options.check:
        path = options.out / MANIFEST
        if not path.is_file():
            print(f"{path} is missing; build first: python -m flash_kda.sm90.build", file=sys.stderr)
            return 1
        manifest = json.loads(path.read_text(encoding="utf-8"))
        problems = limit_violations(manifest, VARIANTS) + _damaged(options.out, manifest)
        print("\n".join(problems) or f"{len(VARIANTS)} variants built, whole and within their limits")
        return 1 if problems else 0
    problem = compiler_problem()
    if VARIANTS and problem and options.allow_no_compiler:
        write_without_kernels(options.out, problem)
        line = "=" * 100
        print(
            f"{line}\nWARNING: flash_kda is built WITHOUT its Hopper kernels: {problem}.\n"
            f"The reference implementation works everywhere; `flash-kda doctor` repeats this reason.\n{line}",
            file=sys.stderr,
        )
        return 0
    try:
        manifest = build(options.out, VARIANTS, jobs=os.cpu_count() or 1, line_info=options.line_info)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, entry in manifest["kernels"].items():
        print(
            f"{name}: {entry['registers']} registers, {entry['spill_bytes']} bytes spilled, {entry['threads']} threads,"
            f" {entry['shared_bytes']} bytes shared, {' '.join(w['code'] for w in entry['warnings']) or 'no warnings'}"
        )
    print(f"{len(manifest['kernels'])} cubins in {options.out}")
    return 0


def _damaged(out_dir: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Kernels whose cubin is missing or is not the one that the manifest describes."""
    found = []
    for name, entry in manifest["kernels"].items():
        path = out_dir / entry["cubin"]
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != entry["cubin_sha256"]:
            found.append(f"{name}: {entry['cubin']} is missing or damaged")
    return found


def _manifest(kernels: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "arch": ARCH,
        "compiler": {"triton": TRITON_VERSION},
        "without_kernels": reason,
        "kernels": dict(kernels),
    }


def _write(out_dir: Path, manifest: Mapping[str, Any], cubins: Mapping[str, bytes]) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    for old in (*out_dir.glob("*.cubin"), out_dir / MANIFEST):
        old.unlink(missing_ok=True)
    for name, cubin in cubins.items():
        (out_dir / f"{name}.cubin").write_bytes(cubin)
    # The manifest comes last: a build that was interrupted leaves none, which the launcher reports.
    (out_dir / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _pinned_environment(line_info: bool) -> Iterator[None]:
    """Hide every variable that could change the code; compile into a throw-away cache and keep ptxas's words."""
    saved = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="flash-kda-build-") as cache:
        try:
            for name in saved:
                if name not in _ENVIRONMENT and not name.startswith("PYTHON"):
                    del os.environ[name]
            os.environ.update(TRITON_CACHE_DIR=cache, TRITON_DUMP_PTXAS_LOG="1")
            os.environ["TRITON_DISABLE_LINE_INFO"] = "0" if line_info else "1"
            yield
        finally:
            os.environ.clear()
            os.environ.update(saved)


def _compile_all(variants: Sequence[Variant], jobs: int) -> list[_Compiled]:
    jobs = min(jobs, len(variants))
    if jobs < 2:
        return [_compile(variant) for variant in variants]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(_compile, variants))


def _compile(variant: Variant) -> _Compiled:
    """Compile one variant and describe it. Call inside `_pinned_environment`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.experimental.gluon._runtime import GluonASTSource

    module = importlib.import_module(variant.module)
    function = getattr(module, variant.function, None)
    if function is None:
        raise BuildError(f"{variant.name}: {variant.module} has no {variant.function}")
    types = argument_types(variant, vars(module))
    expected = [name for name in function.arg_names if name not in variant.constexprs]
    if expected != list(types) or not variant.constexprs.keys() <= set(function.arg_names):
        raise BuildError(
            f"{variant.name}: signature and constexprs must name the arguments of {variant.function} in its order,"
            f" got {list(types)} and {list(variant.constexprs)} for {function.arg_names}"
        )
    constants = {(function.arg_names.index(name),): value for name, value in variant.constexprs.items()}
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    aligned = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    target = GPUTarget("cuda", 90, 32)
    options = make_backend(target).parse_options({"num_warps": variant.num_warps, "ptx_options": ""})
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            kernel = triton.compile(
                GluonASTSource(function, signature, constants, aligned), target=target, options=options.__dict__
            )
    except Exception as error:
        raise BuildError(f"{variant.name}: {type(error).__name__}: {error}\n{log.getvalue()}") from error
    metadata = kernel.metadata
    if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        raise BuildError(f"{variant.name}: the launcher knows no clusters and no scratch memory in global memory")

    arguments = _describe_arguments(variant, types, metadata.tensordesc_meta or [])
    symbol, found, attributes = _ptx_entry(kernel.asm["ptx"])
    params = _expected_params(arguments)
    if found != params:
        raise BuildError(f"{variant.name}: the PTX parameters are {found}, the launch ABI says {params} (bytes, align)")
    threads = 32 * metadata.num_warps
    if f".reqntid {threads}" not in attributes:
        raise BuildError(f"{variant.name}: {threads} threads expected, the PTX says {attributes.split()}")

    sources = source_hashes(variant.module, Path(inspect.getfile(module)))
    entry = {
        "symbol": symbol,
        "cubin": f"{variant.name}.cubin",
        "cubin_sha256": hashlib.sha256(kernel.asm["cubin"]).hexdigest(),
        "shared_bytes": metadata.shared,
        "threads": threads,
        "constexprs": dict(variant.constexprs),
        "arguments": arguments,
        "params": _place(params),
        "sources": sources,
        "fingerprint": variant.fingerprint(),
        **_ptxas_report(variant.name, log.getvalue()),
    }
    return _Compiled(kernel.asm["cubin"], entry)


def _ptxas_version() -> str:
    from triton.backends.nvidia.compiler import get_ptxas_version

    match = re.search(r"V(\d+\.\d+\.\d+)", get_ptxas_version(90))
    return match[1] if match else "unknown"


def argument_types(variant: Variant, constants: Mapping[str, Any]) -> dict[str, str]:
    """The variant's signature with its placeholders filled from its constexprs and the kernel module's `constants`.

    Raises:
        BuildError: a placeholder names neither, or a type is one the launcher cannot pass.
    """
    unwrapped = {name: getattr(value, "value", value) for name, value in constants.items()}
    types = {}
    for name, text in variant.signature.items():
        try:
            types[name] = text.format_map({**unwrapped, **variant.constexprs})
        except KeyError as error:
            raise BuildError(
                f"{variant.name}: the type of {name} needs {error}, which is neither a constexpr of the variant nor a"
                f" constant of {variant.module}"
            ) from error
        if not (types[name].startswith("*") or types[name] in _SCALAR_BYTES or _DESCRIPTOR.match(types[name])):
            raise BuildError(f"{variant.name}: {name} must be a tensordesc, a pointer or one of {list(_SCALAR_BYTES)}"
                             f", got {types[name]!r}")  # fmt: skip
    kinds = [text.startswith("tensordesc") for text in types.values()]
    if kinds != sorted(kinds, reverse=True):
        raise BuildError(f"{variant.name}: descriptors must come before pointers and scalars, got {list(types)}")
    if not set(variant.aligned) <= set(types) or any(types[name].startswith(("fp", "ten")) for name in variant.aligned):
        raise BuildError(f"{variant.name}: aligned must name pointers or integers of {list(types)}, got {variant.aligned}")
    return types


def _describe_arguments(
    variant: Variant, types: Mapping[str, str], descriptors: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One entry an argument; for a descriptor also everything that cuTensorMapEncodeTiled wants besides the tensor."""
    remaining = list(descriptors)
    arguments = []
    for name, text in types.items():
        argument: dict[str, Any] = {"name": name, "type": text, "aligned": name in variant.aligned}
        if match := _DESCRIPTOR.match(text):
            if not remaining:
                raise BuildError(f"{variant.name}: the compiler describes {len(descriptors)} descriptors, {name} is missing")
            meta = remaining.pop(0)
            if meta["fp4_padded"]:
                raise BuildError(f"{variant.name}: {name} is a padded fp4 descriptor, which the launcher does not know")
            argument["descriptor"] = {
                "block": [int(size) for size in match[2].split(",")],
                "box": list(meta["block_size"]),
                "element": _ELEMENT_TYPES[meta["elem_type"]],
                "element_bytes": meta["elem_size"],
                "swizzle": _SWIZZLES[meta["swizzle"]],
            }
        arguments.append(argument)
    return arguments


def _expected_params(arguments: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(bytes, alignment) of every kernel parameter, by the launch ABI."""
    params = []
    for argument in arguments:
        if "descriptor" in argument:
            rank = len(argument["descriptor"]["box"])
            params += [_TENSOR_MAP, *[(4, 4)] * rank, *[(8, 8)] * rank]
        elif argument["type"].startswith("*"):
            params.append(_POINTER)
        else:
            size = _SCALAR_BYTES[argument["type"]]
            params.append((size, size))
    return [*params, _POINTER, _POINTER]


def _place(params: Sequence[tuple[int, int]]) -> list[dict[str, int]]:
    """The parameters with their place in the block that the launcher fills: each at its alignment, in order.

    The driver copies each to where the kernel reads it, which is elsewhere: it aligns from the start of the bank.
    """
    offset, placed = 0, []
    for size, align in params:
        offset = -(-offset // align) * align
        placed.append({"offset": offset, "bytes": size, "align": align})
        offset += size
    return placed


def _ptx_entry(ptx: str) -> tuple[str, list[tuple[int, int]], str]:
    """Symbol, (bytes, alignment) of each parameter, and the directives of the one entry function of `ptx`."""
    entries = _PTX_ENTRY.findall(ptx)
    if len(entries) != 1:
        raise BuildError(f"expected one entry function in the PTX, found {[name for name, *_ in entries]}")
    symbol, text, attributes = entries[0]
    params = []
    for line in text.strip().split(","):
        match = _PTX_PARAM.search(line.strip())
        if match is None:
            raise BuildError(f"cannot read the PTX parameter {line.strip()!r} of {symbol}")
        align, _, bits, count = match.groups()
        size = int(bits) // 8
        params.append((size * int(count or 1), int(align or size)))
    return symbol, params, attributes


def _ptxas_report(name: str, log: str) -> dict[str, Any]:
    """Registers, spills, stack and C75xx warnings from `ptxas -v`; noinline functions count with their kernel."""
    used = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if len(used) != 1 or not spills:
        raise BuildError(f"{name}: cannot read registers and spills from what ptxas said:\n{log}")
    return {
        "registers": int(used[0]),
        "spill_bytes": sum(int(stores) + int(loads) for _, stores, loads in spills),
        "stack_bytes": sum(int(frame) for frame, _, _ in spills),
        "warnings": [{"code": code, "text": text} for code, text in re.findall(r"\((C75\d\d)\) (.*)", log)],
    }


def _module_file(root: Path, name: str) -> Path | None:
    """The file of a dotted module name under `root`, or None if it is not part of that tree."""
    base = root.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imports(tree: ast.AST, package: str) -> list[str]:
    """Dotted names that a module of `package` may import: modules, and members that may be modules themselves."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names += [prefix, *(f"{prefix}.{alias.name}" for alias in node.names)]
    return names


if __name__ == "__main__":
    sys.exit(main())
