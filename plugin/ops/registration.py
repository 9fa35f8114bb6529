"""What every op's file shares: binding fakes, gradients, vmap rules, layout tags and sharding rules to an overload."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from opgraft import _compat
from opgraft.registry import qualified_name

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def require_tensor(op: str, **arguments: Any) -> None:
    """Raises a TypeError that names the first argument that is no tensor."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name} is a {type(value).__name__}, expected a Tensor")


def check_floating(op: str, argument: str, tensor: torch.Tensor) -> None:
    """The fake's form of the kernels' dtype check: same condition, same words."""
    torch._check(
        tensor.dtype in FLOATING,
        lambda: f"{op}: {argument} has dtype {tensor.dtype}, expected float32, float64, float16 or bfloat16",
    )


def check_like(op: str, argument: str, tensor: torch.Tensor, other_argument: str, other: torch.Tensor) -> None:
    """The fake's form of the kernels' checks that two tensors agree in dtype, device and shape."""
    torch._check(
        tensor.dtype == other.dtype,
        lambda: f"{op}: {argument} has dtype {tensor.dtype}, expected that of {other_argument}, {other.dtype}",
    )
    torch._check(
        tensor.device == other.device,
        lambda: f"{op}: {argument} is on {tensor.device}, expected the device of {other_argument}, {other.device}",
    )
    same = tensor.dim() == other.dim()
    torch._check(same, lambda: _shape_message(op, argument, tensor, other_argument, other))
    for given, wanted in zip(tensor.shape, other.shape, strict=True):
        torch._check(given == wanted, lambda: _shape_message(op, argument, tensor, other_argument, other))


def _shape_message(op: str, argument: str, tensor: torch.Tensor, other_argument: str, other: torch.Tensor) -> str:
    return f"{op}: {argument} has shape {tuple(tensor.shape)}, expected that of {other_argument}, {tuple(other.shape)}"


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def call(op: OpOverload, reference: Callable[..., Any], *tensors: Any) -> Any:
    """Calls ``op`` from a public function, past three shortcomings of ``torch.library.register_autograd``.

    Its autograd kernel is Python and runs even where no gradient is wanted, which doubles the price of a small eager
    call (benchmarks/host_time.py); plain tensors that need no gradient skip it. It drops forward-mode tangents without
    a word, and it raises under ``torch.func.grad``: in both the reference is called, which has all derivatives.
    """
    if torch.compiler.is_compiling():
        return op(*tensors)
    if _compat.is_transformed():
        return reference(*tensors)
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (
            type(tensor) not in _PLAIN or (tensor.requires_grad and torch.is_grad_enabled())
        ):
            meet(*tensors)
            return op(*tensors)
    if _compat.below_autograd is None:
        return op(*tensors)
    with _compat.below_autograd():
        return op(*tensors)


def bind(
    op: OpOverload,
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
    vmap: Callable[..., Any] | None = None,
    tags: Sequence[str] = ("needs_contiguous_strides",),
) -> None:
    """Registers the Python half of an op whose schema and kernels are native.

    The layout tag is always explicit: torch's default changed between versions, and an op that a compiler pass
    inserts gets none at all. ``needs_contiguous_strides`` costs nothing where Inductor may still choose the producer's
    layout, and fuses the copy into the producer where it may not. ``pt2_compliant_tag`` says that the op passes
    opcheck, which the tests verify.
    """
    name = qualified_name(op)
    torch.library.register_fake(name, fake)
    torch.library.register_autograd(name, backward, setup_context=setup_context)
    if vmap is not None:
        torch.library.register_vmap(name, vmap)
    _compat.add_tags(op, "pt2_compliant_tag", *tags)


def bind_backward(
    op: OpOverload, reference: Callable[..., Any], *, fake: Callable[..., Any], vmap: Callable[..., Any] | None = None
) -> None:
    """``bind`` for a backward op, whose own gradient is that of its reference: the second derivative."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in inputs))
        ctx.others = tuple(None if isinstance(value, torch.Tensor) else value for value in inputs)

    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [b if a is None else a for a, b in zip(ctx.saved_tensors, ctx.others, strict=True)]
        return vector_jacobian_product(reference, inputs, grads)

    bind(op, fake=fake, backward=backward, setup_context=setup_context, vmap=vmap)


def vector_jacobian_product(
    reference: Callable[..., Any], inputs: Sequence[Any], grads: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of ``reference(*inputs)`` for the incoming ``grads``, differentiable themselves where grad mode is on.

    Gives None for an input that is not a floating tensor. The second derivative of every op goes through here: the
    backward op's gradient is that of the reference's own vector-Jacobian product.
    """
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        variables = [_variable(value, differentiable) for value in inputs]
        outputs = reference(*variables)
        pairs = [
            (out, grad)
            for out, grad in zip(outputs if isinstance(outputs, tuple) else (outputs,), grads, strict=True)
            if grad is not None and out.requires_grad
        ]
        wanted = [v for v in variables if isinstance(v, torch.Tensor) and v.requires_grad]
        if not pairs:
            return (None,) * len(variables)
        found = iter(
            torch.autograd.grad(
                [out for out, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=differentiable,
                allow_unused=True,
            )
        )
    return tuple(next(found) if isinstance(v, torch.Tensor) and v.requires_grad else None for v in variables)


def _variable(value: Any, differentiable: bool) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    # A view keeps the connection to the graph that a third derivative needs; a detached leaf is enough otherwise.
    return value.view_as(value) if differentiable and value.requires_grad else value.detach().requires_grad_()


def batch_first(in_dims: Sequence[int | None], batch_size: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For vmap rules: every tensor with the mapped dimension first, expanded where it is not mapped."""
    return tuple(
        tensor.unsqueeze(0).expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    )


_sharding_rules: list[tuple[OpOverload, Callable[..., Any]]] = []


def shard(op: OpOverload, rule: Callable[..., Any]) -> None:
    """Keeps a DTensor sharding rule for ``op``; it is handed to torch once ``torch.distributed.tensor`` is loaded.

    Importing that module takes longer than all of opgraft, so it is never imported from here.
    """
    _sharding_rules.append((op, rule))
    if "torch.distributed.tensor" in sys.modules:
        register_sharding_rules()


def register_sharding_rules() -> None:
    """Hands every op's sharding rule to DTensor. The public functions do so by themselves when they meet a DTensor;
    call it once before ``torch.compile`` or before calling ``torch.ops.opgraft`` directly with DTensors."""
    if not _sharding_rules:
        return
    from torch.distributed.tensor.experimental import register_sharding

    while _sharding_rules:
        op, rule = _sharding_rules.pop()
        register_sharding(op)(rule)


def meet(*tensors: Any) -> None:
    """Registers the sharding rules at the first DTensor that a public function is given."""
    if _sharding_rules and any(_compat.is_dtensor(t) for t in tensors):
        register_sharding_rules()


def pointwise_rule(inputs: int, outputs: int = 1) -> Callable[..., Any]:
    """The sharding rule of an op whose elements are independent: any dimension may be split, all tensors alike."""

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Replicate, Shard

        dims = args[0].ndim
        return [([p] * outputs, [p] * inputs) for p in [Replicate(), *(Shard(dim) for dim in range(dims))]]

    return rule
