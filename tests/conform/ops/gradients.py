"""Ops whose gradient is missing, wrong, or reads what it is given as dense."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.conform.ops.pairs import NS, add, double, lib, op, save_first

lib.define("no_gradient(Tensor x) -> Tensor")
lib.impl("no_gradient", double, "CPU")
torch.library.register_fake(f"{NS}::no_gradient", lambda x: x.new_empty(x.shape), lib=lib)
add("missing-autograd", "no_gradient", "good_double")

# A formula is there, and below it nobody keeps a graph; the twin says that codes have no gradient.
lib.define("signs_of_nobody(Tensor x) -> Tensor")
torch.library.register_fake(f"{NS}::signs_of_nobody", lambda x: x.new_empty(x.shape), lib=lib)
lib.impl("signs_of_nobody", lambda x: x.contiguous().sign(), "CPU")
lib.impl("signs_of_nobody", lambda x: x.detach().contiguous().sign(), "Autograd")


def signs(x: Tensor) -> Tensor:
    return x.contiguous().sign()


op(
    "signs",
    signs,
    backward=lambda ctx, grad: None,
    setup=lambda ctx, inputs, output: ctx.mark_non_differentiable(output),
)
add("missing-autograd", "signs_of_nobody", "signs", name="missing-autograd: results without one")


def square(x: Tensor) -> Tensor:
    return x.contiguous() ** 2


op("square", square, backward=lambda ctx, grad: 2 * grad * ctx.saved_tensors[0], setup=save_first)
op("square_wrong", square, backward=lambda ctx, grad: grad * ctx.saved_tensors[0], setup=save_first)
add("wrong-gradient", "square_wrong", "square")


def square_and_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.contiguous() ** 2, x.contiguous().flatten().mean(0, keepdim=True)


def save_and_mark(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.mark_non_differentiable(output[1])


# The second result moves with x, and the formula says that nobody differentiates it.
for name, factor in (("square_and_mean", 2), ("square_and_mean_wrong", 1)):
    op(
        name,
        square_and_mean,
        fake=lambda x: (x.new_empty(x.shape), x.new_empty(1)),
        backward=lambda ctx, grad, unused, factor=factor: factor * grad * ctx.saved_tensors[0],
        setup=save_and_mark,
    )
add("wrong-gradient", "square_and_mean_wrong", "square_and_mean", name="wrong-gradient: a result without one")


def square_of_floats(x: Tensor) -> Tensor:
    """As a kernel behind a raw pointer would: whatever the dtype, it reads and writes float32."""
    out = x.new_zeros(x.shape)
    n = x.numel()
    out.view(-1).view(torch.float32)[:n] = x.contiguous().view(-1).view(torch.float32)[:n] ** 2
    return out


def square_of_float32(x: Tensor) -> Tensor:
    torch._check(x.dtype == torch.float32, lambda: f"square_of_float32: x must be float32, it is {x.dtype}")
    return square_of_floats(x)


op("square_of_floats", square_of_floats, backward=lambda ctx, g: 2 * g * ctx.saved_tensors[0], setup=save_first)
op("square_of_float32", square_of_float32, backward=lambda ctx, g: 2 * g * ctx.saved_tensors[0], setup=save_first)
add("wrong-value", "square_of_floats", "square_of_float32", name="wrong-value: a dtype taken for another")
op("square_of_float32_wrong", square_of_float32, backward=lambda ctx, g: g * ctx.saved_tensors[0], setup=save_first)
add("wrong-gradient", "square_of_float32_wrong", "square_of_float32", name="wrong-gradient: float32 alone")
# What such an op gives in float64 says nothing of its gradient in float32.
add("wrong-gradient", "square_wrong", "square_of_floats", name="wrong-gradient: no float64")


def _dense_only(ctx, grad):
    flat = (
        grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
        if grad.untyped_storage().nbytes() >= (grad.storage_offset() + grad.numel()) * grad.element_size()
        else grad.flatten()[:1].expand(grad.numel())
    )
    return 2 * flat.reshape(grad.shape)


op("double_dense_gradient", double, backward=_dense_only, setup=lambda ctx, inputs, output: None)
add("gradient-layout", "double_dense_gradient", "good_double")


def _scaled_middle(x: Tensor, scale: Tensor) -> Tensor:
    x = x.contiguous()
    return (x - x.mean()) * scale.sum()


def _middle_backward(ctx, grad):
    """The sum in another order where the gradient is strided, as a kernel may take it: behind a constant gradient it is
    zero but for rounding."""
    x, scale = ctx.saved_tensors
    parts = (grad * (x - x.mean())).flatten()
    total = sum((parts.flip(0) if 0 in grad.stride() else parts).unbind(0), grad.new_zeros(()))
    rest = grad - grad.mean()
    return rest * scale.sum(), total.expand(scale.shape).clone()


op(
    "scaled_middle",
    _scaled_middle,
    backward=_middle_backward,
    setup=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
add("gradient-layout", "double_dense_gradient", "scaled_middle", name="gradient-layout: zero but for rounding")


def _blind(ctx, grad):
    with torch.no_grad():
        return 2 * grad * ctx.saved_tensors[0]


op("square_once", square, backward=_blind, setup=save_first)
add("double-backward", "square_once", "square")
