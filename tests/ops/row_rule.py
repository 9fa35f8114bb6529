"""The stated rule of the fp8 ops over rows, step by step in plain torch: what every kernel must give bit for bit.

Written from csrc/support/row_mapping.h, fp8_rule.h and silu_rule.h, operation by operation, in float32.
"""

from __future__ import annotations

import math

import torch

LOG2_E = 1.44269504088896341
ROUND = 12582912.0
SILU = (0.0013264724984765053, 0.009671512991189957, 0.05550733581185341, 0.24022242426872253, 0.6931470036506653, 1.0)


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32, rounded once. The product is exact in float64; the sum is rounded to odd there (Boldo and
    Melquiond, 2008), so that rounding it to float32 is the only rounding that counts."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    moved = total - product
    lost = (product - (total - moved)) + (addend - moved)
    bits = total.contiguous().view(torch.int64)
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    odd = torch.where((lost != 0) & (bits & 1 == 0) & total.isfinite(), bits + step, bits)
    return odd.view(torch.float64).float()


def constant(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, value)


def divided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a / b rounded once; torch's own reciprocal on the CPU is not. Rounding the float64 quotient again does no harm,
    since that has more than twice the digits (Figueroa, 1995)."""
    return (a.double() / b.double()).float()


def threads(length: int, width: int) -> int:
    """Threads a row of vectors of ``width`` elements."""
    vectors = -(-length // width)
    if vectors <= 32:
        return 2 ** math.ceil(math.log2(max(vectors, 8)))
    return min(max(2 ** math.ceil(math.log2(-(-vectors // 4))), 32), 1024)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """By lanes in ascending order, then lanes pairwise, neighbours first."""
    width = 16 // x.element_size()
    lanes = threads(x.shape[-1], width) * width
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % lanes)).unflatten(-1, (-1, lanes))
    total = torch.zeros_like(padded[..., 0, :])
    for k in range(padded.shape[-2]):
        total = fused(padded[..., k, :], padded[..., k, :], total)
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total


def normalised(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast_before_weight: bool
) -> torch.Tensor:
    total = sum_of_squares(x)
    mean = divided(total, constant(x.shape[-1], total))
    root = (mean + torch.tensor(eps, dtype=torch.float32)).double().sqrt().float()
    scale = divided(constant(1.0, root), root)
    values = x.float() * scale
    if cast_before_weight:
        values = values.to(x.dtype).float()
    return values if weight is None else values * (weight.float() + torch.tensor(offset, dtype=torch.float32))


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    a, up = torch.where(gate.float() < -87, -87.0, gate.float()), up.float()
    bounded = torch.where(a > 87, 87.0, a)
    shifted = fused(bounded, constant(-LOG2_E, a), constant(ROUND, a))
    n = shifted - ROUND
    f = fused(bounded, constant(-LOG2_E, a), -n)
    p = constant(SILU[0], a)
    for coefficient in SILU[1:]:
        p = fused(p, f, constant(coefficient, a))
    e = (p.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)
    return a * divided(constant(1.0, e), 1.0 + e) * up


def encode(
    values: torch.Tensor, block: int, bound: float | None, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as bytes, NaN as 0x7f, and scales."""
    length = values.shape[-1]
    size = block or length
    parts = torch.nn.functional.pad(values, (0, -length % size)).unflatten(-1, (-1, size))
    amax = parts.abs().amax(-1)
    scale = divided(amax, constant(448.0, amax)).clamp_min(1.0 / (448.0 * 512.0))
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        up = torch.ldexp(torch.ones_like(scale), torch.where(mantissa > 0.5, exponent, exponent - 1))
        scale = torch.where(scale.isfinite(), up, scale)
    if bound is not None:
        limit = torch.tensor(2.0 ** math.floor(math.log2(bound)) if power_of_two else bound, dtype=torch.float32)
        scale = torch.minimum(scale, limit)
    scaled = (parts * divided(constant(1.0, scale), scale).unsqueeze(-1)).clamp(-448.0, 448.0)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(scaled.isnan(), 0x7F, codes).to(torch.uint8)
    return codes.flatten(-2)[..., :length], scale
