"""OG908 cache-bypass: the compile caches are passed by.

What it is
----------
torch keeps compiled graphs on disk and finds them again at the next start. Something in this graph cannot be part of
the key or cannot be stored: a pass without ``uuid()``, an ``autograd.Function`` with a kernel of its own, an op that
cannot be pickled.

Why it matters
--------------
Nothing is wrong with the result. Every start compiles cold: tens of seconds in place of a few.

Example
-------
::

    options = {"post_grad_custom_post_pass": lambda graph: None}     # OG908: no uuid()
    torch.compile(model, options=options)

Mended
------
::

    class Pass(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph): ...
        def uuid(self): return "my-pass-3"

Remedies
--------
``make-cacheable``
    Give the pass a ``uuid()`` that changes with its code, or turn the function into an op. torch >= 2.11. Price: none.
"""

from __future__ import annotations

from opgraft.diagnostics.diagnose.story import CompiledFrame, Story
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Counts, Finding, Location, Remedy

KIND = "cache-bypass"


def conclude(story: Story) -> list[Finding]:
    """One note for every reason that torch gave for passing a cache by."""
    reasons: dict[str, list[str]] = {}
    for event in story.bypasses:
        reasons.setdefault(" ".join(event.reason.split()) or "torch gives no reason", []).append(event.id)
    found = []
    for reason, ids in reasons.items():
        frame = story.frames.get(ids[0])
        place = (_named(frame, reason) or frame.location if frame is not None else None) or Location(path="", line=0)
        found.append(
            Finding(
                kind=KIND,
                code=KINDS[KIND].code,
                severity="note",
                message=f"The compile caches are passed by, so every start compiles cold: {reason[:300]}.",
                location=place,
                sites=(place,),
                stack=(place,),
                counts=Counts(compiles=len(ids)),
                remedies=(
                    Remedy(
                        id="make-cacheable",
                        text="give the pass a uuid() that changes with its code, or turn the function into an op",
                        price="none",
                    ),
                ),
            )
        )
    return found


def _named(frame: CompiledFrame, reason: str) -> Location | None:
    """Where the graph calls the operator that the reason names."""
    for use in frame.uses:
        if use.location is not None and use.op.partition("::")[2].partition(".")[0] in reason:
            return use.location
    return None
