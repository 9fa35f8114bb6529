"""What a step breaks: each question is asked of the running code, none is answered from memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from reference import expected, expected_gradient
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

Op = Callable[[torch.Tensor], torch.Tensor]


def _answer(question: Callable[[], str]) -> str:
    """The question's answer, or "no" where torch raises instead of answering."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return question()
        except Exception:  # every step fails in a way of its own
            return "no"


def _agrees(actual: torch.Tensor, right: torch.Tensor) -> str:
    return "yes" if torch.allclose(actual, right, rtol=1e-4, atol=1e-5) else "wrong values"


def _between(op: Op) -> Op:
    """A function with work before and after the call: a break then splits it in two graphs."""

    def layer(v: torch.Tensor) -> torch.Tensor:
        return op(v * 2) + 1

    return layer


def graph_breaks(op: Op, x: torch.Tensor) -> str:
    """Breaks by ``torch._dynamo.explain``: gaps in the function that was asked about."""

    def ask() -> str:
        torch._dynamo.reset()
        return str(torch._dynamo.explain(_between(op))(x).graph_break_count)

    return _answer(ask)


def break_events(op: Op, x: torch.Tensor) -> str:
    """Breaks by Dynamo's counters, which count again where the wrapper around the kernel is tried as its own frame."""

    def ask() -> str:
        torch._dynamo.reset()
        counters.clear()
        torch.compile(_between(op), backend="eager")(x)
        return str(sum(counters["graph_break"].values()))

    return _answer(ask)


def gradient(op: Op, x: torch.Tensor) -> str:
    def ask() -> str:
        leaf = x.clone().requires_grad_()
        y = op(leaf)
        if not y.requires_grad:
            return "lost, silently"
        (actual,) = torch.autograd.grad(y.sum(), leaf)
        return _agrees(actual, expected_gradient(x))

    return _answer(ask)


def fake(op: Op, x: torch.Tensor) -> str:
    """Whether shape and strides can be had without running the kernel."""

    def ask() -> str:
        with FakeTensorMode() as mode:
            promised = op(mode.from_tensor(x))
        real = op(x)
        same = (promised.shape, promised.stride(), promised.dtype) == (real.shape, real.stride(), real.dtype)
        return "yes" if same else "wrong"

    return _answer(ask)


def vmap(op: Op, x: torch.Tensor) -> str:
    return _answer(lambda: _agrees(torch.vmap(op)(x.reshape(4, -1)).reshape(x.shape), expected(x)))


def export(op: Op, x: torch.Tensor) -> str:
    class Layer(torch.nn.Module):
        def forward(self, v: torch.Tensor) -> torch.Tensor:
            return op(v)

    def ask() -> str:
        return _agrees(torch.export.export(Layer(), (x,)).module()(x), expected(x))

    return _answer(ask)


QUESTIONS: dict[str, Callable[[Op, torch.Tensor], str]] = {
    "gradient": gradient,
    "graph breaks": graph_breaks,
    "break events": break_events,
    "fake": fake,
    "vmap": vmap,
    "export": export,
}
# Triton's interpreter stands in for the kernel's values alone: how it is traced says nothing about a real launch.
INTERPRETER_QUESTIONS = ("gradient",)
