"""A comparison that cannot mean what it says.

**What.** Two programs were timed, and something between them makes the ratio meaningless: nobody looked whether they
compute the same, the kernel did not run, compile time is inside, the model writes its inputs or gives another result
every time, or the machine was throttled. No verdict is given while this stands; what was measured is still shown.

**Why.** A wrong baseline looks exactly like a fast kernel. Most published speedups that did not survive a second look
fell to one of these.

**Fails:**

```python
def build():
    model = Counter()                # forward: self.cache.add_(x); return self.cache * 2
    return model, (torch.randn(64, 1024),)
```

**Mended:**

```python
def build():
    model = Counter()                # forward: cache = self.cache + x; return cache * 2
    return model, (torch.randn(64, 1024),)
```

**Remedies.** `measure-again` (any torch): remove what the message names, then run the same command.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraft.diagnostics.measure import findings
from opgraft.diagnostics.measure.readings import Problem
from opgraft.diagnostics.model import Finding, Location, Remedy

KIND = "invalid-measurement"

_ADVICE = {
    "not-deterministic": "make the model repeatable from a seed, then measure again: no generator of its own, no "
    "uninitialised memory",
    "mutates-inputs": "write into a copy in the model's forward, then measure again",
    "no-tensor": "let build() give a model whose forward returns a tensor",
    "no-memory": "measure with a smaller batch, or leave arms out with --arms",
    "arm-failed": "run that arm alone to see its whole error, mend it, then measure again",
    "recompiles": "find the guard that fails with opgraft explain, mark the size dynamic or keep the value fixed, then "
    "measure again",
    "values-differ": "mend the kernel or the reference until they agree (opgraft doctor shows where they part), then "
    "measure again",
    "no-site": "name an op that the model calls, or check that the call is inside what is compiled",
    "throttled": "let the machine cool or lower its load, then measure again",
    "not-checked": "mend the op until it survives a call in eager (opgraft doctor tries it apart), then measure again",
    "process-failed": "run the command again, with --processes 1 to see the whole error",
}


def find(problem: Problem, site: Location) -> Finding:
    """The finding for a problem of this kind; an arm that failed is an error, since its result is missing."""
    text = _ADVICE.get(problem.about, "remove the cause and measure again")
    return findings.make(
        KIND,
        "warning",
        problem.message + (". No verdict is given." if problem.voids else "."),
        [site],
        op=problem.op,
        remedies=[Remedy(id="measure-again", text=text)],
        evidence=problem.evidence,
    )


def notes(problems: Sequence[Problem]) -> list[Problem]:
    """Each problem once, however many processes saw it."""
    seen: dict[tuple[str, str, str], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.about, problem.arm, problem.op), problem)
    return list(seen.values())
