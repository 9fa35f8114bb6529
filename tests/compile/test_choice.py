"""Whatever serves a site, the model's values and gradients are its own.

Which of the traps of compilers' passes are covered, by their subject (the numbers are those of the project's list of
facts about Inductor, twelve that decide and thirty-two cases):

- facts 1, 2, 10, case 17: an inserted op has a layout tag of its own, and takes over no stale arguments
  (``test_an_inserted_op_brings_its_own_tag_and_place``).
- fact 3, cases 3, 4, 5, 30: caches never replay another fake, rule, op or decision (``test_caches``,
  ``test_identity``).
- facts 4, 5: nothing is built on torch's own autotuning of custom ops; the second call site is served like the first
  (``test_the_same_site_in_many_layers_is_measured_once``).
- facts 6, 11: a kernel is timed with its fusible neighbours, and again in the model (``test_stretch``); a tie and a
  loss are the compiler's (``test_timing``).
- facts 7, 8: the rewrite stands before autograd: forward and backward come from the same candidate
  (``test_values_and_gradients``), an op without a gradient serves only where none is wanted (``test_idioms_*``).
- fact 9, case 28: a user's passes run, in order, and none is overwritten (``test_options``, ``test_no_side_effects``).
- case 6: ranks agree (``test_ranks``, ``test_parallel``).
- cases 1, 2, 7, 8, 9, 10, 13, 29: nothing is matched across a write, ops that write are no sites, and no functionalised
  form is ever met (``test_rules``, ``test_idioms_*``, ``test_bad_input``).
- cases 14, 15: layouts of op and reference agree, or the reference is copied; an idiom in another layout is left alone
  (``test_the_layout_of_the_op_stays``, ``test_rules``, ``test_idioms_*``).
- cases 20, 21, 23: sizes that depend on data (``test_bad_input``).
- case 24: a reference that gives its argument back (``test_a_reference_that_gives_its_argument_back_is_copied``).
- pattern-matcher traps: commuted arguments, scalars of any value, dynamic sizes, views and ``reshape``, several results
  in any order (``test_rules``, ``test_idioms_*``); a replacement that stands too early, and one that reads what another
  replacement took away (``test_change``).
- case 19: strides that padding changes: an inserted op asks for its own by its tag
  (``test_an_inserted_op_brings_its_own_tag_and_place``).

No matter of a pass are fact 12 (which doors to fusion exist), cases 11, 12, 13, 26, 27 (what the ops themselves do with
streams, optional and mutated arguments, and their overhead: the tests of the ops), 16 and 25 (packaged models), 18 (no
rule's op takes a list of tensors), 22 (Triton kernels), 31 (partition rules) and 32 (a neighbour's wrong code).
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import opgraft
from opgraft.compile import timing
from opgraft.compile.choice import Chooser

from models import Perceptron, captured, fake_times, gradients, models, without_inductor

CHOICES = ("kernel", "compiler", "measured")


class Spy(CustomGraphPass):
    """A user's pass that keeps every graph as Inductor gets it. Without a uuid nothing comes from a cache."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append(copy.deepcopy(graph))

    def uuid(self) -> None:
        return None

    def options(self, **own: Any) -> dict[str, Any]:
        return opgraft.compile_options({"post_grad_custom_pre_pass": self}, **own)


