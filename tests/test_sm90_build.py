"""The build on a machine without a GPU: what the manifest says, that it is reproducible, and what it refuses."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from scale_variant import SCALE

from flash_kda.sm90 import build
from flash_kda.sm90.variants import CUBINS, MANIFEST, TRITON_VERSION, VARIANTS, Limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "tests" / "sm90_kernels"

needs_compiler = pytest.mark.skipif(build.compiler_problem() is not None, reason=str(build.compiler_problem()))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("cubins")
    return out, build.build(out, [SCALE])


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@needs_compiler
def test_manifest_says_what_a_launch_needs(built):
    out, manifest = built
    assert json.loads((out / MANIFEST).read_text()) == manifest
    assert manifest["arch"] == "sm_90a"
    assert manifest["compiler"]["triton"] == TRITON_VERSION
    assert manifest["without_kernels"] is None
    entry = manifest["kernels"]["scale"]
    cubin = (out / entry["cubin"]).read_bytes()
    assert cubin[:4] == b"\x7fELF"
    assert hashlib.sha256(cubin).hexdigest() == entry["cubin_sha256"]
    assert entry["symbol"].encode() in cubin
    assert entry["threads"] == 128
    assert entry["shared_bytes"] == 256 * 128 * 2 + 8
    assert entry["constexprs"] == {"WITH_BIAS": True}
    assert [argument["name"] for argument in entry["arguments"]] == list(SCALE.signature)
    assert [argument["name"] for argument in entry["arguments"] if argument["aligned"]] == ["marks_ptr"]
    # 128 channels of bf16 are 256 bytes; a box under the 128-byte swizzle is half of that
    descriptor = {
        "block": [256, 1, 128],
        "box": [256, 1, 64],
        "element": "BFLOAT16",
        "element_bytes": 2,
        "swizzle": "128B",
    }
    assert [a["descriptor"] for a in entry["arguments"][:2]] == [descriptor, descriptor]
    assert [a["type"] for a in entry["arguments"][2:]] == ["*fp32", "*i64", "i32", "i64", "fp32"]
    offsets = [param["offset"] for param in entry["params"]]
    assert offsets[:7] == [0, 128, 132, 136, 144, 152, 160]
    assert offsets[7:14] == [192 + offset for offset in offsets[:7]]
    assert offsets[14:] == [360, 368, 376, 384, 392, 400, 408]
    assert entry["sources"].keys() == {"scale_tile.py", "tile_shape.py"}
    assert entry["fingerprint"] == SCALE.fingerprint()
    assert 0 < entry["registers"] <= 255
    assert entry["spill_bytes"] == 0
    assert build.limit_violations(manifest, [SCALE]) == []


@needs_compiler
def test_build_depends_on_nothing_but_sources_and_variants(built, tmp_path, monkeypatch):
    for name, value in {"PTXAS_OPTIONS": "-O1", "DISABLE_PTXAS_OPT": "1", "TRITON_DEFAULT_FP_FUSION": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.cubin").write_bytes(b"from an earlier build")
    build.build(out, [SCALE])
    assert contents(out) == contents(built[0])
    assert os.environ["PTXAS_OPTIONS"] == "-O1"
    assert str(ROOT).encode() not in (built[0] / "scale.cubin").read_bytes()


def sections(cubin):
    """Name -> contents of the sections of a 64-bit ELF file."""
    table, entries, names = struct.unpack_from("<Q", cubin, 0x28)[0], *struct.unpack_from("<HH", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * entry) for entry in range(entries)]
    start = headers[names][4]
    name = [cubin[start + header[0] :].split(b"\0", 1)[0].decode() for header in headers]
    return dict(zip(name, (cubin[header[4] : header[4] + header[5]] for header in headers), strict=True))


@needs_compiler
def test_line_tables_leave_the_machine_code_as_it_is(built, tmp_path):
    """What a tool reports by offset and line on the one holds for the other."""
    build.build(tmp_path, [SCALE], line_info=True)
    plain, lined = (sections((folder / "scale.cubin").read_bytes()) for folder in (built[0], tmp_path))
    assert len(plain[".text.scale_tile"]) > 1000
    assert plain[".text.scale_tile"] == lined[".text.scale_tile"]
    assert ".debug_line" in lined
    assert ".debug_line" not in plain


@needs_compiler
def test_build_in_parallel_needs_no_torch_and_not_the_package_init(built, tmp_path):
    """In a process of its own, as setup.py does it: forking this one, which has threads, would be asking for trouble."""
    compile_ = (ROOT / "setup.py").read_text().split('COMPILE = """')[1].split('"""')[0]
    script = compile_.replace(
        "from flash_kda.sm90.build import main\nsys.exit(main(arguments))\n",
        "sys.modules['torch'] = None\n"
        "from dataclasses import replace\nfrom pathlib import Path\n"
        "from flash_kda.sm90 import build\nfrom scale_variant import SCALE\n"
        "build.build(Path(arguments[0]), [SCALE, replace(SCALE, name='twin')], jobs=2)\n",
    )
    assert script != compile_
    environment = {**os.environ, "PYTHONPATH": str(KERNELS), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", script, str(ROOT), str(tmp_path)], env=environment, cwd=tmp_path, check=True)
    cubin = contents(built[0])["scale.cubin"]
    found = contents(tmp_path)
    assert found.pop(MANIFEST)
    assert found == {"scale.cubin": cubin, "twin.cubin": cubin}


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": {**SCALE.signature, "x_desc": "tensordesc<bf16[{COLUMNS},1,64],{TILE_LAYOUT!r}>"}}, "COLUMNS"),
        ({"signature": {**SCALE.signature, "scale": "fp16"}}, "scale must be a tensordesc, a pointer or one of"),
        ({"signature": dict(reversed(SCALE.signature.items()))}, "descriptors must come before"),
        ({"signature": {k: v for k, v in SCALE.signature.items() if k != "scale"}, "aligned": ()}, "in its order"),
        ({"constexprs": {}}, "in its order"),
        ({"constexprs": {"WITH_BIAS": True, "STAGES": 2}}, "in its order"),
        ({"aligned": ("scale",)}, "aligned must name pointers or integers"),
        ({"function": "missing"}, "has no missing"),
        ({"signature": {**SCALE.signature, "bias_ptr": "i32"}}, "scale: "),  # what the compiler says
    ],
)
def test_a_variant_that_does_not_fit_its_kernel_fails_the_build(tmp_path, capsys, change, message):
    with pytest.raises(build.BuildError, match=message):
        build.build(tmp_path, [dataclasses.replace(SCALE, **change)])
    assert not (tmp_path / MANIFEST).exists()


@needs_compiler
def test_a_parameter_list_other_than_the_launch_abi_fails_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_TENSOR_MAP", (128, 128))
    with pytest.raises(build.BuildError, match="the PTX parameters are"):
        build.build(tmp_path, [SCALE])


def test_names_must_be_unique(tmp_path):
    with pytest.raises(build.BuildError, match="unique"):
        build.build(tmp_path, [SCALE, SCALE])


def test_ptx_parameters_are_read_with_size_and_alignment():
    ptx = """
