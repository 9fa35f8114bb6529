"""What can be read off an op without calling it: its schema, its kernels, its tags, where it was registered."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._ops import OpOverload

from opgraft.diagnostics import _compat
from opgraft.diagnostics.collect.place import place
from opgraft.diagnostics.model import Location
from opgraft.registry import OpSpec, find, qualified_name


@dataclass(frozen=True)
class Argument:
    """One argument of a schema. ``kind`` is the type's text, such as ``Tensor``, ``SymInt`` or ``int[]``."""

    name: str
    kind: str
    keyword: bool
    default: Any
    has_default: bool
    written: bool

    @property
    def is_tensor(self) -> bool:
        return self.kind.startswith("Tensor")

    @property
    def is_size(self) -> bool:
        return self.kind.startswith("SymInt")

    @property
    def is_int(self) -> bool:
        return self.kind.startswith("int")


@dataclass(frozen=True)
class OpFacts:
    """An overload and what is known of it before it is called."""

    op: OpOverload
    spec: OpSpec | None

    @property
    def name(self) -> str:
        return qualified_name(self.op)

    @cached_property
    def schema(self) -> str:
        return _compat.schema_text(self.op)

    @property
    def namespace(self) -> str:
        return self.name.partition("::")[0]

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        kinds = _kinds(_compat.schema_text(self.op))
        return tuple(
            Argument(
                name=argument.name,
                kind=kinds.get(argument.name, str(argument.type)),
                keyword=argument.kwarg_only,
                default=argument.default_value,
                has_default=argument.has_default_value(),
                written=argument.alias_info is not None and argument.alias_info.is_write,
            )
            for argument in self.op._schema.arguments
        )

    def in_order(self, positional: int, keywords: Iterable[str]) -> list[Argument]:
        """The arguments of a call in the order of ``case.given``: so many by position, then those with these names."""
        by_name = {argument.name: argument for argument in self.arguments}
        return [*self.arguments[:positional], *(by_name[name] for name in keywords)]

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Names of the arguments that the schema says are written."""
        return tuple(argument.name for argument in self.arguments if argument.written)

    @cached_property
    def returns_alias(self) -> bool:
        """The schema says that a result is (a view of) an argument."""
        return any(result.alias_info is not None for result in self.op._schema.returns)

    @cached_property
    def returns(self) -> int:
        return len(self.op._schema.returns)

    def has(self, key: str) -> bool:
        """Is a kernel registered under this dispatch key itself?"""
        return _compat.has_kernel(self.op.name(), key)

    @property
    def is_composite(self) -> bool:
        return self.has("CompositeImplicitAutograd")

    @property
    def has_autograd(self) -> bool:
        return any(self.has(key) for key in ("Autograd", "AutogradCPU", "AutogradCUDA"))

    def tagged(self, name: str) -> bool:
        tag = getattr(torch.Tag, name, None)
        return tag is not None and tag in self.op.tags

    @cached_property
    def location(self) -> Location:
        """Where the op was registered, as far as that can be known: its Python kernel, or the C++ line."""
        kernel = _compat.python_kernel(self.op)
        if kernel is not None:
            code = inspect.unwrap(kernel).__code__ if hasattr(inspect.unwrap(kernel), "__code__") else None
            if code is not None:
                return place(code.co_filename, code.co_firstlineno, code.co_name)
        path, line = _compat.registered_at(self.op)
        return place(path or self.name, line, self.name)

    @cached_property
    def in_python(self) -> bool:
        return bool(getattr(self.op, "_defined_in_python", False))


def _kinds(schema: str) -> dict[str, str]:
    """The types in a schema's text by argument: ``"Tensor(a!)? x=None"`` gives ``{"x": "Tensor?"}``."""
    inside = schema[schema.index("(") + 1 : schema.rindex("->")].rstrip().removesuffix(")")
    found = {}
    for kind, name in re.findall(
        r"([A-Za-z_.0-9]+(?:\([^)]*\))?(?:\[\d*\])?\??(?:\[\d*\])?\??) (\w+)(?==|,|$)", inside
    ):
        found[name] = re.sub(r"\([^)]*\)", "", kind)
    return found


def facts_of(op: OpOverload) -> OpFacts:
    return OpFacts(op, find(op))
