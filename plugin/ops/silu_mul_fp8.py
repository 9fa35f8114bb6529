"""silu(gate) * up as float8_e4m3fn codes with scales, of a row or of 128 elements: the gate of a feed-forward block
before an fp8 matrix product.

The values are not rounded in between: they go from float32 to the codes. The rule is in opgraft/ops/fp8.py; the
exponential is a polynomial in a stated order (csrc/support/silu_rule.h), so the CPU's and the GPU's results are the
same bits. Codes and scales have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from opgraft.ops.fp8 import BLOCK, check_fp8, encode, encoded_bytes, new_outputs
from opgraft.ops.registration import bind, call, check_like, require_tensor, shard
from opgraft.ops.rms_norm_fp8 import options
from opgraft.ops.rows import check_rows, map_rows, row_rule
from opgraft.ops.samples import Maker
from opgraft.registry import Cost, OpSpec, Sample, register

_op = torch.ops.opgraft.silu_mul_fp8.default


def silu_mul_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    block: int = 0,
    scale_upper_bound: float | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu(gate) * up`` in float32, as float8_e4m3fn codes with scales: codes times scale give back the values.

    Args:
        gate: (..., length), any strides, float32, float64, float16 or bfloat16, on the CPU or a CUDA device. The halves
            of a packed projection (``gate, up = packed.chunk(2, -1)``) are read in place.
        up: the shape, dtype and device of ``gate``.
        block, scale_upper_bound, power_of_two: as in ``rms_norm_fp8``.

    Returns:
        The codes, of the shape of ``gate``, and float32 scales of shape (..., 1) or (..., ceil(length / 128)); both
        fresh, contiguous and without a gradient. A gate of minus infinity counts as silu's limit, 0.

    Raises:
        TypeError: ``gate`` or ``up`` is not a tensor.
        RuntimeError: shapes, dtypes, devices, block or bound do not fit; the message names the argument.
    """
    require_tensor("silu_mul_fp8", gate=gate, up=up)
    out: tuple[torch.Tensor, torch.Tensor] = call(_op, reference, gate, up, block, scale_upper_bound, power_of_two)
    return out


def reference(
    gate: torch.Tensor,
    up: torch.Tensor,
    block: int = 0,
    scale_upper_bound: float | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning, in plain torch. With torch's exponential: scales may differ from the op's in their last bits."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return encode(F.silu(gate.to(wide)) * up.to(wide), block, scale_upper_bound, power_of_two)


def _fake(
    gate: torch.Tensor,
    up: torch.Tensor,
    block: int = 0,
    scale_upper_bound: float | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_rows("silu_mul_fp8", "gate", gate)
    check_like("silu_mul_fp8", "up", up, "gate", gate)
    check_fp8("silu_mul_fp8", block, scale_upper_bound)
    return new_outputs(gate, block)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.mark_non_differentiable(*output)


def _backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
    return (None,) * 5


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_rows(_op, info, in_dims, args, rows=2, sums=False)


def cost(gate: torch.Tensor, up: torch.Tensor, block: int = 0, *others: Any) -> Cost:
    """Two reads, and the codes and scales written; an exponential an element."""
    moved = 2 * gate.numel() * gate.element_size() + encoded_bytes(gate, block)
    return Cost(moved, 20 * gate.numel(), gate.numel())


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every layout under every combination of options, the widths at which kernels change, and far gates."""
    maker = Maker(device, dtype, seed=11)
    index = 0
    for name, gate in Maker(device, dtype).layouts():
        if not gate.dim():
            continue
        up = maker.normal(*gate.shape)
        yield Sample(name, (gate, up.transpose(0, -1).contiguous().transpose(0, -1), *options(index)))
        index += 1
    for rows, length in ((4, 133), (7, 265), (19, 640)):
        yield Sample(
            f"{rows} by {length}", (maker.normal(rows, length), maker.normal(rows, length), BLOCK), family="rows"
        )
    for rows, length in ((9, 128), (70, 1024), (600, 2048), (3, 14336), (2, 20480), (1, 70000)):
        for block in (0, BLOCK):
            pair = maker.normal(rows, length), maker.normal(rows, length)
            yield Sample(f"{rows} rows of {length}, block {block}", (*pair, block, None, not block))
    packed = maker.normal(3, 5, 128)
    yield Sample("halves of a packed projection", (packed[..., :64], packed[..., 64:]))
    yield Sample("far gates", (maker.normal(4, 96, scale=60.0), maker.normal(4, 96), BLOCK))
    yield Sample("zeros", (maker.normal(3, 16) * 0, maker.normal(3, 16)))
    yield Sample("not a number", (maker.normal(2, 8) / maker.normal(2, 8).fill_(0) * 0, maker.normal(2, 8)))


def large(device: torch.device, dtype: torch.dtype) -> tuple[Sample, Callable[[Any], None]]:
    """Over 2^31 elements; the last row is compared, out of reach of a 32-bit index."""
    gate = torch.ones(2**19 + 1, 4104, device=device, dtype=dtype)
    gate[-1] = Maker(device, dtype).normal(4104)

    def check(found: tuple[torch.Tensor, torch.Tensor]) -> None:
        codes, scales = _op(gate[-1:], gate[-1:], BLOCK)
        assert torch.equal(found[0][-1:].view(torch.uint8), codes.view(torch.uint8))
        torch.testing.assert_close(found[1][-1:], scales, rtol=0, atol=0)

    return Sample("over 2^31 elements", (gate, gate, BLOCK)), check


bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap)
shard(_op, row_rule(rows=2, outputs=2, sums=False))

SPEC = register(OpSpec(_op, reference, samples=samples, cost=cost, public=silu_mul_fp8, large=large, owner="opgraft"))
