"""Step 4, ``torch.library`` in Python: the same kernel, registered.

Shows: custom_op gives the call a schema, register_fake tells shapes and strides without running it, register_autograd
gives the gradient, register_vmap the batching rule; opcheck tests all of it. The kernel is step 3's, unchanged. The
backward is an op of its own, since torch.compile must see through it too.
Run:    python examples/from_prototype_to_op/step4_torch_library.py
Expect: opcheck passes on forward and backward; torch.compile(fullgraph=True) takes it, forward and backward, with
        the right values and gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from reference import check, expected_gradient, sample
from step3_extension import extension

_kernel = extension()


@torch.library.custom_op("prototype::gelu", mutates_args=())
def gelu(x: torch.Tensor) -> torch.Tensor:
    return _kernel.gelu(x)  # type: ignore[no-any-return]


@torch.library.custom_op("prototype::gelu_backward", mutates_args=())
def gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _kernel.gelu_backward(grad, x)  # type: ignore[no-any-return]


@gelu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    # Written from the kernel's own allocation: contiguous, whatever the strides of x.
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@gelu_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    gradient: torch.Tensor = gelu_backward(grad, x)
    return gradient


gelu.register_autograd(_backward, setup_context=_setup_context)


@gelu.register_vmap
def _(info: Any, in_dims: tuple[int | None], x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    # Elementwise: the batch dimension is one more dimension.
    return gelu(x), in_dims[0]


def main() -> None:
    x = sample(3, 1000)
    if not _kernel.has_cuda:
        x = x.cpu()
    check("step 4, custom_op", gelu(x), x)

    for given in (x, x.t(), x[:, ::3], x.bfloat16()):
        torch.library.opcheck(gelu, (given.detach().requires_grad_(),))
        torch.library.opcheck(gelu_backward, (torch.ones_like(given), given))
    print("opcheck: forward and backward pass (schema, fake, autograd registration, dynamic shapes)")

    compiled = torch.compile(lambda v: gelu(v * 2) + 1, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(leaf).sum(), leaf)
    torch.testing.assert_close(gradient, 2 * expected_gradient(2 * x))
    print("torch.compile(fullgraph=True): one graph, right gradient")


if __name__ == "__main__":
    main()
