"""OG801 recompile: a compiled region is compiled again and again.

What it is
----------
A guard that the compiled code rests on failed: a size, a Python number, a flag, a dtype or an object changed between
calls, and the frame was compiled once more for the new value.

Why it matters
--------------
A compile takes seconds, a step takes milliseconds. After 8 compiles of one frame torch gives up and runs it in eager,
with no more than a line in the log.

Example
-------
::

    @torch.compile
    def step(x, rate):
        return x - rate * x.sin()          # OG801: rate is a Python float that changes every step

    for i in range(10):
        step(x, 0.1 / (i + 1))

Mended
------
::

    for i in range(10):
        step(x, torch.tensor(0.1 / (i + 1)))

Remedies
--------
``mark-dynamic``
    ``torch._dynamo.mark_dynamic(x, 0)`` before the first call, or ``torch.compile(dynamic=True)``, for a size. A
    number that changes is given as a tensor; a flag as two compiled functions. torch >= 2.11. Price: more general,
    slightly slower code.
``use-symint``
    Where an op or its fake turns the size into a constant: ``SymInt`` in the schema, no ``int()`` in the fake.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import msgspec

from opgraft.diagnostics.collect.events import Recompiled
from opgraft.diagnostics.collect.place import changeable, function_name, innermost
from opgraft.diagnostics.diagnose.story import Story
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Callee, Counts, Finding, Location, Remedy

KIND = "recompile"
_SIZE = re.compile(
    r"tensor '(?P<name>[^']+)' (?:size|stride) mismatch at index (?P<index>\d+)\. "
    r"expected (?P<old>-?\d+), actual (?P<new>-?\d+)"
)
_RESUME = re.compile(r"torch_dynamo_resume_in_\w+_at_(?P<line>\d+)")


@dataclass
class Repeated:
    """The recompiles of one function for one kind of change."""

    category: str
    events: list[Recompiled] = field(default_factory=list)
    count: int = 0


def conclude(story: Story, findings: list[Finding]) -> list[Finding]:
    """Adds a finding for every cause of recompiles that no other finding explains; the others get it as evidence."""
    groups: OrderedDict[tuple[str, str, str], Repeated] = OrderedDict()
    for event in story.recompiles:
        if event.reasons and "Unexpected recompilation" in event.reasons[0]:
            continue  # another thread compiled the frame meanwhile: no guard failed
        category = change(event.reasons[0] if event.reasons else "")
        key = (event.path, function_name(event.function), category)
        if category == "size":  # a size that changes is seen by every frame of the region: one cause
            key = (*_region(story, event), category)
        group = groups.setdefault(key, Repeated(category))
        group.count += 1
        if len(group.events) < 16:
            group.events.append(event)
    result = list(findings)
    for group in groups.values():
        path, function = group.events[0].path, function_name(group.events[0].function)
        where = _specialized(story, group)
        if where is not None:
            result = _absorbed(result, _specializes(story, group, *where))
            continue
        index = _caused_by(result, group, path)
        if index is not None:
            words = f"because of it the rest of {function} is compiled again: {_reason(group)}"
            result[index] = _with_evidence(result[index], words)
        else:
            limit = {event.id.partition("/")[0] for event in group.events} & story.limits
            result.append(_finding(group, len(limit)))
    return result


def _region(story: Story, event: Recompiled) -> tuple[str, str]:
    """The reader's line from which the frame was reached: the call of the compiled region."""
    frame = story.frames.get(event.id)
    outer = [f for f in (frame.stack if frame is not None else ()) if changeable(f.path, story.prefixes)]
    return (outer[0].path, str(outer[0].line)) if len(outer) > 1 else (event.path, function_name(event.function))


def change(reason: str) -> str:
    """What kind of thing changed, so that the same change in several frames is one cause."""
    text = reason.partition(": ")[2] or reason
    if _SIZE.search(text):
        return "size"
    text = guard_words(reason)
    for word in (
        "dtype",
        "requires_grad",
        "dispatch key",
        "device",
        "rank mismatch",
        "grad_mode",
        "Global state",
        "training",
    ):
        if word.lower() in text.lower():
            return word
    return re.sub(r"\d+(\.\d+)?", "#", text)[:120]


def _reason(group: Repeated) -> str:
    return guard_words(group.events[-1].reasons[0]) if group.events[-1].reasons else "torch gives no reason"


def guard_words(reason: str) -> str:
    """The guard itself: torch's text without the entry's number, the source comment and the stack."""
    text = reason.partition(": ")[2] or reason
    return " ".join(text.partition("User stack trace")[0].partition("  #")[0].partition(" # ")[0].split())[:200]


