"""The idioms of plain torch that an op can stand for: one file a rule, each with ``RULE``."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import torch

from opgraft import registry
from opgraft.compile.rules.rule import Emit, Match, Rule

__all__ = ["Emit", "Match", "Rule", "all_rules", "matches"]


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule of this folder, by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return tuple(sorted((m.RULE for m in modules if hasattr(m, "RULE")), key=lambda rule: rule.name))


def matches(graph: torch.fx.Graph) -> list[tuple[Rule, Match]]:
    """Every match in a graph of a rule whose op is there, the largest first.

    Matches of several rules may overlap; of one rule a match inside another is left out.
    """
    active = [rule for rule in all_rules() if registry.find(rule.op) is not None]
    found: list[tuple[Rule, Match]] = []
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        for rule in active:
            match = rule.match(node)
            if match is not None:
                found.append((rule, match))
    kept: list[tuple[Rule, Match]] = []
    inside: dict[Rule, set[torch.fx.Node]] = {}
    for rule, match in sorted(found, key=lambda pair: -len(pair[1].nodes)):
        taken = inside.setdefault(rule, set())
        if not taken.issuperset(match.nodes):
            taken.update(match.nodes)
            kept.append((rule, match))
    return kept
