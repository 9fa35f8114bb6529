"""The GELU kernel alone on a GPU: time, bandwidth and share of a copy measured in the same process.

python benchmarks/gelu.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from triton.testing import do_bench

import opgraft

ELEMENTS = 2**28


def milliseconds(call: Callable[[], Any]) -> float:
    found: float = do_bench(call, warmup=50, rep=200, return_mode="median")
    return found


def measure(dtype: torch.dtype) -> None:
    x = torch.randn(ELEMENTS, device="cuda", dtype=dtype)
    grad, out = torch.randn_like(x), torch.empty_like(x)
    size = x.element_size()
    copied = 2 * size * ELEMENTS / milliseconds(lambda: out.copy_(x))
    compiled = torch.compile(lambda v: F.gelu(v, approximate="tanh"))
    rows: list[tuple[str, Callable[[], Any], int]] = [
        ("opgraft forward", lambda: opgraft.gelu(x), 2),
        ("torch eager forward", lambda: F.gelu(x, approximate="tanh"), 2),
        ("Inductor's forward", lambda: compiled(x), 2),
        ("opgraft backward", lambda: torch.ops.opgraft.gelu_backward(grad, x), 3),
        ("torch eager backward", lambda: torch.ops.aten.gelu_backward(grad, x, approximate="tanh"), 3),
        ("opgraft forward, unaligned", lambda: opgraft.gelu(x[1:]), 2),
    ]
    print(f"{dtype}: copy {copied / 1e6:.0f} GB/s")
    for name, call, tensors in rows:
        took = milliseconds(call)
        moved = tensors * size * ELEMENTS / took
        print(f"  {name:28} {took * 1e3:8.1f} us {moved / 1e6:6.0f} GB/s {100 * moved / copied:6.1f} % of the copy")


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ELEMENTS} elements")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        measure(dtype)


if __name__ == "__main__":
    main()
