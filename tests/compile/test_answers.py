"""What tensors without data said once is not asked again in a second process, unless something may have changed it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from opgraft import library
from opgraft.compile import answers, find, fusible, identity, timing
from opgraft.compile.answers import Answers, names
from opgraft.compile.choice import Chooser
from opgraft.compile.site import SiteReport
from opgraft.compile.store import Store

from models import captured, fake_times


@torch.compiler.allow_in_graph
def users_own(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def norm_between(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x) * 2
    return F.rms_norm(h, (8,), weight, 1e-6).sin() @ x.t()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run on tensors without data."""
    found: list[str] = []

    def noted(name: str, function: Callable[..., bool]) -> Callable[..., bool]:
        def run(*args: Any) -> bool:
            found.append(name)
            return function(*args)

        return run

    monkeypatch.setattr(fusible, "_run", noted("fuses", fusible._run))
    monkeypatch.setattr(find, "_gives", noted("gives", find._gives))
    return found


@pytest.fixture
def fresh_identity() -> Iterator[None]:
    identity.of_code.cache_clear()
    yield
    identity.of_code.cache_clear()


def look(*, function: Any = norm_between, dynamic: bool = False, **store: Any) -> list[SiteReport]:
    """The sites as a process sees them that has nothing but the store."""
    module = captured(function, torch.randn(6, 8), torch.rand(8), dynamic=dynamic)
    return Chooser("measured", Store(**store)).look(module.graph)


def kept(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_second_process_asks_nothing_and_sees_the_same(own_store: Path, asked: list[str]) -> None:
    first = look()
    assert {"fuses", "gives"} == set(asked)
    asked.clear()
    assert look() == first
    assert asked == []
    assert first[0].surroundings == "relu mul [rms-norm] .sin", "the answers are the ones that were given"


def test_another_build_or_torch_is_asked_again(
    own_store: Path, asked: list[str], fresh_identity: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    look()
    for change in (
        lambda: monkeypatch.setattr(library, "build_id", lambda: "another"),
        lambda: monkeypatch.setattr(torch.version, "git_version", "another"),
        lambda: monkeypatch.setattr(answers, "_settings", lambda: ("another",)),
    ):
        asked.clear()
        change()
        identity.of_code.cache_clear()
        before = kept(own_store)["answers"]
        look()
        assert {"fuses", "gives"} == set(asked)
        after = kept(own_store)["answers"]
        assert after["of"] != before["of"]
        assert len(after["known"]) <= len(before["known"]) + 1, "what held for another build is dropped"


@pytest.mark.parametrize(
    "spoilt",
    [
        "text",
        [],
        {},
        {"known": {}},
        {"of": "x", "known": [True]},
        lambda table: {"of": table["of"], "known": None},
        lambda table: {"of": table["of"], "known": dict.fromkeys(table["known"], "yes")},
        lambda table: {"of": table["of"], "known": dict.fromkeys(table["known"], 0)},
    ],
)
def test_a_table_that_makes_no_sense_is_asked_again(own_store: Path, asked: list[str], spoilt: Any) -> None:
    first = look()
    (path,) = own_store.glob("*.json")
    content = kept(own_store)
    sound = content["answers"]
    content["answers"] = spoilt(sound) if callable(spoilt) else spoilt
    path.write_text(json.dumps(content))
    asked.clear()
    assert look() == first, "decisions are used all the same"
    assert {"fuses", "gives"} == set(asked)
    assert kept(own_store)["answers"] == sound


def test_a_read_only_store_is_used_and_not_written(own_store: Path, asked: list[str]) -> None:
    look()
    (path,) = own_store.glob("*.json")
    content = kept(own_store)
    del content["answers"]["known"][min(content["answers"]["known"])]
    path.write_text(json.dumps(content))
    asked.clear()
    look(read_only=True)
    assert len(asked) == 1
    assert kept(own_store) == content


def test_only_a_choice_by_measuring_writes(own_store: Path) -> None:
    module = captured(norm_between, torch.randn(6, 8), torch.rand(8))
    Chooser("kernel", Store()).look(module.graph)
    Chooser("compiler", Store()).look(module.graph)
    assert not own_store.exists()


def test_symbolic_sizes_are_asked_in_every_process(own_store: Path, asked: list[str]) -> None:
    look(dynamic=True)
    asked.clear()
    look(dynamic=True)
    assert "gives" in asked


def test_an_answer_to_a_call_that_raises_is_not_kept() -> None:
    given = Answers(Store())
    assert not given.ask("question", "cpu", lambda: bool(1 // 0), keep=True)
    given.keep()
    assert Answers(Store()).ask("question", "cpu", lambda: True, keep=True)


def test_a_function_of_the_users_is_asked_in_every_process() -> None:
    assert names([("call_function", torch.relu), ("call_method", "cumsum"), ("call_function", F.gelu)])[1]
    assert names([("call_function", torch.ops.aten.relu.default), ("call_function", torch.ops.opgraft.gelu.default)])[1]
    for own in (users_own, lambda x: x, torch.ops.opgraft.gelu):
        assert not names([("call_function", torch.relu), ("call_function", own)])[1]


def test_a_method_that_the_user_put_on_tensors_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "own", users_own, raising=False)
    assert not names([("call_method", "own")])[1]
    assert not names([("call_method", "not there")])[1]


@pytest.mark.parametrize("change", ["x.double()", "x.t()", "weight one", "eps"])
def test_another_question_is_asked(own_store: Path, asked: list[str], change: str) -> None:
    look()
    asked.clear()

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if change == "x.double()":
            x, weight = x.double(), weight.double()
        elif change == "x.t()":
            x = x.t().contiguous().t()
        elif change == "weight one":
            x, weight = x[:1], weight
        return F.rms_norm(torch.relu(x) * 2, (8,), weight, 1e-5 if change == "eps" else 1e-6).sin() @ x.t()

    look(function=function)
    assert "gives" in asked
