"""Decides for every site of a graph and puts the chosen candidate there."""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from opgraft.compile import identity, measure, span, stretch, timing
from opgraft.compile.agree import Agreement
from opgraft.compile.answers import Answers
from opgraft.compile.case import Case, case_of, described, option, report, setting, today
from opgraft.compile.change import Change, make_all, rehearsed
from opgraft.compile.find import find_sites
from opgraft.compile.fusible import Fusibility
from opgraft.compile.neighbourhood import Neighbourhood, digest
from opgraft.compile.scope import Scope, scopes
from opgraft.compile.site import COMPILER, KERNEL, Decision, Site, SiteReport, SiteWarning
from opgraft.compile.store import Store, architecture
from opgraft.compile.stretch import Stretch

MEASURED = "measured"
CHOICES = (MEASURED, KERNEL, COMPILER)

# Timing one site, beside compiling it twice; more sharpens the interval only by the square root.
_SECONDS_A_SITE = 0.6
_SILENT_SECONDS = 1.0
# Called with the reports of every graph: what lists the sites of a whole program.
LISTENERS: list[Callable[[list[SiteReport]], None]] = []
# Where a kernel's loss is looked at again: the least that its speed may be of the compiler's in its surroundings.
# A look takes seconds; on a CPU, where it takes the most, clear losses have not been seen to turn.
_DOUBTED = {"cuda": 0.0, "cpu": 0.8}
# How many times as long a stretch is that decides between two looks.
_IN_DISPUTE = 4
# Choices that are looked at again together: (idiom, choice).
_GROUPS = ((True, KERNEL), (False, COMPILER), (False, KERNEL))


