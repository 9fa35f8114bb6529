"""What one process measured, as plain data: workers write it as JSON, ``compare`` joins the readings of all."""

from __future__ import annotations

from typing import Literal

import msgspec

from opgraft.diagnostics.measure.blocks import Series
from opgraft.diagnostics.measure.facts import ArmFacts
from opgraft.diagnostics.model import Location


class SiteReading(msgspec.Struct, frozen=True, kw_only=True):
    """A call site of an op in the model's source."""

    op: str
    location: Location


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that takes the meaning from a measurement, or from one arm of it.

    ``about`` is a fixed word, ``arm`` empty where every arm is hit.
    """

    about: Literal[
        "not-deterministic",
        "mutates-inputs",
        "no-tensor",
        "no-memory",
        "arm-failed",
        "recompiles",
        "values-differ",
        "no-reference-values",
        "op-not-run",
        "op-still-runs",
        "no-site",
        "process-failed",
        "not-checked",
        "throttled",
    ]
    message: str
    arm: str = ""
    op: str = ""
    evidence: tuple[str, ...] = ()

    @property
    def voids(self) -> bool:
        """True where no verdict may be given while this stands."""
        return self.about not in ("arm-failed", "no-memory", "no-reference-values", "process-failed")


class ArmReading(msgspec.Struct, frozen=True, kw_only=True):
    """One arm in one process. Counts are per step; None where the process could not tell.

    ``op_runs`` counts an op however it was seen, ``op_calls`` calls from the host alone: a replayed graph makes none.
    """

    name: str
    failed: str = ""
    graphs: int | None = None
    regions: float | None = None
    launches: float | None = None
    busy_us: float | None = None
    enqueue_us: float | None = None
    op_runs: dict[str, float] = {}
    op_calls: dict[str, float] = {}
    error: float | None = None
    allowed: float | None = None
    compile_seconds: float | None = None
    step_us: float | None = None
    memory_bytes: int | None = None


class AloneReading(msgspec.Struct, frozen=True, kw_only=True):
    """One form of the ops alone: a step's calls together."""

    us_per_step: float
    calls: int
    launches: float | None = None
    cold: bool = True
    host_us_per_call: float | None = None


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one process saw. ``apart`` has times of the arms' steps alone, none of the compiler's counts."""

    device: str
    arms: tuple[ArmReading, ...] = ()
    series: Series | None = None
    apart: tuple[ArmFacts, ...] = ()
    alone: dict[str, dict[str, AloneReading]] = {}
    ideal_bytes: dict[str, int] = {}
    copy_bytes_per_second: float | None = None
    sites: tuple[SiteReading, ...] = ()
    problems: tuple[Problem, ...] = ()
    environment: dict[str, str] = {}
    train: bool = False
    dtype: str = ""

    def arm(self, name: str) -> ArmReading | None:
        return next((a for a in self.arms if a.name == name), None)
