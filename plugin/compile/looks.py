"""Looks at choices in the model around their sites: in a stretch, in a longer one, in the whole graph."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from opgraft.compile import demand, identity, measure, stretch, timing
from opgraft.compile.case import Case, option, setting, today
from opgraft.compile.change import Change
from opgraft.compile.demand import CLEARLY_FASTER, FASTER, NOT_SLOWER
from opgraft.compile.neighbourhood import digest
from opgraft.compile.scope import Scope
from opgraft.compile.site import COMPILER, KERNEL, Decision, Site
from opgraft.compile.store import architecture
from opgraft.compile.stretch import Stretch

# Where a kernel's loss is looked at again: the least that its speed may be of the compiler's in its surroundings.
# A look takes seconds; on a CPU, where it takes the most, clearer losses have not been seen to turn.
_DOUBTED = {"cuda": 0.0, "cpu": 0.67}
# How many times as long a stretch is that decides between two looks; a whole graph up to twice as long does it too.
_IN_DISPUTE = 4
_NEARLY_ALL = 2
# Choices that are looked at again together, (idiom, choice), and what the change has to be there.
_GROUPS = {(True, KERNEL): FASTER, (False, COMPILER): NOT_SLOWER, (False, KERNEL): FASTER}

Decided = list[tuple[Case, Decision]]
Scopes = dict[torch.fx.Node, Scope]


@dataclasses.dataclass
class Budget:
    """Seconds for measuring: of all, and left."""

    of: float
    left: float

    @property
    def has_time_for_looks(self) -> bool:
        """Half of the time is kept for sites that nobody has measured yet."""
        return self.left >= self.of / 2

    @property
    def is_untouched(self) -> bool:
        """True in a process that has measured nothing: it found all that it asked for."""
        return self.left >= self.of


class Ask(Protocol):
    """The decision under a key: known, of another rank, or measured here unless there is an obstacle."""

    def __call__(
        self,
        measured: Callable[[float], Decision],
        case: Case,
        key: str,
        about: dict[str, Any],
        obstacle: Callable[[], str] = str,
    ) -> Decision: ...


class Looks:
    """The looks of one ``torch.compile``, which share time and what they have found."""

    def __init__(self, budget: Budget, ask: Ask) -> None:
        self._budget = budget
        self._ask = ask
        self._stood: dict[str, Decision] = {}  # by the key of a kind of site: what the model around said of a choice
        self._doubts: dict[str, Decision] = {}  # by the same keys: what it said of a loss
        self._seen: set[str] = set()  # stretches that were looked at, with their changes
        self._longest = 0  # nodes of the longest stretch that was timed here, and seconds of that look a node
        self._pace: float | None = None

    def again(self, decided: Decided, scope_of: Scopes) -> Decided:
        """The decisions as the model around their sites has them."""
        for look in (self._confirmed, self._doubted, self._in_the_whole):
            decided = look(decided, scope_of)
        return decided

    def _confirmed(self, decided: Decided, scope_of: Scopes) -> Decided:
        """The same decisions, where they also hold in the model around: see ``stretch``.

        Kernels put in place of idioms must make the stretch measurably faster. At the model's own calls of an op the
        compiler's code must not make it slower, nor faster where the op is to stay.
        """
        for group, wanted in _GROUPS.items():
            waiting = [(case, d) for case, d in decided if d.measured and (case.is_idiom, d.choice) == group]
            changes = [c.change for c, _ in waiting]
            for case, decision in waiting:
                if case.key in self._stood:
                    continue
                found = stretch.around(case.site, changes, scope_of)
                verdict = self._without_stretch(decision) if found is None else self._look(case, found, wanted)
                if found is not None and verdict.choice != decision.choice:
                    # Surroundings and stretch disagree: what the compiler fuses depends on where either was cut.
                    more = _longer(case, changes, scope_of)
                    if more is not None and len(more.nodes) > len(found.nodes):
                        last = self._look(case, more, wanted, self._no_time_for_looks)
                        if last.measured:
                            found, verdict = more, last
                inside = {c.site.root for c in found.changes} if found is not None else set()
                judged = {other.key for other, _ in waiting if other is case or other.site.root in inside}
                for key in judged:
                    self._stood.setdefault(key, verdict)
                if len(judged) == 1:  # asked alone it would get the same answer
                    self._doubts.setdefault(case.key, verdict)
        return [(case, self._after(case, decision)) for case, decision in decided]

    def _doubted(self, decided: Decided, scope_of: Scopes) -> Decided:
        """The same, where a kernel that lost in its surroundings wins in the model around.

        It may: what the compiler fuses there it may write twice, for two readers, or in a layout that the next call
        copies. Looks take seconds, and are had for half of the time at most.
        """
        lost = [c for c, d in decided if c.is_idiom and d.choice == COMPILER and self._in_doubt(c, d)]
        for case in lost:
            alike = [c.change for c in lost if c.key == case.key and not _is_taken(c, decided)]
            if case.site not in {change.site for change in alike}:
                continue
            if case.key not in self._doubts:
                if (found := stretch.around(case.site, alike, scope_of)) is None:
                    continue
                verdict = self._look(case, found, CLEARLY_FASTER, self._no_time_for_looks)
                if not verdict.measured:
                    continue
                self._doubts[case.key] = verdict
            if (verdict := self._doubts[case.key]).choice == KERNEL:
                decided = _turned(decided, {case.site}, verdict)
        return decided

    def _in_the_whole(self, decided: Decided, scope_of: Scopes) -> Decided:
        """The same, looked at in the whole graph, or all of it that can run on its own.

        Some decisions of a compiler are taken for a whole graph (Inductor gives every ancestor of a convolution a
        layout), or far from the site, so that no part shows them. Beside all else that was chosen, a kind of site stays
        changed where the graph is not slower with it, and is changed where it is clearly faster. Each look compiles the
        graph again: the nearest losses come first, and a look that would take more than half of the time left is not
        made.
        """
        waiting = [case for case, d in decided if d.measured and (_is_changed(case, d) or self._in_doubt(case, d))]
        while waiting:
            whole = stretch.around(waiting[0].site, (), scope_of, most=len(scope_of))
            inside = {waiting[0].site.root, *(whole.nodes if whole is not None else ())}
            here = [case for case in waiting if case.site.root in inside]
            waiting = [case for case in waiting if case.site.root not in inside]
            if whole is not None:
                for key in self._in_order(here, decided):
                    decided = self._kind_in_the_whole([c for c in here if c.key == key], whole, decided)
        return decided

    def _kind_in_the_whole(self, kind: list[Case], whole: Stretch, decided: Decided) -> Decided:
        """The decisions after one kind of site was turned in a stretch."""
        case, now = kind[0], {c.site: d for c, d in decided}
        free = [c for c in kind if c.site in now and (_is_changed(c, now[c.site]) or not _is_taken(c, decided))]
        if not free:
            return decided  # part of a larger idiom that a kernel serves by now
        stays = _is_changed(free[0], now[free[0].site])
        sites = {c.site for c in free}
        kept = [c.change for c, d in decided if _is_changed(c, d) and c.site not in sites]
        found = whole.holding([c.change for c in free], kept)
        if not found.changes or digest(found.signature()) in self._seen:
            return decided
        verdict = self._look(
            case, found, NOT_SLOWER if stays else CLEARLY_FASTER, lambda: self._no_time_for(found), demand.WHOLE
        )
        turned = {change.site for change in found.changes}
        if not verdict.measured:
            return [
                (c, dataclasses.replace(d, why=f"{d.why}; {demand.WHOLE} is {verdict.why}") if c.site in turned else d)
                for c, d in decided
            ]
        met = verdict.choice == demand.changed(case.is_idiom)
        return decided if met == stays else _turned(decided, turned, verdict)

    def _in_order(self, cases: list[Case], decided: Decided) -> list[str]:
        """The kinds among cases: first those that are changed, then the nearest losses of the smaller looks."""
        now = {case.site: decision for case, decision in decided}

        def place(case: Case) -> tuple[bool, float]:
            known = self._doubts.get(case.key) or self._stood.get(case.key) or now[case.site]
            return not _is_changed(case, now[case.site]), -_speed_if_changed(case, known)

        return list(dict.fromkeys(case.key for case in sorted(cases, key=place)))

    def _in_doubt(self, case: Case, decision: Decision) -> bool:
        """True for a site that stays as it was given and lost by no more than what may turn in the model."""
        if not decision.measured or _is_changed(case, decision):
            return False
        return _speed_if_changed(case, decision) > _DOUBTED.get(case.device, 1.0)

    def _nothing_new(self) -> str:
        """Why a process that knows all sites makes no looks: it would decide otherwise than the one that measured them,
        and take longer than a compile."""
        return (
            "not looked at: the process that measured its site had no time for it" if self._budget.is_untouched else ""
        )

    def _no_time_for_looks(self) -> str:
        return "" if self._budget.has_time_for_looks else "not looked at: there is no time left for looks"

    def _no_time_for(self, found: Stretch) -> str:
        """Why a whole graph is not looked at: that its compiles would take too long, by the longest look's pace."""
        if self._pace is None:
            return "not looked at: nothing was timed that says how long it would take"
        needed = self._pace * len(found.nodes)
        if needed <= self._budget.left / 2:
            return ""
        return f"not looked at: it would take about {needed:.0f} of {self._budget.left:.0f} s left"

    def _after(self, case: Case, decision: Decision) -> Decision:
        verdict = self._stood.get(case.key) if decision.measured else None
        if verdict is None or verdict.choice == decision.choice:
            return decision
        if verdict.why.startswith(decision.why):
            return verdict
        return dataclasses.replace(decision, choice=verdict.choice, why=f"{decision.why}; but {verdict.why}")

    def _without_stretch(self, decision: Decision) -> Decision:
        why = f"{decision.why}, but not both on the device and on the host"
        return dataclasses.replace(decision, choice=COMPILER, why=why) if decision.open else decision

    def _look(
        self,
        case: Case,
        found: Stretch,
        wanted: str,
        obstacle: Callable[[], str] = str,
        place: str = demand.AROUND,
    ) -> Decision:
        """What a stretch says of its changes; ``obstacle`` says why it is not to be timed, where it is not known."""
        self._seen.add(digest(found.signature()))
        signature = {
            **found.signature(),
            **setting(case.device, [c.site.spec for c in found.changes]),
            "demand": wanted,
        }
        key = digest(signature)
        specs = list({c.site.spec.name: c.site.spec for c in found.changes}.values())
        about = {
            "op": ", ".join(spec.name for spec in specs),
            "idiom": ", ".join(sorted({c.site.idiom for c in found.changes if c.site.idiom})),
            "surroundings": f"a stretch of {len(found.nodes)} operations with {len(found.changes)} sites",
            "training": found.training,
            "architecture": architecture(case.device),
            "build": ", ".join(identity.of_op(spec) for spec in specs),
            "measured_on": today(),
        }

        def measured(seconds: float) -> Decision:
            began = time.monotonic()
            samples = measure.confirm(
                found,
                seconds=seconds,
                replay_decides=bool(option("triton.cudagraphs")),
                is_kept=lambda samples: demand.stands(wanted, timing.judge(samples)),
            )
            if len(found.nodes) >= self._longest:
                self._longest, self._pace = len(found.nodes), (time.monotonic() - began) / len(found.nodes)
            return demand.last_word(samples, case.is_idiom, wanted, place)

        return self._ask(measured, case, key, about, lambda: self._nothing_new() or obstacle())


