"""Where a program speaks of an op, for calls that no trace can place: a warm compile cache replays them untraced."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from opgraft.diagnostics.collect.place import changeable, place
from opgraft.diagnostics.conform.lab.site import GENERATED, prefixes
from opgraft.diagnostics.model import Location

INSERTING = ("call_function", "replace_by_example", "register_replacement", "create_node")


def _modules() -> Iterator[tuple[ModuleType, Path]]:
    """The program's own modules with their sources, those of packages that the reader cannot change left out."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or "site-packages" in path:
            continue
        if changeable(path, prefixes()) and not any(word in path for word in GENERATED):
            yield module, Path(path)


def _tree(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _dotted(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def insertion(name: str) -> Location | None:
    """The statement with which the program's own code puts this op into a graph."""
    wanted = "torch.ops." + name.replace("::", ".")
    for _, path in _modules():
        tree = _tree(path)
        for node in _calls(tree) if tree is not None else ():
            inserts = _dotted(node.func).rpartition(".")[2] in INSERTING
            if inserts and any(_dotted(argument).startswith(wanted) for argument in node.args):
                return place(str(path), node.lineno)
    return None


def _names_of(module: ModuleType, name: str) -> set[str]:
    """What a module calls this op: variables that hold its ``custom_op`` object, a packet or an overload."""
    found = set()
    for variable, value in list(vars(module).items()):
        held = getattr(value, "_qualname", None) or getattr(value, "_qualified_op_name", None)
        held = held or getattr(getattr(value, "_schema", None), "name", None)
        if isinstance(held, str) and held == name:
            found.add(variable)
    return found


def call_site(name: str) -> Location | None:
    """The one statement of the program that calls this op; None where there are several, or none."""
    base = name.partition(".")[0]
    wanted = "torch.ops." + base.replace("::", ".")
    found = []
    for module, path in _modules():
        names = _names_of(module, base)
        tree = _tree(path)
        for node in _calls(tree) if tree is not None else ():
            dotted = _dotted(node.func)
            if dotted in names or dotted in (wanted, f"{wanted}.default"):
                found.append(place(str(path), node.lineno))
    return found[0] if len({(site.path, site.line) for site in found}) == 1 else None
