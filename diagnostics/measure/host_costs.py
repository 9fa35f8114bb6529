"""What one more call of the op, and one more generated kernel, cost the host inside compiled code.

A call over and over costs a fraction of one among others, whose code and data no cache holds: by how much depends on
what runs between two of them. So a graph of two products, compiled with and without the call between them, is run at
places inside the compiler's own step, as many a step as the step makes calls. What it takes longer with the call is the
call's price there: the dispatcher, the allocation, the launch, and the compiler's checks of the result. A training
step's calls of the backward op are priced the same way. The op's arm takes no part.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from opgraft.diagnostics.measure import _compat, clock, statistics
from opgraft.diagnostics.measure.arms import own_code
from opgraft.diagnostics.measure.calls import Call
from opgraft.diagnostics.measure.places import Places
from opgraft.diagnostics.measure.subject import tensors_in

# Samples of each graph, and seconds after which those that there are have to do.
_SAMPLES, _SECONDS = 150, 3.0
_PLAIN, _LONGER = "plain", "longer"


@dataclass(frozen=True)
class HostCosts:
    """Host microseconds of the compiler's step, of a call of each op by name, and of a generated kernel, of one time.

    ``inside`` says whether the places were inside the step's code; else they were between steps, where it is colder.
    """

    step_us: float = 0.0
    call_us: dict[str, float] = field(default_factory=dict)
    launch_us: float = 0.0
    inside: bool = False


def measure(
    step: Callable[[], Any], calls: Mapping[str, tuple[Callable[..., Any], Call]], device: torch.device, often: float
) -> HostCosts:
    """Prices every call and a generated kernel inside the compiler's step.

    Args:
        step: the compiler's arm.
        calls: by the op's name, what is called and with what.
        often: calls a step.
    """
    square = [torch.rand(64, 64, device=device) for _ in range(2)]
    graphs = {_PLAIN: compiled(None, None, square), _LONGER: compiled("kernel", None, square)}
    for name, (function, call) in calls.items():
        graphs[name] = compiled(function, call, square)
    found: dict[str, list[float]] = {name: [] for name in graphs}
    waiting: list[str] = []
    shuffle = random.Random(0)

    def visit() -> None:
        if not waiting:
            waiting.extend(graphs)
            shuffle.shuffle(waiting)
        name = waiting.pop()
        with torch.no_grad():
            begin = time.perf_counter_ns()
            graphs[name]()
            found[name].append((time.perf_counter_ns() - begin) * 1e-3)

    counting = Places(lambda: None)
    with counting.watched():
        step()
    clock.synchronize(device)
    inside = counting.seen > 0
    # Every so many places, so that calls are as far apart as a step's own.
    places = Places(visit, max(1, round(counting.seen / max(1.0, often))))
    steps: list[float] = []
    end = time.monotonic() + _SECONDS
    while min(map(len, found.values())) < _SAMPLES and time.monotonic() < end:
        steps.append(clock.enqueue_seconds(step, device, calls=3, bursts=1) * 1e6)
        # From an idle device: the host is never held up by a full queue.
        clock.synchronize(device)
        if inside:
            with places.watched():
                step()
        else:
            step()
            visit()
        clock.synchronize(device)
    middle = {name: _centre(times) for name, times in found.items()}
    beyond = {name: max(0.0, us - middle[_PLAIN]) for name, us in middle.items()}
    return HostCosts(_centre(steps), {n: beyond[n] for n in calls}, beyond[_LONGER], inside)


def _centre(values: list[float]) -> float:
    return float(statistics.location(np.asarray(values)))


def compiled(more: Callable[..., Any] | str | None, call: Call | None, square: list[torch.Tensor]) -> Callable[[], Any]:
    """A graph of a generated kernel and two products with ``more`` between them, as generated code without guards."""
    kept: list[Any] = []
    inner = _compat.backend_of({})

    def backend(module: Any, inputs: Any, **options: Any) -> Any:
        made = inner(module, inputs, **options)

        def keeping(*given: Any) -> Any:
            kept[:] = [made, given]
            return made(*given)

        return keeping

    def graph(x: torch.Tensor, weight: torch.Tensor, args: Any, kwargs: Any) -> Any:
        x = torch.mm(x * 2.0 + 1.0, weight)
        result = None
        if callable(more):
            result = more(*args, **kwargs)
        elif more is not None:
            x = x * 2.0 + 1.0
        return torch.mm(x, weight), result

    own = own_code(graph, "host_costs_" + (getattr(more, "__name__", "op") if callable(more) else more or _PLAIN))  # type: ignore[arg-type]
    with torch.no_grad():
        given = call.copy() if call is not None else None
        for tensor in tensors_in((given.args, given.kwargs)) if given is not None else ():
            tensor.requires_grad_(False)
        arguments = (given.args, given.kwargs) if given is not None else ((), {})
        torch.compile(own, backend=backend, dynamic=False)(*square, *arguments)
        made, inputs = kept
        for _ in range(3):
            made(*inputs)
    return lambda: made(*inputs)
