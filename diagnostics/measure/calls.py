"""The calls that an op really gets in one step: arguments with their layouts and values, and how often each comes.

Values are kept, not only shapes: labels, offsets and masks cannot be made up, and data moves clocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from opgraft.diagnostics.measure.sites import is_custom
from opgraft.diagnostics.measure.subject import tensors_in
from opgraft.diagnostics.measure.swap import Swap
from opgraft.registry import qualified_name


@dataclass
class Call:
    """One kind of call. ``count`` is how many of it one step makes; ``gradients`` marks the arguments that need one."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    signature: str
    count: int = 1

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in tensors_in((self.args, self.kwargs)))

    def copy(self) -> Call:
        """The same call on fresh memory with the same strides; needed gradients are needed again."""
        args, kwargs = pytree.tree_map(
            lambda x: _copied(x) if isinstance(x, torch.Tensor) else x, (self.args, self.kwargs)
        )
        return Call(self.op, args, kwargs, self.signature, self.count)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        # An expanded tensor has several indices on one element: its copy is filled through the storage it spans.
        if any(s == 0 for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
            fresh = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            fresh.copy_(tensor)
    return fresh.requires_grad_(tensor.requires_grad)


def signature_of(args: Any, kwargs: Any) -> str:
    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}{'g' if value.requires_grad else ''}"
        return repr(value)

    return " ".join(one(leaf) for leaf in pytree.tree_leaves((args, kwargs)))


class _Recorder(TorchDispatchMode):
    def __init__(self, ops: frozenset[str], note: Callable[[str, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops, self.note = ops, note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and (name := qualified_name(func)) in self.ops:
            self.note(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def capture(step: Callable[[], Any], ops: frozenset[str], swaps: tuple[Swap, ...] = ()) -> tuple[Call, ...]:
    """Runs one eager step and returns the distinct calls of ``ops`` and of the functions that ``swaps`` stand for.

    Memory: one copy of the arguments of every distinct call.
    """
    found: dict[tuple[str, str], Call] = {}

    def note(name: str, args: Any, kwargs: Any) -> None:
        key = (name, signature_of(args, kwargs))
        if key in found:
            found[key].count += 1
        else:
            found[key] = Call(name, tuple(args), dict(kwargs), key[1]).copy()

    def watched(swap: Swap) -> Callable[..., Any]:
        real = swap.present

        def call(*args: Any, **kwargs: Any) -> Any:
            note(swap.label, args, kwargs)
            return real(*args, **kwargs)

        return call

    with _installed(swaps, watched), _Recorder(ops, note):
        step()
    return tuple(found.values())


class _Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, tuple[torch._ops.OpOverload, Call]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and is_custom(func):
            name = qualified_name(func)
            if name not in self.found:
                call = Call(name, tuple(args), dict(kwargs or {}), signature_of(args, kwargs)).copy()
                self.found[name] = (func, call)
        return func(*args, **(kwargs or {}))


def dispatched(turn: Callable[[], Any]) -> dict[str, tuple[torch._ops.OpOverload, Call]]:
    """The custom ops that ``turn`` runs, those of its backward included, by name, each with its first call."""
    mode = _Dispatched()
    with mode:
        turn()
    return mode.found


@contextlib.contextmanager
def _installed(swaps: tuple[Swap, ...], make: Callable[[Swap], Callable[..., Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for swap in swaps:
            stack.enter_context(swap.installed(make(swap)))
        yield
