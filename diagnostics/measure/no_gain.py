"""The kernel is faster alone and not faster in the model.

**What.** Timed alone on the inputs that the model gives it, with a cold cache, the op beats the compiler's own code for
its reference. The whole step with the op does not beat the whole step without it.

**Why.** A compiler fuses a pointwise or reducing reference with what stands before and after it. An op is opaque: its
inputs have to be written to memory and its outputs read back. What the kernel saves is given back, often more.

**Fails:**

```python
h = torch.ops.ns.gelu(h * 1.1) * 0.9          # three passes over h
```

**Mended:**

```python
h = F.gelu(h * 1.1, approximate="tanh") * 0.9  # one pass, generated
h = torch.ops.ns.scaled_gelu(h, 1.1, 0.9)      # one pass, the kernel widened over its neighbours
```

**Remedies.** `decompose-here` (any torch): leave this site to the compiler, by calling the reference there or with
`opgraft.compile_options(choose="measured")`, which keeps the kernel only where it was measured faster. `leave-it`: keep
the op where it is wanted for another reason than speed (numerics, memory) and the loss is small.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraft.diagnostics.measure import findings
from opgraft.diagnostics.model import ArmResult, Cost, Finding, Ledger, Location, Remedy

KIND = "no-gain"


def find(
    op: str, baseline: ArmResult, arm: ArmResult, calls: int, ledger: Ledger | None, sites: Sequence[Location]
) -> Finding | None:
    """A finding where the op is faster alone and its step is slower or the same; None otherwise."""
    if arm.isolated_us is None or baseline.isolated_us is None or arm.step_us is None or baseline.step_us is None:
        return None
    if arm.isolated_us >= baseline.isolated_us or arm.verdict not in ("SLOWER", "EQUIVALENT"):
        return None
    loss = arm.step_us - baseline.step_us
    share = loss / baseline.step_us
    gain = baseline.isolated_us / arm.isolated_us
    effect = f"{abs(share):.1%} slower" if arm.verdict == "SLOWER" else "no faster, within 0.5 %"
    eaten = [
        f"{term.name}: {term.us_per_step:+,.0f} us a step ({term.how})"
        for term in (ledger.terms if ledger else ())
        if term.us_per_step is not None and abs(term.us_per_step) >= 0.5
    ]
    slower = arm.verdict == "SLOWER"
    return findings.make(
        KIND,
        "warning" if slower and share >= 0.01 else "note",
        f"{op} is {gain:.2f}x faster alone than the compiler's own code and makes the step {effect}.",
        sites,
        op=op,
        per_step=calls,
        cost=Cost(
            us_per_step=loss,
            low=None if arm.ratio_high is None else baseline.step_us / arm.ratio_high - baseline.step_us,
            high=None if arm.ratio_low is None else baseline.step_us / arm.ratio_low - baseline.step_us,
            share_of_step=share,
            how="measured",
        ),
        remedies=[
            Remedy(
                id="decompose-here",
                text="leave this site to the compiler: call the reference here, or compile with "
                'opgraft.compile_options(choose="measured")',
            ),
            Remedy(
                id="leave-it",
                text="keep it where it is wanted for numerics or memory",
                price=f"{max(0.0, share):.1%} of the step",
            ),
        ],
        evidence=eaten,
    )
