"""An op whose body is compiled by a torch.compile of its own, told from the stacks that led to the compiles."""

from __future__ import annotations

import pytest

from opgraft.diagnostics.collect.events import (
    Began,
    CompileBegan,
    CompileEnded,
    Event,
    Graph,
    OpUse,
    Recompiled,
    Registered,
)
from opgraft.diagnostics.diagnose.report import diagnose
from opgraft.diagnostics.model import Callee, Location

USER = "/home/me/train.py"
DEFINED = Location(path=USER, line=5, function="<module>")
BODY = Location(path=USER, line=7, function="experts")
FORWARD = Location(path=USER, line=20, function="forward")
STEP = Location(path=USER, line=30, function="<module>")


def torch(path: str, function: str = "f") -> Location:
    return Location(path=f"/env/torch{path}", line=1, function=function)


CALLED = (torch("/_ops.py", "__call__"), torch("/_library/custom_ops.py", "wrapped_fn"))
TAPPED = (torch("/_ops.py", "__call__"), Location(path="/env/opgraft/diagnostics/conform/lab/tap.py", line=1))
ENTRY = torch("/_dynamo/eval_frame.py", "compile_wrapper")


def run(
    *stacks: tuple[Location, ...], ops: tuple[Event, ...] = (Registered(op="ns::experts", location=DEFINED),)
) -> list[Event]:
    """A program whose model calls the op, and then one compile for every stack."""
    stream: list[Event] = [Began(prefixes=("/env",)), *ops, CompileBegan(id="0/0", stack=(STEP, ENTRY, FORWARD))]
    stream.append(Graph(id="0/0", ops=2, custom_ops=(OpUse(op="ns::experts.default", location=FORWARD),)))
    for number, stack in enumerate(stacks):
        if number:
            reason = f"1/{number - 1}: tensor 'x' size mismatch at index 0. expected 8, actual {8 + number}"
            place, path, function = stack[-2], "/env/torch/nn/container.py", "forward"
            stream.append(Recompiled(id=f"1/{number}", reasons=(reason,), place=place, function=function, path=path))
        stream.append(CompileBegan(id=f"1/{number}", stack=stack))
        stream.append(Graph(id=f"1/{number}", ops=1))
        stream.append(CompileEnded(id=f"1/{number}", function="forward", path="/env/torch/nn/container.py", line=1))
    return stream


@pytest.mark.parametrize("caller", [CALLED, TAPPED])
def test_the_ops_call_is_named(caller: tuple[Location, ...]) -> None:
    (found,) = diagnose(run((STEP, ENTRY, *caller, BODY, ENTRY))).findings
    assert (found.kind, found.severity, found.location) == ("library-jit", "note", FORWARD)
    assert found.callee == Callee(name="ns::experts", owner="op")
    assert f"{USER}:7" in found.evidence[0]


def test_its_recompiles_are_part_of_it() -> None:
    stack = (STEP, ENTRY, *CALLED, BODY, ENTRY)
    (found,) = diagnose(run(stack, stack, stack)).findings
    assert (found.kind, found.severity, found.counts.compiles) == ("library-jit", "warning", 3)
    assert any("compiled again" in line for line in found.evidence)


@pytest.mark.parametrize(
    "stack",
    [
        (STEP, ENTRY, FORWARD),
        (STEP, *CALLED, torch("/nn/functional.py"), ENTRY),
        (STEP, torch("/_library/fake_impl.py"), BODY, ENTRY),
    ],
)
def test_compiles_outside_of_a_body_are_none(stack: tuple[Location, ...]) -> None:
    assert "library-jit" not in [found.kind for found in diagnose(run(stack)).findings]


def test_an_op_that_cannot_be_told_is_not_named() -> None:
    other = Location(path="/home/me/ops.py", line=1)
    ops = (Registered(op="ns::one", location=other), Registered(op="ns::two", location=other))
    assert diagnose(run((STEP, *CALLED, BODY, ENTRY), ops=ops)).findings == ()
