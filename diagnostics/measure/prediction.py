"""The step foretold: from the compiler's arm, the op alone, and the op's compiled graph, without timing that graph.

The GPU's own time and the host's are foretold apart, and the step takes the longer of the two:

    device(op) = device(compiler) + [A(op) - A(reference)] + price(generated kernels of op) - price(those of compiler)
                 + price(those of the reference) + gap * kernels added
    host(op)   = host(compiler) + host time of the op's calls and of the launches added, beside the compiler's step
                 - launches that go, at the mean of the compiler's step

A price is what a kernel takes that only moves as many bytes. On a CPU nothing hides anything, and the two are a sum.
It explains and it warns early; it concludes nothing. The measured step stands beside it wherever both are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraft.diagnostics.measure.arms import BASELINE
from opgraft.diagnostics.measure.facts import ArmFacts, FactsReading
from opgraft.diagnostics.measure.ledger import lost_bytes, waits
from opgraft.diagnostics.model import ArmResult, Prediction


def predict(rows: Sequence[ArmResult], facts: FactsReading, *, on_gpu: bool) -> tuple[Prediction, ...]:
    """A prediction for the arm ``op``; empty where the facts do not reach."""
    baseline = next((r for r in rows if r.name == BASELINE), None)
    base, own = facts.arm(BASELINE), next((a for a in facts.arms if a.name == "op"), None)
    if baseline is None or baseline.step_us is None or base is None or own is None or "op" not in facts.alone_us:
        return ()
    if not base.kernel_us:
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
    times = facts.in_place_us if "op" in facts.in_place_us else facts.alone_us
    kernels = times["op"] - times[BASELINE] + fusion_us(own, base, facts)
    added = own.count() - base.count()
    if not on_gpu:
        # Beside its kernel a call costs what one does in the base.
        outside = max(0.0, base.step_us - base.kernel_us) / max(1.0, base.count())
        return baseline_us + kernels + added * outside
    idle = waits(base, baseline_us, True)
    seen = max(1.0, sum(base.kernels.values()))
    device = base.kernel_us + idle.gaps
    more_device = kernels + idle.gaps / seen * added
    host = min(base.host_share * baseline_us, base.enqueue_us) if base.host_share else base.enqueue_us
    if idle.bound and base.host_share:
        host = base.host_share * baseline_us
    # What a CUDA graph replays costs the host nothing a kernel.
    by_hand = min(1.0, max(0.0, base.launches - base.replays) / seen) if base.launches else 1.0
    # Host times were taken beside the base's own: where the host was slower meanwhile, so was all of it.
    speed = host / facts.host_us_of_step if facts.host_us_of_step else 1.0
    # Kernels that go where the op has taken over all of their work were launched before, for what a launch costs here.
    gone = max(0.0, base.count() + own.count("op") - own.count())
    more_host = (facts.host_us_of_calls * speed - gone * host / seen) * by_hand
    # The base's own two times say how its step comes about; what else is in it stays as it is.
    return baseline_us + max(device + more_device, host + more_host) - max(device, host)


def fusion_us(own: ArmFacts, base: ArmFacts, facts: FactsReading) -> float:
    """What the generated kernels of the op's arm would take beyond the compiler's, the reference's own given back."""

    def priced(arm: ArmFacts | None) -> float:
        if arm is None:
            return 0.0
        return sum(facts.prices.us(n.bytes) * arm.executions(n.graph) for n in arm.nodes if n.kind == "generated")

    if facts.prices.points:
        return priced(own) - priced(base) + priced(facts.reference)
    rate = facts.copy_bytes_per_second
    return lost_bytes(own, base, facts.reference) / rate * 1e6 if rate else 0.0
