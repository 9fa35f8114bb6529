"""Faults of one arm or of the run, as problems of the reading."""

from __future__ import annotations

from opgraft.diagnostics.measure.arms import Arm
from opgraft.diagnostics.measure.readings import Problem

NO_ROOM = "does not fit in memory"


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def failure(arm: Arm) -> Problem:
    message = f"the arm {arm.name} fails: {arm.failed}"
    if arm.failed == NO_ROOM:
        return Problem(about="no-memory", arm=arm.name, message=message)
    return Problem(about="arm-failed", arm=arm.name, message=message)


def recompiles(name: str) -> Problem:
    return Problem(
        about="recompiles",
        arm=name,
        message=f"the arm {name} compiles again while it is timed: a guard fails at every step, and compile time is no "
        "step time",
    )


def throttled(held: int, blocks: int) -> Problem:
    return Problem(
        about="throttled",
        message=f"the device was throttled by heat or by its hardware in {held} of {blocks} blocks, also when they "
        "were done again: the arms did not run at one speed",
    )
