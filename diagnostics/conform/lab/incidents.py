"""Findings that need no further call of the op: what a run was told by an error, or did with a registration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab.met import Book, Met
from opgraft.diagnostics.conform.lab.remedies import remedies
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Callee, Finding, Location, Severity


def make(
    kind: str,
    message: str,
    location: Location | None,
    op: str,
    *chosen: str,
    severity: Severity = "error",
    evidence: tuple[str, ...] = (),
) -> Finding:
    return Finding(
        kind=kind,
        code=KINDS[kind].code,
        severity=severity,
        message=message,
        location=location or Location(path=op, line=0),
        callee=Callee(name=op, owner="op"),
        remedies=remedies(kind, *chosen),
        evidence=tuple(line for line in evidence if line),
    )


def of_calls(name: str, calls: list[Met], book: Book) -> Iterator[Finding]:
    """What the errors of these calls, and their circumstances, say by themselves."""
    for call in calls:
        if "sharding strategy" in call.error:
            yield make(
                "not-exportable",
                f"{name} has no sharding rule, and the run gives it a sharded tensor",
                call.location, name, "add-sharding-rule", evidence=(call.error.splitlines()[0],),
            )
            break
    for call in calls:
        if call.error and not _compat.is_registered(name):
            yield make(
                "missing-kernel",
                f"{name} is not registered any more: the Library object that defined it was collected",
                call.location, name, "keep-library", "load-library", evidence=(call.error.splitlines()[0],),
            )
            break
    exported = any(event["what"] == "exported" for event in book.events)
    for call in calls:
        if call.exporting and exported and not _defined_in_cpp(name):
            yield make(
                "not-exportable",
                f"{name} exists only where its Python module is imported: a process without it cannot load the program "
                "that was exported",
                call.location, name, "load-library", "register-in-cpp", severity="error" if book.error else "note",
            )
            break


def _defined_in_cpp(name: str) -> bool:
    from opgraft.registry import resolve

    try:
        return not getattr(resolve(name), "_defined_in_python", False)
    except LookupError:
        return False


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else text


def of_events(book: Book) -> Iterator[Finding]:
    """What happened besides calls: registrations that failed, lookups in vain, a second derivative."""
    told: set[Any] = set()
    for event in book.events:
        what, where = event["what"], event["where"]
        place = (what, where and (where.path, where.line))
        if where is None or place in told:
            continue
        text = str(event.get("text", ""))
        ended = bool(book.error) and _first_line(text.partition(": ")[2])[:60] in book.error
        if what == "bad-schema":
            yield make(
                "bad-schema", f"the registration fails: {_first_line(text)}", where, "", "fix-schema",
                severity="error" if ended else "note", evidence=(text,),
            )
        elif what == "namespace-taken":
            before = [e["where"] for e in book.events if e["what"] == "library" and e["where"] is not None]
            evidence = tuple(f"a library was made at {place.path}:{place.line}" for place in before[:3])
            yield make(
                "bad-schema", f"the namespace is taken: {_first_line(text)}", where, "", "unique-namespace", "fix-schema",
                severity="error" if ended else "note", evidence=evidence,
            )
        elif what == "no-such-op":
            name = event["name"]
            if not book.error or name.partition("::")[2] not in book.error or _compat.is_registered(name):
                continue
            defined = next((e for e in book.events if e["what"] == "defined" and e["name"] == name), None)
            # The registration itself asks first whether the name is free.
            if defined is not None and defined["where"] is not None and defined["where"].line == where.line:
                continue
            if defined is not None:
                message = f"{name} is gone: the Library object that defined it was collected"
                site = defined["where"]
                evidence = (f"defined at {site.path}:{site.line}",) if site is not None else ()
                yield make("missing-kernel", message, where, name, "keep-library", "load-library", evidence=evidence)
            else:
                message = f"no op {name} is registered: the library that registers it is not loaded"
                yield make("missing-kernel", message, where, name, "load-library", "add-kernel")
        elif what == "backend-failed":
            first = _first_line(text)
            if not book.error or first[:60] not in book.error and text.partition(": ")[2][:60] not in book.error:
                continue
            yield make(
                "compiler-bug", f"the compiler fails at this statement: {first[:300]}", where, "", "work-around",
                "update-torch", evidence=(text[:1500],),
            )
        elif what == "no-double-backward":
            asked = next((e["where"] for e in book.events if e["what"] == "create_graph" and e["where"]), where)
            yield make(
                "double-backward",
                "a second derivative is taken through a compiled function, which torch's compiler does not support",
                asked, "", "compile-inner-gradient", "keep-eager", evidence=(_first_line(text),),
            )
        else:
            continue
        told.add(place)
