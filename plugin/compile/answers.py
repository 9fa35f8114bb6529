"""What tensors without data say of a call: the same in every process, so that it is asked once and kept.

Whether a call fuses and what an op's fake gives follow from the call, from its arguments' facts, from torch and from
this package. Answers stand in the store's file beside the decisions, under the identity of all that; one whose question
is spelled otherwise, or that was given under another identity, is not found. Only what torch and this package define is
kept: a user's own function may change while its name stays.
"""

from __future__ import annotations

import hashlib
import operator
import types
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from typing import Any

import torch
from torch._ops import OpOverload

from opgraft import registry
from opgraft.compile import identity
from opgraft.compile.site import TensorFacts
from opgraft.compile.store import Store

_OWNERS = (operator, torch, torch.nn.functional, torch._C._nn, torch.special)
_DEVICES = ("cpu", "cuda")


class Answers:
    """Asks each question once a graph, and not at all where the store has the answer.

    Args:
        store: where answers are kept; none are where it is left out.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._here: dict[str, bool] = {}
        self._fresh: dict[str, dict[str, bool]] = {}

    @cached_property
    def _of(self) -> str:
        return _identity()

    def ask(self, question: str, device: str, answer: Callable[[], bool], *, keep: bool) -> bool:
        """The answer to a question about tensors of a device type.

        Args:
            answer: called where it is not known. What raises is a no, which is not kept.
            keep: the question means the same in every process.
        """
        if question not in self._here:
            self._here[question] = self._kept_or(question, device, answer) if keep else or_no(answer)
        return self._here[question]

    def _kept_or(self, question: str, device: str, answer: Callable[[], bool]) -> bool:
        if self._store is None or device not in _DEVICES:
            return or_no(answer)
        key = hashlib.sha256(question.encode()).hexdigest()[:24]
        known = self._store.answers(device, self._of).get(key)
        if isinstance(known, bool):
            return known
        try:
            found = answer()
        except Exception:
            return False
        self._fresh.setdefault(device, {})[key] = found
        return found

    def keep(self) -> None:
        """Puts what was asked anew into the store."""
        for device, fresh in self._fresh.items():
            if self._store is not None:
                self._store.keep(device, self._of, fresh)
        self._fresh = {}


def or_no(answer: Callable[[], bool]) -> bool:
    """The answer, or no where asking raises."""
    try:
        return answer()
    except Exception:
        return False


def _identity() -> str:
    """Changes with torch, with this package, and with settings that turn what a call runs."""
    parts = (torch.__version__, torch.version.git_version, identity.of_code(), *_settings())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _settings() -> tuple[Any, ...]:
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), autocast


class Word(str):
    """Text that is printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


def spelled(args: Any, word_of: Callable[[torch.fx.Node], Word]) -> str:
    """Arguments as text, with words in the place of nodes."""
    return repr(torch.fx.map_arg(args, word_of))


def fact_word(fact: Any) -> Word:
    """A tensor's facts, or a number, in short."""
    if isinstance(fact, TensorFacts):
        return Word(f"<{fact.dtype} {fact.shape} {fact.stride} {fact.device} {fact.requires_grad}>")
    return Word(f"<{fact!r}>")


def names(targets: Iterable[tuple[str, Any]]) -> tuple[str, bool]:
    """Calls (how a node calls, and what) by name, and whether the names mean the same in every process."""
    found = [(_name(kind, target), kind, target) for kind, target in targets]
    return ", ".join(name or f"{kind} {target}" for name, kind, target in found), all(name for name, _, _ in found)


def _name(kind: str, target: Any) -> str:
    """What torch or this package defines, by its name; empty for everything else."""
    if isinstance(target, OpOverload):
        if target.namespace in ("aten", "prims"):
            return str(target)
        spec = registry.find(target)
        own = spec is not None and str(getattr(spec.reference, "__module__", "")).startswith("opgraft.")
        return f"{target} {identity.of_op(spec)}" if spec is not None and own else ""
    return _torch_name(kind, target)


@cache
def _torch_name(kind: str, target: Any) -> str:
    if kind == "call_method":
        method = getattr(torch.Tensor, str(target), None)
        own = isinstance(method, (types.MethodDescriptorType, types.WrapperDescriptorType)) or _is_torchs(method)
        return f".{target}" if own else ""
    name = getattr(target, "__name__", "")
    owner = next((owner for owner in _OWNERS if getattr(owner, name, None) is target), None)
    plain = isinstance(target, types.BuiltinFunctionType) or _is_torchs(target)
    return f"{owner.__name__}.{name}" if owner is not None and plain else ""


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"
