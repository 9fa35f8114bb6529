"""One process's part of a comparison: compile the arms, check them, see the op run, time them, time the op alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from opgraft.diagnostics.measure import apart, blocks, checks, clock, isolated, values
from opgraft.diagnostics.measure.alone import time_alone
from opgraft.diagnostics.measure.arms import BASELINE, Arm, Plan, make_arm, plan_arms
from opgraft.diagnostics.measure.calls import Call
from opgraft.diagnostics.measure.environment import Probe, describe
from opgraft.diagnostics.measure.facts import ArmFacts
from opgraft.diagnostics.measure.problems import NO_ROOM, failure, first_line, recompiles, throttled
from opgraft.diagnostics.measure.profile import Profile, busy_us
from opgraft.diagnostics.measure.question import Progress, Question
from opgraft.diagnostics.measure.readings import AloneReading, ArmReading, Problem, Reading
from opgraft.diagnostics.measure.subject import Subject


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
        problems += checks.check_subject(subject)
    arms, timings = compile_arms(plans, subject, question, tell)
    problems += [failure(arm) for arm in arms if arm.failed and not arm.plan.twin]
    alive = [arm for arm in arms if not arm.failed]
    sites = checks.sites_of(arms)
    problems += checks.missing_sites(question, arms)
    errors: dict[str, values.Agreement] = {}
    if question.check:
        tell("checking values against float64", 0.35)
        errors, found = checks.check_values(alive, subject, question)
        problems += found
    calls: tuple[Call, ...] = ()
    takes_apart = question.apart and device.type == "cuda"
    if question.alone or question.check or takes_apart:
        tell("recording the calls of the op", 0.4)
        calls = checks.recorded_calls(subject, question, problems)
    profiles = {arm.name: checks.profiled(arm, device) for arm in alive} if question.check else {}
    names = checks.kernel_names(calls, question, device) if question.check and device.type == "cuda" else {}
    runs = {arm.name: checks.seen_runs(profiles.get(arm.name), question.ops, names) for arm in alive}
    if question.check:
        problems += checks.misplaced_runs(alive, runs, question)
    series = None
    if any(a.name == BASELINE for a in alive) and question.seconds > 0:
        tell("warming up", 0.45)
        series = time_arms(alive, subject, question, tell, enough)
        if series.recompiled:
            problems += [recompiles(name) for name in series.recompiled]
        held = sum(b.conditions.throttled for b in series.blocks)
        if held:
            problems.append(throttled(held, len(series.blocks)))
    parts: tuple[ArmFacts, ...] = ()
    if takes_apart and series is not None:
        tell("taking the steps apart", 0.9)
        parts = take_apart(alive, subject, question, calls, series)
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
        apart=parts,
        alone=alone,
        ideal_bytes=ideal,
        copy_bytes_per_second=copy_rate,
        sites=sites,
        problems=tuple(problems),
        environment=describe(device),
        train=subject.train,
        dtype=str(subject.dtype).removeprefix("torch."),
    )


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
            arm.failed = NO_ROOM
            torch.cuda.empty_cache()
        except Exception as error:  # whatever the user's model or a compiler raises belongs into the report
            arm.failed = first_line(error)
    return arms, timings


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


def take_apart(
    arms: Sequence[Arm], subject: Subject, question: Question, calls: Sequence[Call], series: blocks.Series
) -> tuple[ArmFacts, ...]:
    """The step of every compiled arm apart; nothing where the profiler does not work."""
    compiled = [a for a in arms if a.plan.compiled and not a.plan.twin]
    try:
        kernels = apart.op_kernels(calls, question, subject.device, subject.train)
        taken = apart.take(compiled, question, subject, kernels)
    except Exception:  # a profiler that does not start takes the ledger away, not the measurement
        return ()
    return tuple(
        msgspec.structs.replace(
            one,
            host_share=series.host_share(name) or 0.0,
            paced_share=(series.paced_share(name, one.queued_us * 1e-6) or 0.0) if one.queued_us else 0.0,
        )
        for name, one in taken.items()
    )


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
