"""Step 3, a compiled pybind11 extension with its own ``setup.py``: the kernel made robust.

Shows: gelu_extension/ (setup.py, one .cpp, one .cu), built with `python setup.py build_ext --inplace` in a copy under
~/.cache/opgraft, so the source tree stays clean; the build is used again while the sources are the same. Forward and
backward, four dtypes, any strides, empty tensors, clear errors. CPU always; CUDA where there is a GPU and nvcc.
Run:    python examples/from_prototype_to_op/step3_extension.py
Expect: about 15 seconds of compiling the first time on a CPU; right values; and what pybind11 cannot give, whatever
        the kernel does: torch.compile knows no schema for it and breaks the graph at the call.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from build_cache import built, compiler
from reference import check, sample

SOURCES = Path(__file__).resolve().parent / "gelu_extension"
BUILD_LIMIT_S = 600


def _build(folder: Path) -> None:
    compiler()
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"building gelu_extension failed, the compiler's words follow:\n{done.stdout}")


@cache
def extension() -> Any:
    """The module ``gelu_extension``: ``gelu(x)``, ``gelu_backward(grad, x)`` and ``has_cuda``."""
    folder = built("gelu_extension", sorted(p for p in SOURCES.iterdir() if p.is_file()), _build)
    library = next(folder.glob("gelu_extension*.so"))
    spec = importlib.util.spec_from_file_location("gelu_extension", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gelu = extension().gelu
gelu_backward = extension().gelu_backward


def main() -> None:
    x = sample(3, 1000)
    if not extension().has_cuda:
        x = x.cpu()
    for given in (x, x.t(), x[:, ::3], x[:0], x.double(), x.half(), x.bfloat16()):
        check("step 3, extension", gelu(given), given)
    try:
        gelu(x.int())
    except RuntimeError as error:
        print(f"refused: {str(error).splitlines()[0]}")
    explanation = torch._dynamo.explain(lambda v: gelu(v * 2) + 1)(x)
    print(f"torch.compile: {explanation.graph_break_count} graph break, {explanation.graph_count} graphs")
    assert explanation.graph_break_count == 1


if __name__ == "__main__":
    main()