.visible .entry kernel(
\t.param .align 64 .b8 kernel_param_0[128],
\t.param .u32 kernel_param_1,
\t.param .u64 .ptr .global .align 1 kernel_param_2,
\t.param .f32 kernel_param_3,
\t.param .u8 kernel_param_4
)
.reqntid 128
{
"""
    assert build._ptx_entry(ptx)[:2] == ("kernel", [(128, 64), (4, 4), (8, 8), (4, 4), (1, 1)])
    with pytest.raises(build.BuildError, match="one entry"):
        build._ptx_entry(ptx + ptx)
    with pytest.raises(build.BuildError, match="cannot read"):
        build._ptx_entry(ptx.replace(".param .f32", ".param .v2 .f32x"))


PTXAS_LOG = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'kernel'
ptxas info    : (C7517) warpgroup.wait is injected in around line 12 by compiler in function 'kernel'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for kernel
    16 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 24 bytes cumulative stack size
"""


def test_ptxas_report_counts_the_functions_that_a_kernel_calls():
    report = build._ptxas_report("kernel", PTXAS_LOG)
    assert (report["registers"], report["spill_bytes"], report["stack_bytes"]) == (168, 32, 24)
    assert [warning["code"] for warning in report["warnings"]] == ["C7510", "C7517"]
    with pytest.raises(build.BuildError, match="cannot read registers"):
        build._ptxas_report("kernel", "nothing of use")


def test_limits_hold_registers_spills_and_warnings():
    entry = build._ptxas_report("scale", PTXAS_LOG)
    tight = dataclasses.replace(SCALE, limits=Limits(registers=128, spill_bytes=16))
    found = build.limit_violations({"kernels": {"scale": entry}}, [tight])
    assert len(found) == 3
    assert "168 registers, at most 128" in found[0]
    assert "32 bytes spilled, at most 16" in found[1]
    assert "C7510" in found[2]
    loose = dataclasses.replace(SCALE, limits=Limits(registers=168, spill_bytes=32, warnings=("C7510", "C7517")))
    assert build.limit_violations({"kernels": {"scale": entry}}, [loose]) == []
    assert build.limit_violations({"kernels": {}}, [tight]) == ["scale: not in the manifest"]


@needs_compiler
def test_shipped_variants_are_within_their_limits(tmp_path):
    command = [sys.executable, "-m", "flash_kda.sm90.build", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(build.__file__).parents[2])}  # this package, installed or not
    subprocess.run(command, env=environment, cwd=tmp_path, check=True)
    assert build.limit_violations(json.loads((tmp_path / MANIFEST).read_text())) == []
    assert {path.stem for path in tmp_path.glob("*.cubin")} == {variant.name for variant in VARIANTS}


