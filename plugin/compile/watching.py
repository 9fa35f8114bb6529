"""Lists the sites of a whole program as it compiles, for ``opgraft explain --sites``: one JSON line a site.

Programs that use this package's choice report it; in graphs of a plain ``torch.compile`` every site is decided all the
same, and left as it is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as config
from torch._inductor.custom_graph_pass import CustomGraphPass

from opgraft.compile import choice
from opgraft.compile.choice import MEASURED, Chooser
from opgraft.compile.options import PRE_GRAD, TIMING, read_only
from opgraft.compile.site import SiteReport
from opgraft.compile.store import Store


class LookPass(CustomGraphPass):
    """Decides for the sites of every graph and changes none."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser

    def __call__(self, graph: torch.fx.Graph) -> None:
        try:
            self.chooser.look(graph)
        except Exception:
            return

    def uuid(self) -> str:
        return "opgraft looks"


def install(path: Path) -> None:
    """From now on every site that this process compiles is written to a file."""
    choice.LISTENERS.append(lambda reports: write(path, reports))
    look = LookPass(Chooser(MEASURED, Store(read_only=read_only())))
    given = getattr(config, PRE_GRAD, None)
    if given is None:
        setattr(config, PRE_GRAD, look)
    if hasattr(config, TIMING):
        setattr(config, TIMING, "early")  # before the cache look-up: a cached graph is looked at too


def write(path: Path, reports: Iterable[SiteReport]) -> None:
    """Appends reports, one line each."""
    with path.open("a", encoding="utf-8") as file:
        for report in reports:
            file.write(json.dumps(_plain(report)) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The reports of a run, each site of each graph once, in order."""
    if not path.is_file():
        return []
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the program died while it wrote
        if isinstance(entry, dict):
            found.setdefault(line, entry)
    return list(found.values())


def _plain(report: SiteReport) -> dict[str, Any]:
    place = report.place
    return {
        "op": report.op,
        "idiom": report.idiom,
        "path": place.path,
        "line": place.line,
        "text": place.text,
        "inputs": list(report.inputs),
        "surroundings": report.surroundings,
        **dataclasses.asdict(report.decision),
    }
