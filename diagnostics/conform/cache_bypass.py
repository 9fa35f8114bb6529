"""The compile caches are passed by because of the op.

**What it means.** torch keeps compiled graphs on disk. A graph with this op cannot be kept, or cannot be found again.

**Why it matters.** Every start of the program compiles cold: tens of seconds in place of a few.

Fails: an op with a registered effect, in torch 2.13; an op that takes an object of a class of its own. Passes: an op of
tensors and numbers without an effect.

**Remedies.** ``make-cacheable``.
"""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotRun
from opgraft.diagnostics.conform.lab.inductor import compiled

KIND = "cache-bypass"
TAIL = """\
from torch._dynamo.utils import counters
torch.compile(lambda {names}: {call}, fullgraph=True)({names})
passed = [key for group in counters.values() for key in group if key.endswith("_cache_bypass")]
assert not passed, passed"""


def check(bench: Bench) -> Iterator[Fault]:
    for case in bench.usable(iter(bench.cases[:1])):
        made = compiled(bench, case, "inductor", neighbours=True)
        if made.error is not None:
            raise NotRun("the op could not be compiled")
        if made.bypasses:
            yield Fault(
                f"{bench.name}: the compile caches are passed by, every start compiles cold",
                case,
                evidence=made.bypasses[:2],
                severity="note",
                tail=TAIL,
            )
        return
