"""Backwards of ``torch.autograd.Function`` that write their incoming gradient or a saved tensor.

Read off the source: in eager the write reaches every other user of that gradient, compiled it does not.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from opgraft.diagnostics.collect.place import changeable, place
from opgraft.diagnostics.conform.lab.incidents import make
from opgraft.diagnostics.conform.lab.site import prefixes
from opgraft.diagnostics.model import Finding

VIEWS = ("view", "reshape", "t", "transpose", "permute", "flatten", "squeeze", "unsqueeze", "detach", "data", "narrow")


def _subclasses(kind: type) -> Iterator[type]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _root(node: ast.AST) -> str:
    """The variable behind views and parts of it: ``grad`` of ``grad.view(-1)[0]``."""
    while True:
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in VIEWS):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS:
            node = node.func.value
        else:
            return node.id if isinstance(node, ast.Name) else ""


def _reads_saved(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == "saved_tensors" for part in ast.walk(node))


def writes(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Lines of a backward that write what is not its own, and what they write."""
    foreign = {argument.arg: "its incoming gradient" for argument in function.args.args[1:]}
    if function.args.vararg is not None:
        foreign[function.args.vararg.arg] = "its incoming gradient"
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
                for name in names:
                    if isinstance(name, ast.Name):
                        if _reads_saved(node.value):
                            foreign[name.id] = "a saved tensor"
                        elif _root(node.value) in foreign and not isinstance(node.value, ast.BinOp):
                            foreign[name.id] = foreign[_root(node.value)]
                        elif name.id in foreign:
                            # Rebound to something of its own, such as grad = grad.clone().
                            del foreign[name.id]
                    elif isinstance(name, ast.Subscript) and _root(name) in foreign:
                        yield node.lineno, foreign[_root(name)]
        elif isinstance(node, ast.AugAssign) and _root(node.target) in foreign:
            yield node.lineno, foreign[_root(node.target)]
        elif isinstance(node, ast.Call):
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            in_place = method.endswith("_") and not method.endswith("__") and method != "requires_grad_"
            if in_place and isinstance(node.func, ast.Attribute) and _root(node.func.value) in foreign:
                yield node.lineno, foreign[_root(node.func.value)]
            for keyword in node.keywords:
                if keyword.arg == "out" and _root(keyword.value) in foreign:
                    yield node.lineno, foreign[_root(keyword.value)]


def _definition(path: str, name: str, line: int) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first <= line <= (node.end_lineno or line):
                return node
    return None


def writing_backwards() -> Iterator[Finding]:
    """One finding for each ``autograd.Function`` of the program whose backward writes what is not its own."""
    for kind in _subclasses(torch.autograd.Function):
        backward: Any = vars(kind).get("backward")
        code = getattr(inspect.unwrap(getattr(backward, "__func__", backward) or len), "__code__", None)
        if code is None or "site-packages" in code.co_filename or not changeable(code.co_filename, prefixes()):
            continue
        function = _definition(code.co_filename, code.co_name, code.co_firstlineno)
        if function is None:
            continue
        for line, what in writes(function):
            yield make(
                "undeclared-mutation",
                f"the backward of {kind.__name__} writes {what}, which others read too",
                place(code.co_filename, line, code.co_name),
                "",
                "make-functional",
            )
            break
