"""The step in program order: graphs, gaps in eager and frames that never compile, with their times where it repeats."""

from __future__ import annotations

from statistics import median

from opgraft.diagnostics.collect.place import function_name
from opgraft.diagnostics.diagnose.story import Story
from opgraft.diagnostics.model import Region


def per_step(story: Story, ids: set[str]) -> int | None:
    """How often a step executes the gaps after the graphs of these compiles; None where no step was seen or they made
    no graph to count by."""
    if story.laps.steps < 2:
        return None
    executions = sum(1 for graph in story.laps.graphs if graph in ids)
    return executions or None


def step_us(story: Story) -> float | None:
    """Microseconds from the first graph of one repeat of the step to that of the next; the median."""
    laps = story.laps
    return median(laps.step_us) if laps.steps >= 2 and laps.step_us else None


def regions(story: Story, findings: dict[str, int]) -> tuple[Region, ...]:
    """One region a graph and a gap: those of the repeating step with times, else those that were compiled, without.

    ``findings`` gives the number of the finding that a compile id's break belongs to."""
    laps = story.laps
    order = list(laps.graphs) if laps.steps >= 2 else [i for i, frame in story.frames.items() if frame.graphs]
    found: list[Region] = []
    for index, identity in enumerate(order[:2000]):
        frame = story.frames.get(identity)
        timed = laps.steps >= 2
        found.append(
            Region(
                kind="graph",
                name=f"graph {identity}",
                location=frame.location if frame else None,
                compile_id=identity,
                ops=frame.ops if frame else 0,
                us_per_step=median(laps.us[index]) if timed and laps.us[index] else None,
            )
        )
        if frame is not None and frame.broke:
            gap = laps.gap_us[index] if timed and index < len(laps.gap_us) else ()
            found.append(
                Region(
                    kind="gap",
                    name="eager",
                    compile_id=identity,
                    us_per_step=median(gap) if gap and index + 1 < len(order) else None,
                    finding=findings.get(identity),
                )
            )
    found.extend(
        Region(
            kind="skipped-frame",
            name=function_name(frame.function) or "frame",
            location=frame.location,
            compile_id=identity,
            finding=findings.get(identity),
        )
        for identity, frame in story.frames.items()
        if frame.skipped
    )
    return tuple(found)


def explain_would_say(story: Story) -> tuple[int, int]:
    """Graphs, and graphs minus one for every compiled callable, as ``torch._dynamo.explain`` counts one call of
    each."""
    first = [frame for frame in story.frames.values() if frame.id.endswith("/0") and frame.function]
    graphs = sum(1 for frame in first if frame.graphs)
    roots = sum(
        1 for frame in first if not is_resume(frame.function) and (frame.path, frame.function) not in story.inlined
    )
    return graphs, graphs - max(1, roots)


def is_resume(function: str) -> bool:
    """True for the rest of a function behind a break, which torch compiles as a function of its own."""
    return function.startswith("torch_dynamo_resume_in_")
