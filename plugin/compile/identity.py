"""Digests of everything that decides which code a pass makes: torch's caches look at none of it by themselves."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from opgraft import _compat, library, registry
from opgraft.registry import OpSpec


def of_op(spec: OpSpec) -> str:
    """Changes with an op's schema, its native build, and the sources of its reference, fake and registrations."""
    return _of_op(spec, _compat.fake_kernel_of(spec.op), library.build_id() if spec.op.namespace == "opgraft" else "")


@lru_cache(1024)
def _of_op(spec: OpSpec, fake: Callable[..., Any] | None, build: str) -> str:
    found = hashlib.sha256(f"{spec.op._schema}{build}".encode())
    if spec.backward is not None:
        found.update(str(spec.backward._schema).encode())
    for function in (spec.reference, spec.public, fake):
        found.update(_source(function).encode())
    found.update(repr((spec.surrogate, [str(d) for d in spec.dtypes])).encode())
    return found.hexdigest()[:16]


def of_package() -> str:
    """Changes with any source file of the rules and passes, and with any record in the table of ops."""
    found = hashlib.sha256(_own_sources().encode())
    for spec in registry.specs():
        found.update(f"{spec.name}={of_op(spec)};".encode())
    return found.hexdigest()[:24]


@cache
def of_code() -> str:
    """Changes with any source file of the rules, passes and ops, and with the native build."""
    found = hashlib.sha256(f"{_own_sources()}{library.build_id()}".encode())
    folder = Path(__file__).parent.parent
    for path in sorted((*folder.glob("*.py"), *folder.glob("ops/*.py"))):
        found.update(path.read_bytes())
    return found.hexdigest()[:24]


@cache
def _own_sources() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _source(function: Callable[..., Any] | None) -> str:
    """The file that a function is written in, since its helpers count too; its code where there is no file."""
    function = inspect.unwrap(function) if function is not None else None
    if function is None:
        return ""
    try:
        path = inspect.getsourcefile(function)
    except TypeError:
        path = None
    content = _file_digest(path) if path else None
    return content if content is not None else _code(getattr(function, "__code__", None))


@cache
def _file_digest(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _code(code: Any) -> str:
    return "".join(_parts(code)) if code is not None else ""


def _parts(code: Any) -> Iterator[str]:
    yield code.co_code.hex()
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            yield from _parts(constant)
        else:
            yield repr(constant)
    yield repr(code.co_names)
