"""Pitfall: a non-contiguous input. The kernel reads memory in order; a view's elements lie in another order.

Run:    python examples/from_prototype_to_op/pitfall_non_contiguous.py
Expect: the transposed input gives right numbers in wrong places, without an error; made contiguous first, all right.
In C++: const at::Tensor input = x.contiguous();   (free where it already is; or pass the strides and walk them)
"""

from __future__ import annotations

import torch
from pitfall_raw import DEVICE, current_stream, launch, report
from reference import sample


def wrong(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, device=x.device)
    launch(x, y, stream=current_stream(x))
    return y


def mended(x: torch.Tensor) -> torch.Tensor:
    return wrong(x.contiguous())


def main() -> None:
    x = sample(64, 48).to(DEVICE)
    assert report("contiguous input, unchecked kernel", wrong(x), x)
    assert not report("WRONG  transposed input, unchecked kernel", wrong(x.t()), x.t())
    assert report("MENDED transposed input, made contiguous", mended(x.t()), x.t())


if __name__ == "__main__":
    main()
