"""The kernel that is measured or trusted did not run in the compiled model, or still ran where it was taken out.

**What.** In the arm that is named after the op, no run of it was seen, neither as an operator nor by its kernels; or it
was seen in an arm where its reference stands in its place.

**Why.** Both arms are then the same code, or partly so, and their ratio says nothing about the kernel. It happens where
a decomposition or a pass replaced the op, where another dispatch key wins, and where the call is outside the graphs.

**Fails:**

```python
@torch.compiler.disable
def act(x):
    return torch.ops.ns.gelu(x)      # runs in eager between two graphs: no arm can exchange it
```

**Mended:**

```python
def act(x):
    return torch.ops.ns.gelu(x)      # a node of the graph
```

**Remedies.** `fix-dispatch` (any torch): register the kernel under the backend's own key (CPU, CUDA), take the op out
of decomposition tables, call it inside the compiled region.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraft.diagnostics.measure import findings
from opgraft.diagnostics.measure.readings import Problem
from opgraft.diagnostics.model import Finding, Location, Remedy

KIND = "kernel-not-run"


def find(problem: Problem, sites: Sequence[Location]) -> Finding:
    if problem.about == "op-still-runs":
        text = "call the op inside the compiled region, not under torch.compiler.disable and not inside another op"
    else:
        text = "register the kernel under the device's own key and see that no decomposition or pass replaces the op"
    return findings.make(
        KIND,
        "warning",
        problem.message + ". No verdict is given.",
        sites,
        op=problem.op,
        remedies=[Remedy(id="fix-dispatch", text=text)],
        evidence=problem.evidence,
    )
