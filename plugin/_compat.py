"""Every probe of a private torch name of the plugin, and nothing else. A missing name takes one thing away, by name."""

from __future__ import annotations

from typing import Any

import torch


def add_tags(op: torch._ops.OpOverload, *names: str) -> tuple[str, ...]:
    """Adds torch.Tag members to an overload whose schema is defined in C++; returns those that this torch lacks.

    The stable ABI takes tags in C++ from 2.12 on, above this project's floor, and torch has no public way to tag an
    overload after its definition. ``OpOverload.tags`` reads the list ``_tags`` on 2.11 to 2.15.
    """
    missing = []
    for name in names:
        tag = getattr(torch.Tag, name, None)
        tags = getattr(op, "_tags", None)
        if tag is None or not isinstance(tags, list):
            missing.append(name)
        elif tag not in tags:
            tags.append(tag)
    return tuple(missing)


def is_dtensor(value: Any) -> bool:
    """True for a DTensor, without importing torch.distributed.tensor."""
    return type(value).__name__ == "DTensor" and type(value).__module__.startswith("torch.distributed")


# Excludes the autograd keys on this thread while it lives: what torch itself does around a kernel. None where missing.
below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)


_functorch: Any = getattr(torch._C, "_functorch", None)


def is_transformed() -> bool:
    """True where a derivative is taken by a transform that ``torch.library.register_autograd`` cannot serve:
    forward mode (``torch.func.jvp``, ``torch.autograd.forward_ad``) or ``torch.func.grad`` at any level."""
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return True
    if _functorch is None or _functorch.maybe_current_level() is None:
        return False
    stack = _functorch.get_interpreter_stack() or ()
    return any(level.key() in (_functorch.TransformType.Grad, _functorch.TransformType.Jvp) for level in stack)
