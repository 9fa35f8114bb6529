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
from opgraft.diagnostics.collect.place import function_name, innermost
from opgraft.diagnostics.diagnose.guard_words import Change, change, guard_words, size_source
from opgraft.diagnostics.diagnose.story import Story
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Callee, Counts, Finding, Location, Remedy

KIND = "recompile"
_RESUME = re.compile(r"torch_dynamo_resume_in_\w+_at_(?P<line>\d+)")
_KEPT = 64
_NAMED = 3
_VALUES = 4


@dataclass
class Repeated:
    """The recompiles of one region for one kind of change."""

    category: str
    region: tuple[str, str]
    events: list[Recompiled] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    count: int = 0

    def add(self, event: Recompiled, what: Change) -> None:
        self.count += 1
        if len(self.events) < _KEPT:
            self.events.append(event)
            self.changes.append(what)


def conclude(story: Story, findings: list[Finding]) -> list[Finding]:
    """Adds a finding for every cause of recompiles that no other finding explains; the others get it as evidence."""
    result = list(findings)
    groups = _grouped(story)
    for group in groups:
        where = _specialized(story, group)
        if where is not None:
            result.append(_specializes(story, group, *where))
            continue
        index = _caused_by(result, group)
        if index is not None:
            function = function_name(group.events[0].function)
            words = f"because of it the rest of {function} is compiled again: {_guard(group)}"
            result[index] = _with_evidence(result[index], words)
        else:
            result.append(_finding(story, group, groups))
    return result


def _limits(story: Story, group: Repeated, groups: list[Repeated]) -> int:
    """How many frames reached torch's limit because of this change: each counts for the change that it met most."""

    def met(one: Repeated, frame: str) -> int:
        return sum(event.id.partition("/")[0] == frame for event in one.events)

    frames = {event.id.partition("/")[0] for event in group.events} & story.limits
    return sum(1 for frame in frames if max(groups, key=lambda one: met(one, frame)) is group)


def _grouped(story: Story) -> list[Repeated]:
    """One group a cause: a size that changes is seen by every frame of its region, another value where it is read."""
    compiled = {(frame.stack[-1].path, frame.stack[-1].function) for frame in story.frames.values() if frame.stack}
    groups: OrderedDict[tuple[object, ...], Repeated] = OrderedDict()
    numbers: list[tuple[Recompiled, Change]] = []
    old_sizes: dict[tuple[str, str], set[str]] = {}
    for event in story.recompiles:
        if event.reasons and "Unexpected recompilation" in event.reasons[0]:
            continue  # another thread compiled the frame meanwhile: no guard failed
        what = change(event.reasons[0] if event.reasons else "")
        if what.category == "number":
            numbers.append((event, what))
        elif what.category == "size":
            region = _region(story, event, compiled)
            old_sizes.setdefault(region, set()).add(what.old)
            groups.setdefault((*region, "size"), Repeated("size", region)).add(event, what)
        else:
            _by_value(groups, event, what)
    for event, what in numbers:
        region = _region(story, event, compiled)
        if what.old in old_sizes.get(region, ()):  # the old size itself, handed on as a number
            groups[(*region, "size")].add(event, what)
        else:
            _by_value(groups, event, what)
    return list(groups.values())


def _by_value(groups: OrderedDict[tuple[object, ...], Repeated], event: Recompiled, what: Change) -> None:
    """Adds the event to the group of the value that changed in its function."""
    own = (event.path, function_name(event.function))
    groups.setdefault((*own, what.category, what.name), Repeated(what.category, own)).add(event, what)


def _region(story: Story, event: Recompiled, compiled: set[tuple[str, str]]) -> tuple[str, str]:
    """The function that the compiled region begins with: the outermost compiled one on the way to the frame."""
    frame = story.frames.get(event.id)
    for place in frame.stack if frame is not None else ():
        if (place.path, place.function) in compiled:
            return place.path, place.function
    return event.path, function_name(event.function)


def _guard(group: Repeated) -> str:
    return guard_words(group.events[-1].reasons[0]) if group.events[-1].reasons else "torch gives no reason"


def _caused_by(findings: list[Finding], group: Repeated) -> int | None:
    """The break after which the recompiled frames resume, where nothing before it is recompiled for the same change."""
    lines = set()
    path = group.events[0].path
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
    names = {found for event in group.events for text in event.reasons if (found := size_source(text))}
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
        evidence=(f"compiled {group.count + 1} times, last because {_guard(group)}",),
    )


def _finding(story: Story, group: Repeated, groups: list[Repeated]) -> Finding:
    limit = _limits(story, group, groups)
    serious = bool(limit) or max(Counter(event.function for event in group.events).values()) > 1
    times = {1: "once", 2: "twice"}.get(group.count, f"{group.count} times")
    frames = len({(event.path, event.function) for event in group.events})
    inside = f" in {frames} frames" if frames > 1 else ""
    limit_words = "; torch has reached its limit and runs the frame in eager from now on" if limit else ""
    place, subject = _place(story, group)
    sites = tuple(dict.fromkeys(e.place for e in group.events if e.place is not None and e.place.line != 0))
    return Finding(
        kind=KIND,
        code=KINDS[KIND].code,
        severity="warning" if serious else "note",
        message=f"{subject} is compiled again {times}{inside}: {_changed(group)}{limit_words}.",
        location=place,
        sites=tuple(dict.fromkeys((place, *(sites if group.category == "size" else ())))),
        stack=(place,),
        counts=Counts(sites=1, compiles=group.count, frames_skipped=limit),
        remedies=(_mark_dynamic(group), *((_use_symint(),) if story.op_uses else ())),
        evidence=tuple(dict.fromkeys(f"failed guard: {guard_words(e.reasons[0])}" for e in group.events if e.reasons)),
    )