@pytest.mark.skipif(not (CUBINS / MANIFEST).is_file(), reason="this tree's kernels were not built")
def test_installed_cubins_are_complete_whole_and_within_their_limits():
    """Needs no compiler: what `pip install` put here is every variant that can be asked for."""
    manifest = json.loads((CUBINS / MANIFEST).read_text())
    if manifest["without_kernels"]:
        pytest.skip(f"built without kernels: {manifest['without_kernels']}")
    assert build.limit_violations(manifest) == []
    assert build._damaged(CUBINS, manifest) == []
    for variant in VARIANTS:
        assert manifest["kernels"][variant.name]["fingerprint"] == variant.fingerprint()


def test_source_hashes_follow_imports_inside_the_tree_only(tmp_path):
    package = tmp_path / "pack" / "sub"
    package.mkdir(parents=True)
    (tmp_path / "pack" / "constants.py").write_text("CHUNK = 16\n")
    (package / "helper.py").write_text("import os\nfrom ..constants import CHUNK\n")
    (package / "kernel.py").write_text("import json\nfrom . import helper\nfrom triton import jit\n")
    (package / "other.py").write_text("import pack.sub.kernel\n")
    hashes = build.source_hashes("pack.sub.kernel", package / "kernel.py")
    assert list(hashes) == ["pack/constants.py", "pack/sub/helper.py", "pack/sub/kernel.py"]
    (tmp_path / "pack" / "constants.py").write_text("CHUNK = 32\n")
    changed = build.source_hashes("pack.sub.kernel", package / "kernel.py")
    assert [name for name in hashes if hashes[name] != changed[name]] == ["pack/constants.py"]


def test_fingerprint_covers_what_shapes_the_code_and_nothing_else():
    assert dataclasses.replace(SCALE, limits=Limits(registers=1)).fingerprint() == SCALE.fingerprint()
    for change in (
        {"constexprs": {"WITH_BIAS": False}},
        {"num_warps": 8},
        {"aligned": ()},
        {"signature": dict(reversed(SCALE.signature.items()))},
    ):
        assert dataclasses.replace(SCALE, **change).fingerprint() != SCALE.fingerprint()


