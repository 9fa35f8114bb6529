"""Where compiled code goes: outside the source tree, once for each source, torch and Python.

The folder is ``$XDG_CACHE_HOME/opgraft/from_prototype_to_op`` (``~/.cache`` where the variable is not set).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from reference import unavailable

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opgraft" / "from_prototype_to_op"


def compiler() -> str:
    """The C++ compiler; ends the step with one sentence where there is none."""
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    return found or unavailable("This step compiles C++ and finds no compiler: install g++ 11 or newer, or set CXX.")


def nvcc() -> str | None:
    """CUDA's compiler where there is one and a GPU to run its code; None means that the step stays on the CPU."""
    if not torch.cuda.is_available():
        return None
    from torch.utils.cpp_extension import CUDA_HOME  # imported late: it looks for a toolkit, which takes a moment

    return shutil.which(f"{CUDA_HOME}/bin/nvcc") if CUDA_HOME else None


def built(name: str, sources: Iterable[Path], build: Callable[[Path], None]) -> Path:
    """The folder that ``build`` filled, from the cache where sources, torch, Python and CUDA are the same.

    A build goes into a folder of its own that takes its final name when it is complete: a build that was killed
    leaves nothing that a later run could take for a whole one.
    """
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {nvcc()} {os.environ.get('CXX')}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = CACHE / f"{name}-{digest.hexdigest()[:16]}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{name}-", ignore_cleanup_errors=True) as unfinished:
            complete = Path(unfinished) / "build"
            complete.mkdir()
            build(complete)
            try:
                complete.rename(folder)
            except OSError:
                # Another process finished the same build first.
                if not folder.exists():
                    raise
    return folder
