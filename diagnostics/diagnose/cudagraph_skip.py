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

from opgraft.diagnostics.collect.place import changeable, place
from opgraft.diagnostics.diagnose.story import Story
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Counts, Finding, Location, Remedy

KIND = "cudagraph-skip"
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')


def conclude(story: Story) -> list[Finding]:
    """A finding for every reason that torch gave, and one for partitions that no reason explains."""
    reasons: OrderedDict[str, tuple[str, int]] = OrderedDict()
    told = [(event.reason, event.id) for event in story.cudagraphs if event.reason]
    told += [(end.cudagraph_skip, identity) for identity, end in story.ends.items() if end.cudagraph_skip]
    seen = set()
    for reason, identity in told:
        text = " ".join(reason.split())
        if (text, identity) in seen:
            continue
        seen.add((text, identity))
        reasons[text] = (identity, reasons.get(text, ("", 0))[1] + 1)
    found = [_finding(story, text, identity, times) for text, (identity, times) in reasons.items()]
    counters = story.ended.counters if story.ended is not None else {}
    partitions = counters.get("inductor.cudagraph_partitions", 0)
    if partitions > 1 and not found:
        found.append(_finding(story, f"the graph is cut into {partitions} partitions", "", partitions))
    return found


def _finding(story: Story, text: str, identity: str, times: int) -> Finding:
    frames = [place(m["path"], int(m["line"]), m["name"]) for m in _FRAME.finditer(text)]
    mine = [frame for frame in frames if changeable(frame.path, story.prefixes)]
    frame = story.frames.get(identity)
    where = mine[-1] if mine else (frame.location if frame is not None else None) or Location(path="", line=0)
    reason = text.partition("Found from")[0].strip().rstrip(".")
    mutated = "mutated" in reason
    cpu = "cpu" in reason.lower()
    remedies = {
        "make-functional": Remedy(
            id="make-functional",
            text="return a new tensor in place of writing the input, or torch._dynamo.mark_static_address(input)",
            price="memory for one tensor",
        ),
        "keep-on-device": Remedy(
            id="keep-on-device", text="move CPU tensors and host reads out of the region", price="none"
        ),
        "leave-it": Remedy(
            id="leave-it", text="keep it where the launches hide behind the device's work", price="none"
        ),
    }
    order = ("make-functional", "leave-it") if mutated else ("keep-on-device", "leave-it") if cpu else tuple(remedies)
    return Finding(
        kind=KIND,
        code=KINDS[KIND].code,
        severity="warning",
        message=f"CUDA graphs are not used as asked: {reason}. This is no graph break; the launches come back.",
        location=where,
        sites=(where,),
        stack=tuple(mine),
        counts=Counts(compiles=times),
        remedies=tuple(remedies[name] for name in order),
        evidence=(text[:600],),
    )
