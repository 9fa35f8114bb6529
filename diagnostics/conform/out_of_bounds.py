"""The kernel reads or writes outside its tensors.

**What it means.** Memory before, behind or between the elements of an argument was written, or another pattern there
gave another result; or the process died of the access.

**Why it matters.** It corrupts a neighbour, or reads one: wrong numbers today, a crash on another allocator.

Fails: a loop that runs to the next multiple of the vector width. Passes: the same loop with a scalar tail.

**Remedies.** ``fix-kernel``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from opgraft.diagnostics.conform.lab import compare, vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault
from opgraft.diagnostics.conform.lab.case import Case

KIND = "out-of-bounds"
# Two patterns that are different numbers in every dtype: as float32, -1.5e-36 and 1.4e+09.
PATTERNS = (0x84, 0x4E)


def trespass(bench: Bench, case: Case) -> str:
    """What the call did outside its tensors; ``""`` where nothing was seen."""
    results = [bench.real(case, pattern=pattern, filling=0) for pattern in PATTERNS]
    for result in results:
        for zone in result.zones:
            where = zone.touched()
            if where is not None:
                side = "before" if where < 0 else "behind the start of"
                return f"writes {abs(where)} bytes {side} {zone.label}, outside its elements"
        if result.allocations is not None and (words := result.allocations.trespass()):
            return words
        if result.allocations is not None and result.allocations.replaced:
            return ""  # what it returns under guards is no result
    first, second = results
    if not (first.ok and second.ok):
        return ""
    again = bench.real(case, pattern=PATTERNS[0], filling=0)
    if again.ok and compare.disagree(first.outputs, again.outputs, 1):
        return ""  # not repeatable anyhow: another check's subject
    words = compare.disagree(first.outputs, second.outputs, 1)
    which = "" if words.startswith("result") else "the result "
    return f"reads outside its tensors: with other bytes there {which}{words}" if words else ""


def check(bench: Bench) -> Iterator[Fault]:
    for base in bench.cases:
        others = () if bench.recorded else chain(vary.sizes(base))
        for case in bench.usable(chain((vary.dense(base),), others)):
            words = trespass(bench, case)
            if words:
                small = bench.shrink(case, lambda tried: bool(trespass(bench, tried)))
                yield Fault(f"{bench.name} {trespass(bench, small) or words}", small)
                return
