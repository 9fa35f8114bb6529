"""Swaps of one attribute, and a group of them that is done and undone as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class Swap:
    """``owner.name`` becomes ``new(old)``. ``owner`` is a module of Python or of torch; ``key`` tells swaps apart.

    ``check`` gives the difference that the swap makes and what is allowed, where running the module does not show it.
    """

    owner: Any
    name: str
    new: Callable[[Any], Any]
    check: Callable[[], tuple[float, float]] | None = None

    @property
    def key(self) -> object:
        return id(self.owner), self.name


@dataclass
class Change:
    """The swaps made for one module of a model."""

    name: str
    replaced: tuple[str, ...]
    swaps: tuple[Swap, ...]
    difference: float = 0.0
    _old: list[Any] = field(default_factory=list)

    def do(self) -> None:
        for swap in self.swaps:
            self._old.append(vars(swap.owner).get(swap.name, _ABSENT))
            setattr(swap.owner, swap.name, swap.new(getattr(swap.owner, swap.name, None)))

    def undo(self) -> None:
        for swap in reversed(self.swaps):
            old = self._old.pop()
            if old is _ABSENT:
                delattr(swap.owner, swap.name)
            else:
                setattr(swap.owner, swap.name, old)
