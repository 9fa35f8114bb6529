"""Small models with sites in them, and what the tests of this folder share."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import opgraft
from opgraft.compile import timing
from opgraft.compile.choice import Chooser
from opgraft.compile.site import SiteWarning
from opgraft.compile.store import Store


class Perceptron(nn.Module):
    """A call of the op between a scale and a gain: what a compiler fuses when it can look inside."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.scale = nn.Parameter(torch.rand(2 * width) + 0.5)
        self.gain = nn.Parameter(torch.rand(2 * width) + 0.5)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(opgraft.gelu(self.up(x) * self.scale) * self.gain)


class Plain(nn.Module):
    """The same function as an idiom of plain torch, called or written out."""

    def __init__(self, width: int = 16, *, written_out: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.activation = nn.GELU(approximate="tanh")
        self.written_out = written_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h**3))) if self.written_out else self.activation(h)
        return self.down(h * 2)


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"op": Perceptron(), "idiom": Plain(), "written out": Plain(written_out=True)}


def gelu_amid(length: int, x: torch.Tensor) -> torch.Tensor:
    """An idiom with ``length`` operations before it and as many behind."""
    for _ in range(length):
        x = x.sin()
    x = nn.functional.gelu(x * 2, approximate="tanh")
    for _ in range(length):
        x = x.cos()
    return x


def captured(function: Any, *inputs: Any, dynamic: bool | None = None) -> torch.fx.GraphModule:
    """The graph that Dynamo makes of a function."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(module)
        return module.forward

    torch.compile(function, backend=keep, dynamic=dynamic, fullgraph=True)(*inputs)
    (graph,) = graphs
    return graph


def gradients(model: nn.Module, output: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the parameters, which are cleared."""
    model.zero_grad()
    output.square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def without_inductor(function: Any, choose: str, **options: Any) -> Any:
    """Compiled with the sites served, but run by AOTAutograd's eager backend: for what Inductor has no part in."""
    chooser = Chooser(choose, Store())

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for inner in module.modules():
            if isinstance(inner, torch.fx.GraphModule):
                chooser.apply(inner.graph)
                inner.recompile()
        return aot_eager(module, inputs)

    return torch.compile(function, backend=backend, fullgraph=True, **options)


@contextlib.contextmanager
def one_warning(text: str) -> Iterator[None]:
    """Exactly one of this package's warnings comes, and it says ``text``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (message,) = [str(w.message) for w in caught if issubclass(w.category, SiteWarning)]
    assert text in message


def fake_times(compiler: float, kernel: float) -> Callable[..., timing.Samples]:
    """In place of ``timing.interleave``: both candidates run once, and the times are given."""

    def interleave(first: Callable[[], None], second: Callable[[], None], **options: Any) -> timing.Samples:
        first()
        second()
        return timing.Samples(((compiler, kernel, kernel, compiler),) * 11)

    return interleave


def agreeing(stretch: Any, **options: Any) -> timing.Samples:
    """In place of ``measure.confirm``: faster with a kernel in place of an idiom, equal without an op."""
    idiom = bool(stretch.changes[0].site.idiom)
    return timing.Samples(((2.0, 1.0, 1.0, 2.0) if idiom else (1.0, 1.0, 1.0, 1.0),) * 11)
