"""A comparison over fresh processes: how many, when it is enough, and what a process that died costs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from opgraft.diagnostics.measure import outcome, statistics
from opgraft.diagnostics.measure.arms import BASELINE, TWIN
from opgraft.diagnostics.measure.facts import FactsReading
from opgraft.diagnostics.measure.processes import Ended, ask
from opgraft.diagnostics.measure.readings import ArmReading, Problem, Reading
from opgraft.diagnostics.measure.request import Request

Progress = Callable[[str, float], None]

_ARM_STAGE = re.compile(r"^(?:compiling (?P<arm>.+?)(?: again, caches off)?|running (?P<eager>eager))$")


@dataclass
class Campaign:
    """What was gathered. ``stopped`` says why there are no more processes."""

    readings: list[Reading] = field(default_factory=list)
    facts: FactsReading | None = None
    problems: list[Problem] = field(default_factory=list)
    stopped: str = ""


def run(
    request: Request,
    *,
    processes: int,
    limit: float,
    ledger: bool,
    fresh: bool = True,
    progress: Progress | None = None,
) -> Campaign:
    """Asks one process after the other; the first also checks values and times the op alone.

    Raises:
        RefusedError: the request names something that is not there.
    """
    found = Campaign()
    tell = progress or (lambda message, share: None)
    total = processes + (1 if ledger else 0)
    out: tuple[str, ...] = ()
    done = 0
    checking = True
    while done < processes:
        first = not found.readings and checking
        task = msgspec.structs.replace(
            request, task="time", check=first, alone=first, apart=ledger, seed=done, leave_out=out
        )
        stage = _part(tell, done, total, f"process {done + 1} of {processes}: ")
        answer = ask(task, Reading, limit=limit, progress=stage, fresh=fresh)
        if isinstance(answer, Reading):
            done += 1
            found.readings.append(answer)
            if done >= statistics.LEAST_PROCESSES and done < processes and sure(found.readings):
                found.stopped = f"every verdict was sure after {done} processes"
                break
            continue
        arm = _arm_of(answer)
        found.problems.append(_died(answer, arm))
        if arm not in (None, BASELINE, TWIN) and arm not in out:
            # The arm that ended the process is left out from here on, and the same process is asked again.
            out = (*out, str(arm))
        elif first and arm is None:
            # What the checks need (the op in eager, the op alone) ends the process: the arms may still run.
            checking = False
            found.problems.append(_unchecked(answer))
        else:
            done += 1
            if not found.readings:
                found.stopped = "no process came back"
                return found
    if not found.stopped:
        blocks = sum(len(r.series.blocks) for r in found.readings if r.series is not None)
        found.stopped = f"the time was used up, after {blocks} blocks in {_processes(found.readings)}"
    if ledger and found.readings:
        task = msgspec.structs.replace(request, task="facts", leave_out=(*out, "eager"))
        taken = ask(task, FactsReading, limit=limit, progress=_part(tell, total - 1, total, "ledger: "), fresh=fresh)
        if isinstance(taken, FactsReading):
            found.facts = taken
        else:
            found.problems.append(_died(taken, None, "the process that takes the steps apart"))
    found.readings = [_with_failed(r, found.problems, out) for r in found.readings]
    return found


def _processes(readings: list[Reading]) -> str:
    return "1 process" if len(readings) == 1 else f"{len(readings)} processes"


def sure(readings: list[Reading]) -> bool:
    """Whether every arm's verdict stands and its figure is precise."""
    intervals = outcome.intervals(readings)
    return all(statistics.decided(i) for name, i in intervals.items() if name not in (TWIN, "eager"))


def _part(tell: Progress, index: int, total: int, prefix: str) -> Progress:
    return lambda message, share: tell(prefix + message, (index + share) / total)


def _arm_of(ended: Ended) -> str | None:
    matched = _ARM_STAGE.match(ended.stage)
    return (matched["arm"] or matched["eager"]) if matched else None


def _died(ended: Ended, arm: str | None, what: str = "a measuring process") -> Problem:
    where = f"while {ended.stage}" if ended.stage else "at its start"
    if arm is not None:
        return Problem(
            about="arm-failed",
            arm=arm,
            message=f"the arm {arm} fails: its process {ended.how} {where}",
            evidence=tuple(ended.output.splitlines()[-6:]),
        )
    lines = [line for line in ended.output.splitlines() if line.strip()]
    last = f": {lines[-1].strip()[:200]}" if lines and "exit code" in ended.how else ""
    return Problem(about="process-failed", message=f"{what} {ended.how} {where}{last}", evidence=tuple(lines[-6:]))


def _unchecked(ended: Ended) -> Problem:
    return Problem(
        about="not-checked",
        message="values were not checked and the op was not timed alone, since the process "
        f"{ended.how} while {ended.stage}",
    )


def _with_failed(reading: Reading, problems: list[Problem], out: tuple[str, ...]) -> Reading:
    """Rows for the arms that were left out, so that the table has them with the reason."""
    why = {p.arm: p.message.partition(" fails: ")[2] for p in problems if p.about == "arm-failed"}
    extra = tuple(ArmReading(name=name, failed=why.get(name, "failed")) for name in out if reading.arm(name) is None)
    return msgspec.structs.replace(reading, arms=(*reading.arms, *extra)) if extra else reading
