"""The arms of a comparison: one model, several ways to compile it that differ at the op's call sites alone."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opgraft.diagnostics.measure import _compat
from opgraft.diagnostics.measure.sites import SiteBackend
from opgraft.diagnostics.measure.subject import Subject, make_step
from opgraft.diagnostics.measure.swap import Swap

BASELINE = "compiler"
TWIN = "A/A"


@dataclass(frozen=True)
class Plan:
    """One arm before it is compiled: which ops give way to their references, and what is swapped in by name.

    ``twin`` is the A/A arm: the baseline compiled a second time.
    """

    name: str
    compiled: bool = True
    replaced: frozenset[str] = frozenset()
    swaps: tuple[Swap, ...] = ()
    runs_ops: frozenset[str] = frozenset()
    twin: bool = False


@dataclass
class Arm:
    """An arm that can run. ``failed`` says in a sentence why it cannot."""

    plan: Plan
    step: Callable[[], Any] | None = None
    entry: Callable[..., Any] | None = None
    backend: SiteBackend | None = None
    failed: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.plan.name

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The arm's swaps in place: to be held while the arm is compiled and whenever it runs."""
        with contextlib.ExitStack() as stack:
            for swap in self.plan.swaps:
                stack.enter_context(swap.installed())
            yield


def plan_arms(
    ops: Sequence[str], swapped: Sequence[Swap], raw: Sequence[Swap], wanted: Sequence[str] | None = None
) -> tuple[Plan, ...]:
    """The arms in the order of the table.

    Args:
        ops: names of the registered ops that are compared.
        swapped: unregistered functions that are compared, each with its reference.
        raw: unregistered forms to be brought in beside the registered ops.
        wanted: names of arms; by default every one that makes sense.

    Raises:
        ValueError: an unknown arm is asked for.
    """
    every = frozenset(ops)
    out = tuple(swapped)
    plans = [
        Plan("eager", compiled=False, runs_ops=every),
        Plan(BASELINE, replaced=every, swaps=out),
    ]
    if ops:
        if len(ops) > 1:
            plans += [
                Plan(f"op {name}", replaced=every - {name}, swaps=out, runs_ops=frozenset({name})) for name in ops
            ]
        plans.append(Plan("op", swaps=out, runs_ops=every))
    if raw:
        plans.append(Plan("raw", swaps=(*out, *raw)))
    elif swapped:
        plans.append(Plan("raw", runs_ops=every))
    plans.append(Plan(TWIN, replaced=every, swaps=out, twin=True))
    if wanted is None:
        return tuple(plans)
    known = {plan.name for plan in plans}
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"compare: no arm {unknown[0]!r} here, there are {', '.join(sorted(known))}")
    return tuple(p for p in plans if p.name in wanted or p.name in (BASELINE, TWIN))


def own_code(function: types.FunctionType, name: str) -> types.FunctionType:
    """The function with a code object of its own: Dynamo keeps compiled entries, and counts recompiles, by code."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def make_entry(model: Callable[..., Any], name: str) -> Callable[..., Any]:
    def entry(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    identifier = "".join(c if c.isalnum() else "_" for c in f"opgraft_arm_{name}")
    return own_code(entry, identifier)  # type: ignore[arg-type]


def make_arm(
    plan: Plan,
    subject: Subject,
    references: Mapping[str, Callable[..., Any]],
    compile_options: Mapping[str, Any] | None = None,
    *,
    make_backend: Callable[[Callable[..., Any], Mapping[str, Callable[..., Any]]], SiteBackend] = SiteBackend,
) -> Arm:
    """An arm whose first step will compile it.

    Args:
        references: the reference of every op that some arm replaces.
        compile_options: keyword arguments of ``torch.compile``.
        make_backend: what stands between Dynamo and the backend that the options name.
    """
    entry = make_entry(subject.model, plan.name)
    if not plan.compiled:
        return Arm(plan, make_step(subject, entry), entry)
    given = dict(compile_options or {})
    sites = make_backend(_compat.backend_of(given), {name: references[name] for name in plan.replaced})
    options = {key: value for key, value in given.items() if key not in ("mode", "options", "backend")}
    compiled = torch.compile(entry, backend=sites, **options)
    return Arm(plan, make_step(subject, compiled), compiled, sites)
