"""The idioms of plain torch that an op can stand for: one file a rule, each with ``RULE``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache

import torch

from opgraft.compile.rules.rule import Match, Rule

__all__ = ["Match", "Rule", "all_rules", "matches"]


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule of this folder, by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return tuple(sorted((m.RULE for m in modules if hasattr(m, "RULE")), key=lambda rule: rule.name))


def matches(graph: torch.fx.Graph) -> Iterator[tuple[Rule, Match]]:
    """Every match in a graph; a node belongs to one match at most, the first that takes it."""
    taken: set[torch.fx.Node] = set()
    for node in graph.nodes:
        for rule in all_rules():
            match = rule.match(node)
            if match is not None and not taken.intersection(match.nodes):
                taken.update(match.nodes)
                yield rule, match
                break
