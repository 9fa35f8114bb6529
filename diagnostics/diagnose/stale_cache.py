"""OG907 stale-cache: a compile cache replays an older registration of an op.

What it is
----------
torch's compile caches know an op by its name. A change of its schema, its ``mutates_args``, its fake or its Python
backward does not change their keys, so code that was compiled for the old registration runs again.

Why it matters
--------------
The correction of a wrong registration has no effect, silently: the old wrong result comes back. Diagnosis and
benchmarks are misled in the same way.

Example
-------
::

    define("my::fill", mutates_args=())          # wrong: it writes `out`
    torch.compile(step)(x, out)
    define("my::fill", mutates_args=("out",))    # right
    torch._dynamo.reset()
    torch.compile(step)(x, out)                  # OG907: the cache still drops the call

Mended
------
::

    TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 python train.py     # once, or delete the folder of TORCHINDUCTOR_CACHE_DIR

Remedies
--------
``clear-cache``
    Delete the cache folder after changing a registration, or run once with ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1``.
    torch >= 2.11. Price: one cold compile.
"""

from __future__ import annotations

from itertools import pairwise

from opgraft.diagnostics.diagnose.story import Story
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Callee, Finding, Location, Remedy

KIND = "stale-cache"


def conclude(story: Story) -> list[Finding]:
    """A finding for every op that was registered anew with another schema, and whose graph then came out of a cache."""
    found = []
    for op in {event.op for event in story.registered}:
        changes = [event for event in story.registered if event.op == op]
        changed = next((b for a, b in pairwise(changes) if a.schema != b.schema), None)
        if changed is None:
            continue
        hit = next((h for h in story.hits if h.op == op and h.t > changed.t), None)
        if hit is None:
            continue
        place = hit.location or Location(path="", line=0)
        found.append(
            Finding(
                kind=KIND,
                code=KINDS[KIND].code,
                severity="error",
                message=f"The compiled code of a graph with {op} came out of the {hit.cache.replace('_', ' ')}, "
                "although the op has been registered anew with another schema: the cache knows ops by name, so the old "
                "code runs.",
                location=place,
                sites=(place,),
                stack=(place,),
                callee=Callee(name=op, owner="op"),
                remedies=(
                    Remedy(
                        id="clear-cache",
                        text="delete the folder of TORCHINDUCTOR_CACHE_DIR, or run once with "
                        "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, after every change of a registration",
                        price="one cold compile",
                    ),
                ),
                evidence=(
                    f"before: {changes[0].schema}",
                    f"now: {changed.schema}",
                    f"key of the cache entry: {hit.key}",
                ),
            )
        )
    return found
