"""Loads the native libraries into torch's registry, once, at import."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent / "lib"
CPU_LIBRARY = FOLDER / "libopgraft.so"
CUDA_LIBRARY = FOLDER / "libopgraft_cuda.so"


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
    """A digest of the loaded libraries' bytes: what caches must be keyed by, since torch's own ignore kernels."""
    digest = hashlib.sha256()
    for library in (CPU_LIBRARY, CUDA_LIBRARY):
        if library.exists():
            digest.update(library.read_bytes())
    return digest.hexdigest()[:16]


def has_cuda_kernels() -> bool:
    """True where CUDA kernels are loaded. Says nothing about whether a device is present."""
    return torch.version.cuda is not None and CUDA_LIBRARY.exists()
