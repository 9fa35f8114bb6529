"""Step 1, a Triton kernel: the shortest way from an idea to a GPU.

Shows: a kernel in 8 lines and its launch, called like any Python function. On a machine without a GPU it runs in
Triton's interpreter (TRITON_INTERPRET=1), which checks values and says nothing about speed.
Needs:  triton, which CUDA builds of torch bring; beside a CPU build: pip install triton.
Run:    python examples/from_prototype_to_op/step1_triton.py
Expect: right values in float32 and float16, also for a size that is no multiple of the block; and the first thing
        that a prototype lacks: the gradient is gone, and nothing says so.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from reference import check, sample, unavailable

if importlib.util.find_spec("triton") is None:
    unavailable("Triton is not installed: run `pip install triton` (any release from 3.6 on runs in its interpreter).")
if not torch.cuda.is_available():
    # Read at every @triton.jit, those inside triton.language too: it must be set before anybody imports triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit  # type: ignore[misc]
def gelu_kernel(x_ptr, y_ptr, elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    twice_inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    tl.store(y_ptr + offsets, x * tl.sigmoid(twice_inner), mask=inside)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU of a contiguous tensor. The mask takes care of the tail, nothing takes care of strides or gradients."""
    y = torch.empty_like(x)
    elements = x.numel()
    gelu_kernel[(triton.cdiv(elements, 1024),)](x, y, elements, BLOCK=1024)
    return y


def main() -> None:
    print("Triton's interpreter on the CPU" if INTERPRETED else f"Triton on {torch.cuda.get_device_name()}")
    for dtype in (torch.float32, torch.float16):
        check("step 1, Triton", gelu(sample(3, 1000, dtype=dtype)), sample(3, 1000, dtype=dtype))
    leaf = sample(64).requires_grad_()
    assert not gelu(leaf).requires_grad
    print("gradient: lost. The output of a raw launch does not require grad, and training goes on without an error.")


if __name__ == "__main__":
    main()
