"""A function put in place of an attribute for a while: how an unregistered kernel enters or leaves a model."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Swap:
    """``setattr(owner, name, function)`` while an arm is compiled and run, and the old value back afterwards.

    As ``raw=Swap(module, "gelu", kernel)`` it brings an unregistered kernel in beside a registered op. As a member of
    ``ops`` it takes one out: the model as it is becomes the ``raw`` arm, and ``function`` is the reference.

    Attributes:
        owner: a module, a class, an instance, or the dotted name of a module.
        name: the attribute that the model looks up when it calls the kernel.
        function: what stands there instead.
    """

    owner: Any
    name: str
    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"Swap: function is a {type(self.function).__name__}, expected something that can be called"
            )
        if not hasattr(self.target, self.name):
            raise AttributeError(
                f"Swap: {_name_of(self.target)} has no attribute {self.name!r} to put a function in place of"
            )

    @property
    def target(self) -> Any:
        return importlib.import_module(self.owner) if isinstance(self.owner, str) else self.owner

    @property
    def label(self) -> str:
        return f"{_name_of(self.target)}.{self.name}"

    @property
    def present(self) -> Callable[..., Any]:
        """What stands at the place now."""
        found: Callable[..., Any] = getattr(self.target, self.name)
        return found

    @contextlib.contextmanager
    def installed(self, function: Callable[..., Any] | None = None) -> Iterator[None]:
        """Puts ``function`` (by default the swap's own) there, and takes it away again."""
        target = self.target
        # An attribute that an instance inherits is deleted afterwards and not written into the instance.
        own = self.name in getattr(target, "__dict__", {})
        before = target.__dict__[self.name] if own else None
        setattr(target, self.name, function or self.function)
        try:
            yield
        finally:
            if own:
                setattr(target, self.name, before)
            else:
                delattr(target, self.name)


def _name_of(target: Any) -> str:
    return str(getattr(target, "__name__", type(target).__name__))
