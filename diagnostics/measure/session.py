"""One process's part of a comparison: compile the arms, check them, see the op run, time them, time the op alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opgraft.diagnostics.measure import blocks, clock, isolated, values
from opgraft.diagnostics.measure.arms import BASELINE, TWIN, Arm, Plan, make_arm, make_entry, plan_arms
from opgraft.diagnostics.measure.calls import Call, capture
from opgraft.diagnostics.measure.environment import Probe, describe
from opgraft.diagnostics.measure.profile import Profile, busy_us, record
from opgraft.diagnostics.measure.readings import AloneReading, ArmReading, Problem, Reading, SiteReading
from opgraft.diagnostics.measure.subject import Subject, make_step, tensors_in
from opgraft.diagnostics.measure.swap import Swap
from opgraft.registry import find, resolve

Progress = Callable[[str, float], None]

_NO_ROOM = "does not fit in memory"


@dataclass(frozen=True)
class Question:
    """What is asked of every process alike.

    Attributes:
        ops: names of the registered ops; ``references`` has one for each.
        swapped: unregistered functions to compare, each with its reference.
        raw: unregistered forms brought in beside the registered ops.
        seconds: time for the interleaved blocks of this process, in seconds.
        alone_seconds: time for the op alone.
    """

    ops: tuple[str, ...]
    references: Mapping[str, Callable[..., Any]]
    swapped: tuple[Swap, ...] = ()
    raw: tuple[Swap, ...] = ()
    wanted: tuple[str, ...] | None = None
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 20.0
    alone_seconds: float = 2.0
    check: bool = True
    alone: bool = True
    most_blocks: int = 200
    seed: int = 0


def run(
    subject: Subject,
    question: Question,
    progress: Progress | None = None,
    enough: Callable[[Sequence[blocks.Block]], bool] | None = None,
) -> Reading:
    """Measures in this process. A fault of one arm is noted and the others go on."""
    tell = progress or (lambda message, share: None)
    device = subject.device
    problems: list[Problem] = []
    plans = plan_arms(question.ops, question.swapped, question.raw, question.wanted)
    if question.check:
        tell("running the model in eager", 0.0)
        problems += check_subject(subject)
    arms, timings = compile_arms(plans, subject, question, tell)
    problems += [_failure(arm) for arm in arms if arm.failed and not arm.plan.twin]
    alive = [arm for arm in arms if not arm.failed]
    sites = sites_of(arms)
    problems += missing_sites(question, arms)
    errors: dict[str, values.Agreement] = {}
    if question.check:
        tell("checking values against float64", 0.35)
        errors, found = check_values(alive, subject, question)
        problems += found
    calls: tuple[Call, ...] = ()
    if question.alone or question.check:
        tell("recording the calls of the op", 0.4)
        calls = recorded_calls(subject, question, problems)
    profiles = {arm.name: profiled(arm, device) for arm in alive} if question.check else {}
    names = kernel_names(calls, question, device) if question.check and device.type == "cuda" else {}
    runs = {arm.name: seen_runs(profiles.get(arm.name), question.ops, names) for arm in alive}
    if question.check:
        problems += misplaced_runs(alive, runs, question)
    series = None
    if any(a.name == BASELINE for a in alive) and question.seconds > 0:
        tell("warming up", 0.45)
        series = time_arms(alive, subject, question, tell, enough)
        if series.recompiled:
            problems += [_recompiles(name) for name in series.recompiled]
        held = sum(b.conditions.throttled for b in series.blocks)
        if held:
            problems.append(_throttled(held, len(series.blocks)))
    alone: dict[str, dict[str, AloneReading]] = {}
    copy_rate = None
    ideal: dict[str, int] = {}
    if question.alone and calls:
        tell("timing the op alone", 0.92)
        copy_rate = isolated.copy_bandwidth(device)
        alone, ideal = time_alone(calls, subject, question)
    tell("done", 1.0)
    return Reading(
        device=str(device),
        arms=tuple(_reading(arm, errors, runs, profiles, timings, series) for arm in arms),
        series=series,
        alone=alone,
        ideal_bytes=ideal,
        copy_bytes_per_second=copy_rate,
        sites=sites,
        problems=tuple(problems),
        environment=describe(device),
        train=subject.train,
        dtype=str(subject.dtype).removeprefix("torch."),
    )


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


def compile_arms(
    plans: Sequence[Plan], subject: Subject, question: Question, tell: Progress
) -> tuple[list[Arm], dict[str, tuple[float, float]]]:
    """Compiles every arm by running it twice; returns the arms and, for each, compile seconds and a step's seconds."""
    arms, timings = [], {}
    for index, plan in enumerate(plans):
        tell(f"compiling {plan.name}" if plan.compiled else "running eager", 0.05 + 0.3 * index / len(plans))
        arm = make_arm(plan, subject, question.references, question.compile_options)
        arms.append(arm)
        try:
            with arm.installed():
                assert arm.step is not None
                begin = time.perf_counter()
                # Forward and backward under CUDA graphs warm up, record, then replay: three steps.
                for _ in range(3):
                    arm.step()
                clock.synchronize(subject.device)
                compiled = time.perf_counter() - begin
                timings[plan.name] = (compiled, clock.sample(arm.step, 1, subject.device))
        except KeyboardInterrupt:
            raise
        except torch.OutOfMemoryError:
            arm.failed = _NO_ROOM
            torch.cuda.empty_cache()
        except Exception as error:  # whatever the user's model or a compiler raises belongs into the report
            arm.failed = _first_line(error)
    return arms, timings


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _failure(arm: Arm) -> Problem:
    message = f"the arm {arm.name} fails: {arm.failed}"
    if arm.failed == _NO_ROOM:
        return Problem(about="no-memory", arm=arm.name, message=message)
    return Problem(about="arm-failed", arm=arm.name, message=message)


