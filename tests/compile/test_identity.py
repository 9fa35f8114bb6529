"""The identity that goes into cache keys follows everything that decides about the code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import opgraft
from opgraft import library, registry
from opgraft.compile import identity, timing
from opgraft.compile.choice import Chooser
from opgraft.compile.passes import Seal, SitePass
from opgraft.compile.store import Store

from models import Perceptron, fake_times


def test_it_is_the_same_in_the_same_program() -> None:
    assert identity.of_package() == identity.of_package()
    assert SitePass(Chooser("kernel", Store())).uuid() == SitePass(Chooser("kernel", Store())).uuid()
    assert SitePass(Chooser("kernel", Store())).uuid() != SitePass(Chooser("compiler", Store())).uuid()


def test_it_changes_with_the_native_build(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Seal().uuid()
    monkeypatch.setattr(library, "build_id", lambda: "another")
    assert Seal().uuid() != before


def test_it_changes_with_the_source_of_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Seal().uuid()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + (b"#" if self.name == "tanh_gelu.py" else b""))
    identity._own_sources.cache_clear()
    assert Seal().uuid() != before
    monkeypatch.undo()
    identity._own_sources.cache_clear()
    assert Seal().uuid() == before


def test_it_changes_with_a_described_op() -> None:
    before = Seal().uuid()
    with torch.library._scoped_library("opgraft_test_identity", "FRAGMENT") as fragment:
        fragment.define("f(Tensor x) -> Tensor")
        opgraft.describe("opgraft_test_identity::f", torch.sin)
        described = Seal().uuid()
        opgraft.describe("opgraft_test_identity::f", lambda x: x.sin())
        assert len({before, described, Seal().uuid()}) == 3
        registry._TABLE.pop("opgraft_test_identity::f")


def test_it_changes_with_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = Chooser("measured", Store())
    before = SitePass(chooser).uuid()
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    opgraft.sites(Perceptron(), torch.randn(6, 16), store=chooser.store)
    assert SitePass(chooser).uuid() != before
