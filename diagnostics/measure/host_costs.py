"""What one more call of the op, and one more generated kernel, cost the host inside compiled code.

A call over and over costs less than one among others, whose code and data are in nobody's cache. So small graphs of
products and normalisations are compiled with and without the calls, and take turns with the compiler's own step: what
the host does besides slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opgraft.diagnostics.measure import _compat, clock, statistics
from opgraft.diagnostics.measure.arms import own_code
from opgraft.diagnostics.measure.calls import Call

_STAGES, _ROUNDS, _BURST = 8, 9, 12
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class HostCosts:
    """Host microseconds of the compiler's step, of a call of the op, and of a generated kernel, of one time."""

    step_us: float = 0.0
    call_us: float = 0.0
    launch_us: float = 0.0


def measure(step: Callable[[], Any], function: Callable[..., Any], call: Call, device: torch.device) -> HostCosts:
    """Medians over rounds in which the graphs and the step take turns.

    Args:
        step: the compiler's arm.
        function: what stands at the call's site.
    """
    copies = max(1, min(_STAGES, _MOST_BYTES // max(1, call.bytes)))
    # Equal calls would be made one: each has inputs of its own.
    given = [call.copy() for _ in range(copies)]
    x, weight = (torch.rand(64, 64, device=device) for _ in range(2))
    variants = {"plain": (False, False), "longer": (True, False), "with calls": (False, True)}
    runs: dict[str, Callable[[], Any]] = {"step": step}
    kernels: dict[str, int] = {}
    with torch.no_grad():
        for name, (longer, called) in variants.items():
            runs[name], kernels[name] = _compiled(name, longer, function if called else None, given, (x, weight))
        found: dict[str, list[float]] = {name: [] for name in runs}
        for place in range(_ROUNDS):
            for name in list(runs) if place % 2 == 0 else list(runs)[::-1]:
                found[name].append(clock.enqueue_seconds(runs[name], device, _BURST, bursts=3) * 1e6)
    base = statistics.median(found["step"])

    def beyond(name: str, number: int) -> float:
        """Microseconds beyond the plain graph, brought round by round to the speed of the step's median."""
        rows = zip(found[name], found["plain"], found["step"], strict=True)
        return max(0.0, statistics.median([(more - plain) / own for more, plain, own in rows]) * base / max(1, number))

    return HostCosts(base, beyond("with calls", copies), beyond("longer", kernels["longer"] - kernels["plain"]))


def _compiled(
    name: str, longer: bool, function: Callable[..., Any] | None, given: list[Call], inputs: tuple[Any, ...]
) -> tuple[Callable[[], Any], int]:
    counted: list[Any] = []

    def count(nodes: list[Any]) -> list[Any]:
        counted.extend(n for n in nodes if not _compat.node_is_nothing(n))
        return nodes

    def graph(x: torch.Tensor, weight: torch.Tensor, arguments: list[Any]) -> Any:
        results = []
        for place in range(_STAGES):
            x = torch.mm(x, weight)
            x = x / (1.0 + x.abs().sum(dim=0, keepdim=True))
            if longer:
                x = x / (1.0 + x.abs().sum(dim=1, keepdim=True))
            if function is not None and place < len(arguments):
                results.append(function(*arguments[place][0], **arguments[place][1]))
        return x, results

    compiled = torch.compile(own_code(graph, f"host_costs_{name.replace(' ', '_')}"), dynamic=False)  # type: ignore[arg-type]
    arguments = [(c.args, c.kwargs) for c in given]
    with _compat.patched(_compat.scheduler_hook(count)):
        compiled(*inputs, arguments)
    for _ in range(2):
        compiled(*inputs, arguments)
    return lambda: compiled(*inputs, arguments), len(counted)
