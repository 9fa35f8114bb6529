"""Pitfall: the wrong stream. ``kernel<<<grid, block>>>`` uses the default stream; torch may be on another.

Run:    python examples/from_prototype_to_op/pitfall_wrong_stream.py       (needs a GPU)
Expect: while torch's current stream is busy producing x, the kernel on the default stream reads x too early and
        gives the GELU of the old values; on the current stream, right. In a model whose only stream is the default
        one nothing shows, until somebody captures a CUDA graph or overlaps copies.
In C++: kernel<<<grid, block, 0, c10::cuda::getCurrentCUDAStream()>>>(...);
"""

from __future__ import annotations

import torch
from pitfall_raw import DEVICE, current_stream, launch, needs_gpu, report
from reference import sample


def wrong(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    launch(x, y, stream=0)
    return y


def mended(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    launch(x, y, stream=current_stream(x))
    return y


def main() -> None:
    needs_gpu("The wrong stream")
    new, factor = sample(4096).to(DEVICE), torch.randn(4096, 4096, device=DEVICE)
    x = torch.zeros_like(new)
    mended(x)  # the first launch loads the module, which may wait for the whole device
    outcome = {}
    for name, call in (("WRONG ", wrong), ("MENDED", mended)):
        x.zero_()
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(20):
                factor = torch.tanh(factor @ factor)  # tens of milliseconds of work before x is written
            x.copy_(new)
            y = call(x)
        torch.cuda.synchronize()
        outcome[name] = report(f"{name} x written on a side stream", y, x)
    assert outcome == {"WRONG ": False, "MENDED": True}


if __name__ == "__main__":
    main()
