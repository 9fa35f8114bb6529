"""Memory traffic and launches that exist only because the op is opaque to the compiler.

**What.** Around the op's call the compiled graph has kernels that write a tensor for the op to read, or read back what
it wrote. With the op's reference in its place these kernels do not exist: the compiler makes one of all of them.

**Why.** A pointwise or normalising op is bound by memory. One more write and read of its tensor costs as much as the
op itself, so a kernel that is a few percent faster alone cannot pay for it.

**Fails:**

```python
y = torch.ops.ns.gelu(x * scale + shift) * gate     # three kernels: x once, h twice, y twice
```

**Mended:**

```python
y = torch.ops.ns.gelu_scaled(x, scale, shift, gate) # one kernel
```

**Remedies.** `decompose-here` (any torch): give this site to the compiler. `widen-op` (any torch): take the neighbours
into the kernel, as arguments of the op.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraft.diagnostics.measure import findings
from opgraft.diagnostics.measure.prose import data, reliable, us
from opgraft.diagnostics.model import Cost, Finding, Ledger, Location, Remedy

KIND = "lost-fusion"


def find(
    op: str, ledger: Ledger, baseline_us: float, calls: int, rate: float | None, sites: Sequence[Location]
) -> Finding | None:
    """A finding where the op's arm moves more bytes around it than the compiler's; else None.

    Args:
        rate: the copy bandwidth, bytes a second: prices the bytes where the ledger explains too little.
    """
    term = next((t for t in ledger.terms if t.name == "lost fusion"), None)
    if term is None or term.us_per_step is None or not (term.bytes_per_step or 0) > 0:
        return None
    sure = reliable(ledger)
    price = term.us_per_step if sure else (term.bytes_per_step or 0) / rate * 1e6 if rate else None
    share = price / baseline_us if price is not None else 0.0
    priced = "" if price is None else f": {us(max(0.0, price))} {'of kernel time' if sure else 'at the copy rate'}"
    return findings.make(
        KIND,
        "warning" if share >= 0.01 else "note",
        f"The compiler had fused what stands around {op}: with the op a step moves "
        f"{data(term.bytes_per_step or 0)} more in {term.launches_per_step or 0:+d} launches{priced}.",
        sites,
        op=op,
        per_step=calls,
        cost=Cost(
            us_per_step=price,
            bytes_per_step=term.bytes_per_step,
            share_of_step=share,
            how="measured" if sure else "counted",
        ),
        remedies=[
            Remedy(id="decompose-here", text="leave this site to the compiler: call the reference here"),
            Remedy(id="widen-op", text="take the neighbouring operations into the kernel, as arguments of the op"),
        ],
        evidence=[f"{t.name}: {t.us_per_step:+,.0f} us a step" for t in ledger.terms if t.us_per_step is not None],
    )
