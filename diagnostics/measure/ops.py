"""Which ops are compared: what a user may write for one, and how they are found where nobody named any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft.diagnostics.measure.arms import make_entry
from opgraft.diagnostics.measure.sites import SiteBackend, overload_of
from opgraft.diagnostics.measure.subject import Subject, make_step
from opgraft.diagnostics.measure.swap import Swap
from opgraft.registry import OpSpec, find, qualified_name, resolve, specs


def name_of(op: Any) -> str:
    """``ns::op`` of whatever names an op: a name, an overload, a packet, a ``custom_op``, a record, a public function.

    Raises:
        TypeError: it names none.
        LookupError: no such op is registered.
    """
    if isinstance(op, str):
        return qualified_name(resolve(op.replace(".", "::", 1) if "::" not in op else op))
    if isinstance(op, OpSpec):
        return op.name
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        found = overload_of(op)
        if found is not None:
            return qualified_name(found)
    own = getattr(op, "_opoverload", None)
    if isinstance(own, OpOverload):
        return qualified_name(own)
    for spec in specs():
        if spec.public is op or (
            getattr(op, "__module__", None) == getattr(spec.reference, "__module__", "")
            and (getattr(op, "__name__", None) == spec.name.partition("::")[2])
        ):
            return spec.name
    raise TypeError(
        f"compare: {op!r} in ops is neither an op nor the name of one: write 'ns::op', torch.ops.ns.op, or "
        "Swap(module, 'function', reference) for a function that is not registered"
    )


def split(ops: Iterable[Any]) -> tuple[tuple[str, ...], tuple[Swap, ...]]:
    """Names of the registered ops, each once, and the unregistered ones."""
    names: dict[str, None] = {}
    swaps = []
    for op in [ops] if isinstance(ops, (str, Swap, OpOverload, OpOverloadPacket, OpSpec)) else list(ops):
        if isinstance(op, Swap):
            swaps.append(op)
        else:
            names[name_of(op)] = None
    return tuple(names), tuple(swaps)


def references_for(
    names: Iterable[str], given: Mapping[Any, Callable[..., Any]] | None
) -> dict[str, Callable[..., Any]]:
    """A reference for every op: the user's own first, then the op's record.

    Raises:
        LookupError: an op has none.
    """
    own = {name_of(op): function for op, function in (given or {}).items()}
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        spec = find(name)
        if name in own:
            found[name] = own[name]
        elif spec is not None:
            found[name] = spec.reference
        else:
            raise LookupError(
                f"compare: {name} has no reference to be compared with: describe it, opgraft.describe({name!r}, "
                f"reference), or pass references={{{name!r}: function}}"
            )
    return found


def discover(subject: Subject) -> tuple[str, ...]:
    """Every op with a record that the model's graphs call. Traces the model once, and compiles nothing.

    Raises:
        LookupError: there is none.
    """
    backend = SiteBackend(lambda module, inputs, **_: module.forward, {})
    step = make_step(subject, torch.compile(make_entry(subject.model, "discover"), backend=backend))
    step()
    called = dict.fromkeys(site.op for site in backend.sites)
    known = tuple(name for name in called if find(name) is not None)
    if not known:
        seen = f"it calls {', '.join(called)}, of which none is described" if called else "it calls no custom op"
        raise LookupError(
            f"compare: no op with a reference was found in the model ({seen}): name it in ops, or describe it"
        )
    return known
