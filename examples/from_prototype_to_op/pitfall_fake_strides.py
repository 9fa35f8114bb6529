"""Pitfall: a fake that promises other strides than the kernel delivers. Only a compiled model meets it.

Run:    python examples/from_prototype_to_op/pitfall_fake_strides.py
Expect: torch.empty_like keeps the strides of a transposed input, the kernel returns a contiguous tensor. Eager is
        right; what the compiler plans for is wrong, and opcheck says so (for CPU tensors from torch 2.13 on). With
        the kernel's own allocation in the fake, both agree.
In C++: the same rule: output strides in the fake are those of the at::empty(...) in the kernel, not of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from pitfall_raw import DEVICE, current_stream, launch, report
from reference import sample


def _run(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, device=x.device)
    launch(x.contiguous(), y, stream=current_stream(x))
    return y


@torch.library.custom_op("pitfall::wrong_fake", mutates_args=())
def wrong(x: torch.Tensor) -> torch.Tensor:
    return _run(x)


@wrong.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pitfall::right_fake", mutates_args=())
def mended(x: torch.Tensor) -> torch.Tensor:
    return _run(x)


@mended.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def promised_and_real(op: Any, x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides of the fake (a meta tensor runs nothing else) and of the kernel."""
    return op(x.to("meta")).stride(), op(x).stride()


def opcheck_passes(op: Any, x: torch.Tensor) -> bool:
    outcome = torch.library.opcheck(op, (x,), test_utils="test_faketensor", raise_exception=False)
    return outcome["test_faketensor"] == "SUCCESS"


def main() -> None:
    x = sample(64, 48).to(DEVICE).t()
    assert report("eager, either fake", wrong(x), x)
    outcome = {}
    for name, op in (("WRONG ", wrong), ("MENDED", mended)):
        fake, real = promised_and_real(op, x)
        outcome[name] = fake == real
        verdict = "passes" if opcheck_passes(op, x) else "finds it"
        print(f"{name} strides promised by the fake {fake}, of the kernel {real}; opcheck {verdict}")
    assert outcome == {"WRONG ": False, "MENDED": True}
    assert opcheck_passes(mended, x)
    if torch.__version__ >= "2.13" or DEVICE.type == "cuda":
        assert not opcheck_passes(wrong, x)


if __name__ == "__main__":
    main()
