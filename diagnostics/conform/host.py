"""A process that imports the modules which register ops, and examines the ops in forks of itself.

``opgraft doctor`` starts it, so that not even an import can take the command down.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.model import CheckResult, Finding, Report


def examine_elsewhere(
    ops: Sequence[str],
    *,
    imports: Sequence[str] = (),
    device: str = "cpu",
    thorough: bool = False,
    seconds: float = 30.0,
    cases: tuple[Case, ...] = (),
    wrap: Sequence[str] = (),
) -> Report:
    """Examines ops in another process.

    Args:
        imports: modules, or paths of Python files, to import there first.
        cases: calls of the (one) op to start from.
        wrap: a command to run the other process under, such as ``compute-sanitizer``.
    """
    import torch

    from opgraft.diagnostics.conform.doctor import report

    with tempfile.TemporaryDirectory(prefix="opgraft-doctor-") as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        saved = ""
        if cases:
            from opgraft.diagnostics.conform.lab.saved import save_cases

            saved = str(Path(folder) / "cases")
            save_cases(Path(saved), cases)
        libraries = [str(path) for path in getattr(torch.ops, "loaded_libraries", ())]
        request.write_text(
            json.dumps(
                {
                    "ops": list(ops),
                    "imports": list(imports),
                    "libraries": libraries,
                    "device": device,
                    "thorough": thorough,
                    "seconds": seconds,
                    "cases": saved,
                }
            )
        )
        environment = dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1", PYTHONUNBUFFERED="1")
        paths = [os.getcwd(), *sys.path]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        command = [*wrap, sys.executable, "-m", "opgraft.diagnostics.conform.host", str(request), str(answer)]
        trouble, output = "", ""
        try:
            done = subprocess.run(
                command, env=environment, timeout=seconds * len(ops) * 1.5 + 120, capture_output=True, text=True
            )
            output = done.stdout + done.stderr
            if done.returncode:
                lines = output.strip().splitlines()
                trouble = lines[-1] if lines else f"it ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            trouble = "it did not come back in time"
        findings: list[Finding] = []
        results: list[CheckResult] = []
        if answer.exists():
            for line in answer.read_text().splitlines():
                part: Answer = msgspec.json.decode(line, type=Answer)
                findings += part.findings
                results += part.checks
        for op in ops:
            if not any(result.op == op for result in results):
                results.append(CheckResult(op=op, check="all", outcome="not-run", detail=trouble or "it said nothing"))
        made = report(findings, results, torch.device(device))
        return msgspec.structs.replace(made, degraded=_sanitizer_words(output) if wrap else ())


def _sanitizer_words(output: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in output.splitlines() if line.startswith("=========") and "Invalid" in line)


class Answer(msgspec.Struct, frozen=True):
    """What was found about one op; one line of the answer's file."""

    findings: tuple[Finding, ...] = ()
    checks: tuple[CheckResult, ...] = ()


def import_named(name: str) -> None:
    """Imports a module by name, a Python file by path, or loads a shared library."""
    if name.endswith(".so"):
        import torch

        torch.ops.load_library(name)
    elif name.endswith(".py"):
        path = Path(name).resolve()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        importlib.import_module(name)


def main(request: dict[str, Any], answer: Path) -> int:
    import torch

    from opgraft.diagnostics.conform.doctor import owner
    from opgraft.diagnostics.conform.lab.examine import Plan, examine
    from opgraft.diagnostics.conform.lab.facts import facts_of
    from opgraft.registry import resolve

    for name in request["imports"]:
        try:
            import_named(name)
        except Exception as error:
            print(f"cannot import {name}: {type(error).__name__}: {error}")
            return 2
    for path in request["libraries"]:
        try:
            torch.ops.load_library(path)
        except OSError as error:
            print(f"cannot load {path}: {error}")
    cases: tuple[Case, ...] = ()
    if request["cases"]:
        from opgraft.diagnostics.conform.lab.saved import load_cases

        cases = load_cases(Path(request["cases"]))
    with answer.open("w") as lines:
        for name in request["ops"]:
            try:
                facts = facts_of(resolve(name))
            except LookupError as error:
                part: Answer = Answer(checks=(CheckResult(op=name, check="all", outcome="not-run", detail=str(error)),))
            else:
                findings, results = examine(
                    Plan(
                        facts=facts,
                        cases=cases,
                        device=torch.device(request["device"]),
                        thorough=request["thorough"],
                        seconds=request["seconds"],
                        fresh=True,
                        imports=tuple(request["imports"]),
                        distribution=owner(facts.spec),
                    )
                )
                part = Answer(findings, results)
            lines.write(msgspec.json.encode(part).decode() + "\n")
            lines.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
