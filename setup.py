"""Builds the native libraries with CMake and packs them as a ``py3-none`` wheel.

The libraries use torch's stable ABI and no Python ABI, so one wheel serves every torch from 2.11 and every Python 3.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.dist import Distribution
from setuptools.errors import ExecError, SetupError

ROOT = Path(__file__).resolve().parent


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise SetupError(
            "opgraft builds against torch's headers: install torch first, then pip install --no-build-isolation"
        )
    return Path(next(iter(found.submodule_search_locations)))


def find_tool(name: str, variable: str, advice: str) -> str:
    tool = os.environ.get(variable) or shutil.which(name)
    if tool is None or shutil.which(tool) is None:
        raise ExecError(f"opgraft needs {name} to build its kernels, and there is none: {advice} (or set {variable})")
    return tool


def find_nvcc() -> str | None:
    if os.environ.get("OPGRAFT_CUDA", "1") == "0":
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [os.environ.get("CUDACXX"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise ExecError(f"opgraft: {what} failed, see the output above: {' '.join(command)}")


def up_to_date(target: Path, cuda: bool) -> bool:
    """True where the libraries in ``target`` are newer than every source: one build serves every torch."""
    libraries = [target / "libopgraft.so", *([target / "libopgraft_cuda.so"] if cuda else [])]
    if not all(library.exists() for library in libraries) or cuda != (target / "libopgraft_cuda.so").exists():
        return False
    newest = max(path.stat().st_mtime for path in [ROOT / "setup.py", *(ROOT / "csrc").rglob("*")])
    return min(library.stat().st_mtime for library in libraries) > newest


def build_native(target: Path) -> None:
    """Builds into ``build/native`` (kept between runs, so only changed files are compiled) and copies to ``target``."""
    cmake = find_tool("cmake", "CMAKE", "install CMake 3.24 or newer")
    find_tool("c++", "CXX", "install g++ 11 or newer, or clang")
    nvcc = find_nvcc()
    if nvcc is None:
        print("opgraft: no nvcc found, the CUDA half is left out", file=sys.stderr)
    if up_to_date(target, cuda=nvcc is not None):
        return
    folder = Path(os.environ.get("OPGRAFT_BUILD_DIR", ROOT / "build" / "native"))
    torch = torch_folder()
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DTORCH_INCLUDE_DIR={torch / 'include'}",
        f"-DTORCH_LIBRARY_DIR={torch / 'lib'}",
        f"-DOPGRAFT_CUDA={'ON' if nvcc else 'OFF'}",
        *([f"-DCMAKE_CUDA_COMPILER={nvcc}"] if nvcc else []),
        *(["-G", "Ninja"] if shutil.which("ninja") and not (folder / "Makefile").exists() else []),
    ]
    run([cmake, "-S", str(ROOT / "csrc"), "-B", str(folder), *options], "configuring the build")
    run([cmake, "--build", str(folder), "--parallel", str(os.cpu_count() or 2)], "building the kernels")
    target.mkdir(parents=True, exist_ok=True)
    built = sorted(folder.glob("libopgraft*.so"))
    for library in built:
        # Replaced in one step: a process that starts meanwhile finds the old library or the new one.
        shutil.copy(library, target / f".{library.name}.new")
        os.replace(target / f".{library.name}.new", target / library.name)
    for old in set(target.glob("libopgraft*.so")) - {target / library.name for library in built}:
        old.unlink()


class BuildNative(Command):
    """A step of ``build``: the libraries go beside the sources for an editable install, else into the wheel."""

    description = "build the native libraries with CMake"
    user_options: ClassVar = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        build_native(ROOT / "plugin" / "lib" if self.editable_mode else Path(self.build_lib) / "opgraft" / "lib")

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_native", None)]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def packages() -> list[str]:
    tops = (("opgraft", ROOT / "plugin"), ("opgraft.diagnostics", ROOT / "diagnostics"))
    return [
        ".".join([top, *init.parent.relative_to(folder).parts])
        for top, folder in tops
        for init in sorted(folder.rglob("__init__.py"))
    ]


setup(
    packages=packages(),
    package_dir={"opgraft": "plugin", "opgraft.diagnostics": "diagnostics"},
    package_data={
        "opgraft": ["py.typed"],
        "opgraft.diagnostics": ["py.typed", "report/*.html", "report/*.css", "report/*.js", "report/*.json"],
    },
    distclass=PlatformDistribution,
    cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": PlatformWheel},
)
