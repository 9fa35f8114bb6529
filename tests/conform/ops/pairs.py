"""Pairs of an op that breaks one rule and its mended twin, and what registers them: ``PAIRS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NS = "faulty"


@dataclass(frozen=True)
class Pair:
    """A check, the kind of what it finds, the op that fails it and the twin that passes.

    Attributes:
        notes: the finding is no more than a note.
        setup: is called before either is examined.
        cases: arguments of one call, by the op's short name, where the schema does not tell them.
    """

    check: str
    kind: str
    bad: str
    good: str
    notes: bool = False
    thorough: bool = False
    setup: Callable[[], None] | None = None
    cases: dict[str, tuple[Any, ...]] = field(default_factory=dict)


PAIRS: dict[str, Pair] = {}
lib = torch.library.Library(NS, "DEF")


def add(check: str, bad: str, good: str, kind: str = "", name: str = "", **more: Any) -> None:
    names = [word if "::" in word else f"{NS}::{word}" for word in (bad, good)]
    PAIRS[name or check] = Pair(check, kind or check, *names, **more)


def op(name, fn, mutates=(), fake="like", backward=None, setup=None, tags=()):
    """A custom op with a fake (contiguous, like the first argument) and a gradient."""
    made = torch.library.custom_op(f"{NS}::{name}", fn, mutates_args=mutates, tags=tags)
    if fake == "like":
        made.register_fake(lambda x, *rest: x.new_empty(x.shape))
    elif fake is not None:
        made.register_fake(fake)
    if backward is not None:
        made.register_autograd(backward, setup_context=setup)
    return made


def save_first(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def double_backward_rule(ctx, grad):
    return 2 * grad


def plain(name: str, function: Callable[..., object], schema: str = "(Tensor x) -> Tensor", tags=(), fake=None) -> None:
    lib.define(name + schema, tags=tags)
    lib.impl(name, function, "CPU")
    torch.library.register_fake(f"{NS}::{name}", fake or (lambda x, *rest: x.new_empty(x.shape)), lib=lib)


def double(x: Tensor) -> Tensor:
    return x.contiguous() * 2


op("good_double", double, backward=double_backward_rule, setup=lambda ctx, inputs, output: None)
