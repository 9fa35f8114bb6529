"""The libraries cross torch's border through the C shims of torch 2.11 alone, and keep no path of the build."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from opgraft import library

SHIMS = {
    line
    for line in (Path(__file__).parent / "torch_2_11_shims.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
LIBRARIES = [path for path in (library.CPU_LIBRARY, library.CUDA_LIBRARY) if path.exists()]
every_library = pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.stem)


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def _undefined(path: Path) -> set[str]:
    lines = _run("nm", "-D", "--undefined-only", str(path)).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


@every_library
def test_torch_symbols_are_shims_that_torch_2_11_has(path: Path) -> None:
    of_torch = {name for name in _undefined(path) if name.startswith(("aoti_torch_", "torch_"))}
    assert of_torch, "the library uses nothing of torch: is this the right file?"
    assert of_torch <= SHIMS, f"not in torch 2.11: {sorted(of_torch - SHIMS)}"


@every_library
def test_no_cxx_symbol_of_torch_and_no_python(path: Path) -> None:
    mangled = "\n".join(sorted(_undefined(path)))
    readable = subprocess.run(["c++filt"], input=mangled, capture_output=True, text=True, check=True, timeout=60).stdout
    assert not [line for line in readable.splitlines() if re.search(r"\b(at|c10|torch|pybind11)::|^_?Py[A-Z_]", line)]


@every_library
def test_no_rpath_and_only_expected_dependencies(path: Path) -> None:
    dynamic = _run("readelf", "-d", str(path))
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    needed = set(re.findall(r"Shared library: \[(.+?)\]", dynamic))
    allowed = re.compile(r"libtorch_(cpu|cuda)\.so|lib(stdc\+\+|m|c|gcc_s|dl|rt|pthread)\.so.*|ld-linux.*")
    assert not [name for name in needed if not allowed.fullmatch(name)]


def test_build_id_names_the_bytes_of_the_libraries() -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", library.build_id())


@pytest.mark.skipif(shutil.which("readelf") is None, reason="binutils are not installed")
@pytest.mark.parametrize("path", [p for p in (library.CPU_LIBRARY, library.CUDA_LIBRARY) if p.exists()])
def test_the_linked_id_is_the_one_that_the_linker_noted(path: Path) -> None:
    noted = re.search(r"Build ID: ([0-9a-f]+)", _run("readelf", "-n", str(path)))
    found = library._linked_id(path)
    assert found == (bytes.fromhex(noted[1]) if noted else None)


def test_without_a_noted_id_the_bytes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPU_LIBRARY", "CUDA_LIBRARY"):
        monkeypatch.setattr(library, name, tmp_path / "no.so")
    found = []
    for content in (b"", b"\x7fELF", b"no library", b"another one" * 9):
        (tmp_path / "no.so").write_bytes(content)
        assert library._linked_id(tmp_path / "no.so") is None
        library.build_id.cache_clear()
        found.append(library.build_id())
    library.build_id.cache_clear()
    assert len(set(found)) == 4
