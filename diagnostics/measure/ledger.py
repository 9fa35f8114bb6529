"""The ledger: the measured difference between an arm and the compiler, split into terms that say how they are known.

Kernel time is split by who wrote the kernel. With K for kernel time in the step and A for time alone, of a step's
calls, K(arm) - K(compiler) is the sum of

    kernel alone        A(op) - A(reference)
    neighbours          op in place - A(op)
    lost fusion         generated(arm) - generated(compiler) + A(reference), copies taken out and named
    other kernels       library(arm) - library(compiler)

The reference's own time is inside the compiler's generated kernels, so it is given back there. What passes between
kernels and what host time leaves exposed are measured apart, by other clocks than the step; what then remains of the
measured step is ``unexplained``: nothing is fitted to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from opgraft.diagnostics.measure.arms import BASELINE
from opgraft.diagnostics.measure.facts import ArmFacts, FactsReading
from opgraft.diagnostics.model import Ledger, LedgerTerm

# A step whose kernels run less than this share of it, and whose host time fills it, waits for launches.
HOST_BOUND_BELOW = 0.7
# A host that issues a step in less than this share of its kernels' time is never waited for.
FAR_AHEAD = 0.6
# Mean kernel beside which the microsecond that the profiler adds between kernels is small.
LONG_KERNEL_US = 30.0

GAPS, HOST, HIDDEN = "gaps between kernels", "host time, exposed", "hidden behind the host"


def make(
    arm: str, facts: FactsReading, baseline_us: float, arm_us: float, *, on_gpu: bool, breaks: int = 0
) -> Ledger | None:
    """The ledger of one arm; None where the arm or the baseline has no facts.

    Args:
        baseline_us, arm_us: the steps as the interleaved blocks measured them.
    """
    base, own = facts.arm(BASELINE), facts.arm(arm)
    if base is None or own is None or "op" not in facts.alone_us or not base.kernel_us or not own.kernel_us:
        return None
    # On a CPU the steps were taken apart in another process than the one that timed them. Where that ran at another
    # speed, its times are brought to the speed of the timed steps: both were taken without the profiler.
    speed = baseline_us / base.step_us if base.step_us and not on_gpu else 1.0
    base, own = base.scaled(speed), own.scaled(arm_us / own.step_us if own.step_us and not on_gpu else 1.0)
    form = "raw" if arm == "raw" and "raw" in facts.alone_us else "op"
    alone, reference = facts.alone_us[form] * speed, facts.alone_us[BASELINE] * speed
    # A kernel that left no record of its own (an unregistered function on a CPU) is taken at its time alone.
    seen = own.op_us > 0
    in_place = own.op_us if seen else alone
    terms = [
        LedgerTerm(
            name="kernel alone",
            us_per_step=alone - reference,
            how="measured",
            detail=f"{facts.calls} calls, {_factor(reference, alone)} than the compiler's own code, cold cache",
        )
    ]
    if seen:
        terms.append(
            LedgerTerm(
                name="kernel among its neighbours",
                us_per_step=in_place - alone,
                how="measured",
                detail="warm caches and clocks of the step, against alone",
            )
        )
    terms += _copies(own, base, facts.copy_bytes_per_second)
    copies = sum(t.us_per_step or 0.0 for t in terms if t.name in _COPIES.values())
    copied = sum(t.bytes_per_step or 0 for t in terms if t.name in _COPIES.values())
    terms.append(_fusion(own, base, facts, reference, copies, copied))
    # An op made of torch's own kernels cannot be told from them by name: on a GPU its time is among the library's.
    hidden = 0.0 if seen or not on_gpu else alone
    terms.append(
        LedgerTerm(
            name="other kernels",
            us_per_step=own.library_us - hidden - base.library_us,
            how="measured",
            detail="matrix products, optimiser: the same kernels at another speed",
        )
    )
    if on_gpu:
        terms += _idle(own, base, baseline_us, arm_us, facts)
    else:
        terms.append(_outside(own, base, arm_us, 0.0 if seen else alone))
    if breaks:
        terms.append(
            LedgerTerm(
                name="graph breaks",
                us_per_step=None,
                how="counted",
                detail=f"{breaks} a step: their price is in lost fusion and in host time",
            )
        )
    if own.partitions > base.partitions or own.skips > base.skips:
        terms.append(
            LedgerTerm(
                name="CUDA-graph segments lost",
                us_per_step=None,
                how="counted",
                detail=f"{own.partitions} segments against {base.partitions}, {own.skips} graphs without one against "
                f"{base.skips}: their price is in host time",
            )
        )
    if own.saved_bytes != base.saved_bytes:
        terms.append(
            LedgerTerm(
                name="memory saved for backward",
                us_per_step=None,
                how="counted",
                bytes_per_step=own.saved_bytes - base.saved_bytes,
                detail="held from forward to backward",
            )
        )
    total = arm_us - baseline_us
    rest = total - sum(t.us_per_step or 0.0 for t in terms)
    terms.append(
        LedgerTerm(
            name="unexplained", us_per_step=rest, how="measured", detail=f"{abs(rest) / baseline_us:.1%} of the step"
        )
    )
    share = reference / baseline_us
    return Ledger(
        arm=arm,
        terms=tuple(t for t in terms if t.us_per_step is None or abs(t.us_per_step) >= 0.05 or t.name in _ALWAYS),
        total_us=total,
        share_of_step=in_place / arm_us,
        amdahl_bound=amdahl(share, reference / alone) if alone > 0 else None,
        unexplained_share=abs(rest) / baseline_us,
    )


_ALWAYS = ("kernel alone", "lost fusion", "unexplained")
_COPIES = {"layout copy": "layout copies", "functional copy": "functionalisation copies", "cast": "casts"}


def amdahl(share: float, speedup: float) -> float:
    """What the step gains at most if only the op gets ``speedup`` times faster and it is ``share`` of the step."""
    bounded = min(max(share, 0.0), 1.0)
    return 1.0 / (1.0 - bounded + bounded / speedup)


def _factor(reference: float, alone: float) -> str:
    if alone <= 0 or reference <= 0:
        return "no slower"
    return f"{reference / alone:.2f}x faster" if alone <= reference else f"{alone / reference:.2f}x slower"


def _copies(own: ArmFacts, base: ArmFacts, rate: float) -> list[LedgerTerm]:
    """Kernels that only copy, by why they are there: counted from the graphs and priced at the copy rate."""
    found = []
    for role, name in _COPIES.items():
        extra = own.bytes(role=role) - base.bytes(role=role)
        if abs(extra) < 1 or rate <= 0:
            continue
        found.append(
            LedgerTerm(
                name=name,
                us_per_step=extra / rate * 1e6,
                how="counted",
                bytes_per_step=round(extra),
                launches_per_step=round(own.count(role=role) - base.count(role=role)),
                detail=f"priced at {rate / 1e9:,.0f} GB/s",
            )
        )
    return found


def lost_bytes(own: ArmFacts, base: ArmFacts, reference: ArmFacts | None) -> float:
    """Bytes that generated kernels move beyond those of the compiler's arm, the reference's own taken out."""
    return own.bytes() - base.bytes() + (reference.bytes() if reference is not None else 0.0)


def _fusion(
    own: ArmFacts, base: ArmFacts, facts: FactsReading, reference_us: float, copies: float, copied: float
) -> LedgerTerm:
    time = own.generated_us - base.generated_us + reference_us - copies
    launches = sum(own.kernels.values()) - sum(base.kernels.values())
    detail = ""
    size = None
    if own.nodes and base.nodes:
        size = lost_bytes(own, base, facts.reference) - copied
        priced = size / facts.copy_bytes_per_second * 1e6 if facts.copy_bytes_per_second else 0.0
        detail = f"by bytes at {facts.copy_bytes_per_second / 1e9:,.0f} GB/s it would be {priced:+,.0f}"
    return LedgerTerm(
        name="lost fusion",
        us_per_step=time,
        how="measured",
        detail=detail,
        bytes_per_step=None if size is None else round(size),
        launches_per_step=round(launches),
    )


@dataclass(frozen=True)
class Waits:
    """Microseconds of a step in which no kernel runs: between kernels, and for the host. ``bound``: it is the host
    that sets the pace."""

    gaps: float
    host: float
    bound: bool


def waits(facts: ArmFacts, step_us: float, on_gpu: bool) -> Waits:
    """What a step spends outside kernels, from clocks that do not see each other.

    On a GPU the step was taken on the device alone as well: issued ahead and without the profiler. What that is longer
    than its kernels passes between them. How the host issued the timed steps, by its own clock, says how long they take
    at least; what that is beyond the device's time is exposed. Where a step cannot be issued ahead (it waits for the
    device itself), the records of the profiler say, which stretches what the host does: a step that it fills is taken
    to wait for it.
    """
    if not on_gpu:
        return Waits(0.0, max(0.0, facts.span_us - facts.kernel_us), False)
    host = facts.host_share * step_us if facts.host_share else facts.enqueue_us
    number = sum(facts.kernels.values())
    if 0 < facts.enqueue_us < FAR_AHEAD * facts.kernel_us and facts.kernel_us > LONG_KERNEL_US * number:
        # Nothing waits for the host, and kernels this long are at the mercy of the power limit: their records, taken
        # under the load of the timed steps, say more of them than a step that stood behind a pause.
        return Waits(max(0.0, facts.span_us - facts.kernel_us), 0.0, False)
    if facts.queued_us > 0:
        paced = facts.paced_share * step_us or max(host, facts.queued_us)
        # From an idle device the host is never held up by a full queue, as it may be over many steps.
        bound = min(host, facts.enqueue_us) > facts.queued_us
        return Waits(facts.queued_us - facts.kernel_us, max(0.0, paced - facts.queued_us), bound)
    if facts.kernel_us < HOST_BOUND_BELOW * facts.step_us and facts.enqueue_us > 0.9 * facts.step_us:
        return Waits(0.0, max(0.0, host - facts.kernel_us), True)
    gaps = max(0.0, facts.span_us - facts.kernel_us)
    return Waits(min(gaps, max(0.0, facts.step_us - facts.kernel_us)), 0.0, False)


def _idle(own: ArmFacts, base: ArmFacts, baseline_us: float, arm_us: float, facts: FactsReading) -> list[LedgerTerm]:
    """Terms of a GPU's step for the time in which no kernel runs."""
    mine, theirs = waits(own, arm_us, True), waits(base, baseline_us, True)
    launches = sum(own.kernels.values()) - sum(base.kernels.values())
    terms = [
        LedgerTerm(
            name=GAPS,
            us_per_step=mine.gaps - theirs.gaps,
            how="measured",
            detail="steps issued ahead, or the records of kernels, less their kernels",
            launches_per_step=round(launches),
        )
    ]
    busy = own.kernel_us / arm_us
    if not (mine.bound and theirs.bound and own.queued_us > 0 and base.queued_us > 0):
        host = mine.host - theirs.host
        if mine.bound or theirs.bound:
            which = "both arms" if mine.bound and theirs.bound else own.name if mine.bound else BASELINE
            detail = f"host-bound ({which}): kernels run {busy:.0%} of the step"
        else:
            detail = f"GPU-bound, kernels run {busy:.0%} of the step: launches are hidden"
        return [*terms, LedgerTerm(name=HOST, us_per_step=host, how="measured", detail=detail)]
    # Both wait for the host: then the host's time is the step, and what kernels and gaps cost does not show.
    device = own.queued_us - base.queued_us
    host = mine.host + own.queued_us - theirs.host - base.queued_us
    called = f"; {facts.calls} calls of the op beside the compiler's step: {facts.host_us_of_calls:+.0f} us"
    called = called if facts.host_us_of_calls else ""
    terms.append(
        LedgerTerm(
            name=HOST,
            us_per_step=host,
            how="measured",
            detail=f"host-bound (both arms): kernels run {busy:.0%} of the step; {launches:+.0f} launches{called}",
            launches_per_step=round(own.launches - base.launches),
        )
    )
    terms.append(
        LedgerTerm(
            name=HIDDEN,
            us_per_step=-device,
            how="measured",
            detail="kernels and gaps above, which run while the host is not ready yet",
        )
    )
    return terms


def _outside(own: ArmFacts, base: ArmFacts, arm_us: float, unrecorded: float) -> LedgerTerm:
    """The term of a CPU's step for the time outside operators and generated kernels."""
    return LedgerTerm(
        name=HOST,
        us_per_step=waits(own, arm_us, False).host - unrecorded - waits(base, arm_us, False).host,
        how="measured",
        detail="time outside kernels: Python, guards, dispatch",
    )
