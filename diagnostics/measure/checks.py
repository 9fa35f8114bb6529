"""Before timing: the model can be compared, the arms compute the same, the op runs in its arms and in no other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch

from opgraft.diagnostics.measure import isolated, values
from opgraft.diagnostics.measure.arms import BASELINE, Arm, make_entry
from opgraft.diagnostics.measure.calls import Call, capture
from opgraft.diagnostics.measure.problems import failure, first_line
from opgraft.diagnostics.measure.profile import Profile, record
from opgraft.diagnostics.measure.question import Question
from opgraft.diagnostics.measure.readings import Problem, SiteReading
from opgraft.diagnostics.measure.subject import Subject, make_step, tensors_in
from opgraft.registry import resolve


def check_subject(subject: Subject) -> list[Problem]:
    """Whether the model can be compared at all: it returns tensors, twice the same, and leaves its inputs alone."""
    before = values.snapshot(subject)
    eager = make_entry(subject.model, "check")
    with values.kept_buffers(subject):
        first = values.run_once(subject, eager)
        if not first.tensors:
            return [
                Problem(about="no-tensor", message="the model returns no tensor, so there is nothing to check or time")
            ]
        found = []
        if values.inputs_changed(subject, before):
            found.append(
                Problem(
                    about="mutates-inputs",
                    message="the model writes into its inputs: every step starts from what the step before it left, so "
                    "the arms do not do the same work",
                )
            )
            with torch.no_grad():
                for tensor, value in zip(tensors_in((subject.args, subject.kwargs)), before, strict=True):
                    tensor.copy_(value)
        second = values.run_once(subject, eager)
    if not found:
        error, where = values.distance(second, first)
        if error > 1024 * torch.finfo(subject.dtype).eps:
            found.append(
                Problem(
                    about="not-deterministic",
                    message="the model gives another result when it is run again from the same seed, so no arm can be "
                    "checked",
                    evidence=(f"{where} differs by {error:.3g} of its root mean square between two eager runs",),
                )
            )
    return found


def sites_of(arms: Sequence[Arm]) -> tuple[SiteReading, ...]:
    """Call sites of custom ops in the order in which the baseline's graphs have them."""
    chosen = next((a for a in arms if a.name == BASELINE and a.backend is not None and a.backend.sites), None)
    chosen = chosen or next((a for a in arms if a.backend is not None and a.backend.sites), None)
    if chosen is None or chosen.backend is None:
        return ()
    seen: dict[tuple[str, str, int], SiteReading] = {}
    for site in chosen.backend.sites:
        seen.setdefault(
            (site.op, site.location.path, site.location.line), SiteReading(op=site.op, location=site.location)
        )
    return tuple(seen.values())


def missing_sites(question: Question, arms: Sequence[Arm]) -> list[Problem]:
    """Ops that no compiled graph calls: there is nothing to exchange."""
    baseline = next((a for a in arms if a.name == BASELINE), None)
    if baseline is None or baseline.backend is None or baseline.failed:
        return []
    called = {site.op for site in baseline.backend.sites}
    return [
        Problem(
            about="no-site",
            op=op,
            message=f"no compiled graph of the model calls {op}, so its arms are the same code",
            evidence=tuple(f"the graphs call {name}" for name in sorted(called)),
        )
        for op in question.ops
        if op not in called
    ]


