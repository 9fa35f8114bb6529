"""Calls beside the compiler's step: they stand where the op would, and change neither values nor what is fused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from torch._ops import OpOverload

from opgraft.diagnostics.measure import host_costs, isolated
from opgraft.diagnostics.measure.arms import BASELINE, make_arm, plan_arms
from opgraft.diagnostics.measure.calls import Call, capture, dispatched
from opgraft.diagnostics.measure.question import Question
from opgraft.diagnostics.measure.subject import Subject, make_step, subject_of

import measured

SQUARE = "measuretest::square"
CALLED = torch.ops.measuretest.square.default


def runs_of(subject: Subject) -> dict[str, list[tuple[OpOverload, Call]]]:
    calls = capture(make_step(subject, subject.model), frozenset({SQUARE}))
    return {SQUARE: list(dispatched(isolated.once(CALLED, calls[0], subject.train)).values())}


def two(x: torch.Tensor) -> torch.Tensor:
    first = torch.ops.measuretest.square(x.sin())
    return torch.ops.measuretest.square(first.cos()).tan()


def beside(function: Any, x: torch.Tensor, kernels: float, room: int = 1 << 30) -> tuple[Any, Any, torch.Tensor]:
    """The arm's graph as the compiler would get it, the backend, and what the arm returns."""
    seen: list[torch.fx.GraphModule] = []

    def inner(module: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        assert all(i.shape == n for i, n in zip(inputs[1:], [x.shape] * (len(inputs) - 1), strict=True))
        seen.append(module)
        return module

    torch._dynamo.reset()
    runs = runs_of(subject_of(function, x, train=False))
    backend = host_costs._Beside(inner, {SQUARE: measured.square}, runs, kernels)
    backend.room = room
    result = torch.compile(function, backend=backend)(x)
    return seen[0], backend, result


@pytest.mark.parametrize("kernels", [0.0, 0.5, 1.0])
def test_every_site_has_a_call_and_its_share_of_kernels_beside_it(kernels: float) -> None:
    x = torch.rand(4, 4)
    module, backend, result = beside(two, x, kernels)
    torch.testing.assert_close(result, two(x))
    assert (backend.made, backend.wanted) == (2, 2)
    names = [n.target for n in module.graph.nodes if n.op.startswith("call")]
    assert names.count(CALLED) == 2
    assert names.count(torch.mul) == round(2 * kernels)
    # The first stands behind the first site and before what the second reads.
    added = [i for i, name in enumerate(names) if name is CALLED]
    assert added[0] < names.index("cos") < added[1]


def test_without_room_fewer_calls_are_made_and_the_rest_is_known() -> None:
    x = torch.rand(4, 4)
    _, backend, result = beside(two, x, 0.0, room=x.nbytes)
    torch.testing.assert_close(result, two(x))
    assert (backend.made, backend.wanted) == (1, 2)


def test_a_site_within_a_checkpoint_has_its_call_at_the_end_of_the_whole() -> None:
    def kept(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.utils.checkpoint.checkpoint(two, x, use_reentrant=False)
        return out.exp()

    x = torch.rand(4, 4)
    module, backend, result = beside(kept, x, 0.0)
    torch.testing.assert_close(result, kept(x))
    assert backend.made == 2
    assert [n.target for n in module.graph.nodes][-3:-1] == [CALLED, CALLED]


def test_the_backwards_own_op_is_among_what_a_call_runs() -> None:
    import opgraft

    x = torch.rand(4, 4, requires_grad=True)
    call = Call("opgraft::gelu", (x,), {}, "")
    turn = isolated.once(opgraft.gelu, call, True)
    assert set(dispatched(turn)) == {"opgraft::gelu", "opgraft::gelu_backward"}
    assert set(dispatched(isolated.once(opgraft.gelu, call, False))) == {"opgraft::gelu"}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_the_step_with_calls_beside_it_compiles_and_runs(train: bool) -> None:
    torch._dynamo.reset()
    subject = subject_of(*measured.build(), train=train)
    question = Question(ops=(SQUARE,), references={SQUARE: measured.square})
    plan = next(p for p in plan_arms((SQUARE,), (), ()) if p.name == BASELINE)
    base = make_arm(plan, subject, question.references)
    assert base.step is not None
    base.step()
    found = host_costs.measure(base, runs_of(subject), 1.0, subject, question)
    assert found.step_us > 0
    assert found.more_us >= 0
