"""Where ``torch.compile`` might have been meant, in a program that compiled nothing. Reads the source, runs nothing."""

from __future__ import annotations

import ast
from pathlib import Path

from opgraft.diagnostics.collect.launch import Target


def advice(target: Target) -> str:
    """One sentence about the program's own use of torch.compile, "" where the source cannot be read."""
    if target.kind == "module":
        return "If the module means to compile a model, call what torch.compile returns."
    path = target.name.rpartition(":")[0] if target.kind == "function" else target.name
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    decorators = [found for node in ast.walk(tree) for found in getattr(node, "decorator_list", ())]
    compiles = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_compile(node.func)]
    compiles += [found for found in decorators if is_compile(found)]
    for statement in ast.walk(tree):
        if (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and is_compile(statement.value.func)
        ):
            return (
                f"Line {statement.lineno} calls torch.compile and throws its result away: assign it, and call that, "
                "or use model.compile()."
            )
    for statement in ast.walk(tree):
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Call)
            and is_compile(statement.value.func)
        ):
            for name in (target.id for target in statement.targets if isinstance(target, ast.Name)):
                if not _is_used(tree, name):
                    return (
                        f"Line {statement.lineno} compiles {name}, which is never called: call {name} in place of "
                        "the original."
                    )
    if compiles:
        return (
            f"Line {compiles[0].lineno} has torch.compile, but what it returned was not called, or held no tensor "
            "operation."
        )
    model = _first_model(tree)
    if model is not None:
        where = f"line {model.lineno}: `{ast.unparse(model)[:80]}`"
        return f"The program has no torch.compile; it might have been meant at {where}."
    return "The program has no torch.compile."


def is_compile(function: ast.expr) -> bool:
    """``torch.compile`` or a bare ``compile`` imported from torch."""
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "compile"
        and (isinstance(function.value, ast.Name) and function.value.id == "torch")
    )


def _is_used(tree: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) for node in ast.walk(tree)
    )


def _first_model(tree: ast.Module) -> ast.stmt | None:
    """The first statement that builds an instance of a class that the file derives from a Module, else from ``nn``."""
    modules = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Module") for base in node.bases)
    }
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.Assign) or any(isinstance(t, ast.Attribute) for t in statement.targets):
            continue
        calls = [call for call in ast.walk(statement.value) if isinstance(call, ast.Call)]
        if any(isinstance(call.func, ast.Name) and call.func.id in modules for call in calls):
            return statement
    return None
