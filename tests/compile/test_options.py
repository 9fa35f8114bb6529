"""The entries: options, modes, the backend; what they leave alone, and a user's passes beside ours."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._inductor.config as config
from torch._inductor.custom_graph_pass import CustomGraphPass

import opgraft
from opgraft.compile import timing
from opgraft.compile.choice import Chooser
from opgraft.compile.passes import InOrder, SitePass
from opgraft.compile.store import Store

from models import Perceptron, fake_times, models, one_warning

HOOK = "pre_grad_custom_pass"


class Users(CustomGraphPass):
    """A user's pass: notes which ops it sees."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen += [str(n.target) for n in graph.nodes if n.op == "call_function"]

    def uuid(self) -> str:
        return "a user's pass"


def without_pass(graph: torch.fx.Graph) -> None:
    """A bare callable, as the hook also takes them."""


def test_base_and_torch_config_stay_as_they_were() -> None:
    user = Users()
    base = {"max-autotune": False, HOOK: user, "joint_custom_pre_pass": user}
    before, settings = copy.copy(base), config.get_config_copy()
    options = opgraft.compile_options(base)
    assert base == before
    assert options is not base
    torch.compile(Perceptron(), options=options)(torch.randn(6, 16))
    assert base == before
    assert config.get_config_copy() == settings


def test_options_that_say_the_same_are_equal() -> None:
    """torch compares them to find out whether a function must be compiled again."""
    assert opgraft.compile_options(choose="kernel") == opgraft.compile_options(choose="kernel")
    assert opgraft.compile_options(choose="kernel") != opgraft.compile_options(choose="compiler")
    twice = opgraft.compile_options(opgraft.compile_options(choose="kernel"), choose="kernel")
    assert twice == opgraft.compile_options(choose="kernel")


def test_a_users_pass_at_the_same_hook_runs_first() -> None:
    user = Users()
    options = opgraft.compile_options({HOOK: user}, choose="kernel")
    model, x = models()["idiom"], torch.randn(6, 16)
    torch.testing.assert_close(torch.compile(model, options=options)(x), model(x))
    assert any("gelu" in t and "opgraft" not in t for t in user.seen)
    assert not any("opgraft" in t for t in user.seen)


def test_passes_of_inductors_config_and_lists_of_passes_are_kept() -> None:
    user, other = Users(), Users()
    with config.patch({HOOK: user}):
        options = opgraft.compile_options()
    assert isinstance(options[HOOK], InOrder)
    assert options[HOOK].passes[0] is user
    options = opgraft.compile_options({HOOK: [user, other]})
    assert options[HOOK].passes[:2] == (user, other)


def test_identities_of_passes_in_order() -> None:
    ours = SitePass(Chooser("kernel", Store()))
    assert InOrder((Users(), ours)).uuid() != InOrder((ours,)).uuid()
    assert InOrder((without_pass, ours)).uuid() is None, "torch then does not cache, as without this package"


def test_a_users_pass_that_raises_is_undone_and_named() -> None:
    def broken(graph: torch.fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op == "call_function" and "mul" in str(node.target):
                node.replace_all_uses_with(node.args[0])
        raise KeyError("half done")

    model, x = Perceptron(), torch.randn(6, 16)
    with one_warning("broken"):
        compiled = torch.compile(model, options=opgraft.compile_options({HOOK: broken}, choose="compiler"))
        got = compiled(x)
    torch.testing.assert_close(got, model(x))


@pytest.mark.core
@pytest.mark.parametrize("settings", [{}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"choose": "kernel"}}])
def test_the_backend_by_name(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(1.0, 1.0))
    model, x = Perceptron(), torch.randn(6, 16)
    with torch.no_grad():
        compiled = torch.compile(model, backend="opgraft", fullgraph=True, **settings)
        torch.testing.assert_close(compiled(x), model(x))


def test_the_backend_is_listed() -> None:
    assert "opgraft" in torch._dynamo.list_backends()


def test_a_mode_by_name() -> None:
    options = opgraft.compile_options("max-autotune-no-cudagraphs")
    assert options["max_autotune"] is True
    assert isinstance(options[HOOK], SitePass)


def test_a_choice_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="choose is 'fastest', expected one of"):
        opgraft.compile_options(choose="fastest")


def test_importing_the_names_is_cheap_and_lazy() -> None:
    code = (
        "import sys, torch\nbefore = set(sys.modules)\nimport opgraft\n"
        "assert 'compile_options' in dir(opgraft)\n"
        "assert not any(m.startswith('opgraft.compile') for m in sys.modules)\n"
        "assert not any(m.startswith('torch._inductor') for m in set(sys.modules) - before)\n"
        "opgraft.compile_options, opgraft.sites"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
