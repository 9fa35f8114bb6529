"""Installing from source: without nvcc, without a compiler, and as a wheel used outside the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "plugin", "diagnostics")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a source archive holds: no libraries, no build folder."""
    import shutil

    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.new"))
    for file in FILES:
        shutil.copy(ROOT / file, copy / file)
    return copy


def _build(source: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "-w", str(out), str(source)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OPGRAFT_BUILD_DIR": str(out / "native"), **environment},
    )


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("wheel")
    done = _build(source, out, OPGRAFT_CUDA="0")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    return found, done.stdout + done.stderr


def test_without_nvcc_the_cuda_half_is_left_out_in_one_line(wheel: tuple[Path, str]) -> None:
    _, output = wheel
    assert len([line for line in output.splitlines() if "no nvcc found, the CUDA half is left out" in line]) == 1


def test_the_wheel_serves_every_python(wheel: tuple[Path, str]) -> None:
    path, _ = wheel
    assert "-py3-none-" in path.name
    names = zipfile.ZipFile(path).namelist()
    assert "opgraft/lib/libopgraft.so" in names
    assert "opgraft/diagnostics/model.py" in names
    assert not [name for name in names if name.startswith(("tests", "csrc", "plugin"))]


def test_the_wheel_imports_outside_the_source_tree(wheel: tuple[Path, str], tmp_path: Path) -> None:
    path, _ = wheel
    zipfile.ZipFile(path).extractall(tmp_path / "site")
    code = (
        "import sys, torch, opgraft; assert opgraft.__file__.startswith(sys.argv[1]), opgraft.__file__;"
        "x = torch.randn(5); wanted = torch.nn.functional.gelu(x, approximate='tanh');"
        "torch.testing.assert_close(opgraft.gelu(x), wanted);"
        "assert 'opgraft.diagnostics' not in sys.modules"
    )
    # -S: no editable install of the source tree gets in the way; torch's own folder is given by hand.
    site = Path(torch.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(tmp_path / "site")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(site)])},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("variable", "tool", "words"),
    [("CMAKE", "cmake", "install CMake"), ("CXX", "c++", "install g++")],
)
def test_a_missing_tool_gets_one_clear_sentence(
    source: Path, tmp_path: Path, variable: str, tool: str, words: str
) -> None:
    done = _build(source, tmp_path, **{variable: "/nowhere/to/be/found"})
    assert done.returncode != 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if f"opgraft needs {tool} to build" in line]
    assert lines, (done.stdout + done.stderr)[-2000:]
    assert words in lines[0]
    assert "Traceback" not in done.stdout + done.stderr