def _place(story: Story, group: Repeated) -> tuple[Location, str]:
    """Where the value that changed is read, else the call that hands it in; and what to call the region."""
    roots = [e for e in group.events if (e.path, e.function) == group.region]
    for event in roots or group.events:
        if event.place is not None and not _is_header(story, event):
            return event.place, function_name(event.function) or "a frame"
    called_at = _call_of(story, (roots or group.events)[0])
    if called_at is not None:
        return called_at, "the region called here"
    event = group.events[0]
    return event.place or Location(path=event.path, line=0), function_name(event.function) or "a frame"


def _is_header(story: Story, event: Recompiled) -> bool:
    """True where the event's place is its frame's first line, which stands for "no line found"."""
    own = story.frames[event.id].stack[-1:] if event.id in story.frames else ()
    return bool(own and event.place) and (own[0].path, own[0].line) == (event.place.path, event.place.line)  # type: ignore[union-attr]


def _call_of(story: Story, event: Recompiled) -> Location | None:
    """The reader's line that led to the compile of the event's frame."""
    frame = story.frames.get(event.id)
    return innermost(frame.stack[:-1], story.prefixes) if frame is not None else None


def _changed(group: Repeated) -> str:
    """What changed, in words: the values by name where they have one."""
    if group.category == "size":
        given = _given(group)
        seen: dict[str, list[str]] = {}
        for c in given:
            if c.name and c.new:
                values = seen.setdefault(c.subject, [c.old])
                values.extend(value for value in (c.new,) if value != values[-1])
        first = [f"{subject} {' -> '.join(v[:_VALUES])}{' ...' * (len(v) > _VALUES)}" for subject, v in seen.items()]
        between = len({c.subject for c in group.changes if c.name} - {c.subject for c in given})
        text = ", ".join(first[:_NAMED]) or _guard(group)
        text += f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
        text += f", and with them {between} of values inside the region" if between else ""
        return f"sizes change from call to call: {text}"
    name = group.changes[0].name
    values = list(dict.fromkeys(c.old for c in group.changes))
    if group.category in ("number", "text") and name and len(values) > 1:
        return f"{name} has another value at every call ({', '.join(v[:12] for v in values[:_NAMED])}, ...)"
    return _guard(group)


def _given(group: Repeated) -> list[Change]:
    """The changes of what the region is given; of what it computes inside, where nothing else is known to change."""
    pairs = list(zip(group.events, group.changes, strict=True))
    return [c for e, c in pairs if (e.path, e.function) == group.region] or group.changes


def _mark_dynamic(group: Repeated) -> Remedy:
    name = group.changes[0].name or "the value"
    general = "more general code, sometimes slightly slower"
    if group.category == "size":
        text = _for_sizes(_given(group))
    elif group.category == "number" and all(change.old.lstrip("-").isdigit() for change in group.changes):
        text = f"give {name} as a tensor, or keep it constant"
        if name.startswith("self."):
            text = (
                "torch._dynamo.config.allow_unspec_int_on_nn_module = True lets an int of a module be symbolic; "
                f"or keep {name} outside the region, or as a tensor"
            )
    elif group.category == "number":
        text = f"keep {name} as a 0-dimensional tensor (a buffer, or an argument), which no guard compares"
    elif group.category in ("text", "flag"):
        text = f"keep {name} constant within the region, or compile one function for each of its values"
    else:
        text = {
            "requires_grad": "call the region with and without gradients as two compiled functions, or warm both up",
            "grad_mode": "call the region with and without gradients as two compiled functions, or warm both up",
            "Global state": "call the region in the state in which it was compiled (grad mode, autocast, determinism), "
            "or warm every state up",
            "training": "compile the model for training and for evaluation apart, or warm both up",
            "dtype": "give the region one dtype, or warm every dtype up",
            "device": "give the region one device, or warm every device up",
        }.get(group.category, "keep what the guard names the same from call to call, or compile one function for each")
        general = "one compile for each"
    return Remedy(id="mark-dynamic", text=text, price=general)


def _for_sizes(changes: list[Change]) -> str:
    """``mark_dynamic`` for the tensors that have names; a size of 0 or 1 cannot be made dynamic."""
    marked = [c for c in changes if c.name and not {c.old, c.new} & {"0", "1"}]
    calls = list(dict.fromkeys(f"torch._dynamo.mark_dynamic({c.name}, {c.index})" for c in marked))
    text = ""
    if calls:
        text = f"{', '.join(calls[:_NAMED])} before the first call, or torch.compile(dynamic=True)"
    elif len(changes) > len([c for c in changes if {c.old, c.new} & {"0", "1"}]):
        text = "torch._dynamo.mark_dynamic(tensor, dimension) before the first call, or torch.compile(dynamic=True)"
    ones = list(dict.fromkeys(c.subject or "a size" for c in changes if {c.old, c.new} & {"0", "1"}))
    if ones:
        text += "; " if text else ""
        text += f"{ones[0]} is 0 or 1 at times, which always gets code of its own: warm it up, or pad it to 2"
    return text


def _use_symint() -> Remedy:
    return Remedy(
        id="use-symint",
        text="where an op makes a constant of the size: SymInt in its schema, no int() in its fake",
        price="none",
    )
