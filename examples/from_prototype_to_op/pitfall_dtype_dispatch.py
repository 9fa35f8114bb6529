"""Pitfall: no dispatch on the dtype. ``data_ptr()`` has no type, and the kernel reads every tensor as float.

Run:    python examples/from_prototype_to_op/pitfall_dtype_dispatch.py
Expect: a float64 tensor through the float kernel is garbage without an error (a 16-bit one would be read beyond its
        end, which is not shown); dispatched on the dtype it is right, and a dtype without a kernel is refused.
In C++: AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "gelu", [&] { ... scalar_t ... });
        x.data_ptr<float>() refuses a wrong dtype by itself, static_cast<float*>(x.data_ptr()) does not.
"""

from __future__ import annotations

import torch
from pitfall_raw import DEVICE, current_stream, launch, report
from reference import sample

KERNELS = {torch.float32: "gelu_float", torch.float64: "gelu_double"}


def wrong(x: torch.Tensor) -> torch.Tensor:
    # Zeros and not empty, so that what the kernel never writes is the same in every run.
    y = torch.zeros_like(x)
    launch(x, y, stream=current_stream(x))
    return y


def mended(x: torch.Tensor) -> torch.Tensor:
    name = KERNELS.get(x.dtype)
    if name is None:
        raise TypeError(f"gelu: x has dtype {x.dtype}, expected one of {', '.join(map(str, KERNELS))}")
    y = torch.zeros_like(x)
    launch(x, y, name=name, stream=current_stream(x))
    return y


def main() -> None:
    x = sample(4096, dtype=torch.float64).to(DEVICE)
    assert not report("WRONG  float64 through the float kernel", wrong(x), x)
    assert report("MENDED float64, dispatched on the dtype", mended(x), x)
    try:
        mended(x.half())
    except TypeError as error:
        print(f"MENDED float16, no kernel: {error}")
    else:
        raise AssertionError("float16 was not refused")


if __name__ == "__main__":
    main()
