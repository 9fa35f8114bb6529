"""The unchecked kernel that the pitfalls of step 6 call: ``pitfall_raw.cu`` through ctypes, on the GPU or the CPU."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path

import torch
from build_cache import built, compiler, nvcc
from reference import expected, unavailable

SOURCE = Path(__file__).resolve().parent / "pitfall_raw.cu"
ON_GPU = nvcc() is not None
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def needs_gpu(what: str) -> None:
    """Ends the file with one line where there is no GPU to show it on."""
    if not ON_GPU:
        unavailable(f"{what} needs a GPU (and nvcc): on a CPU there is nothing to get wrong.")


@cache
def library() -> ctypes.CDLL:
    """``gelu_float`` and ``gelu_double`` (in, out, elements, threads, stream), and ``last_launch_error``."""

    def build(folder: Path) -> None:
        out = str(folder / "raw.so")
        if ON_GPU:
            major, minor = torch.cuda.get_device_capability()
            # The runtime is shared with torch, as in any extension: the last error is one for both.
            command = [str(nvcc()), "-O3", f"-arch=sm_{major}{minor}", "-cudart=shared", "-Xcompiler=-fPIC"]
        else:
            command = [compiler(), "-x", "c++", "-O3", "-fPIC"]
        done = subprocess.run(
            [*command, "-shared", str(SOURCE), "-o", out], capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise RuntimeError(f"compiling {SOURCE.name} failed: {done.stderr}")

    loaded = ctypes.CDLL(str(built("pitfall_raw", [SOURCE], build) / "raw.so"))
    for name in ("gelu_float", "gelu_double"):
        function = getattr(loaded, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
        function.restype = None
    loaded.last_launch_error.restype = ctypes.c_char_p
    return loaded


def launch(x: torch.Tensor, y: torch.Tensor, *, name: str = "gelu_float", threads: int = 256, stream: int = 0) -> None:
    """Calls the kernel with what it is given: no check of device, dtype, strides, stream or launch."""
    getattr(library(), name)(x.data_ptr(), y.data_ptr(), x.numel(), threads, stream)


def current_stream(x: torch.Tensor) -> int:
    """The handle of torch's current stream on the device of ``x``; 0 on the CPU."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


def report(what: str, actual: torch.Tensor, x: torch.Tensor) -> bool:
    """Prints how many elements are wrong; True where none is."""
    right = expected(x)
    wrong = int((~torch.isclose(actual, right, rtol=1e-4, atol=1e-6)).sum())
    print(f"{what}: {wrong} of {x.numel()} elements wrong")
    return wrong == 0
