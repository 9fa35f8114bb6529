"""OG605 cudagraph-skip: CUDA graphs are skipped or split.

What it is
----------
With ``mode="reduce-overhead"`` torch records the launches of a graph once and replays them. It gives up where an
input is mutated, where an op is marked unsafe or runs on the CPU, or where a size is dynamic; or it cuts the graph in
partitions there.

Why it matters
--------------
It is no graph break and does not look like one: everything is compiled, only the launches come back. A small model
loses what the mode was chosen for.

Example
-------
::

    @torch.compile(mode="reduce-overhead")
    def step(cache, x):
        cache.add_(x)                      # OG605: an input is written
        return cache * 2

Mended
------
::

    @torch.compile(mode="reduce-overhead")
    def step(cache, x):
        return cache + x                   # a new tensor; or mark the input: torch._dynamo.mark_static_address(cache)

Remedies
--------
``make-functional``
    Return a new tensor in place of writing an input, or give the input a static address.
``keep-on-device``
    Move CPU tensors and host reads out of the region.
``leave-it``
    Where the launches are hidden behind the device's work.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

from opgraft.diagnostics.collect.place import changeable, frames_of
from opgraft.diagnostics.diagnose.story import Story
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Counts, Finding, Location, Remedy

KIND = "cudagraph-skip"
_AGAIN = re.compile(r"^(?:(?:skipping|disabling) cudagraphs due to:? )+", re.IGNORECASE)
_DISTINCT = re.compile(r"We have observed (\d+) distinct sizes")


@dataclass
class Cause:
    """What keeps a graph, or parts of it, out of CUDA graphs. ``partitions`` is 0 where the whole graph is."""

    category: str
    partitions: int
    identity: str
    reasons: list[str] = field(default_factory=list)
    places: dict[tuple[str, int], Location] = field(default_factory=OrderedDict)
    times: int = 0


def conclude(story: Story) -> list[Finding]:
    """A finding for every cause that torch gave, and one for partitions that no reason explains."""
    causes: OrderedDict[tuple[object, ...], Cause] = OrderedDict()
    told = set()
    for event in story.cudagraphs:
        if not event.reason:
            continue
        reason = " ".join(event.reason.partition("Found from")[0].split()).rstrip(".")
        told.add(reason)
        mine = [f for f in event.stack or frames_of(event.reason) if changeable(f.path, story.prefixes)]
        _add(causes, reason, event.partitions, event.id, mine[-1] if mine else None)
    for identity, end in story.ends.items():
        reason = " ".join(end.cudagraph_skip.partition("Found from")[0].split()).rstrip(".")
        if reason and reason not in told:
            mine = [f for f in frames_of(end.cudagraph_skip) if changeable(f.path, story.prefixes)]
            _add(causes, reason, 0, identity, mine[-1] if mine else None)
    found = [_finding(story, cause) for cause in causes.values()]
    counters = story.ended.counters if story.ended is not None else {}
    partitions = counters.get("inductor.cudagraph_partitions", 0)
    if partitions > 1 and not found:
        found.append(_finding(story, Cause("", partitions, "", [f"the graph is cut into {partitions} partitions"])))
    return found


def _add(
    causes: OrderedDict[tuple[object, ...], Cause], reason: str, partitions: int, identity: str, at: Location | None
) -> None:
    category = _category(reason)
    place = (at.path, at.line) if at is not None else None
    if partitions and at is None and any(c.partitions and c.identity == identity for c in causes.values()):
        return  # what follows in the same graph from a cause that has a place
    key: tuple[object, ...] = (
        (category, place, reason if place is None else "")
        if not partitions
        else ("partition", identity, category, reason if category in ("unsafe", "other") else "")
    )
    cause = causes.setdefault(key, Cause(category, partitions, identity))
    cause.times += not partitions or not cause.times
    if reason not in cause.reasons:
        cause.reasons.append(reason)
    if at is not None:
        cause.places.setdefault((at.path, at.line), at)


def _category(reason: str) -> str:
    lowered = reason.lower()
    for category, words in (
        ("mutated", ("mutated", "mutation")),
        ("sizes", ("distinct input size", "dynamic shape")),
        ("data", ("unbacked", "incompatible op aten.")),
        ("cpu", ("cpu", "devicecopy", "multiple devices")),
        ("unsafe", ("unsafe", "incompatible op", "custom partition")),
    ):
        if any(word in lowered for word in words):
            return category
    return "other"


def _finding(story: Story, cause: Cause) -> Finding:
    places = tuple(cause.places.values()) or (_graph_of(story, cause.identity),)
    return Finding(
        kind=KIND,
        code=KINDS[KIND].code,
        severity="warning",
        message=f"{_words(cause)}. This is no graph break; the launches come back.",
        location=places[0],
        sites=places,
        stack=places[:1] if cause.places else (),
        counts=Counts(sites=len(places), compiles=max(1, cause.times)),
        remedies=_remedies(cause.category),
        evidence=tuple(cause.reasons)[:8],
    )


def _graph_of(story: Story, identity: str) -> Location:
    """Where the graph begins that a reason without a place speaks of; of an unnamed graph, if there is only one."""
    frame = story.frames.get(identity)
    graphs = [one for one in story.frames.values() if one.location is not None]
    if frame is None and len({(one.path, one.function) for one in graphs}) == 1:
        frame = graphs[0]
    return (frame.location if frame is not None else None) or Location(path="", line=0)


def _words(cause: Cause) -> str:
    reasons = [_AGAIN.sub("", reason) for reason in cause.reasons]
    distinct = _DISTINCT.search(cause.reasons[0])
    if distinct:
        return f"A CUDA graph is recorded for every distinct input size, {distinct[1]} so far"
    if not cause.partitions or not cause.category:
        return f"CUDA graphs are not used as asked: {', '.join(reasons)}"
    parts = f"The CUDA graph is cut into {cause.partitions} parts" if cause.partitions > 1 else "No CUDA graph is made"
    return f"{parts}, because some of it cannot be recorded: {', '.join(reasons[:4])}"


def _remedies(category: str) -> tuple[Remedy, ...]:
    functional = Remedy(
        id="make-functional",
        text="return a new tensor in place of writing the input, or torch._dynamo.mark_static_address(input)",
        price="memory for one tensor",
    )
    on_device = {
        "cpu": "make the tensor on the device, or move what runs on the CPU out of the region",
        "data": "give a fixed number of rows on the device (a mask, torch.nonzero_static): then no size is read back",
        "unsafe": "where the op launches on the current stream and never waits for the device, drop its "
        "cudagraph_unsafe tag; else keep it out of the region",
    }.get(category, "move CPU tensors and host reads out of the region")
    device = Remedy(id="keep-on-device", text=on_device, price="none")
    leave = Remedy(id="leave-it", text="keep it where the launches hide behind the device's work", price="none")
    if category == "sizes":
        text = "pad inputs to a few fixed sizes; or keep it where the sizes are few"
        return (Remedy(id="leave-it", text=text, price="some padding, or memory for a graph a size"),)
    if category == "mutated":
        return (functional, leave)
    return (device, leave) if category else (functional, device, leave)
