"""The paragraph: what the table and the ledger say, for somebody who never profiled and has to decide."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from opgraft.diagnostics.measure.arms import BASELINE
from opgraft.diagnostics.measure.ledger import HIDDEN, HOST
from opgraft.diagnostics.measure.readings import Problem
from opgraft.diagnostics.model import ArmResult, Comparison, Ledger, LedgerTerm


def with_sentence(comparison: Comparison, calls: int, problems: Sequence[Problem]) -> Comparison:
    return msgspec.structs.replace(comparison, sentence=paragraph(comparison, calls, problems))


def paragraph(comparison: Comparison, calls: int, problems: Sequence[Problem]) -> str:
    """Effect, cause, advice, in that order; no claim that the table does not hold."""
    arms = {arm.name: arm for arm in comparison.arms}
    baseline = arms.get(BASELINE)
    chosen = arms.get("op") or arms.get("raw")
    if baseline is None or chosen is None:
        return "Nothing was compared."
    voids = [p for p in problems if p.voids]
    if voids:
        return f"No verdict: {voids[0].message}."
    if chosen.failed or baseline.failed:
        failed = chosen if chosen.failed else baseline
        return f"No verdict: the arm {failed.name} fails ({failed.failed})."
    name = comparison.ops[0] if len(comparison.ops) == 1 else "The kernels together" if comparison.ops else "The kernel"
    parts = [_effect(name, baseline, chosen, calls)]
    ledger = next((one for one in comparison.ledgers if one.arm == chosen.name), None)
    if ledger is not None and reliable(ledger) and chosen.verdict != "UNRESOLVED":
        parts += reasons(ledger)
    raw = arms.get("raw")
    if raw is not None and raw is not chosen and raw.verdict is not None:
        parts.append(_raw(raw, chosen))
    parts.append(_advice(chosen, baseline, ledger, comparison))
    return " ".join(part for part in parts if part)


def us(value: float) -> str:
    """Microseconds as a person reads them."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:,.2f} s"
    if size >= 1e4:
        return f"{value / 1e3:,.1f} ms"
    if size >= 1e3:
        return f"{value / 1e3:,.2f} ms"
    return f"{value:,.0f} us" if size >= 10 else f"{value:,.1f} us"


def data(size: float) -> str:
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size) >= limit:
            return f"{size / limit:,.3g} {unit}"
    return f"{size:,.0f} B"


def _effect(name: str, baseline: ArmResult, arm: ArmResult, calls: int) -> str:
    alone = ""
    if arm.isolated_us and baseline.isolated_us:
        gain = baseline.isolated_us / arm.isolated_us
        if gain >= 1.02:
            alone = f"is {gain:.2f}x faster alone"
        elif gain <= 1 / 1.02:
            alone = f"is {1 / gain:.2f}x slower alone"
        else:
            alone = "is as fast alone as the compiler's own code"
    step = ""
    if arm.step_us and baseline.step_us and arm.ratio is not None:
        change = 1 / arm.ratio - 1
        if arm.verdict == "FASTER":
            step = f"makes the step {-change:.1%} faster"
        elif arm.verdict == "SLOWER":
            step = f"makes the step {change:.1%} slower"
        elif arm.verdict == "EQUIVALENT":
            step = "changes the step by less than 0.5 %"
        elif arm.ratio_low is not None and arm.ratio_high is not None:
            step = (
                f"leaves its effect on the step open, somewhere between {_change(1 / arm.ratio_high - 1)} and "
                f"{_change(1 / arm.ratio_low - 1)}"
            )
    times = f", {calls} calls a step" if calls > 1 else ""
    if alone and step:
        against = (alone.endswith("faster alone") and arm.verdict == "SLOWER") or (
            "slower alone" in alone and arm.verdict == "FASTER"
        )
        return f"{name} {alone}{times} {'but' if against else 'and'} {step}."
    return f"{name} {alone or step or 'was not timed'}{times}."


def _change(share: float) -> str:
    return f"{abs(share):.1%} {'longer' if share > 0 else 'shorter'}"


def reliable(ledger: Ledger | None) -> bool:
    """Whether the terms explain enough of the step for a claim about causes."""
    return ledger is not None and ledger.unexplained_share is not None and ledger.unexplained_share < 0.05


