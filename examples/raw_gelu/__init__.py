"""opgraft's GELU kernel bound raw with pybind11: the control arm of the demo. Built at first use, kept afterwards."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@functools.cache
def extension() -> ModuleType:
    """The pybind11 module. Builds it into ``build/raw_gelu`` where it is missing or older than its sources."""
    from torch.utils.cpp_extension import load

    cuda = torch.cuda.is_available() and shutil.which("nvcc") is not None
    folder = ROOT / "build" / f"raw_gelu-{torch.__version__}{'-cuda' if cuda else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    if cuda:
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    module: ModuleType = load(
        name="raw_gelu_extension",
        sources=[str(HERE / "binding.cpp"), *([str(HERE / "launch.cu")] if cuda else [])],
        extra_include_paths=[str(ROOT / "csrc")],
        # Without -fopenmp at::parallel_for, which is a header, runs on one thread.
        extra_cflags=["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
        + (["-DWITH_CUDA"] if cuda else []),
        # USE_CUDA makes torch's stable headers declare their CUDA half.
        extra_cuda_cflags=["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-DUSE_CUDA"],
        extra_ldflags=["-fopenmp"],
        build_directory=str(folder),
        with_cuda=cuda,
    )
    return module


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU, tanh form, straight into the extension."""
    out: torch.Tensor = extension().gelu(x)
    return out
