"""GELU in its tanh form, y = x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel, arXiv 1606.08415).

The demonstration of an op that wins alone and may lose in a model: it is pointwise, so a compiler fuses it with its
neighbours, and an opaque kernel cannot be fused. See docs/ops/gelu.md for what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from opgraft.ops.registration import (
    batch_first,
    bind,
    bind_backward,
    call,
    check_floating,
    check_like,
    pointwise_rule,
    require_tensor,
    shard,
    vector_jacobian_product,
)
from opgraft.ops.samples import Maker
from opgraft.registry import Cost, OpSpec, Sample, register

_op = torch.ops.opgraft.gelu.default
_backward_op = torch.ops.opgraft.gelu_backward.default


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU, tanh form, of every element.

    Args:
        x: any shape and strides, float32, float64, float16 or bfloat16, on the CPU or a CUDA device.

    Returns:
        A fresh contiguous tensor of the shape and dtype of ``x``; computed in float32 for 16-bit types.

    Raises:
        TypeError: ``x`` is not a tensor.
        RuntimeError: ``x`` has another dtype.
    """
    require_tensor("gelu", x=x)
    out: torch.Tensor = call(_op, reference, x)
    return out


def reference(x: torch.Tensor) -> torch.Tensor:
    """The meaning, in plain torch."""
    return F.gelu(x, approximate="tanh")


def _fake(x: torch.Tensor) -> torch.Tensor:
    check_floating("gelu", "x", x)
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    out: torch.Tensor = _backward_op(grad, x)
    return out


def _vmap(info: Any, in_dims: tuple[int | None], x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    return _op(x), in_dims[0]


def cost(x: torch.Tensor) -> Cost:
    """One read and one write; a cubic, an exponential and a division an element."""
    return Cost(bytes=2 * x.numel() * x.element_size(), flops=8 * x.numel(), exponentials=x.numel())


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every layout, and the values at which a careless formula overflows or cancels."""
    for name, tensor in Maker(device, dtype).layouts():
        yield Sample(name, (tensor,))
    maker = Maker(device, dtype, seed=2)
    for rows, columns in ((4, 33), (7, 65), (19, 8)):
        yield Sample(f"{rows} by {columns}", (maker.normal(rows, columns),), family="matrix")
    edges = [0.0, -0.0, 1e-7, -1e-7, 3.0, -3.0, 12.0, -12.0, 200.0, -200.0, 6e4, -6e4]
    yield Sample("edge values", (torch.tensor(edges, device=device, dtype=dtype),))
    yield Sample("not a number", (torch.tensor([1.0, float("nan"), -1.0], device=device, dtype=dtype),))


def large(device: torch.device, dtype: torch.dtype) -> tuple[Sample, Callable[[Any], None]]:
    """Over 2^31 elements; the last ones are compared, since a 32-bit index never reaches them."""
    x = torch.ones(2**31 + 4099, device=device, dtype=dtype)
    x[-4099:] = Maker(device, dtype).normal(4099)

    def check(y: torch.Tensor) -> None:
        torch.testing.assert_close(y[-4099:], reference(x[-4099:]))
        torch.testing.assert_close(y[:1], reference(x[:1]))

    return Sample("over 2^31 elements", (x,)), check


def reference_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of the reference."""
    (found,) = vector_jacobian_product(reference, (x,), (grad,))
    assert found is not None
    return found


def _backward_fake(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    check_floating("gelu_backward", "x", x)
    check_like("gelu_backward", "grad", grad, "x", x)
    return x.new_empty(x.shape)


def _backward_vmap(
    info: Any, in_dims: tuple[int | None, int | None], grad: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, int]:
    return _backward_op(*batch_first(in_dims, info.batch_size, grad, x)), 0


def backward_cost(grad: torch.Tensor, x: torch.Tensor) -> Cost:
    """Two reads and one write."""
    return Cost(bytes=3 * x.numel() * x.element_size(), flops=16 * x.numel(), exponentials=x.numel())


def backward_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The forward's samples, with incoming gradients that are dense, expanded or permuted."""
    maker = Maker(device, dtype, seed=1)
    for sample in samples(device, dtype):
        (x,) = sample.args
        yield Sample(sample.name, (maker.normal(*x.shape), x), family=sample.family)
    x = maker.normal(6, 10)
    yield Sample("gradient of a sum", (maker.normal().expand(6, 10), x))
    yield Sample("gradient transposed", (maker.normal(10, 6).t(), x))


bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap)
bind_backward(_backward_op, reference_backward, fake=_backward_fake, vmap=_backward_vmap)
shard(_op, pointwise_rule(inputs=1))
shard(_backward_op, pointwise_rule(inputs=2))

SPEC = register(
    OpSpec(_op, reference, samples=samples, cost=cost, public=gelu, backward=_backward_op, large=large, owner="opgraft")
)
BACKWARD_SPEC = register(
    OpSpec(_backward_op, reference_backward, samples=backward_samples, cost=backward_cost, owner="opgraft")
)