def no_triton(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(("version", "words"), [(no_triton, "is not installed"), (lambda _: "3.8.0", "triton 3.8.0 is")])
def test_without_the_pinned_compiler_there_is_a_reason_and_no_cubin(tmp_path, monkeypatch, capsys, version, words):
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(build, "VARIANTS", (SCALE,))
    with pytest.raises(build.BuildError, match="pip install triton=="):
        build.build(tmp_path, [SCALE])
    assert build.main(["--out", str(tmp_path)]) == 1
    (tmp_path / "old.cubin").write_bytes(b"from an earlier build")
    assert build.main(["--out", str(tmp_path), "--allow-no-compiler"]) == 0
    assert "WITHOUT its Hopper kernels" in capsys.readouterr().err
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert words in manifest["without_kernels"]
    assert manifest["kernels"] == {}
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_no_variants_need_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", no_triton)
    assert build.build(tmp_path, [])["kernels"] == {}
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


@needs_compiler
def test_check_compiles_nothing_and_finds_what_is_missing_damaged_or_beyond_limits(built, tmp_path, monkeypatch, capsys):
    def check(folder):
        return build.main(["--check", "--out", str(folder)]), capsys.readouterr().out

    monkeypatch.setattr(build, "_compile", lambda variant: pytest.fail("compiled"))
    monkeypatch.setattr(build, "VARIANTS", (SCALE,))
    assert check(tmp_path)[0] == 1  # no manifest
    shutil.copytree(built[0], tmp_path, dirs_exist_ok=True)
    assert check(tmp_path) == (0, "1 variants built, whole and within their limits\n")
    (tmp_path / "scale.cubin").write_bytes(b"x")
    assert check(tmp_path) == (1, "scale: scale.cubin is missing or damaged\n")
    monkeypatch.setattr(build, "VARIANTS", (dataclasses.replace(SCALE, limits=Limits(registers=1)),))
    assert "registers, at most 1 allowed" in check(built[0])[1]
    build.build(tmp_path, [])
    assert check(tmp_path) == (1, "scale: not in the manifest\n")


@pytest.mark.skipif(tomllib is None, reason="tomllib needs Python 3.11")
def test_the_build_requirement_is_the_pinned_compiler():
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [text.split(";")[0] for text in requires if text.startswith("triton")] == [f"triton=={TRITON_VERSION}"]


@pytest.mark.slow
@needs_compiler
def test_wheel_is_pure_and_holds_every_cubin_and_the_sdist_none(tmp_path):
    """`python -m build` on a copy of the project to which one kernel variant was added."""
    project = tmp_path / "project"
    ignore = shutil.ignore_patterns("__pycache__", "cubins", "*.egg-info")
    shutil.copytree(ROOT / "flash_kda", project / "flash_kda", ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    kernels = project / "flash_kda" / "sm90" / "kernels"
    kernels.mkdir(exist_ok=True)
    (kernels / "__init__.py").touch()
    text = (KERNELS / "scale_tile.py").read_text().replace("from tile_shape", "from .tile_shape")
    (kernels / "scale_tile.py").write_text(text)
    shutil.copy(KERNELS / "tile_shape.py", kernels)
    (project / "flash_kda" / "sm90" / "cubins").mkdir()
    (project / "flash_kda" / "sm90" / "cubins" / "old.cubin").write_bytes(b"from an editable install")
    variant = dataclasses.replace(SCALE, module="flash_kda.sm90.kernels.scale_tile")
    with (project / "flash_kda" / "sm90" / "variants.py").open("a") as file:
        file.write(f"\nVARIANTS = (*VARIANTS, {variant!r})\n")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(project)], check=True)

    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        cubins = {name for name in archive.namelist() if "/cubins/" in name}
        manifest = json.loads(archive.read("flash_kda/sm90/cubins/manifest.json"))
        assert {"flash_kda/sm90/build.py", "flash_kda/sm90/kernels/scale_tile.py"} <= set(archive.namelist())
    names = {variant.name, *(shipped.name for shipped in VARIANTS)}
    assert manifest["kernels"].keys() == names
    assert cubins == {f"flash_kda/sm90/cubins/{name}.cubin" for name in names} | {"flash_kda/sm90/cubins/manifest.json"}
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = archive.getnames()
    assert not [name for name in files if name.endswith((".cubin", "manifest.json"))]
    assert any(name.endswith("/setup.py") for name in files)
    assert any(name.endswith("/kernels/scale_tile.py") for name in files)
