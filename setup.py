"""Build step for the Hopper kernels; everything else about the package is in pyproject.toml.

`pip install .`, `pip install -e .` and `python -m build` end here. The kernels are compiled in a process of their own,
because the build environment has Triton but no torch, which importing `flash_kda` would want.
"""

import subprocess
import sys
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent
CUBINS = Path("flash_kda", "sm90", "cubins")

# The two packages above the build module are put in place without running their __init__.py.
COMPILE = """
import importlib.machinery, importlib.util, sys
root, *arguments = sys.argv[1:]
for name in ("flash_kda", "flash_kda.sm90"):
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [root + "/" + name.replace(".", "/")]
    sys.modules[name] = importlib.util.module_from_spec(spec)
from flash_kda.sm90.build import main
sys.exit(main(arguments))
"""


class BuildKernels(Command):
    """Compile every kernel variant for sm_90a into the wheel, or into the tree of an editable install."""

    description = "compile the Hopper kernels into cubins"
    user_options = [("build-lib=", "d", "folder that the wheel is made from")]  # noqa: RUF012

    def initialize_options(self):
        self.build_lib = None
        self.editable_mode = False

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self):
        out = (ROOT if self.editable_mode else Path(self.build_lib).resolve()) / CUBINS
        command = [sys.executable, "-c", COMPILE, str(ROOT), "--out", str(out), "--allow-no-compiler"]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise ExecError("the Hopper kernels do not compile; the compiler's words are above")

    def get_source_files(self):
        return []  # the kernels' sources are Python modules, which build_py names

    def get_outputs(self):
        return [str(path) for path in sorted(Path(self.build_lib).joinpath(CUBINS).glob("*"))]

    def get_output_mapping(self):
        return {}


class Build(build):
    """The usual steps, then the kernels."""

    sub_commands = [*build.sub_commands, ("build_kernels", None)]  # noqa: RUF012


setup(cmdclass={"build": Build, "build_kernels": BuildKernels})