class Chooser:
    """Serves the graphs of one ``torch.compile``.

    Args:
        choose: ``"measured"``, ``"kernel"`` or ``"compiler"``.
        store: where decisions are kept.
        tune_seconds: time for measuring in all; sites beyond it get the compiler's code. A compile that has begun is
            finished.
    """

    def __init__(self, choose: str = MEASURED, store: Store | None = None, tune_seconds: float = 60.0) -> None:
        if choose not in CHOICES:
            raise ValueError(f'choose is {choose!r}, expected one of "measured", "kernel", "compiler"')
        self.choose = choose
        self.store = store if store is not None else Store()
        self.tune_seconds = tune_seconds
        self.reports: list[SiteReport] = []
        self._left = tune_seconds
        self._settled: dict[str, Decision] = {}
        self._stood: dict[str, Decision] = {}  # by the same keys: what the model around said of a choice
        self._doubts: dict[str, Decision] = {}  # by the same keys: what it said of a loss
        self._warned: set[str] = set()
        self._agreement = Agreement(patience=tune_seconds + 60.0)

    @property
    def seconds_spent(self) -> float:
        """Seconds that went into measuring so far."""
        return self.tune_seconds - self._left

    @property
    def _has_time_for_looks(self) -> bool:
        """Half of the time is kept for sites that nobody has measured yet."""
        return self._left >= self.tune_seconds / 2

    def apply(self, graph: torch.fx.Graph) -> list[SiteReport]:
        """Decides for every site of ``graph`` and rewrites it; what cannot be rewritten stays as it was."""
        decided = self.decide(graph)
        wanted = {case.site: change for case, decision in decided if (change := _change(case, decision)) is not None}
        sound, failed = rehearsed(graph, list(wanted.values()))
        make_all(sound)
        changed = {change.site for change in sound}
        span.hold(c.surroundings for c, d in decided if d.measured and c.site in changed and c.surroundings is not None)
        reports = []
        for case, decision in decided:
            error = failed.get(wanted[case.site]) if case.site in wanted else None
            if error is not None:
                decision = _left(case, f"it cannot be rewritten ({type(error).__name__}: {_first_line(error)})")
                self._warn(case.site, decision.why)
            reports.append(report(case, decision))
        self._tell(reports)
        return reports

    def look(self, graph: torch.fx.Graph) -> list[SiteReport]:
        """Decides for every site of ``graph`` and changes nothing."""
        reports = [report(case, decision) for case, decision in self.decide(graph)]
        self._tell(reports)
        return reports

    def _tell(self, reports: list[SiteReport]) -> None:
        self.reports.extend(reports)
        for listener in LISTENERS:
            listener(reports)

    def decide(self, graph: torch.fx.Graph) -> list[tuple[Case, Decision]]:
        """Every site of a graph with its decision; the graph is not changed."""
        scope_of = scopes(graph)
        answers = Answers(self.store)
        found = find_sites(graph, scope_of, answers)
        if not found:
            return []
        fusible = Fusibility(answers)
        traced: dict[Any, torch.fx.GraphModule] = {}
        decided: list[tuple[Case, Decision]] = []
        served: set[torch.fx.Node] = set()
        for site in found:
            if served.intersection(site.nodes):
                continue  # part of a larger idiom that a kernel serves
            case = case_of(site, scope_of, fusible, traced)
            decision = self._decide(case)
            if decision.choice == KERNEL:
                served.update(site.nodes)
            decided.append((case, decision))
        if self.choose == MEASURED:
            answers.keep()
        return self._confirmed(decided, scope_of)

    def _confirmed(
        self, decided: list[tuple[Case, Decision]], scope_of: dict[torch.fx.Node, Scope]
    ) -> list[tuple[Case, Decision]]:
        """The same decisions, where they also hold in the model around: see ``stretch``.

        Kernels put in place of idioms must make the stretch measurably faster. At the model's own calls of an op the
        compiler's code must not make it slower, nor faster where the op is to stay.
        """
        if self.choose != MEASURED:
            return decided
        for group in _GROUPS:
            waiting = [(case, d) for case, d in decided if d.measured and (case.is_idiom, d.choice) == group]
            changes = [c.change for c, _ in waiting]
            for case, decision in waiting:
                if case.key in self._stood:
                    continue
                found = stretch.around(case.site, changes, scope_of)
                verdict = self._stretch_verdict(case, decision, found)
                if found is not None and verdict.choice != decision.choice and self._has_time_for_looks:
                    # Surroundings and stretch disagree: what the compiler fuses depends on where either was cut.
                    more = stretch.around(case.site, changes, scope_of, most=_IN_DISPUTE * stretch.MOST_NODES)
                    if more is not None and len(more.nodes) > len(found.nodes):
                        last = self._stretch_verdict(case, decision, more)
                        if last.measured:
                            found, verdict = more, last
                inside = {c.site.root for c in found.changes} if found is not None else set()
                judged = {other.key for other, _ in waiting if other is case or other.site.root in inside}
                for key in judged:
                    self._stood.setdefault(key, verdict)
                if len(judged) == 1:  # asked alone it would get the same answer
                    self._doubts.setdefault(case.key, verdict)
        return self._doubted([(case, self._after(case, decision)) for case, decision in decided], scope_of)

    def _doubted(
        self, decided: list[tuple[Case, Decision]], scope_of: dict[torch.fx.Node, Scope]
    ) -> list[tuple[Case, Decision]]:
        """The same, where a kernel that lost in its surroundings wins in the model around.

        It may: what the compiler fuses there it may write twice, for two readers, or in a layout that the next call
        copies. Looks take seconds, and are had for half of the time at most.
        """
        lost = [
            case
            for case, d in decided
            if d.measured
            and case.is_idiom
            and d.choice == COMPILER
            and (d.ratio or 0.0) > _DOUBTED.get(case.device, 1.0)
        ]
        taken = {node for case, d in decided if d.choice == KERNEL for node in case.site.nodes}
        won: dict[Site, Decision] = {}
        for case in (c for c in lost if not taken.intersection(c.site.nodes)):
            if case.key not in self._doubts:
                alike = [c.change for c in lost if c.key == case.key and not taken.intersection(c.site.nodes)]
                found = stretch.around(case.site, alike, scope_of)
                if found is None or not self._has_time_for_looks:
                    continue
                self._doubts[case.key] = self._stretch_verdict(case, Decision(COMPILER, ""), found, doubt=True)
            if (verdict := self._doubts[case.key]).choice == KERNEL:
                taken.update(case.site.nodes)
                won[case.site] = verdict
        covered = {node for site in won for node in site.nodes}
        kept = [(c, d) for c, d in decided if c.site in won or not covered.intersection(c.site.nodes)]
        return [
            (c, dataclasses.replace(d, choice=KERNEL, why=f"{d.why}; but {won[c.site].why}") if c.site in won else d)
            for c, d in kept
        ]

    def _after(self, case: Case, decision: Decision) -> Decision:
        verdict = self._stood.get(case.key) if decision.measured else None
        if verdict is None or verdict.choice == decision.choice:
            return decision
        if verdict.why.startswith(decision.why):
            return verdict
        return dataclasses.replace(decision, choice=verdict.choice, why=f"{decision.why}; but {verdict.why}")

    def _stretch_verdict(self, case: Case, decision: Decision, found: Stretch | None, doubt: bool = False) -> Decision:
        if found is None:
            why = f"{decision.why}, but not both on the device and on the host"
            return dataclasses.replace(decision, choice=COMPILER, why=why) if decision.open else decision
        signature = {
            **found.signature(),
            **setting(case.device, [c.site.spec for c in found.changes]),
            **({"doubt": True} if doubt else {}),
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
            replay = bool(option("triton.cudagraphs"))

            def word(samples: timing.Samples) -> Decision:
                return _last_word(samples, case.is_idiom, decision.choice, doubt)

            changed = KERNEL if case.is_idiom else COMPILER
            return word(
                measure.confirm(
                    found,
                    seconds=seconds,
                    replay_decides=replay,
                    is_kept=lambda samples: word(samples).choice == changed,
                )
            )

        return self._agreement.settle(key, lambda: self._known_or(measured, case.site, case.device, key, about))

    def _decide(self, case: Case) -> Decision:
        site = case.site
        if case.obstacle:
            return _left(case, case.obstacle)
        if self.choose == COMPILER:
            return Decision(COMPILER, 'choose="compiler"')
        if case.surroundings is None:
            return Decision(COMPILER, "a size depends on data, so nothing can be measured")
        surroundings, key = case.surroundings, case.key
        if key not in self._settled:
            if self.choose == KERNEL:
                self._settled[key] = self._forced(site, surroundings)
            else:
                noted = described(surroundings)

                def measured(seconds: float) -> Decision:
                    replay = bool(option("triton.cudagraphs"))
                    return measure.measure(surroundings, seconds=seconds, replay_decides=replay)

                self._settled[key] = self._agreement.settle(
                    key, lambda: self._known_or(measured, site, case.device, key, noted)
                )
        decision = self._settled[key]
        if decision.why.startswith(_FAILED):
            self._warn(site, decision.why)
        return decision

    def _forced(self, site: Site, surroundings: Neighbourhood) -> Decision:
        try:
            measure.verify(surroundings)
        except measure.UnmeasurableError as error:
            return Decision(COMPILER, f"not checked: {error}")
        except Exception as error:
            return _failure(error)
        return Decision(KERNEL, 'choose="kernel"')

    def _known_or(
        self,
        measured: Callable[[float], Decision],
        site: Site,
        device: str,
        key: str,
        about: dict[str, Any],
    ) -> Decision:
        """The stored decision under a key, or a new one, where there is time left to measure."""
        if (known := self.store.find(device, key)) is not None:
            return known
        if self._left <= 0.0:
            return Decision(COMPILER, f"not measured: tune_seconds={self.tune_seconds:g} are used up")
        started = time.monotonic()
        progress = _Progress(site, self.tune_seconds - self._left, self.tune_seconds)
        try:
            decision = measured(min(_SECONDS_A_SITE, self._left))
        except measure.UnmeasurableError as error:
            decision = Decision(COMPILER, f"not measured: {error}")
        except Exception as error:
            decision = _failure(error)
        finally:
            self._left -= time.monotonic() - started
            progress.done()
        if decision.measured:
            self.store.put(device, key, decision, about)
        return decision

    def _warn(self, site: Site, why: str) -> None:
        message = f"opgraft: {site}: {why}"
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, SiteWarning, stacklevel=2)


