"""The doctor: puts an op through every check and reports what it found, whatever the op does meanwhile."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft.diagnostics.conform.lab.arrive import registrars
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.examine import examine
from opgraft.diagnostics.conform.lab.facts import facts_of
from opgraft.diagnostics.conform.lab.isolate import can_fork
from opgraft.diagnostics.conform.lab.plan import Plan
from opgraft.diagnostics.conform.lab.settle import settle
from opgraft.diagnostics.model import CheckResult, Finding, Report
from opgraft.diagnostics.report.checks import PART
from opgraft.registry import Sample, resolve

SECONDS = 30.0
THOROUGH_SECONDS = 300.0


def version() -> str:
    try:
        return importlib.metadata.version("opgraft")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def overload_of(op: Any) -> OpOverload:
    """The overload behind what a user calls an op: an overload, a packet, a ``custom_op`` object, or a name.

    Raises:
        TypeError: it is none of these.
        LookupError: there is no such op, or it has several overloads.
    """
    if isinstance(op, str):
        return resolve(op)
    if isinstance(op, OpOverload):
        return op
    if isinstance(op, OpOverloadPacket):
        return resolve(op._qualified_op_name)
    found = getattr(op, "_opoverload", None)
    if isinstance(found, OpOverload):
        return found
    raise TypeError(f"doctor: op is a {type(op).__name__}, expected an op such as torch.ops.ns.op.default, or its name")


def cases_of(samples: Iterable[Any] | None) -> tuple[Case, ...]:
    """Calls from ``opgraft.registry.Sample`` records or plain tuples of arguments."""
    found = []
    for index, sample in enumerate(samples or ()):
        if isinstance(sample, Sample):
            found.append(Case(tuple(sample.args), dict(sample.kwargs), "sample", sample.name))
        elif isinstance(sample, (tuple, list)):
            found.append(Case(tuple(sample), {}, "sample", f"sample {index}"))
        else:
            raise TypeError(
                f"doctor: sample {index} is a {type(sample).__name__}, expected a tuple of arguments or a Sample"
            )
    return tuple(found)


def doctor(
    op: Any,
    samples: Iterable[Any] | None = None,
    *,
    thorough: bool = False,
    device: str | torch.device | None = None,
    seconds: float | None = None,
    imports: Sequence[str] = (),
) -> Report:
    """Examines one op, in processes of their own: a crash is a finding, and nothing here changes.

    Args:
        op: an overload, a packet, a ``custom_op`` object or a name, ``"ns::op"``.
        samples: calls to start from: tuples of arguments, or ``opgraft.registry.Sample``. Without any, those of the
            op's record (``opgraft.describe``) are used, else calls are made from the schema.
        thorough: more inputs and larger ones, and more time.
        device: where samples of a record are made; the CPU by default.
        seconds: how long it may take; 30 by default, 300 with ``thorough``.
        imports: modules, files or libraries that register the op; needed where that cannot be read off the op, and
            only for what runs in a process of its own.

    Returns:
        A report: findings, and one result a check.
    """
    overload = overload_of(op)
    facts = facts_of(overload)
    given = cases_of(samples)
    limit = seconds or (THOROUGH_SECONDS if thorough else SECONDS)
    place = torch.device(device or "cpu")
    if not can_fork():
        from opgraft.diagnostics.conform.host import examine_elsewhere

        imports = tuple(imports) or registrars(facts)
        return examine_elsewhere(
            (facts.name,), imports=imports, device=str(place), thorough=thorough, seconds=limit, cases=given
        )
    found, results = examine(
        Plan(
            facts=facts,
            cases=given,
            device=place,
            thorough=thorough,
            seconds=limit,
            distribution=owner(facts.spec),
            imports=tuple(imports),
        )
    )
    return report(found, results, place)


def owner(spec: Any) -> str:
    return spec.owner if spec is not None else "unknown"


def report(findings: Iterable[Finding], results: Iterable[CheckResult], device: torch.device) -> Report:
    kept = settle(findings)
    return Report(
        opgraft=version(),
        torch=str(torch.__version__),
        device=str(device),
        findings=kept,
        checks=tuple(_explained(result, kept) for result in results),
    )


def _explained(result: CheckResult, kept: Sequence[Finding]) -> CheckResult:
    """A failed check whose finding was taken back, since it follows from another one, says so."""
    told = any(_names(found, result.op) and result.detail in found.message for found in kept)
    if result.outcome != "fail" or told or not any(_names(found, result.op) for found in kept):
        return result
    return msgspec.structs.replace(result, detail=PART + result.detail)


def _names(finding: Finding, op: str) -> bool:
    return finding.callee is not None and finding.callee.name == op