def _recompiles(name: str) -> Problem:
    return Problem(
        about="recompiles",
        arm=name,
        message=f"the arm {name} compiles again while it is timed: a guard fails at every step, and compile time is no "
        "step time",
    )


def _throttled(held: int, blocks: int) -> Problem:
    return Problem(
        about="throttled",
        message=f"the device was throttled by heat or by its hardware in {held} of {blocks} blocks, also when they "
        "were done again: the arms did not run at one speed",
    )


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
            arm.failed = _first_line(error)
            problems.append(_failure(arm))
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


def time_arms(
    arms: Sequence[Arm],
    subject: Subject,
    question: Question,
    tell: Progress,
    enough: Callable[[Sequence[blocks.Block]], bool] | None,
) -> blocks.Series:
    device = subject.device
    begin = time.monotonic()
    steps: dict[str, float] = {}
    for arm in arms:
        with arm.installed():
            assert arm.step is not None
            steps[arm.name] = clock.settle(arm.step, device, 0.15 * question.seconds / len(arms))
    left = question.seconds - (time.monotonic() - begin)
    return blocks.run_blocks(
        arms,
        device,
        deadline=time.monotonic() + left,
        most=question.most_blocks,
        seed=question.seed,
        step_seconds=steps,
        occasional=frozenset(a.name for a in arms if not a.plan.compiled),
        probe=Probe(device),
        enough=enough,
        progress=lambda share: tell("timing", 0.5 + 0.4 * share),
    )


