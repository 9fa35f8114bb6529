"""What the tracer was calling: the object behind its stand-in, described as plain data while the object is at hand."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from opgraft.diagnostics.collect.events import Argument, Called

_HOLDERS = ("value", "fn", "obj", "fn_cls")


def python_value(variable: Any) -> Any:
    """The Python object that one of the tracer's variables stands for, None where it has none."""
    for name in _HOLDERS:
        try:
            held = object.__getattribute__(variable, name)
        except AttributeError:
            continue
        if held is not None and "VariableTracker" not in {base.__name__ for base in type(held).__mro__}:
            return held
    return None


def describe(variable: Any, arguments: Any = (), keywords: Any = None, method: str = "") -> Called:
    """A :class:`Called` for a call of ``variable``; never raises, what cannot be known stays empty."""
    value = python_value(variable)
    kind = type(variable).__name__
    described = tuple(argument(item) for item in _listed(arguments)) + tuple(
        argument(item, name) for name, item in dict(keywords or {}).items()
    )
    if value is None:
        return Called(name=_variable_name(variable), variable=kind, method=method, arguments=described)
    subject = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    subject = subject.__func__ if isinstance(subject, MethodType) else subject
    module = _module(subject)
    return Called(
        name=_name(subject),
        module=module,
        type=type(subject).__name__,
        type_module=type(subject).__module__ or "",
        file=_file(subject, module),
        distribution=distribution_of(module),
        native=_is_native(subject),
        variable=kind,
        method=method,
        arguments=described,
        doc=_signature_line(subject),
    )


def argument(variable: Any, keyword: str = "") -> Argument:
    """One argument as the tracer saw it."""
    kind = type(variable).__name__
    if kind.startswith("Lazy"):
        if not variable.is_realized():
            return _plain(getattr(getattr(variable, "_cache", None), "value", None), keyword)
        variable = variable.realize()
        kind = type(variable).__name__
    if "TensorVariable" in {base.__name__ for base in type(variable).__mro__}:
        return Argument(
            type="Tensor",
            dtype=str(getattr(variable, "dtype", "") or "").replace("torch.", ""),
            shape=_shape(variable),
            requires_grad=bool(getattr(variable, "requires_grad", False)),
            keyword=keyword,
        )
    value = python_value(variable)
    items = vars(variable).get("items") if value is None and hasattr(variable, "__dict__") else None
    if isinstance(items, (list, tuple)) and any(argument(item).type == "Tensor" for item in items):
        return Argument(type="Tensor[]", keyword=keyword)
    if value is None:
        return Argument(type="NoneType" if kind == "ConstantVariable" else kind, keyword=keyword)
    return Argument(type=type(value).__name__, keyword=keyword)


def _plain(value: Any, keyword: str) -> Argument:
    """An argument that the tracer has not looked at yet: the Python value itself."""
    if any(base.__name__ == "Tensor" and base.__module__ == "torch" for base in type(value).__mro__):
        return Argument(
            type="Tensor",
            dtype=str(value.dtype).replace("torch.", ""),
            shape=tuple(int(size) for size in value.shape),
            requires_grad=bool(value.requires_grad),
            keyword=keyword,
        )
    return Argument(type=type(value).__name__, keyword=keyword)


def _shape(variable: Any) -> tuple[int | str, ...]:
    size = getattr(variable, "_size", None)
    if size is None:
        try:
            size = variable.proxy.node.meta["example_value"].shape
        except Exception:
            return ()
    return tuple(item if isinstance(item, int) else str(item) for item in size)


def _listed(arguments: Any) -> list[Any]:
    try:
        return list(arguments)
    except TypeError:
        return []


def _name(subject: Any) -> str:
    name = getattr(subject, "__qualname__", None) or getattr(subject, "__name__", None)
    return str(name) if isinstance(name, str) else type(subject).__qualname__


def _module(subject: Any) -> str:
    """The module that a reader would import: pybind11 functions and bound builtins know theirs only through
    ``__self__``."""
    module = getattr(subject, "__module__", None)
    owner = getattr(subject, "__self__", None)
    if isinstance(subject, BuiltinFunctionType) and isinstance(owner, ModuleType):
        return owner.__name__
    if isinstance(module, str) and module:
        return module
    if owner is not None and not isinstance(owner, ModuleType):
        return type(owner).__module__ or ""
    return type(subject).__module__ or ""


def _file(subject: Any, module: str) -> str:
    code = getattr(subject, "__code__", None)
    if code is not None:
        return str(code.co_filename)
    return str(getattr(sys.modules.get(module), "__file__", "") or "")


def _is_native(subject: Any) -> bool:
    if isinstance(subject, (FunctionType, MethodType)):
        return False
    if isinstance(subject, type):
        return not subject.__flags__ & (1 << 9) or subject.__module__ in ("builtins", "_ctypes")
    if isinstance(subject, BuiltinFunctionType):
        return True
    calls = [vars(base)["__call__"] for base in type(subject).__mro__ if "__call__" in vars(base)]
    return not (calls and isinstance(calls[0], FunctionType))


def _signature_line(subject: Any) -> str:
    """The first line of a native function's docstring, where pybind11 writes the signature."""
    doc = getattr(subject, "__doc__", None)
    return doc.strip().splitlines()[0][:200] if isinstance(doc, str) and doc.strip() and _is_native(subject) else ""


def _variable_name(variable: Any) -> str:
    for name in ("name", "fn_name", "method_name"):
        found = getattr(variable, name, None)
        if isinstance(found, str):
            return found
    return ""


@lru_cache(maxsize=1)
def _packages() -> dict[str, list[str]]:
    try:
        return dict(importlib.metadata.packages_distributions())
    except Exception:
        return {}


@lru_cache(maxsize=256)
def distribution_of(module: str) -> str:
    """``name version`` of the installed distribution that ships ``module``, "" where none claims it."""
    top = module.partition(".")[0]
    if not top or top in sys.stdlib_module_names or top == "__main__":
        return ""
    names = _packages().get(top, [])
    if not names:
        return ""
    try:
        return f"{names[0]} {importlib.metadata.version(names[0])}"
    except importlib.metadata.PackageNotFoundError:
        return names[0]
