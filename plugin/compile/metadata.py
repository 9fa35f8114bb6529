"""What the graph knows about a node's value. Anything unknown gives None, and a site with a None is left alone."""

from __future__ import annotations

from typing import Any

import torch

from opgraft import _compat
from opgraft.compile.site import TensorFacts


def value_of(node: Any) -> Any:
    """The example value that Dynamo keeps for a node: a fake tensor, a symbolic number, a tuple; None if unknown."""
    return node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None


def is_plain(value: Any) -> bool:
    """True for a dense tensor that is no subclass (DTensor, nested, quantised): those are left to the compiler."""
    return isinstance(value, torch.Tensor) and _compat.is_plain_fake(value) and value.layout == torch.strided


def facts_of(node: Any) -> TensorFacts | None:
    """Shape, strides, dtype, device of a node's tensor; None where it is no plain tensor or a size has no hint."""
    return facts(value_of(node))


def facts(value: Any) -> TensorFacts | None:
    if not is_plain(value):
        return None
    shape = [number(s) for s in value.shape]
    stride = [number(s) for s in value.stride()]
    if any(s is None for s in (*shape, *stride)):
        return None
    return TensorFacts(
        shape=tuple(s for s in shape if s is not None),
        stride=tuple(s for s in stride if s is not None),
        dtype=value.dtype,
        device=value.device,
        requires_grad=value.requires_grad,
        dynamic=tuple(i for i, s in enumerate(value.shape) if isinstance(s, torch.SymInt)),
    )


def number(value: Any) -> int | None:
    """An integer, or the hint of a symbolic one; None where it has none (its value depends on data)."""
    if isinstance(value, torch.SymInt):
        return _compat.hint(value)
    return int(value) if isinstance(value, int) else None


def same_value(left: Any, right: Any) -> bool:
    """True where two example values agree in shape, strides, dtype and device, symbols compared as symbols."""
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(same_value(a, b) for a, b in zip(left, right, strict=True))
    if not (is_plain(left) and is_plain(right)):
        return left is None and right is None
    return left.dtype == right.dtype and left.device == right.device and same_shape(left, right)


def same_shape(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True where two shapes are the same numbers or symbols."""
    return left.dim() == right.dim() and _same_sizes(left.shape, right.shape)


def is_static(value: torch.Tensor) -> bool:
    """True where every size is a number."""
    return not any(isinstance(size, torch.SymInt) for size in value.shape)


def same_strides(left: Any, right: Any) -> bool:
    """True where the strides of two tensors agree. A dimension of size one has no stride to speak of."""
    pairs = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(same_size(a, b) or same_size(size, 1) for size, a, b in pairs)


def _same_sizes(left: Any, right: Any) -> bool:
    return all(same_size(a, b) for a, b in zip(left, right, strict=True))


def same_size(left: Any, right: Any) -> bool:
    """Equal without a guard: the same number, or the same expression."""
    if isinstance(left, torch.SymInt) or isinstance(right, torch.SymInt):
        return _compat.expression(left) == _compat.expression(right)
    return bool(left == right)
