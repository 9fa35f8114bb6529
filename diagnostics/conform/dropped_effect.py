"""An op with a side effect that may be removed or reordered.

**What it means.** The op does more than compute its results (it writes a file, fills a list, prints), or has no result
at all, and nothing tells the compiler.

**Why it matters.** A call whose results nobody uses is removed; calls without a common argument change places.

Fails: an op that returns None, ``mutates_args=()``. Passes, with this beside it::

    note.register_effect(torch._library.effects.EffectType.ORDERED)

**Remedies.** ``declare-effect``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.tree import leaves

KIND = "dropped-effect"
WRITING = ("os.remove", "os.rename", "os.mkdir", "os.putenv", "socket.connect", "subprocess.Popen", "os.system")
_seen: list[str] = []
_listening = [False]


def _listen(event: str, args: tuple[Any, ...]) -> None:
    if not _listening[0]:
        return
    if event == "open" and len(args) > 2 and isinstance(args[2], int) and args[2] & 0o3:
        _seen.append(f"opens {args[0]!r} to write")
    elif event in WRITING:
        _seen.append(f"calls {event}")


def _state(function: Any) -> str:
    """What the kernel can reach and change: its globals and the variables that it closes over, as text."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    names = sorted(_names(code) & set(function.__globals__))
    found: list[tuple[str, Any]] = [(name, function.__globals__[name]) for name in names]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:
            continue
    return "; ".join(f"{name}={_brief(value)}" for name, value in found)


def _names(code: Any) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            names |= _names(constant)
    return names


def _brief(value: Any) -> str:
    if isinstance(value, (list, dict, set, int, float, str, bytes)):
        return repr(value)[:2000] + str(len(value) if hasattr(value, "__len__") else "")
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, type(sys)):
        return repr({key: repr(item)[:200] for key, item in vars(value).items()})[:2000]
    return ""


def effect(bench: Bench, case: Case, kernel: Any) -> str:
    """What the call does beside its results, as far as a Python kernel shows it."""
    sys.addaudithook(_listen)
    before = _state(kernel) if kernel is not None else ""
    _seen.clear()
    bytes_written: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        start = _written()
        _listening[0] = True
        try:
            return bench.op(*args, **kwargs)
        finally:
            _listening[0] = False
            bytes_written.append(_written() - start)

    bench.real(case)  # what a first call sets up is no effect of every call
    bench.real(case, function=call)
    if _seen:
        return _seen[0]
    if any(bytes_written):
        return "writes to a file or to the terminal"
    return "changes variables outside" if kernel is not None and before != _state(kernel) else ""


def _written() -> int:
    """Bytes that this process has handed to ``write`` so far, files, pipes and terminal together."""
    try:
        with open("/proc/self/io", encoding="ascii") as counters:
            return int(next(line for line in counters if line.startswith("wchar")).split()[1])
    except (OSError, StopIteration, ValueError):
        return 0


def check(bench: Bench) -> Iterator[Fault]:
    if _compat.declares_effect(bench.op):
        raise NotApplicable("the effect is declared")
    if bench.facts.written:
        raise NotApplicable("the op writes an argument, which keeps the call")
    dropped = "dropped" in bench.met
    for case in bench.usable(iter(bench.cases[:2])):
        result = bench.real(case)
        if not result.ok:
            continue
        silent = not [leaf for leaf in leaves(result.outputs) if leaf is not None]
        kernel = _compat.python_kernel(bench.op)
        does = effect(bench, case, kernel)
        if not silent and not does:
            continue
        what = f"{does}, and does not declare that" if does else "returns nothing and declares no effect"
        what += ": its calls were removed" if dropped else ": the compiler may remove a call"
        yield Fault(
            f"{bench.name} {what}",
            case,
            evidence=(bench.facts.schema,),
            remedies=("declare-effect",),
            severity=("error" if dropped else "note") if bench.recorded else "warning",
            tail="{call}",
        )
        return
