"""Where a program speaks of an op, for calls that no trace can place: a warm compile cache replays them untraced."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from opgraft.diagnostics.collect.place import place
from opgraft.diagnostics.conform.lab.site import prefixes
from opgraft.diagnostics.model import Location

INSERTING = ("call_function", "replace_by_example", "register_replacement", "create_node")


def _files() -> Iterator[Path]:
    """Sources of the program's own modules, those of packages that the reader cannot change left out."""
    from opgraft.diagnostics.collect.place import changeable

    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if (
            isinstance(path, str)
            and path.endswith(".py")
            and "site-packages" not in path
            and changeable(path, prefixes())
        ):
            yield Path(path)


def _dotted(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def insertion(name: str) -> Location | None:
    """The statement with which the program's own code puts this op into a graph."""
    wanted = "torch.ops." + name.replace("::", ".")
    for path in _files():
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or _dotted(node.func).rpartition(".")[2] not in INSERTING:
                continue
            if any(_dotted(argument).startswith(wanted) for argument in node.args):
                return place(str(path), node.lineno)
    return None
