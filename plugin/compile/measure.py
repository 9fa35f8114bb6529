"""Compiles a neighbourhood both ways, checks both against float64, times them by turns, and decides."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opgraft import _compat
from opgraft.compile import checking, inputs, timing
from opgraft.compile.neighbourhood import Neighbourhood
from opgraft.compile.site import COMPILER, KERNEL, Decision

Candidate = Callable[..., Any]


class UnmeasurableError(Exception):
    """The neighbourhood cannot be compiled or run on its own; the message says why."""


def measure(around: Neighbourhood, *, seconds: float, replay_decides: bool = False) -> Decision:
    """The choice for a site in its surroundings.

    Args:
        seconds: time for timing, beside compiling.
        replay_decides: the model runs under CUDA graphs, so that the host's time does not count.

    Raises:
        UnmeasurableError: the compiler's own candidate fails here.
        Exception: what the kernel raised, or ``checking.WrongValueError``.
    """
    with _compat.aside():
        training = around.training
        try:
            reference = around.graph(kernel=False)
            tensors, exact = _inputs_and_values(around, reference, training)
            compiled = _compile(around, tensors, kernel=False)
            beside = checking.outputs_and_gradients(compiled, tensors, training)
        except Exception as error:
            raise UnmeasurableError(f"its surroundings do not compile alone ({type(error).__name__})") from error
        kernel = _compile(around, tensors, kernel=True)
        checking.check(checking.outputs_and_gradients(kernel, tensors, training), beside, exact)
        del exact, beside
        steps = [_step(f, tensors, training) for f in (compiled, kernel)]
        return _decide(around, steps, tensors[0].device.type, seconds, replay_decides)


def verify(around: Neighbourhood) -> None:
    """Runs the kernel's form of the surroundings once, uncompiled, and compares it with float64.

    Raises:
        UnmeasurableError: there is nothing to compare with.
        Exception: what the kernel raised, or ``checking.WrongValueError``.
    """
    with _compat.aside():
        try:
            reference = around.graph(kernel=False)
            tensors, exact = _inputs_and_values(around, reference, around.training)
            beside = checking.outputs_and_gradients(reference, tensors, around.training)
        except Exception as error:
            raise UnmeasurableError(f"its reference does not run here ({type(error).__name__})") from error
        kernel = around.graph(kernel=True)
        checking.check(checking.outputs_and_gradients(kernel, tensors, around.training), beside, exact)


def _inputs_and_values(
    around: Neighbourhood, reference: torch.fx.GraphModule, training: bool
) -> tuple[list[torch.Tensor], checking.Values]:
    facts = [fact for _, fact in around.inputs]
    for kind in (inputs.NORMAL, inputs.POSITIVE):
        tensors = inputs.make(facts, kind, training)
        exact = checking.in_float64(reference, tensors, training)
        if checking.mostly_finite(exact):
            break
    return tensors, exact


def _compile(around: Neighbourhood, tensors: Sequence[torch.Tensor], *, kernel: bool) -> Candidate:
    # Graph replay is timed by this package itself; Inductor's own would keep its memory pools for good.
    with torch.set_grad_enabled(around.training):
        compiled: Candidate = _compat.compile_alone(
            around.graph(kernel=kernel), list(tensors), {"triton.cudagraphs": False, "freezing": False}
        )
    return compiled


def _step(function: Candidate, tensors: Sequence[torch.Tensor], training: bool) -> Callable[[], None]:
    if not training:

        def forward() -> None:
            with torch.no_grad():
                function(*tensors)

        return forward

    wanted = [x for x in tensors if x.requires_grad]
    results = [r for r in function(*tensors) if isinstance(r, torch.Tensor) and r.requires_grad]
    seeds = [torch.ones_like(r) for r in results]

    def both() -> None:
        with torch.enable_grad():
            found = [r for r in function(*tensors) if isinstance(r, torch.Tensor) and r.requires_grad]
            torch.autograd.grad(found, wanted, seeds, allow_unused=True)

    return both


def _decide(
    around: Neighbourhood, steps: list[Callable[[], None]], device: str, seconds: float, replay_decides: bool
) -> Decision:
    synchronise: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else _nothing
    collecting = gc.isenabled()
    gc.disable()
    try:
        samples = timing.interleave(*steps, seconds=seconds, synchronise=synchronise)
        replays = _replays(steps) if device == "cuda" else None
        replayed = timing.interleave(*replays, seconds=seconds, synchronise=synchronise) if replays else None
    finally:
        if collecting:
            gc.enable()
    if replayed is None:
        return decide(samples, where="", span=span_of(around))
    if replay_decides:
        return decide(replayed, where=" under CUDA-graph replay", span=span_of(around))
    return both_ways(samples, replayed, span_of(around))


def both_ways(called: timing.Samples, replayed: timing.Samples, span: str = "") -> Decision:
    """On a GPU without CUDA graphs either the host or the device may be the limit: the kernel may lose in neither."""
    on_device, on_host = decide(replayed, where=" on the device", span=span), decide(called, where="", span=span)
    if on_device.choice == KERNEL and not timing.judge(called).second_loses:
        return on_device
    if on_host.choice == KERNEL and not timing.judge(replayed).second_loses:
        return on_host
    return on_device if on_device.choice == COMPILER else on_host


def decide(samples: timing.Samples, *, where: str, span: str = "") -> Decision:
    """The winner by more than the noise; a tie goes to the compiler."""
    verdict = timing.judge(samples)
    compiler, kernel = (1e6 * t for t in samples.medians)
    if verdict.second_wins:
        choice, why = KERNEL, f"the kernel is {verdict.ratio:.2f}x as fast in its surroundings{where}"
    elif verdict.second_loses:
        choice, why = COMPILER, f"the compiler's code is {1 / verdict.ratio:.2f}x as fast with its surroundings{where}"
    else:
        choice, why = COMPILER, f"no difference beyond the noise{where} ({verdict.ratio:.3f}x): a tie is the compiler's"
    return Decision(
        choice=choice,
        why=why,
        measured=True,
        ratio=round(verdict.ratio, 4),
        interval=(round(verdict.interval[0], 4), round(verdict.interval[1], 4)),
        noise=round(verdict.noise, 4),
        compiler_us=round(compiler, 2),
        kernel_us=round(kernel, 2),
        range=span,
    )


def _nothing() -> None:
    return None


def span_of(around: Neighbourhood) -> str:
    """The sizes that a decision for dynamic shapes is kept for: the power-of-two bucket of every dynamic dimension."""
    words = []
    for i, (_, fact) in enumerate(around.inputs):
        for dim in fact.dynamic:
            top = 1 << max(fact.shape[dim] - 1, 0).bit_length()
            words.append(f"input {i} dim {dim}: {top // 2 + 1} to {top}")
    return ", ".join(words)


def _replays(steps: list[Callable[[], None]]) -> list[Callable[[], None]] | None:
    """Both steps captured as CUDA graphs; None where one cannot be captured."""
    try:
        graphs = []
        for step in steps:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            graphs.append(graph)
    except Exception:
        torch.cuda.synchronize()
        return None
    return [graph.replay for graph in graphs]
