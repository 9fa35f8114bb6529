"""Overloads that take memory for their result, so that a compiler plans it.

torch 2.14 and newer lower a functional op to the overload of the same arguments that carries a tag for it. Its result
is then a buffer like any other: reused, and not allocated by the op. A kernel finds the planned tensor where it
allocates (csrc/support/planned.h).

Not every op has one. What torch (to 2.15, ``FallbackKernel.create``) generates for such an overload passes all
tensors first and then everything else, None among it: that is the right order only where a tensor that may be left out
is the last of the tensors, and numbers follow. And where an op has several results of which one is not used, it names a
buffer that it has taken away.
"""

from __future__ import annotations

from typing import Any

import torch

from opgraft import _compat
from opgraft.registry import specs


def can_be_planned(schema: torch.FunctionSchema) -> bool:
    """True for a functional op with one result whose arguments torch puts into the right order."""
    types = [str(argument.type) for argument in schema.arguments]
    places = [i for i, type_ in enumerate(types) if "Tensor" in type_]
    maybe_none = [i for i in places if types[i].startswith("Optional")]
    return (
        not schema.is_mutable
        and len(schema.returns) == 1
        and places == list(range(len(places)))
        and maybe_none in ([], places[-1:])
    )


def schema_of(schema: torch.FunctionSchema) -> str:
    """The schema of the ``out`` overload for that of a functional op: the same arguments, and the result's tensor."""
    name, _, rest = str(schema).partition("::")[2].partition("(")
    return f"{name}.out({rest.rpartition(') -> ')[0]}, *, Tensor(a!) out) -> Tensor(a!)"


def _fake(*_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
    return out


def define() -> torch.library.Library | None:
    """Defines one for every op of this package that can have it; the library that is returned has to be kept.

    Only where a compiler takes them: without torch's tag, which invites it, nothing that calls one could be compiled.
    """
    if not _compat.plans_results():
        return None
    library = torch.library.Library("opgraft", "FRAGMENT")
    for spec in specs("opgraft"):
        schema = spec.op._schema
        if can_be_planned(schema):
            library.define(schema_of(schema), tags=(torch.Tag.out,))
            torch.library.register_fake(f"{schema.name}.out", _fake, lib=library)
    return library
