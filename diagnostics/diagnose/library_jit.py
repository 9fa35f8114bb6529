"""OG704 library-jit: the kernel's library compiles while the model runs.

What it is
----------
An op whose own body compiles: it calls a function that ``torch.compile`` made, or builds or tunes a kernel at the first
call with a new shape or dtype. What is found here is the former, with the call of the op and the line of the body.

Why it matters
--------------
Single steps take seconds among steps of milliseconds; a benchmark that meets one says nothing. The compiled body has
guards of its own and, with CUDA graphs, a capture inside the capture of the model around it, which fails.

Example
-------
::

    @torch.library.custom_op("mylib::experts", mutates_args=())
    def experts(x: torch.Tensor) -> torch.Tensor:
        return compiled_experts(x)        # OG704: compiled at the first call, and again for other shapes

    for batch in loader:
        step(batch)

Mended
------
::

    for size in (64, 32):                 # every shape that will come, before it counts
        step(example(size))

Remedies
--------
``warm-up-first``
    Call the kernel once with every shape that will come, before measuring and before serving; or leave the op away
    where its body is plain torch, so that the model's compiler sees it. Price: start-up time.
"""

from __future__ import annotations

from opgraft.diagnostics.collect.events import Registered
from opgraft.diagnostics.collect.place import changeable, innermost
from opgraft.diagnostics.diagnose.story import CompiledFrame, Story
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Callee, Counts, Finding, Location, Remedy

KIND = "library-jit"
_CALLERS = ("/torch/_library/custom_ops.py", "/torch/_ops.py")
"""The frame of torch's that calls the Python body of an op."""
_TAP = "/conform/lab/tap.py"
"""Our own frame between the two, where the calls of ops are recorded."""


def conclude(story: Story, found: list[Finding]) -> list[Finding]:
    """``found`` with a finding for every op whose body is compiled while it runs; recompiles of that body are part of
    it."""
    nested: dict[str, list[tuple[CompiledFrame, Location, Location | None]]] = {}
    for frame in story.frames.values():
        place = body(frame.stack, story.prefixes)
        op = _op_of(place[0], story) if place is not None else ""
        if place is not None and op:
            nested.setdefault(op, []).append((frame, *place))
    for op, compiles in nested.items():
        lines = {(inner.path, inner.line) for _, inner, _ in compiles}
        again = [one for one in found if one.kind == "recompile" and (one.location.path, one.location.line) in lines]
        found = [one for one in found if one not in again]
        found.append(_finding(story, op, compiles, again))
    return found


def body(stack: tuple[Location, ...], prefixes: tuple[str, ...]) -> tuple[Location, Location | None] | None:
    """Of the stack that led to a compile: the line in the body of an op, and the reader's line that called the op; None
    where no op's body led to it."""
    frames = [frame for frame in stack if not frame.path.endswith(_TAP)]
    for index in range(len(frames) - 2, -1, -1):
        inner = frames[index + 1]
        if frames[index].path.endswith(_CALLERS) and changeable(inner.path, prefixes):
            return inner, innermost(frames[:index], prefixes)
    return None


def _op_of(place: Location, story: Story) -> str:
    """The op whose body this line is in: the last one registered above it in the file, or the only one; "" where it
    cannot be told."""

    def line(event: Registered) -> int:
        return event.location.line if event.location is not None else 0

    above = [
        event
        for event in story.registered
        if event.location is not None and event.location.path == place.path and line(event) <= place.line
    ]
    if above:
        return max(above, key=line).op.partition(".")[0]
    names = {event.op.partition(".")[0] for event in story.registered}
    return names.pop() if len(names) == 1 else ""


def _finding(
    story: Story, op: str, compiles: list[tuple[CompiledFrame, Location, Location | None]], again: list[Finding]
) -> Finding:
    used = [place for _, place in story.op_uses.get(op, ()) if place is not None]
    _, inner, outer = compiles[0]
    at = (used or [outer or inner])[0]
    sites = tuple(dict.fromkeys(used)) or (at,)
    count = len(compiles)
    times = {1: "once", 2: "twice"}.get(count, f"{count} times")
    return Finding(
        kind=KIND,
        code=KINDS[KIND].code,
        severity="warning" if any(one.severity == "warning" for one in again) else "note",
        message=f"{op} is compiled inside, by a torch.compile of its own ({times} in this run): the first call, and "
        "the first with another shape or dtype, takes the time of a compile; CUDA graphs of the model and of the op do "
        "not go together.",
        location=at,
        sites=sites,
        stack=(at,),
        callee=Callee(name=op, owner="op"),
        counts=Counts(sites=len(sites), compiles=count),
        remedies=(
            Remedy(
                id="warm-up-first",
                text="call it once with every shape that will come, before measuring and before serving; where its "
                "body is plain torch, call that in place of the op: the model's compiler then sees it",
                price="start-up time",
            ),
        ),
        evidence=(
            f"the op's body calls the compiled function at {inner.path}:{inner.line}",
            *(f"in the run: {one.message}" for one in again),
        ),
    )