def waits_for_host(ledger: Ledger | None) -> bool:
    """Whether host time sets the pace of both arms, so that no kernel's time shows in the step."""
    return ledger is not None and any(t.name == HIDDEN for t in ledger.terms)


def reasons(ledger: Ledger) -> list[str]:
    """The two or three terms that make up most of the difference, each as a sentence."""
    known = [t for t in ledger.terms if t.us_per_step is not None and t.name != "unexplained"]
    host = next((t for t in known if t.name == HOST), None)
    if host is not None and waits_for_host(ledger):
        launches = f" {host.launches_per_step:+d} launches," if host.launches_per_step else ""
        amount = f"{us(abs(host.us_per_step or 0.0))} a step {'saved' if (host.us_per_step or 0.0) < 0 else 'lost'}"
        return [
            f"The step waits for the host, which issues less than the GPU could run:{launches} {amount}. What kernels "
            "take is hidden behind that."
        ]
    weight = sum(abs(t.us_per_step or 0.0) for t in known) or 1.0
    large = sorted(known, key=lambda t: -abs(t.us_per_step or 0.0))[:3]
    told = [t for t in large if abs(t.us_per_step or 0.0) >= 0.1 * weight]
    # What is saved comes first, then what is given back, the largest first.
    return [_reason(t) for t in sorted(told, key=lambda t: ((t.us_per_step or 0.0) > 0, -abs(t.us_per_step or 0.0)))]


def _reason(term: LedgerTerm) -> str:
    assert term.us_per_step is not None
    saved = term.us_per_step < 0
    amount = us(abs(term.us_per_step))
    if term.name == "kernel alone":
        return f"The kernel itself {'saves' if saved else 'costs'} {amount} a step."
    if term.name == "lost fusion" and not saved:
        moved = f" you now move {data(term.bytes_per_step)} more" if term.bytes_per_step else ""
        launches = f" in {term.launches_per_step} more launches" if term.launches_per_step else ""
        return f"The compiler had fused what stands around it;{moved}{launches}: {amount} a step{_priced(term)}."
    return f"{term.name[0].upper()}{term.name[1:]}: {amount} a step {'saved' if saved else 'lost'}{_priced(term)}."


def _priced(term: LedgerTerm) -> str:
    return "" if term.how == "measured" else f" ({term.how})"


def _raw(raw: ArmResult, arm: ArmResult) -> str:
    if raw.breaks:
        breaks = f"{raw.breaks} gap{'s' if raw.breaks != 1 else ''} in eager between graphs"
        apart = None not in (raw.ratio_high, raw.ratio_low, arm.ratio_low, arm.ratio_high) and (
            (raw.ratio_high or 0) < (arm.ratio_low or 0) or (raw.ratio_low or 0) > (arm.ratio_high or 0)
        )
        if raw.step_us and arm.step_us and apart:
            extra = raw.step_us - arm.step_us
            change = f"{us(abs(extra))} {'longer' if extra > 0 else 'shorter'}"
            return f"Unregistered, the same kernel leaves {breaks}, and the step is {change} than with it registered."
        return (
            f"Unregistered, the same kernel leaves {breaks}; no difference in time to the registered one was resolved."
        )
    return ""


def _advice(arm: ArmResult, baseline: ArmResult, ledger: Ledger | None, comparison: Comparison) -> str:
    if arm.verdict == "FASTER":
        return "Keep it."
    if arm.verdict == "SLOWER":
        if waits_for_host(ledger):
            graphs = 'Compile with mode="reduce-overhead", which replays launches without the host'
            return f"{graphs}, or leave this site to the compiler."
        fusion = ledger is not None and any(t.name == "lost fusion" and (t.us_per_step or 0) > 0 for t in ledger.terms)
        if fusion:
            return "Fuse the neighbours into the kernel, or leave this site to the compiler."
        return "Leave this site to the compiler."
    if arm.verdict == "EQUIVALENT":
        return "It is not worth keeping for speed."
    if comparison.smallest_effect is not None:
        seen = f"{comparison.smallest_effect:.1%}"
        return f"An effect under {seen} cannot be seen in this noise: give it more time or a quieter machine."
    return ""