def _caused_by(findings: list[Finding], group: Repeated, path: str) -> int | None:
    """The break after which the recompiled frames resume, where nothing before it is recompiled for the same change."""
    lines = set()
    for event in group.events:
        found = _RESUME.search(event.function)
        if not found:
            return None
        lines.add(int(found["line"]))
    for index, finding in enumerate(findings):
        for site in (*finding.sites, *finding.stack):
            if site.path == path and any(site.line <= line <= (site.end_line or site.line) for line in lines):
                return index
    return None


def _with_evidence(finding: Finding, words: str) -> Finding:
    return msgspec.structs.replace(finding, evidence=(*finding.evidence, words))


def _specialized(story: Story, group: Repeated) -> tuple[str, Location] | None:
    """The custom op whose call made a constant of the size that then changed, if that is what happened."""
    if group.category != "size":
        return None
    names = {
        (found["name"], found["index"])
        for event in group.events
        for text in event.reasons
        if (found := _SIZE.search(text))
    }
    compiles = {event.id.partition("/")[0] for event in group.events}
    for symbol in story.symbols:
        if symbol.id.partition("/")[0] not in compiles or not _is_source(symbol.sources, names):
            continue
        at = innermost(symbol.stack, story.prefixes)
        for op, uses in story.op_uses.items():
            for _, place in uses:
                if at is not None and place is not None and (place.path, place.line) == (at.path, at.line):
                    return op, at
    return None


def _is_source(sources: tuple[str, ...], names: set[tuple[str, str]]) -> bool:
    for source in sources:
        for name, index in names:
            if source.endswith(f".size()[{index}]") and (f"['{name}']" in source or source.startswith(name)):
                return True
    return False


def _specializes(story: Story, group: Repeated, op: str, place: Location) -> Finding:
    schema = next((event.schema for event in reversed(story.registered) if event.op == op), "")
    narrow = re.search(r"(?<!Sym)\bint\b(?!\[)[^,)]*", schema.partition("->")[0])
    why = (
        f"its schema takes `{narrow[0].strip()}`, a constant for the compiler"
        if narrow
        else "its fake turns a symbolic size into a constant"
    )
    first = Remedy(
        id="use-symint",
        text="write SymInt for every size-like argument in the schema"
        if narrow
        else "keep sizes symbolic: SymInt in the schema, no int() or comparison of sizes in the fake",
        price="none",
    )
    second = Remedy(
        id="fix-fake",
        text="in the fake use x.shape[i] as it is, without int(), .item() or branches on it",
        price="none",
    )
    return Finding(
        kind="fake-specializes",
        code=KINDS["fake-specializes"].code,
        severity="warning",
        message=f"{op} is compiled again for every size: {why}.",
        location=place,
        sites=(place,),
        stack=(place,),
        callee=Callee(name=op, owner="op"),
        counts=Counts(compiles=group.count),
        remedies=(first, second) if narrow else (second, first),
        evidence=(f"compiled {group.count + 1} times, last because {_reason(group)}",),
    )


def _absorbed(findings: list[Finding], new: Finding) -> list[Finding]:
    return [*findings, new]


def _finding(group: Repeated, limit: int) -> Finding:
    event = group.events[0]
    place = event.place or Location(path=event.path, line=0)
    serious = bool(limit) or max(Counter(e.function for e in group.events).values()) > 1
    limit_words = "; torch has reached its limit and runs the frame in eager from now on" if limit else ""
    return Finding(
        kind=KIND,
        code=KINDS[KIND].code,
        severity="warning" if serious else "note",
        message=f"{function_name(event.function) or 'A frame'} is compiled again "
        f"({group.count} time{'s' if group.count > 1 else ''}): {_reason(group)}{limit_words}.",
        location=place,
        sites=tuple(dict.fromkeys(e.place for e in group.events if e.place is not None)) or (place,),
        stack=(place,),
        counts=Counts(sites=len({e.place for e in group.events}), compiles=group.count, frames_skipped=limit),
        remedies=(_mark_dynamic(group.category), _use_symint()),
        evidence=tuple(dict.fromkeys(f"failed guard: {guard_words(e.reasons[0])}" for e in group.events if e.reasons)),
    )


def _mark_dynamic(category: str) -> Remedy:
    text = {
        "size": "torch._dynamo.mark_dynamic(tensor, dimension) before the first call, or torch.compile(dynamic=True)",
        "requires_grad": "call the region with and without gradients as two compiled functions, or warm both up",
        "grad_mode": "call the region with and without gradients as two compiled functions, or warm both up",
        "training": "compile the model for training and for evaluation apart, or warm both up",
        "dtype": "give the region one dtype, or warm every dtype up",
    }.get(
        category,
        "give a number that changes as a tensor, or keep it constant; for a size use torch._dynamo.mark_dynamic",
    )
    return Remedy(id="mark-dynamic", text=text, price="more general code, sometimes slightly slower")


def _use_symint() -> Remedy:
    return Remedy(
        id="use-symint",
        text="where an op makes a constant of the size: SymInt in its schema, no int() in its fake",
        price="none",
    )
