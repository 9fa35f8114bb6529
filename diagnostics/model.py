"""The data that all parts pass on. The JSON of a report is this module, written by msgspec; see ``report/json.py``."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = 1

Severity = Literal["error", "warning", "note"]
Owner = Literal["op", "extension", "triton", "user", "torch", "unknown"]
How = Literal["measured", "counted", "modelled", "unknown"]
Verdict = Literal["FASTER", "SLOWER", "EQUIVALENT", "UNRESOLVED"]


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a source file. ``line`` counts from 1; columns count characters from 0, as ``ast`` gives them."""

    path: str
    line: int
    function: str = ""
    text: str = ""
    end_line: int | None = None
    column: int | None = None
    end_column: int | None = None


class Callee(msgspec.Struct, frozen=True, kw_only=True):
    """Who was called where the finding points: its name, who ships it, and what kind of thing it is."""

    name: str
    distribution: str = "unknown"
    owner: Owner = "unknown"


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One message of torch's compiler, as data. A finding lists them from the root cause to the wrappers."""

    gb_type: str
    context: str = ""
    explanation: str = ""
    hints: tuple[str, ...] = ()


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Four counts that are never added up: places in the source, compile-time events, frames that run wholly in
    eager because of this, and executions a step (``None`` where no step was observed)."""

    sites: int = 1
    compiles: int = 0
    frames_skipped: int = 0
    per_step: int | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds and bytes a step, with a 95 % interval. ``None`` means not measured, never zero. ``with_call`` says
    that the called kernel's own time is in it, which would be spent without the break as well: an upper bound."""

    us_per_step: float | None = None
    low: float | None = None
    high: float | None = None
    bytes_per_step: int | None = None
    share_of_step: float | None = None
    how: How = "unknown"
    with_call: bool = False


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """One way out. ``torch`` is a version specifier; ``price`` says what the reader pays for it."""

    id: str
    text: str
    price: str = ""
    diff: str | None = None
    proved: bool = False
    torch: str = ">=2.11"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause, with its place, owner, cost and remedies. ``sites`` lists every place; ``location`` is the first."""

    kind: str
    code: str
    severity: Severity
    message: str
    location: Location
    stack: tuple[Location, ...] = ()
    sites: tuple[Location, ...] = ()
    callee: Callee | None = None
    causes: tuple[Cause, ...] = ()
    counts: Counts = Counts()
    cost: Cost = Cost()
    remedies: tuple[Remedy, ...] = ()
    evidence: tuple[str, ...] = ()


class ExplainFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What ``torch._dynamo.explain`` prints for the same run, and why it differs from our counts."""

    graph_count: int | None
    graph_break_count: int | None
    why_it_differs: str = ""


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of a step in program order: a compiled graph, or a gap that runs in eager."""

    kind: Literal["graph", "gap", "skipped-frame"]
    name: str
    location: Location | None = None
    compile_id: str = ""
    ops: int = 0
    us_per_step: float | None = None
    finding: int | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The run that was watched. ``ended`` says how; ``steps`` is the number of repeats seen of the outermost region."""

    command: tuple[str, ...] = ()
    ended: Literal["ok", "exit", "exception", "signal", "timeout", "interrupt"] = "ok"
    exit_code: int = 0
    detail: str = ""
    seconds: float | None = None
    step_us: float | None = None
    graphs: int = 0
    gaps: int = 0
    frames_skipped: int = 0
    advice: str = ""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the doctor's table op x check. Nothing is skipped silently: ``detail`` says why it was not run."""

    op: str
    check: str
    outcome: Literal["pass", "fail", "not-applicable", "not-run"]
    detail: str = ""
    seconds: float = 0.0


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    """One arm of a comparison. Times are microseconds; ``ratio`` is compiler time over this arm's time, so above 1
    is faster than the compiler's own code."""

    name: str
    isolated_us: float | None = None
    host_us: float | None = None
    step_us: float | None = None
    step_low: float | None = None
    step_high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    verdict: Verdict | None = None
    breaks: int | None = None
    graphs: int | None = None
    launches: int | None = None
    max_error: float | None = None
    reference_error: float | None = None
    failed: str = ""


class LedgerTerm(msgspec.Struct, frozen=True, kw_only=True):
    """One term of the step's difference, in microseconds a step; negative is time saved."""

    name: str
    us_per_step: float | None
    how: How
    detail: str = ""
    bytes_per_step: int | None = None
    launches_per_step: int | None = None


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """What the difference between an arm and the compiler consists of. The terms add up to ``total_us``."""

    arm: str
    terms: tuple[LedgerTerm, ...]
    total_us: float
    share_of_step: float | None = None
    amdahl_bound: float | None = None
    unexplained_share: float | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """An arm's step foretold from isolated times and one compiled graph, beside the measured one; ``error`` is
    predicted over measured, less 1."""

    arm: str
    predicted_us: float
    measured_us: float | None = None
    error: float | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``compare``: arms with verdicts, the noise floor, the ledgers, and a sentence to act on."""

    arms: tuple[ArmResult, ...]
    ops: tuple[str, ...] = ()
    noise_low: float | None = None
    noise_high: float | None = None
    smallest_effect: float | None = None
    copy_bytes_per_second: float | None = None
    kernel_share_of_copy: float | None = None
    ledgers: tuple[Ledger, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    sentence: str = ""
    stopped_because: str = ""
    environment: dict[str, str] = {}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one command found. ``degraded`` names the parts that a missing hook took away."""

    schema: int = SCHEMA
    opgraft: str
    torch: str
    device: str = "cpu"
    findings: tuple[Finding, ...] = ()
    explain: ExplainFigures | None = None
    ledger: Comparison | None = None
    run: Run | None = None
    regions: tuple[Region, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    degraded: tuple[str, ...] = ()
