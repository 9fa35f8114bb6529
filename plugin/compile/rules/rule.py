"""What a rule is, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Match:
    """An idiom found: ``root`` has the value of ``op(*args)``, and ``nodes`` (``root`` among them) compute it."""

    root: torch.fx.Node
    nodes: tuple[torch.fx.Node, ...]
    args: tuple[Any, ...]
    cast: torch.dtype | None = None


@dataclass(frozen=True)
class Rule:
    """``match(node)`` is asked for every node of a graph and gives a match or, for anything in doubt, None."""

    name: str
    op: str
    match: Callable[[torch.fx.Node], Match | None]
