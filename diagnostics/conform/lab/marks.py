"""What a formula says of its own results: those without a gradient, by ``ctx.mark_non_differentiable``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from opgraft.diagnostics import _compat


@contextmanager
def marked() -> Iterator[list[torch.Tensor]]:
    """Collects the tensors that Python formulas mark as not differentiable meanwhile."""
    found: list[torch.Tensor] = []
    context = _compat.function_context()
    plain = context.mark_non_differentiable

    def mark(self: Any, *args: torch.Tensor) -> None:
        found.extend(args)
        plain(self, *args)

    context.mark_non_differentiable = mark
    try:
        yield found
    finally:
        context.mark_non_differentiable = plain
