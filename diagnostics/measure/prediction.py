"""The step foretold: from the compiler's arm, the op alone, and the op's compiled graph, without timing that graph.

    step(op) = step(compiler) + [A(op) - A(reference)] + lost bytes / copy rate + kernels added * launch, where exposed

It explains and it warns early; it concludes nothing. The measured step stands beside it wherever both are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraft.diagnostics.measure.arms import BASELINE
from opgraft.diagnostics.measure.facts import ArmFacts, FactsReading
from opgraft.diagnostics.measure.ledger import HOST_BOUND_BELOW, lost_bytes
from opgraft.diagnostics.model import ArmResult, Prediction


def predict(rows: Sequence[ArmResult], facts: FactsReading) -> tuple[Prediction, ...]:
    """A prediction for the arm ``op``; empty where the facts do not reach."""
    baseline = next((r for r in rows if r.name == BASELINE), None)
    base, own = facts.arm(BASELINE), next((a for a in facts.arms if a.name == "op"), None)
    if baseline is None or baseline.step_us is None or base is None or own is None or "op" not in facts.alone_us:
        return ()
    row = next((r for r in rows if r.name == "op"), None)
    measured = baseline.step_us / row.ratio if row is not None and row.ratio else None
    foretold = step_us(baseline.step_us, base, own, facts)
    if foretold <= 0:
        # The op alone was timed in so much noise that it would save more than the whole step: nothing is foretold.
        return ()
    error = foretold / measured - 1 if measured else None
    return (Prediction(arm="op", predicted_us=foretold, measured_us=measured, error=error),)


def step_us(baseline_us: float, base: ArmFacts, own: ArmFacts, facts: FactsReading) -> float:
    """Microseconds a step with the op. Of the op's arm only the graph is used: its kernels and their bytes."""
    alone = facts.alone_us["op"] - facts.alone_us[BASELINE]
    rate = facts.copy_bytes_per_second
    fusion = lost_bytes(own, base, facts.reference) / rate * 1e6 if rate else 0.0
    added = own.count() - base.count()
    # A launch costs what one costs in the baseline's own step where the host is what it waits for, else nothing.
    waits = base.step_us > 0 and base.kernel_us < HOST_BOUND_BELOW * base.step_us
    each = max(0.0, base.step_us - base.kernel_us) / max(1.0, base.count()) if waits else 0.0
    return baseline_us + alone + fusion + added * each