_FAILED = "the kernel failed"


def _failure(error: Exception) -> Decision:
    return Decision(COMPILER, f"{_FAILED} ({type(error).__name__}: {_first_line(error)}): the compiler's code is used")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _change(case: Case, decision: Decision) -> Change | None:
    """What a decision changes in the graph; None where the site stays as it is."""
    return case.change if decision.choice != (COMPILER if case.is_idiom else KERNEL) else None


def _left(case: Case, why: str) -> Decision:
    """A site that stays as the model has it."""
    if case.is_idiom:
        return Decision(COMPILER, f"left to the compiler: {why}")
    return Decision(KERNEL, f"left as called: {why}")


def _last_word(samples: timing.Samples, idiom: bool, chosen: str, doubt: bool = False) -> Decision:
    """What timing a stretch says: ``samples`` are of it as given and with the change, the kernel in place of an idiom
    or the compiler's code in place of an op. Where it is to overrule a loss (``doubt``), it must win clearly."""
    verdict = timing.judge(samples)
    before, after = (1e6 * t for t in samples.medians)
    if idiom:
        choice = KERNEL if (verdict.second_wins if doubt else verdict.second_is_faster) else COMPILER
        why = f"the model around it is {'' if choice == KERNEL else 'not '}faster with the kernel"
    elif chosen == COMPILER:
        choice = KERNEL if verdict.second_is_slower else COMPILER
        why = f"the model around it is {'' if choice == KERNEL else 'not '}slower without the op"
    else:
        choice = COMPILER if verdict.second_is_faster else KERNEL
        why = f"the model around it is {'' if choice == COMPILER else 'not '}faster without the op"
    return Decision(
        choice=choice,
        why=f"{why} ({verdict.ratio:.3f} [{verdict.interval[0]:.3f}, {verdict.interval[1]:.3f}])",
        measured=True,
        ratio=round(verdict.ratio if idiom else 1.0 / verdict.ratio, 4),
        interval=(round(verdict.interval[0], 4), round(verdict.interval[1], 4)),
        noise=round(verdict.noise, 4),
        compiler_us=round(before if idiom else after, 2),
        kernel_us=round(after if idiom else before, 2),
    )


class _Progress:
    """A line on the terminal while a site is measured, once measuring has taken a while; removed at the end."""

    def __init__(self, site: Site, used: float, of: float) -> None:
        self._shown = sys.stderr.isatty() and used > _SILENT_SECONDS
        if self._shown:
            print(f"\ropgraft: measuring {site} ({used:.0f} of {of:.0f} s)", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
