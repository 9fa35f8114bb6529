"""Loads the native libraries into torch's registry, once, at import."""

from __future__ import annotations

import hashlib
import struct
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent / "lib"
CPU_LIBRARY = FOLDER / "libopgraft.so"
CUDA_LIBRARY = FOLDER / "libopgraft_cuda.so"

_NOTES, _BUILD_ID = 4, 3  # PT_NOTE, NT_GNU_BUILD_ID


def load() -> None:
    """Loads the schemas and CPU kernels, and the CUDA kernels where torch has CUDA and they were built.

    Raises:
        ImportError: a library is missing or torch cannot load it; the message says what to do.
    """
    if not CPU_LIBRARY.exists():
        raise ImportError(
            f"opgraft: {CPU_LIBRARY} is missing: the kernels were not built. "
            "Run `pip install --no-build-isolation -e .` in the source tree, with torch installed"
        )
    _load(CPU_LIBRARY)
    if torch.version.cuda is not None and CUDA_LIBRARY.exists():
        _load(CUDA_LIBRARY)


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(
            f"opgraft: torch {torch.__version__} cannot load {library.name}: {error}. opgraft needs torch 2.11 or newer"
        ) from error


@cache
def build_id() -> str:
    """A digest of what the loaded libraries hold: what caches must be keyed by, since torch's own ignore kernels.

    The linker has noted a digest of a library's content in it; reading all of the kernels takes longer than the rest of
    a warm compile's look-ups, and is done only where that note is missing.
    """
    digest = hashlib.sha256()
    for library in (CPU_LIBRARY, CUDA_LIBRARY):
        if library.exists():
            digest.update(_linked_id(library) or library.read_bytes())
    return digest.hexdigest()[:16]


def _linked_id(library: Path) -> bytes | None:
    """The build id in a 64-bit little-endian ELF file (``NT_GNU_BUILD_ID``, see elf(5)); None where there is none."""
    with library.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            return None
        (table,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        for i in range(count):
            file.seek(table + i * size)
            segment = file.read(56)
            kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", segment)
            if kind == _NOTES:
                file.seek(offset)
                if found := _noted_id(file.read(length)):
                    return found
    return None


def _noted_id(notes: bytes) -> bytes | None:
    at = 0
    while at + 12 <= len(notes):
        name, content, kind = struct.unpack_from("<III", notes, at)
        start = at + 12 + -(-name // 4) * 4
        if kind == _BUILD_ID and notes[at + 12 : at + 12 + name] == b"GNU\0":
            return notes[start : start + content]
        at = start + -(-content // 4) * 4
    return None


def has_cuda_kernels() -> bool:
    """True where CUDA kernels are loaded. Says nothing about whether a device is present."""
    return torch.version.cuda is not None and CUDA_LIBRARY.exists()