def time_alone(
    calls: Sequence[Call], subject: Subject, question: Question
) -> tuple[dict[str, dict[str, AloneReading]], dict[str, int]]:
    """Every op and swapped function alone: the op, its compiled reference, and the raw form where there is one."""
    device = subject.device
    options = isolated.without_graphs(question.compile_options)
    result: dict[str, dict[str, AloneReading]] = {}
    ideal: dict[str, int] = {}
    by_op: dict[str, list[Call]] = {}
    for call in calls:
        by_op.setdefault(call.op, []).append(call)
    for name, own in by_op.items():
        functions: dict[str, Callable[..., Any]] = {}
        swap = next((s for s in question.swapped if s.label == name), None)
        if swap is not None:
            functions["raw"] = swap.present
            reference: Callable[..., Any] = swap.function
        else:
            functions["op"] = resolve(name)
            reference = question.references[name]
            if len(question.ops) == 1 and len(question.raw) == 1 and accepts(question.raw[0], own[0], subject.train):
                functions["raw"] = question.raw[0].function
        functions[BASELINE] = torch.compile(named(reference), **options)
        readings = isolated.measure_alone(functions, own, device, subject.train, question.alone_seconds / len(by_op))
        small = small_call(name, own, device, subject.dtype)
        result[name] = {}
        for form, one in readings.items():
            host = None
            if small is not None and form != BASELINE:
                with contextlib.suppress(Exception):
                    host = isolated.host_us(functions[form], small, device, subject.train)
            result[name][form] = AloneReading(
                us_per_step=one.us_per_step,
                calls=one.calls,
                launches=one.launches,
                cold=one.cold,
                host_us_per_call=host,
            )
        spec = find(name)
        outputs = {c.signature: isolated.once(functions.get("op") or reference, c, False)() for c in own}
        ideal[name] = isolated.bytes_of(own, outputs, {name: spec.cost if spec else None})
    return result, ideal


def named(reference: Callable[..., Any]) -> Callable[..., Any]:
    def alone(*args: Any, **kwargs: Any) -> Any:
        return reference(*args, **kwargs)

    from opgraft.diagnostics.measure.arms import own_code

    return own_code(alone, "reference_alone")  # type: ignore[arg-type]


def accepts(swap: Swap, call: Call, train: bool) -> bool:
    """Whether the raw form takes the op's own arguments: only then can it be timed alone on them."""
    try:
        isolated.once(swap.function, call, train)()
    except Exception:
        return False
    return True


def small_call(name: str, calls: Sequence[Call], device: torch.device, dtype: torch.dtype) -> Call | None:
    """A call whose kernel time is negligible: a small sample of the op's record on a CPU, any call on a GPU."""
    if device.type == "cuda":
        return min(calls, key=lambda c: c.bytes)
    spec = find(name)
    if spec is None or spec.samples is None:
        return None
    with contextlib.suppress(Exception):
        made = [Call(name, s.args, s.kwargs, s.name) for s in spec.samples(device, dtype)]
        filled = [c for c in made if c.bytes > 0 and all(t.numel() for t in tensors_in((c.args, c.kwargs)))]
        return min(filled, key=lambda c: c.bytes, default=None)
    return None


def _reading(
    arm: Arm,
    errors: Mapping[str, values.Agreement],
    runs: Mapping[str, dict[str, float]],
    profiles: Mapping[str, Profile | None],
    timings: Mapping[str, tuple[float, float]],
    series: blocks.Series | None,
) -> ArmReading:
    profile = profiles.get(arm.name)
    on_device = profile.device() if profile is not None else []
    error = errors.get(arm.name)
    taken = series.seconds(arm.name) if series is not None else []
    return ArmReading(
        name=arm.name,
        failed=arm.failed,
        graphs=arm.backend.graphs if arm.backend is not None else None,
        regions=profile.regions(arm.backend.compile_ids) if profile is not None and arm.backend is not None else None,
        launches=len(on_device) / profile.steps if profile is not None and on_device else None,
        busy_us=busy_us(on_device) / profile.steps if profile is not None and on_device else None,
        op_runs=runs.get(arm.name, {}),
        op_calls={} if profile is None else {op: profile.count(op.split(".")[0]) for op in runs.get(arm.name, {})},
        error=error.error if error is not None else None,
        allowed=error.allowed if error is not None else None,
        compile_seconds=timings[arm.name][0] if arm.name in timings and arm.plan.compiled else None,
        step_us=sorted(taken)[len(taken) // 2] * 1e6 if taken else None,
    )


__all__ = ["BASELINE", "TWIN", "Question", "run"]
