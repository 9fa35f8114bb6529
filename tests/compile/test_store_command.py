"""``opgraft store`` on a store with two decisions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import opgraft
from opgraft.compile import timing
from opgraft.compile.store import Store, merge
from opgraft.diagnostics.cli import app

from models import Perceptron, fake_times


@pytest.fixture
def folder(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    monkeypatch.setenv("COLUMNS", "250")
    opgraft.sites(Perceptron(), torch.randn(6, 16))
    (path,) = own_store.glob("*.json")
    merge(path, {"old": {"choice": "compiler", "why": "slower", "op": "gone::op", "build": "0", "inputs": []}})
    return own_store


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["store", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def count(folder: Path) -> int:
    (path,) = folder.glob("*.json")
    return len(json.loads(path.read_text())["decisions"])


def test_show_prune_export(folder: Path, tmp_path: Path) -> None:
    shown = run("show")
    assert "3 decisions" in shown, "of the site, of the stretch around it, and the old one"
    assert "mul [opgraft::gelu] mul" in shown
    assert "2.00x" in shown
    assert "gone::op" not in run("show", "--op", "opgraft::gelu")
    target = tmp_path / "model.json"
    assert "2 decisions" in run("export", str(target), "--op", "opgraft::gelu")
    assert opgraft.sites(Perceptron(), torch.randn(6, 16), store=Store(target, read_only=True))[0].chosen
    assert "1 of 3" in run("prune", "--stale")
    assert count(folder) == 2
    run("prune", "--all")
    assert count(folder) == 0


def test_answers_go_with_pruned_decisions_and_are_not_exported(folder: Path, tmp_path: Path) -> None:
    (path,) = folder.glob("*.json")
    assert json.loads(path.read_text())["answers"]["known"], "kept when a decision was added to the file"
    run("export", str(tmp_path / "model.json"))
    assert "answers" not in json.loads((tmp_path / "model.json").read_text())
    run("prune", "--op", "gone::op")
    assert "answers" not in json.loads(path.read_text())


def test_prune_wants_to_know_what(folder: Path) -> None:
    done = CliRunner().invoke(app, ["store", "prune"])
    assert done.exit_code == 2
    assert "--stale" in done.output
    assert count(folder) == 3


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    assert "no decisions in" in run("show", "--store", str(tmp_path / "nowhere"))
