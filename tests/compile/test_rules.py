"""What a rule takes for the op, and what it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from opgraft.compile.find import find_sites
from opgraft.compile.rewrite import put_kernel

from models import captured

Function = Callable[[torch.Tensor], torch.Tensor]

# The constant is a literal: with dynamic=True Dynamo hands even math.pi in as an input, whose value no graph shows.
SAME: dict[str, Function] = {
    "call": lambda x: F.gelu(x, approximate="tanh"),
    "module": lambda x: torch.nn.GELU(approximate="tanh")(x),
    "aten": lambda x: torch.ops.aten.gelu.default(x, approximate="tanh"),
    "transformers new": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "transformers fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "arguments swapped": lambda x: (torch.tanh((x**3 * 0.044715 + x) * 0.7978845608) + 1) * x * 0.5,
    "methods": lambda x: x.mul(0.5).mul(x.pow(3).mul(0.044715).add(x).mul(0.7978845608).tanh().add(1.0)),
    "divided": lambda x: x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x))) / 2,
    "distributed": lambda x: 0.5 * x
    + 0.5 * x * torch.tanh(0.7978845608 * x + 0.7978845608 * 0.044715 * x.square() * x),
    "sigmoid": lambda x: x * torch.sigmoid(2 * 0.7978845608 * (x + 0.044715 * x**3)),
    "alpha": lambda x: 0.5 * x * torch.add(torch.tanh(0.7978845608 * torch.add(x, x**3, alpha=0.044715)), 1),
}

OTHER: dict[str, Function] = {
    "erf call": F.gelu,
    "erf written out": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "another cubic": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.04 * torch.pow(x, 3.0)))),
    "another factor": lambda x: x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "another variable": lambda x: 0.5
    * x
    * (1.0 + torch.tanh(0.7978845608 * (x.flip(0) + 0.044715 * torch.pow(x.flip(0), 3.0)))),
    "inner value used": lambda x: (t := torch.tanh(0.7978845608 * (x + 0.044715 * x**3))) + 0.5 * x * (1 + t),
    "broadcast": lambda x: 0.5 * x[:1] * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("name", [n for n in SAME if n != "alpha"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_way_of_writing_it_is_one_site(name: str, dynamic: bool) -> None:
    x = torch.randn(6, 5)
    module = captured(lambda x: SAME[name](x * 2), x, dynamic=dynamic)
    (site,) = find_sites(module.graph)
    assert site.idiom == "tanh-gelu"
    put_kernel(site)
    module.recompile()
    targets = [str(n.target) for n in module.graph.nodes if n.op in ("call_function", "call_method")]
    assert targets[-1] == "opgraft.gelu.default"
    assert not any("tanh" in t or "sigmoid" in t for t in targets)
    torch.testing.assert_close(module(*_in_order(module, x))[0], SAME[name](x * 2))


def _in_order(module: torch.fx.GraphModule, x: torch.Tensor) -> list[object]:
    """Dynamo's own order of inputs: sizes first where they are dynamic."""
    values: list[object] = []
    for node in module.graph.find_nodes(op="placeholder"):
        example = node.meta["example_value"]
        values.append(x if isinstance(example, torch.Tensor) else int(example.node.hint))
    return values


@pytest.mark.parametrize("name", OTHER)
def test_what_is_another_function_is_left_alone(name: str) -> None:
    assert find_sites(captured(OTHER[name], torch.randn(6, 5)).graph) == []


def test_casts_and_views_are_seen_through() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        flat = wide.view(-1)
        return (0.5 * wide.reshape(30) * (1 + torch.tanh(0.7978845608 * (flat + 0.044715 * flat**3)))).to(
            torch.bfloat16
        )

    x = torch.randn(6, 5).bfloat16()
    module = captured(function, x)
    (site,) = find_sites(module.graph)
    assert site.args[0].op == "placeholder", "the widening cast went with the chain: the op computes in float32 inside"
    put_kernel(site)
    module.recompile()
    torch.testing.assert_close(module(x)[0], function(x), rtol=0.02, atol=0.01)


def test_a_wide_result_stays_wide() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x.float() * (1 + torch.tanh(0.7978845608 * (x.float() + 0.044715 * x.float() ** 3)))

    x = torch.randn(6, 5).bfloat16()
    module = captured(function, x)
    (site,) = find_sites(module.graph)
    put_kernel(site)
    module.recompile()
    torch.testing.assert_close(module(x)[0], function(x))


def test_a_narrowing_cast_is_not_seen_through() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x.bfloat16() + 0.044715 * x.bfloat16() ** 3)))

    assert find_sites(captured(function, torch.randn(6, 5)).graph) == []


def test_a_write_in_the_middle_ends_the_match() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        inner = torch.tanh(0.7978845608 * (x + 0.044715 * x**3))
        x.add_(1)
        return 0.5 * x * (1 + inner)

    assert find_sites(captured(function, torch.randn(6, 5)).graph) == []


def test_a_result_in_another_layout_is_left_alone() -> None:
    """F.gelu keeps a transposed layout and the op does not: a later view was traced with the former."""
    assert find_sites(captured(lambda x: F.gelu(x.t(), approximate="tanh").t().view(-1), torch.randn(6, 5)).graph) == []


def test_an_integer_power_of_a_dynamic_size_is_no_constant() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + x.shape[0] * 0.0074525 * x**3)))

    assert find_sites(captured(function, torch.randn(6, 5), dynamic=True).graph) == []
