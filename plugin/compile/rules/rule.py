"""What a rule is, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# ``emit(target, *args, **kwargs)`` puts a call in front of the idiom and gives its node.
Emit = Callable[..., torch.fx.Node]
# ``write(emit, *args)`` puts the op there, with the views and casts that its arguments and results need, and gives the
# nodes that take the places of ``outputs``, in that order.
Write = Callable[..., tuple[torch.fx.Node, ...]]


@dataclass(frozen=True)
class Match:
    """An idiom found.

    Attributes:
        outputs: the nodes whose values the op gives; most idioms have one.
        nodes: all nodes that compute them, the outputs among them, in the graph's order.
        args: the nodes and constants that the op is given.
        write: how the op is put there.
    """

    outputs: tuple[torch.fx.Node, ...]
    nodes: tuple[torch.fx.Node, ...]
    args: tuple[Any, ...]
    write: Write


@dataclass(frozen=True)
class Rule:
    """``match(node)`` is asked for every node of a graph and gives a match or, for anything in doubt, None.

    ``differentiable`` is False where the op gives no gradient: it then serves only where none is wanted.
    """

    name: str
    op: str
    match: Callable[[torch.fx.Node], Match | None]
    differentiable: bool = True
