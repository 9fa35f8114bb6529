"""The step foretold: from the compiler's arm, the op alone, and the op's compiled graph, without timing that graph.

    step(op) = step(compiler) + [A(op) - A(reference)] + lost bytes / copy rate + kernels added * launch, where exposed

It explains and it warns early; it concludes nothing. The measured step stands beside it wherever both are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraft.diagnostics.measure.arms import BASELINE
from opgraft.diagnostics.measure.facts import ArmFacts, FactsReading
from opgraft.diagnostics.measure.ledger import exposed_us, lost_bytes
from opgraft.diagnostics.model import ArmResult, Prediction


def predict(rows: Sequence[ArmResult], facts: FactsReading, *, on_gpu: bool) -> tuple[Prediction, ...]:
    """A prediction for the arm ``op``; empty where the facts do not reach."""
    baseline = next((r for r in rows if r.name == BASELINE), None)
    base, own = facts.arm(BASELINE), next((a for a in facts.arms if a.name == "op"), None)
    if baseline is None or baseline.step_us is None or base is None or own is None or "op" not in facts.alone_us:
        return ()
    row = next((r for r in rows if r.name == "op"), None)
    measured = baseline.step_us / row.ratio if row is not None and row.ratio else None
    foretold = step_us(baseline.step_us, base, own, facts, on_gpu=on_gpu)
    if foretold <= 0:
        # The op alone was timed in so much noise that it would save more than the whole step: nothing is foretold.
        return ()
    error = foretold / measured - 1 if measured else None
    return (Prediction(arm="op", predicted_us=foretold, measured_us=measured, error=error),)


def step_us(baseline_us: float, base: ArmFacts, own: ArmFacts, facts: FactsReading, *, on_gpu: bool) -> float:
    """Microseconds a step with the op. Of the op's arm only the graph is used: its kernels and their bytes."""
    alone = facts.alone_us["op"] - facts.alone_us[BASELINE]
    rate = facts.copy_bytes_per_second
    fusion = lost_bytes(own, base, facts.reference) / rate * 1e6 if rate else 0.0
    added = own.count() - base.count()
    # Where the host is what the step waits for, a call of the op costs what it was measured to, and any other launch
    # what one costs in the baseline's own step; elsewhere both are hidden.
    waits = exposed_us(base, on_gpu)[1] if on_gpu else base.kernel_us < base.step_us
    if not waits:
        return baseline_us + alone + fusion
    each = max(0.0, base.step_us - base.kernel_us) / max(1.0, base.count())
    boundary = facts.calls * facts.host_us_per_call + max(0.0, added - facts.calls) * each
    return baseline_us + alone + fusion + (boundary if facts.host_us_per_call else added * each)
