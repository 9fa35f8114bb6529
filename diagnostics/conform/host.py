"""A process that imports the modules which register ops, and examines the ops in forks of itself.

``opgraft doctor`` starts it, so that not even an import can take the command down; ``opgraft explain`` does where the
program itself uses CUDA and cannot be forked.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform import errand
from opgraft.diagnostics.conform.lab import names
from opgraft.diagnostics.conform.lab.arrive import place_of
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.model import CheckResult, Finding, Location, Report
from opgraft.diagnostics.orphans import end_with

# compute-sanitizer makes kernels and their loading so many times slower.
SANITIZED = 8.0


@dataclass(frozen=True)
class Asked:
    """One op to examine: ``cases`` and ``met`` are those of a run where ``recorded``."""

    name: str
    cases: tuple[Case, ...] = ()
    met: frozenset[str] = frozenset()
    device: str = "cpu"
    imports: tuple[str, ...] = ()
    recorded: bool = True


class Answer(msgspec.Struct, frozen=True):
    """What was found about one op; one line of the answer's file."""

    findings: tuple[Finding, ...] = ()
    checks: tuple[CheckResult, ...] = ()


def examine_elsewhere(
    ops: Sequence[str],
    *,
    imports: Sequence[str] = (),
    device: str = "cpu",
    thorough: bool = False,
    seconds: float = 30.0,
    cases: tuple[Case, ...] = (),
    wrap: Sequence[str] = (),
    progress: errand.Progress | None = None,
) -> Report:
    """Examines ops in another process.

    Args:
        ops: names, or patterns such as ``"mylib::*"``, which stand for every overload that fits.
        imports: modules, or paths of Python files, to import there first.
        cases: calls of the (one) op to start from.
        wrap: a command to run the other process under, such as ``compute-sanitizer``.
        progress: is told of every op that is begun: its name, its number from 0, and how many there are.
    """
    import torch

    from opgraft.diagnostics.conform.doctor import report

    asked = [Asked(name=op, cases=cases, device=device, imports=tuple(imports), recorded=False) for op in ops]
    said: list[str] = []
    parts = examine_asked(asked, thorough=thorough, seconds=seconds, wrap=wrap, said=said, progress=progress)
    findings = [finding for part in parts for finding in part.findings]
    results = [result for part in parts for result in part.checks]
    made = report(findings, results, torch.device(device))
    return msgspec.structs.replace(made, degraded=_sanitizer_words(said[0])) if wrap else made


def examine_asked(
    asked: Sequence[Asked],
    *,
    script: str = "",
    thorough: bool = False,
    seconds: float = 30.0,
    wrap: Sequence[str] = (),
    said: list[str] | None = None,
    progress: errand.Progress | None = None,
) -> list[Answer]:
    """Examines ops in one other process; an op that it does not come to is said to be not run, and why.

    Args:
        script: a program whose registrations are repeated there; see ``lab.replay``.
        seconds: for each op.
        said: receives what the process printed.
        progress: is told of every op that is begun.
    """
    import torch

    limit = seconds * (SANITIZED if wrap else 1.0)
    with tempfile.TemporaryDirectory(prefix="opgraft-doctor-") as folder:
        files = errand.Files.within(Path(folder))
        files.request.write_text(
            json.dumps(
                {
                    "ops": [_written(one, Path(folder) / f"cases{index}") for index, one in enumerate(asked)],
                    "imports": sorted({name for one in asked for name in one.imports}),
                    "libraries": [str(path) for path in getattr(torch.ops, "loaded_libraries", ())],
                    "script": script,
                    "thorough": thorough,
                    "seconds": limit,
                    "patience": SANITIZED if wrap else 1.0,
                }
            )
        )
        trouble = errand.run(files, seconds=limit, wrap=wrap, progress=progress)
        if said is not None:
            said.append(files.said())
        parts: list[Answer] = []
        if files.answers.exists():
            # The last line may be cut where the process died.
            for line in files.answers.read_text().splitlines():
                try:
                    parts.append(msgspec.json.decode(line, type=Answer))
                except msgspec.DecodeError:
                    trouble = trouble or "its answer was cut off"
    answered = {result.op for part in parts for result in part.checks}
    for one in asked:
        if not any(names.asks_for(one.name, op) for op in answered):
            why = trouble or "it said nothing"
            parts.append(Answer(checks=(CheckResult(op=one.name, check="all", outcome="not-run", detail=why),)))
    return parts