def _longer(case: Case, changes: list[Change], scope_of: Scopes) -> Stretch | None:
    """The stretch that decides where two looks disagree."""
    longer = stretch.around(case.site, changes, scope_of, most=_IN_DISPUTE * stretch.MOST_NODES)
    whole = stretch.around(case.site, changes, scope_of, most=len(scope_of))
    if longer is None or whole is None or len(whole.nodes) > _NEARLY_ALL * len(longer.nodes):
        return longer
    return whole


def _is_changed(case: Case, decision: Decision) -> bool:
    return decision.choice == demand.changed(case.is_idiom)


def _speed_if_changed(case: Case, decision: Decision) -> float:
    """How fast what was timed is with the site changed, as a share of what it is as given; 0 where it was not timed."""
    ratio = decision.ratio or 0.0
    return ratio if case.is_idiom or not ratio else 1.0 / ratio


def _is_taken(case: Case, decided: Decided) -> bool:
    """True where a kernel already serves some of the site's nodes."""
    own = set(case.site.nodes)
    return any(d.choice == KERNEL and c.site is not case.site and own.intersection(c.site.nodes) for c, d in decided)


def _turned(decided: Decided, sites: set[Site], verdict: Decision) -> Decided:
    """The decisions with those at ``sites`` as a look says; what a new kernel covers is no site any more."""
    new = {node for site in sites if verdict.choice == KERNEL for node in site.nodes}
    return [
        (c, dataclasses.replace(d, choice=verdict.choice, why=f"{d.why}; but {verdict.why}") if c.site in sites else d)
        for c, d in decided
        if c.site in sites or not new.intersection(c.site.nodes)
    ]