@pytest.mark.core
@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("name", models())
def test_values_and_gradients(name: str, choose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    model = models()[name]
    x = torch.randn(6, 16)
    if name == "op":
        compiled = torch.compile(model, options=opgraft.compile_options(choose=choose), fullgraph=True)
    else:
        compiled = without_inductor(model, choose)
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(gradients(model, compiled(x)), gradients(model, model(x)))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("choose", CHOICES)
def test_dynamic_sizes(choose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    model = Perceptron()
    compiled = without_inductor(model, choose, dynamic=True)
    for rows in (3, 5, 40):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(gradients(model, compiled(x)), gradients(model, model(x)))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.randn(9, 16))


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("inside", [True, False])
def test_autocast(choose: str, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    model = Perceptron()
    x = torch.randn(6, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return model(x)

    compiled = without_inductor(function, choose)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        got, want = compiled(x), function(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("faster", ["kernel", "compiler"])
def test_the_faster_candidate_runs(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(*((2.0, 1.0) if faster == "kernel" else (1.0, 2.0))))
    spy, model, x = Spy(), Perceptron(), torch.randn(6, 16)
    with torch.no_grad():
        torch.compile(model, options=spy.options())(x)
    (graph,) = spy.graphs
    targets = [str(n.target) for n in graph.nodes]
    assert ("opgraft.gelu.default" in targets) == (faster == "kernel")


def test_the_same_site_in_many_layers_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def count(*args: Any, **options: Any) -> timing.Samples:
        calls.append(1)
        return fake_times(2.0, 1.0)(*args, **options)

    monkeypatch.setattr(timing, "interleave", count)
    model = nn.Sequential(*(Perceptron() for _ in range(4)))
    x = torch.randn(6, 16)
    first = opgraft.sites(model, x)
    assert (len(first), len(calls)) == (4, 2), "once, and once more since it won"
    assert all(site.chosen for site in first)
    # From the store: another chooser measures nothing.
    assert [s.decision for s in opgraft.sites(model, x)] == [s.decision for s in first]
    assert len(calls) == 2


def test_a_used_up_time_leaves_the_compilers_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    (site,) = opgraft.sites(Perceptron(), torch.randn(6, 16), tune_seconds=0)
    assert not site.chosen
    assert "tune_seconds=0" in site.decision.why


def test_sites_say_where_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(1.0, 1.5))
    (site,) = opgraft.sites(Perceptron(), torch.randn(6, 16))
    assert (site.op, site.idiom) == ("opgraft::gelu", "")
    assert site.place.path.endswith("models.py")
    assert "opgraft.gelu(" in site.place.text
    assert site.surroundings == "mul [opgraft::gelu] mul"
    assert site.inputs == ("float32[6, 32]",)
    assert site.decision.ratio == pytest.approx(1 / 1.5, rel=1e-3)
    assert "1.50x" in str(site)
    assert "models.py" in str(site)


def test_an_inserted_op_brings_its_own_tag_and_place() -> None:
    spy, model, x = Spy(), models()["idiom"], torch.randn(6, 16)
    gradients(model, torch.compile(model, options=spy.options(choose="kernel"))(x))
    found = [n for graph in spy.graphs for n in graph.nodes if "opgraft.gelu" in str(n.target)]
    assert {str(n.target) for n in found} == {"opgraft.gelu.default", "opgraft.gelu_backward.default"}
    for node in found:
        # Recorded where the op's tag asks for the exact strides of eager mode; never another node's.
        args, _ = node.meta.get("eager_input_vals") or ([a.meta["val"] for a in node.args], {})
        assert [a.shape for a in args] == [a.meta["val"].shape for a in node.args]
    assert "models.py" in next(n.meta["stack_trace"] for n in found if str(n.target) == "opgraft.gelu.default")
    assert torch.Tag.needs_contiguous_strides in torch.ops.opgraft.gelu.default.tags


@pytest.mark.parametrize("choose", ["kernel", "compiler"])
def test_the_layout_of_the_op_stays(choose: str) -> None:
    """F.gelu keeps a transposed layout, the op does not: views after the op were traced with its own."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return opgraft.gelu(x.t()).view(-1) + 1

    x = torch.randn(6, 5)
    compiled = without_inductor(function, choose)
    torch.testing.assert_close(compiled(x), function(x))


def test_a_reference_that_gives_its_argument_back_is_copied() -> None:
    with torch.library._scoped_library("opgraft_test_alias", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x.clone(), "CPU")
        torch.library.register_fake("opgraft_test_alias::same", lambda x: torch.empty_like(x), lib=library)
        opgraft.describe("opgraft_test_alias::same", lambda x: x)

        def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.ops.opgraft_test_alias.same(x)
            y.add_(1)
            return x, y

        x = torch.randn(4)
        compiled = without_inductor(function, "compiler")
        with torch.no_grad():
            same, more = compiled(x)
        torch.testing.assert_close(more, same + 1)


def test_activation_checkpointing() -> None:
    model, x = Perceptron(), torch.randn(6, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    for choose in ("kernel", "compiler"):
        compiled = torch.compile(function, options=opgraft.compile_options(choose=choose), fullgraph=True)
        torch.testing.assert_close(gradients(model, compiled(x)), gradients(model, model(x)))


def test_deciding_changes_no_graph() -> None:
    module = captured(models()["written out"], torch.randn(6, 16))
    before = module.code
    Chooser("kernel").look(module.graph)
    module.recompile()
    assert module.code == before


def test_gradients_of_gradients_of_the_compilers_code() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x * 2, approximate="tanh")

    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(function, options=opgraft.compile_options(choose="kernel"))
    assert torch.autograd.gradcheck(compiled, (x,))


def test_reports_can_be_kept() -> None:
    reports = opgraft.sites(Perceptron(), torch.randn(6, 16), choose="compiler")
    assert pickle.loads(pickle.dumps(reports)) == reports