def _written(one: Asked, path: Path) -> dict[str, Any]:
    """An op as the request holds it; its calls go to files beside it."""
    from opgraft.diagnostics.conform.lab.saved import save_cases

    entry: dict[str, Any] = {
        "name": one.name,
        "met": sorted(one.met),
        "device": one.device,
        "imports": list(one.imports),
        "recorded": one.recorded,
        "cases": "",
        "trouble": "",
        "location": msgspec.to_builtins(next((case.location for case in one.cases if case.location), None)),
    }
    if one.cases:
        try:
            save_cases(path, one.cases)
            entry["cases"] = str(path)
        except TypeError as error:
            entry["trouble"] = str(error)
    return entry


def _sanitizer_words(output: str) -> tuple[str, ...]:
    """What the sanitizer saw, each access once, with how often."""
    counts: dict[str, int] = {}
    lines = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("Invalid"):
            where = after.partition("+0x")[0].removeprefix("at ").strip()
            words = f"compute-sanitizer: {line} in {where}" if where else f"compute-sanitizer: {line}"
            counts[words] = counts.get(words, 0) + 1
    return tuple(f"{words} ({count} times)" if count > 1 else words for words, count in counts.items())


def import_named(name: str) -> None:
    """Imports a module by name, a Python file by path, or loads a shared library."""
    if name.endswith(".so"):
        import torch

        torch.ops.load_library(name)
    elif name.endswith(".py"):
        folder, stem = place_of(name)
        sys.path.insert(0, folder)
        path = Path(name).resolve()
        spec = importlib.util.spec_from_file_location(stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[stem] = module
        spec.loader.exec_module(module)
    else:
        importlib.import_module(name)


def _arrive(request: dict[str, Any]) -> str:
    """Imports and loads everything that registers the ops; what went wrong, else ``""``."""
    import torch

    for name in request["imports"]:
        try:
            import_named(name)
        except Exception as error:
            return f"cannot import {name}: {type(error).__name__}: {error}"
    for path in request["libraries"]:
        try:
            torch.ops.load_library(path)
        except OSError as error:
            print(f"cannot load {path}: {error}")
    if request["script"]:
        from opgraft.diagnostics.conform.lab.replay import replay

        try:
            replay(request["script"])
        except (OSError, SyntaxError) as error:
            print(f"cannot repeat the registrations of {request['script']}: {error}")
    return ""


def _examined(entry: dict[str, Any], request: dict[str, Any]) -> Answer:
    import torch

    from opgraft.diagnostics.conform.doctor import owner
    from opgraft.diagnostics.conform.lab.examine import examine
    from opgraft.diagnostics.conform.lab.facts import facts_of
    from opgraft.diagnostics.conform.lab.plan import Plan
    from opgraft.diagnostics.conform.lab.saved import load_cases
    from opgraft.registry import resolve

    def absent(why: str) -> Answer:
        return Answer(checks=(CheckResult(op=entry["name"], check="all", outcome="not-run", detail=why),))

    if entry["trouble"]:
        return absent(entry["trouble"])
    try:
        facts = facts_of(resolve(entry["name"]))
    except LookupError as error:
        if entry["name"] == names.NEW:
            return absent("the imports register no op that was not there before: name the ops, or a pattern, 'ns::*'")
        return absent(f"{error}; it is registered while the program runs" if request["script"] else str(error))
    return Answer(
        *examine(
            Plan(
                facts=facts,
                # Loaded in the fork, since the tensors may belong on a GPU, which this process must not touch.
                load=(lambda: load_cases(Path(entry["cases"]))) if entry["cases"] else None,
                device=torch.device(entry["device"]),
                recorded=entry["recorded"],
                thorough=request["thorough"],
                seconds=request["seconds"],
                met=frozenset(entry["met"]),
                fresh=True,
                imports=tuple(entry["imports"]),
                patience=request["patience"],
                place=msgspec.convert(entry["location"], Location | None),
                distribution=owner(facts.spec),
            )
        )
    )


def main(request: dict[str, Any], answers: Path, begun: Path) -> int:
    end_with(0)
    before = frozenset(names.registered())
    trouble = _arrive(request)
    if trouble:
        print(trouble)
        return 2
    entries = [{**entry, "name": name} for entry in request["ops"] for name in names.expanded(entry["name"], before)]
    if any(not entry["recorded"] and _compat.is_registered(entry["name"]) for entry in entries):
        _compat.load_compiler()
    with answers.open("w") as lines, begun.open("w") as places:
        for place, entry in enumerate(entries):
            places.write(f"{place} {len(entries)} {entry['name']}\n")
            places.flush()
            lines.write(msgspec.json.encode(_examined(entry, request)).decode() + "\n")
            lines.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3])))
