"""A failed guard's text -> the line of source that uses the guarded value."""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache

from opgraft.diagnostics.collect.place import place
from opgraft.diagnostics.model import Location

_COMMENT = re.compile(r"#\s+(?P<path>[^\s#][^#]*?\.py):(?P<line>\d+) in (?P<name>\S+)\s*$")
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_TENSOR = re.compile(r"tensor '(?P<source>.+?)' (?:\w+ )+mismatch")
_BARE = re.compile(r"^(?:\S+/\d+: )?(?P<name>[A-Za-z_]\w*(?:\.\w+)*) (?:==|!=|is|in)\b")
_SOURCE = re.compile(r"\b[LG]\[['\"](?P<name>\w+)['\"]\](?P<rest>[\w.\[\]'\"]*)")
_ATTRIBUTE = re.compile(r"\.(\w+)|\['(\w+)'\]")


def guarded_value(reason: str, frame: Location | None) -> Location | None:
    """The place that torch names in the guard's comment; else where the frame's code first uses the guarded name."""
    told = [f for f in _FRAME.finditer(reason.partition("User stack trace")[2]) if "/torch/" not in f["path"]]
    if told:
        return place(told[-1]["path"], int(told[-1]["line"]), told[-1]["name"])
    for line in reason.splitlines():
        found = _COMMENT.search(line)
        if found and frame is not None and found["path"] in (frame.path, frame.path.rpartition("/")[2]):
            return place(frame.path, int(found["line"]), found["name"])
        if found and found["path"].startswith("/") and "/torch/" not in found["path"]:
            return place(found["path"], int(found["line"]), found["name"])
    if frame is None or not frame.line:
        return None
    for name in guarded_names(reason):
        line_number = first_use(frame.path, frame.line, name)
        if line_number:
            return place(frame.path, line_number, frame.function)
    return frame


def guarded_names(reason: str) -> tuple[str, ...]:
    """Names of the guarded value as source spells them, the longest first: ``L['self'].scale`` is ``self.scale``."""
    tensor = _TENSOR.search(reason)
    text = tensor["source"] if tensor else reason
    found = _SOURCE.search(text)
    if not found:
        bare = _BARE.match(text)
        name = text if tensor else bare["name"] if bare else ""
        return (name,) if name and all(part.isidentifier() for part in name.split(".")) else ()
    parts = [found["name"]]
    for attribute, key in _ATTRIBUTE.findall(found["rest"]):
        if attribute not in (
            "size",
            "stride",
            "_modules",
            "_parameters",
            "_buffers",
            "__dict__",
            "__func__",
            "forward",
        ):
            parts.append(attribute or key)
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return tuple(name for name in names if name != "self") or tuple(names)


def first_use(path: str, first_line: int, name: str) -> int:
    """The first line in the body of the function that begins at ``first_line`` where ``name`` is read; 0 if none is."""
    lines = linecache.getlines(path)
    function = _function_at("".join(lines), first_line) if lines else None
    if function is None:
        return 0
    found = [
        node.lineno
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == name
    ]
    return min(found, default=0)


def only_raises(path: str, line: int) -> bool:
    """True where the ``if`` whose test is at ``line`` does nothing but raise: a check, not a choice."""
    tree = _tree("".join(linecache.getlines(path)))
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.If) and node.lineno <= line <= (node.test.end_lineno or node.lineno):
            return all(isinstance(statement, ast.Raise) for statement in node.body) and not node.orelse
    return False


@lru_cache(maxsize=64)
def _function_at(source: str, first_line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    tree = _tree(source)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first <= first_line <= node.body[0].lineno:
                return node
    return None


@lru_cache(maxsize=16)
def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