def check_values(
    arms: Sequence[Arm], subject: Subject, question: Question
) -> tuple[dict[str, values.Agreement], list[Problem]]:
    """Every arm against float64; the baseline's own rounding is the yardstick."""
    found: dict[str, values.Values] = {}
    problems: list[Problem] = []
    for arm in arms:
        if arm.plan.twin:
            continue
        try:
            found[arm.name] = values.run_arm(arm, subject)
        except Exception as error:  # the arm ran before: what fails here is its gradient or its memory
            arm.failed = first_line(error)
            problems.append(failure(arm))
    with values.kept_buffers(subject):
        reference, why = values.in_float64(subject, question.references)
    if reference is None:
        with contextlib.suppress(Exception), values.References(question.references), values.kept_buffers(subject):
            reference = values.run_once(subject, make_entry(subject.model, "reference"))
        problems.append(
            Problem(
                about="no-reference-values",
                message=f"{why}: the arms were compared with eager code in the model's own dtype instead",
            )
        )
    if reference is None:
        return {}, problems
    result: dict[str, values.Agreement] = {}
    try:
        yardstick = values.yardstick_of(found, reference)
    except ValueError:
        yardstick = 0.0
    for name, got in found.items():
        try:
            result[name] = values.agreement(got, reference, yardstick, subject.dtype)
        except ValueError as error:
            problems.append(Problem(about="values-differ", arm=name, message=f"the arm {name}: {error}"))
            continue
        if not result[name].ok:
            one = result[name]
            problems.append(
                Problem(
                    about="values-differ",
                    arm=name,
                    message=f"the arm {name} computes something else: {one.where} is off by {one.error:.3g} of its "
                    f"root mean square, {one.allowed:.3g} is what rounding explains",
                )
            )
    return result, problems


def recorded_calls(subject: Subject, question: Question, problems: list[Problem]) -> tuple[Call, ...]:
    eager = make_step(subject, make_entry(subject.model, "calls"))
    try:
        with values.kept_buffers(subject):
            return capture(eager, frozenset(question.ops), question.swapped)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        problems.append(
            Problem(
                about="no-reference-values", message="there is no memory left to keep the op's inputs: no isolated time"
            )
        )
        return ()


def profiled(arm: Arm, device: torch.device) -> Profile | None:
    try:
        with arm.installed():
            assert arm.step is not None
            return record(arm.step, device)
    except Exception:  # a profiler that does not start takes the counts away, not the measurement
        return None


def kernel_names(calls: Sequence[Call], question: Question, device: torch.device) -> dict[str, frozenset[str]]:
    """The device kernels of each op, by name: what tells a run of the op inside a replayed CUDA graph."""
    names: dict[str, frozenset[str]] = {}
    for op in question.ops:
        call = next((c for c in calls if c.op == op), None)
        if call is None:
            continue
        turn = isolated.once(resolve(op), call, train=False)
        turn()
        names[op] = frozenset(r.name for r in record(turn, device).device() if r.kind == "kernel")
    return names


def seen_runs(profile: Profile | None, ops: Sequence[str], kernels: Mapping[str, frozenset[str]]) -> dict[str, float]:
    """Runs of each op a step: as an operator of the dispatcher, else by its kernels."""
    if profile is None:
        return {}
    runs = {}
    for op in ops:
        base = op.split(".")[0]
        dispatched = profile.count(base)
        by_kernel = 0.0
        if kernels.get(op):
            by_kernel = sum(r.name in kernels[op] for r in profile.device()) / max(1, len(kernels[op])) / profile.steps
        runs[op] = max(dispatched, by_kernel)
    return runs


def misplaced_runs(arms: Sequence[Arm], runs: Mapping[str, Mapping[str, float]], question: Question) -> list[Problem]:
    """The op has to run in its arms and must not run in the others."""
    problems = []
    for arm in arms:
        if not arm.plan.compiled or arm.plan.twin or not runs.get(arm.name):
            continue
        for op, count in runs[arm.name].items():
            if op in arm.plan.runs_ops and count == 0 and not arm.plan.swaps:
                problems.append(
                    Problem(
                        about="op-not-run",
                        arm=arm.name,
                        op=op,
                        message=f"{op} was not seen to run in the arm {arm.name}: what was timed there is other code",
                    )
                )
            elif op in arm.plan.replaced and count > 0:
                problems.append(
                    Problem(
                        about="op-still-runs",
                        arm=arm.name,
                        op=op,
                        message=f"{op} still runs {count:g} times a step in the arm {arm.name}: it is called where the "
                        "compiler does not see it (in eager code between graphs, or inside another op)",
                    )
                )
    return problems
