"""Every site of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft import _compat, registry
from opgraft.compile import rules
from opgraft.compile.answers import Answers, Word, fact_word, names, or_no, spelled
from opgraft.compile.metadata import facts_of, is_plain, same_strides, same_value, value_of
from opgraft.compile.scope import Scope, scopes
from opgraft.compile.site import Site


def overload_of(target: Any) -> OpOverload | None:
    """The overload that a node calls, where that is certain."""
    if isinstance(target, OpOverload):
        return target
    if isinstance(target, OpOverloadPacket) and target.overloads() == ["default"]:
        found: OpOverload = target.default
        return found
    return None


def find_sites(
    graph: torch.fx.Graph, scope_of: dict[torch.fx.Node, Scope] | None = None, answers: Answers | None = None
) -> list[Site]:
    """Calls of registered ops and idioms, in the graph's order. Ops that write to their arguments are left alone.

    Idioms may overlap (a norm, and the same norm with the addition before it): then the larger one comes first.
    """
    found = []
    for node in graph.nodes:
        op = overload_of(node.target) if node.op == "call_function" else None
        spec = registry.find(op) if op is not None else None
        if spec is not None and not spec.op._schema.is_mutable:
            found.append(Site(spec, node, (node,), tuple(node.args), dict(node.kwargs)))
    matched = rules.matches(graph)
    answers = answers if answers is not None else Answers()
    scope_of = scope_of if scope_of is not None or not matched else scopes(graph)
    for rule, match in matched:
        spec = registry.find(rule.op)
        if spec is not None and scope_of is not None and _can_serve(spec, rule, match, scope_of, answers):
            root = match.nodes[-1]
            found.append(Site(spec, root, match.nodes, match.args, {}, rule.name, match.outputs, match.write))
    order = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(found, key=lambda site: (order[site.nodes[0]], -len(site.nodes)))


def _can_serve(
    spec: registry.OpSpec,
    rule: rules.Rule,
    match: rules.Match,
    scope_of: dict[torch.fx.Node, Scope],
    answers: Answers,
) -> bool:
    """True where the op takes these arguments and gives what the rest of the graph was traced with."""
    scope = scope_of[match.nodes[0]]
    if any(scope_of[node] != scope for node in match.nodes):
        return False  # part of it runs without gradients, or under another autocast
    values = [value_of(a) for a in match.args if isinstance(a, torch.fx.Node)]
    wanted = [value_of(node) for node in match.outputs]
    if not all(is_plain(v) or isinstance(v, (int, torch.SymInt)) for v in values) or not all(map(is_plain, wanted)):
        return False
    first = min(match.outputs)
    if any(isinstance(a, torch.fx.Node) and not a < first for a in match.args):
        return False  # the op stands where the first of its results is, and its arguments come later
    if not rule.differentiable and scope.grad and any(getattr(v, "requires_grad", False) for v in values):
        return False
    if not any(isinstance(v, torch.Tensor) and v.dtype in spec.dtypes for v in values):
        return False
    question, device, keep = _question(match, scope)
    if not question:
        return or_no(lambda: _gives(match, wanted, scope))
    return answers.ask(question, device, lambda: _gives(match, wanted, scope), keep=keep)


def _question(match: rules.Match, scope: Scope) -> tuple[str, str, bool]:
    """What ``_gives`` asks: which results these calls have on these arguments, and whether they are the wanted ones.

    The text holds the calls as the match writes them, so that nothing which it decides on is left out. It is empty
    where a size is symbolic: one graph's symbols are not another's.
    """
    nodes = [a for a in match.args if isinstance(a, torch.fx.Node)]
    place = {node: Word(f"%{i}") for i, node in enumerate(nodes)}
    facts = [facts_of(node) for node in (*nodes, *match.outputs)]
    calls: list[tuple[Any, Any, Any]] = []

    def emit(target: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((target, args, kwargs))
        return Word(f"%{len(nodes) + len(calls) - 1}")

    known = [fact for fact in facts if fact is not None and not fact.dynamic]
    if len(known) < len(facts):
        return "", "", False
    try:
        results = match.write(emit, *match.args)
        written = spelled([call[1:] for call in calls], place.__getitem__)
    except Exception:
        return "", "", False
    name, keep = names([("call_function", target) for target, _, _ in calls])
    words = [fact_word(fact) for fact in known]
    return f"gives: {name} {written} {results} {words} {scope.autocast}", known[-1].device.type, keep


def _gives(match: rules.Match, wanted: list[Any], scope: Scope) -> bool:
    """Writes the op on the graph's own example values and compares shape, dtype, device and strides of every result.

    Views later in the graph were traced with the old layout, so another one ends the match.

    Raises:
        Exception: the op takes no such arguments.
    """
    mode = _compat.fake_mode_of(*[value_of(a) for a in match.args if isinstance(a, torch.fx.Node)])
    if mode is None:
        return False

    def emit(target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    args = torch.fx.map_arg(match.args, value_of)
    with torch.no_grad(), scope.autocast_regions(), mode:
        given = match.write(emit, *args)
    return len(given) == len(wanted) and all(
        is_plain(g) and same_value(g, w) and same_strides(g, w) for g, w in zip(given, wanted, strict=True)
    )
