"""float8_e4m3fn results of the ops over rows: the rule in plain torch, its checks and the shape of the scales.

All in float32, every operation rounded to nearest, ties to even:

    scale   = max(amax / 448, 1 / (448 * 512)), rounded up to a power of two where that is asked for,
              at most the upper bound (which is rounded down to a power of two then); NaN where an element is NaN
    inverse = 1 / scale
    code    = e4m3(clamp(value * inverse, -448, 448)), to nearest, ties to even

Codes times scale give back the values. A row of zeros has the smallest scale. NaN makes its row's (block's) scale and
codes NaN. Infinity makes the scale infinite, finite elements 0 and infinite ones NaN; under an upper bound they
saturate.
"""

from __future__ import annotations

import math
from typing import Any

import torch

CODES = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 1.0 / (448.0 * 512.0)
BLOCK = 128


def check_fp8(op: str, block: int, scale_upper_bound: float | None) -> None:
    """The kernels' checks of block and bound."""
    torch._check(block in (0, BLOCK), lambda: f"{op}: block is {block}, expected 0 (a scale a row) or {BLOCK}")
    torch._check(
        scale_upper_bound is None or 2.0**-126 <= scale_upper_bound <= torch.finfo(torch.float32).max,
        lambda: f"{op}: scale_upper_bound is {scale_upper_bound}, expected a number from 2^-126 to the largest "
        "float32, or None",
    )


def new_outputs(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales for rows like those of x: what kernels and fakes allocate."""
    return x.new_empty(x.shape, dtype=CODES), x.new_empty((*x.shape[:-1], blocks(x, block)), dtype=torch.float32)


def blocks(x: torch.Tensor, block: int) -> Any:
    """Scales a row."""
    return 1 if block == 0 else (x.shape[-1] + block - 1) // block


def encode(
    values: torch.Tensor, block: int, scale_upper_bound: float | None, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of float32 values, by the rule. No gradient passes."""
    values = values.detach().to(torch.float32)
    length = values.shape[-1]
    if length == 0:
        scale = values.new_full((*values.shape[:-1], blocks(values, block)), 0.0)
        return values.to(CODES), scale_of(scale, scale_upper_bound, power_of_two)
    parts = values.unsqueeze(-2)
    if block:
        padding = blocks(values, block) * block - length
        parts = torch.nn.functional.pad(values, (0, padding)).unflatten(-1, (-1, block))
    scale = scale_of(parts.abs().amax(-1), scale_upper_bound, power_of_two)
    codes = (parts * (1.0 / scale).unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(CODES)
    return codes.flatten(-2)[..., :length].contiguous(), scale.contiguous()


def scale_of(amax: torch.Tensor, scale_upper_bound: float | None, power_of_two: bool) -> torch.Tensor:
    """The scale for a largest magnitude."""
    scale = (amax / LARGEST).clamp_min(SMALLEST_SCALE)
    if power_of_two:
        # Up to the next exponent unless the mantissa is zero. Adding to NaN's bits would leave NaN.
        up = ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, up)
    if scale_upper_bound is not None:
        bound = 2.0 ** math.floor(math.log2(scale_upper_bound)) if power_of_two else scale_upper_bound
        scale = scale.clamp_max(bound)
    return scale


def encoded_bytes(x: torch.Tensor, block: int) -> int:
    """What a kernel writes of codes and scales."""
    length = x.shape[-1]
    scales = (
        x.numel() // length * int(blocks(x, block)) if length else x[..., :0].sum(-1).numel() * int(blocks(x, block))
    )
    return x.numel() + 4 * scales
