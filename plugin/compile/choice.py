"""Decides for every site of a graph and puts the chosen candidate there."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from opgraft.compile import demand, measure, span
from opgraft.compile.agree import Agreement
from opgraft.compile.answers import Answers
from opgraft.compile.case import Case, case_of, described, option, report
from opgraft.compile.change import Change, make_all, rehearsed
from opgraft.compile.find import find_sites
from opgraft.compile.fusible import Fusibility
from opgraft.compile.looks import Budget, Looks
from opgraft.compile.neighbourhood import Neighbourhood
from opgraft.compile.scope import scopes
from opgraft.compile.site import COMPILER, KERNEL, Decision, Site, SiteReport, SiteWarning
from opgraft.compile.store import Store

MEASURED = "measured"
CHOICES = (MEASURED, KERNEL, COMPILER)

# Timing one site, beside compiling it twice; more sharpens the interval only by the square root.
_SECONDS_A_SITE = 0.6
_SILENT_SECONDS = 1.0
# Called with the reports of every graph: what lists the sites of a whole program.
LISTENERS: list[Callable[[list[SiteReport]], None]] = []


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
        self._budget = Budget(tune_seconds, tune_seconds)
        self._settled: dict[str, Decision] = {}
        self._warned: set[str] = set()
        self._agreement = Agreement(patience=tune_seconds + 60.0)
        self._looks = Looks(self._budget, self._ask)

    @property
    def seconds_spent(self) -> float:
        """Seconds that went into measuring so far."""
        return self.tune_seconds - self._budget.left

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
        if self.choose != MEASURED:
            return decided
        answers.keep()
        return self._looks.again(decided, scope_of)

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

                self._settled[key] = self._ask(measured, case, key, noted)
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

    def _ask(
        self,
        measured: Callable[[float], Decision],
        case: Case,
        key: str,
        about: dict[str, Any],
        obstacle: Callable[[], str] = str,
    ) -> Decision:
        """The job's decision under a key: the stored one, or a new one where there is time left and no obstacle.

        Ranks ask for the same keys whatever time each has left: an obstacle is an answer, on which they agree too.
        """

        def decide() -> Decision:
            if (known := self.store.find(case.device, key)) is not None:
                return known
            why = obstacle()
            return Decision(COMPILER, why) if why else self._measured(measured, case, key, about)

        return self._agreement.settle(key, decide)

    def _measured(self, measured: Callable[[float], Decision], case: Case, key: str, about: dict[str, Any]) -> Decision:
        if self._budget.left <= 0.0:
            return Decision(COMPILER, f"not measured: tune_seconds={self.tune_seconds:g} are used up")
        started = time.monotonic()
        progress = _Progress(case.site, self.tune_seconds - self._budget.left, self.tune_seconds)
        try:
            decision = measured(min(_SECONDS_A_SITE, self._budget.left))
        except measure.UnmeasurableError as error:
            decision = Decision(COMPILER, f"not measured: {error}")
        except Exception as error:
            decision = _failure(error)
        finally:
            self._budget.left -= time.monotonic() - started
            progress.done()
        if decision.measured:
            self.store.put(case.device, key, decision, about)
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
    return case.change if decision.choice == demand.changed(case.is_idiom) else None


def _left(case: Case, why: str) -> Decision:
    """A site that stays as the model has it."""
    if case.is_idiom:
        return Decision(COMPILER, f"left to the compiler: {why}")
    return Decision(KERNEL, f"left as called: {why}")


class _Progress:
    """A line on the terminal while a site is measured, once measuring has taken a while; removed at the end."""

    def __init__(self, site: Site, used: float, of: float) -> None:
        self._shown = sys.stderr.isatty() and used > _SILENT_SECONDS
        if self._shown:
            print(f"\ropgraft: measuring {site} ({used:.0f} of {of:.0f} s)", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
