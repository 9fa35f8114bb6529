"""Walking over an op's arguments and results: tensors, and lists, tuples and dicts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor replaced by ``function(tensor)``."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def leaves(value: Any) -> Iterator[Any]:
    """Everything in ``value`` that is no container, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of ``value``, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one that ``tensor`` addresses, both counted; 0 for an empty tensor."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_plain(tensor: torch.Tensor) -> bool:
    """A dense strided tensor, that can be taken apart into storage, strides and offset."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
