"""What a look at a stretch of the model demands of a change, and what its times say."""

from __future__ import annotations

from opgraft.compile import timing
from opgraft.compile.site import COMPILER, KERNEL, Decision

FASTER = "faster"  # by any amount that can be told from noise
CLEARLY_FASTER = "clearly faster"  # to overrule a loss
NOT_SLOWER = "not slower"

AROUND = "the model around it"
WHOLE = "the whole graph"


def stands(demand: str, verdict: timing.Verdict) -> bool:
    """True where a change meets what is demanded; ``verdict`` is of the stretch without it over the one with it."""
    if demand == NOT_SLOWER:
        return not verdict.second_is_slower
    return verdict.second_wins if demand == CLEARLY_FASTER else verdict.second_is_faster


def changed(idiom: bool) -> str:
    """The choice that changes a site: the kernel in place of an idiom, the compiler's code in place of an op."""
    return KERNEL if idiom else COMPILER


def last_word(samples: timing.Samples, idiom: bool, demand: str, place: str = AROUND) -> Decision:
    """What timing a stretch says: ``samples`` are of it without the change and with it."""
    verdict = timing.judge(samples)
    before, after = (1e6 * t for t in samples.medians)
    met = stands(demand, verdict)
    negated = "not " if met == (demand == NOT_SLOWER) else ""
    word = "slower" if demand == NOT_SLOWER else "faster"
    why = f"{place} is {negated}{word} {'with the kernel' if idiom else 'without the op'}"
    return Decision(
        choice=changed(idiom) if met else changed(not idiom),
        why=f"{why} ({verdict.ratio:.3f} [{verdict.interval[0]:.3f}, {verdict.interval[1]:.3f}])",
        measured=True,
        ratio=round(verdict.ratio if idiom else 1.0 / verdict.ratio, 4),
        interval=(round(verdict.interval[0], 4), round(verdict.interval[1], 4)),
        noise=round(verdict.noise, 4),
        compiler_us=round(before if idiom else after, 2),
        kernel_us=round(after if idiom else before, 2),
    )
