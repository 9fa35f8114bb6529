"""Registers the ops of a script again, in another process, without running the script.

A script that is still running on a GPU cannot be forked, and running it once more would train twice. Of its top-level
statements only those are executed that can matter to a registration: imports, definitions, constants, and calls that
speak of a library. What they raise is passed over; whoever asks looks whether the op is there.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

NAME = "__opgraft_main__"
# Words by which a call is known to register, load or build ops, or to make that possible.
REGISTERING = (
    "torch.library",
    "load_library",
    "cpp_extension",
    "load_inline",
    "Library",
    "custom_op",
    "register_",
    "impl_abstract",
    "describe",
    "triton_op",
    "ctypes",
    "CDLL",
    "sys.path",
    "define",
    "impl",
)
HARMLESS = (
    "getenv",
    "environ",
    "Path",
    "path.",
    "getLogger",
    "namedtuple",
    "TypeVar",
    "NewType",
    "partial",
    "lru_cache",
)


def _dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


class _Chooser:
    """Decides statement by statement; remembers which names hold a library, an op or a function that registers."""

    def __init__(self) -> None:
        self.registrars: set[str] = set()

    def registers(self, node: ast.AST) -> bool:
        """Does a call in here register something?"""
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                name = _dotted(call.func)
                if any(word in name for word in REGISTERING) or _root(call.func) in self.registrars:
                    return True
        return False

    def constant(self, node: ast.AST | None) -> bool:
        """An expression that computes no tensor: no call but harmless ones."""
        if node is None:
            return True
        calls = [_dotted(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)]
        return all(any(word in name for word in HARMLESS) or name in ("int", "float", "str", "len") for name in calls)

    def wanted(self, statement: ast.stmt) -> bool:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            return True
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            decorated = any(self.registers(ast.Expr(node)) or self._speaks(node) for node in statement.decorator_list)
            if decorated or self.registers(ast.Module(statement.body, [])):
                self.registrars.add(statement.name)
            return True
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            value = statement.value
            if value is not None and self.registers(value):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                self.registrars |= {target.id for target in targets if isinstance(target, ast.Name)}
                return True
            return self.constant(value)
        if isinstance(statement, ast.Expr):
            return self.registers(statement) or isinstance(statement.value, ast.Constant)
        return False

    def _speaks(self, node: ast.AST) -> bool:
        text = ast.unparse(node)
        return any(word in text for word in REGISTERING) or _root(node) in self.registrars


def _of_main(test: ast.AST) -> bool:
    return "__name__" in ast.unparse(test)


def statements(body: list[ast.stmt], chooser: _Chooser | None = None) -> Iterator[ast.stmt]:
    """The statements of a script that can matter to a registration, in order."""
    chooser = chooser or _Chooser()
    for statement in body:
        if isinstance(statement, ast.If) and not _of_main(statement.test) and chooser.constant(statement.test):
            kept = [list(statements(part, chooser)) for part in (statement.body, statement.orelse)]
            if any(kept):
                yield ast.copy_location(ast.If(statement.test, kept[0] or [ast.Pass()], kept[1]), statement)
        elif isinstance(statement, ast.Try):
            inner = [*statement.body, *statement.orelse, *statement.finalbody]
            inner += [part for handler in statement.handlers for part in handler.body]
            if any(chooser.wanted(part) for part in inner):
                yield statement
        elif isinstance(statement, ast.With) and any(chooser.wanted(part) for part in statement.body):
            if chooser.registers(statement):
                yield statement
        elif (isinstance(statement, ast.For) and chooser.registers(statement)) or chooser.wanted(statement):
            yield statement


def replay(path: str) -> ModuleType:
    """Executes what registers ops in the script at ``path``, as a module of another name than ``__main__``.

    Raises:
        OSError: the file cannot be read.
        SyntaxError: it is no Python.
    """
    source = Path(path).read_text(encoding="utf-8")
    tree = ast.parse(source, path)
    module = ModuleType(NAME)
    module.__file__ = path
    sys.modules[NAME] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    for statement in statements(tree.body):
        code = compile(ast.fix_missing_locations(ast.Module([statement], [])), path, "exec", dont_inherit=True)
        # A statement may need what was left out; the ops that are there in the end decide.
        with contextlib.suppress(Exception):
            exec(code, vars(module))
    return module
