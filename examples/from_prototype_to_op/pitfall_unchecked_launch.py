"""Pitfall: an unchecked launch. A kernel that cannot start says so only to those who ask.

Run:    python examples/from_prototype_to_op/pitfall_unchecked_launch.py       (needs a GPU)
Expect: with 2048 threads a block (1024 is the limit) the kernel never runs: the output is whatever its memory held
        before, and the error comes up later, at an innocent call. Checked, it is an error at the launch.
In C++: C10_CUDA_KERNEL_LAUNCH_CHECK();   right after <<<...>>>
"""

from __future__ import annotations

import torch
from pitfall_raw import DEVICE, current_stream, launch, library, needs_gpu, report
from reference import sample

TOO_MANY_THREADS = 2048


def wrong(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    launch(x, y, threads=TOO_MANY_THREADS, stream=current_stream(x))
    return y


def mended(x: torch.Tensor, threads: int) -> torch.Tensor:
    y = torch.empty_like(x)
    launch(x, y, threads=threads, stream=current_stream(x))
    error = library().last_launch_error()
    if error is not None:
        raise RuntimeError(f"gelu: the launch failed: {error.decode()}")
    return y


def main() -> None:
    needs_gpu("The unchecked launch")
    x = sample(4096).to(DEVICE)
    leftover = torch.full_like(x, 42.0)
    torch.cuda.synchronize()
    del leftover  # its memory is what torch.empty_like hands out next
    y = wrong(x)
    print("WRONG  2048 threads a block: the call returned without an error")
    try:
        innocent = torch.ones(3, device=DEVICE)
        innocent.add_(1)
    except RuntimeError as error:
        print(f"WRONG  the error is raised by torch.ones, which did nothing wrong: {str(error).splitlines()[0]}")
    library().last_launch_error()  # reading it clears it
    assert not report("WRONG  2048 threads a block", y, x)
    print(f"WRONG  the first value is {y[0].item()}, left there by another tensor")

    try:
        mended(x, TOO_MANY_THREADS)
    except RuntimeError as error:
        print(f"MENDED 2048 threads a block: {error}")
    else:
        raise AssertionError("the failed launch was not reported")
    assert report("MENDED 256 threads a block", mended(x, 256), x)


if __name__ == "__main__":
    main()
