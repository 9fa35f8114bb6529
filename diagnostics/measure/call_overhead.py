"""The host time of the op's boundary, exposed: the device waits while Python and the dispatcher call the kernel.

**What.** Every call of the op costs host time (schema, dispatch, allocation, launch; more where a Python function is
registered), and the step is bound by the host, so that this time is not hidden behind kernels.

**Why.** A kernel of 5 us behind a boundary of 20 us is a 20 us kernel. On large inputs the device is busy and the
boundary costs nothing; at small batch sizes it decides.

**Fails:**

```python
@torch.library.custom_op("ns::act", mutates_args=())   # a Python function on the hot path
def act(x: torch.Tensor) -> torch.Tensor: ...
```

**Mended:**

```cpp
STABLE_TORCH_LIBRARY_IMPL(ns, CUDA, m) { m.impl("act", TORCH_BOX(&act)); }   // registered in C++
```

**Remedies.** `register-in-cpp` (torch 2.10 and newer for the stable ABI): schema and kernel from C++. `use-cuda-graphs`
(any torch): `torch.compile(model, mode="reduce-overhead")` replays the launches without the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraft.diagnostics.measure import findings
from opgraft.diagnostics.measure.prose import us
from opgraft.diagnostics.model import Cost, Finding, Location, Remedy

KIND = "call-overhead"
THRESHOLD = 0.01


def find(
    op: str,
    host_us: float | None,
    calls: int,
    step_us: float | None,
    busy: float | None,
    on_gpu: bool,
    sites: Sequence[Location],
) -> Finding | None:
    """A finding from 1 % of the step on, where the host is what the step waits for; else None.

    Args:
        host_us: host time a call.
        busy: share of the step in which kernels run; None on a CPU, where every call is exposed.
    """
    if host_us is None or not step_us or (on_gpu and (busy is None or busy > 0.7)):
        return None
    share = host_us * calls / step_us
    if share < THRESHOLD:
        return None
    remedies = [
        Remedy(id="register-in-cpp", text="register schema and kernel from C++, with no Python on the hot path")
    ]
    if on_gpu:
        remedies.append(
            Remedy(
                id="use-cuda-graphs",
                text='compile with mode="reduce-overhead"',
                price="memory of the graph's pool; fixed shapes",
            )
        )
    bound = f" and kernels run only {busy:.0%} of the step" if busy is not None else ""
    return findings.make(
        KIND,
        "warning",
        f"A call of {op} costs {us(host_us)} on the host, {calls} times a step{bound}: {share:.1%} of the step.",
        sites,
        op=op,
        per_step=calls,
        cost=Cost(us_per_step=host_us * calls, share_of_step=share, how="measured"),
        remedies=remedies,
    )
