"""Compiles a part of a graph both ways, checks both against float64, times them by turns, and decides."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from opgraft import _compat
from opgraft.compile import checking, inputs, span, timing
from opgraft.compile.neighbourhood import Neighbourhood
from opgraft.compile.site import COMPILER, KERNEL, Decision, TensorFacts
from opgraft.compile.stretch import Stretch

Candidate = Callable[..., Any]
Step = Callable[[], None]

# Timing goes on while the verdict is open: for so many times the time of a first look.
_PATIENCE = 4.0
# What the host needs for a call of a compiled model beside what is in its graph: guards, wrappers, and some to spare.
_SECONDS_A_CALL = 60e-6


class UnmeasurableError(Exception):
    """The part cannot be compiled or run on its own; the message says why."""


def measure(around: Neighbourhood, *, seconds: float, replay_decides: bool = False) -> Decision:
    """The choice for a site in its surroundings.

    A win is measured twice, the second time on inputs at other addresses: where memory lies can be worth more than
    the difference.

    Args:
        seconds: time for a first look, beside compiling; an open verdict takes up to four times as long.
        replay_decides: the model runs under CUDA graphs, so that the host's time does not count.

    Raises:
        UnmeasurableError: the compiler's own candidate fails here.
        Exception: what the kernel raised, or ``checking.WrongValueError``.
    """
    with _compat.aside():
        training, facts = around.training, inputs.wanted(around.inputs)
        try:
            tensors, exact = _inputs_and_values(facts, around.graph(kernel=False), training)
            compiled = _compile(around.graph(kernel=False), tensors, training)
            beside = checking.outputs_and_gradients(compiled, tensors, training)
        except Exception as error:
            raise UnmeasurableError(f"its surroundings do not compile alone ({type(error).__name__})") from error
        kernel = _compile(around.graph(kernel=True), tensors, training)
        checking.check(checking.outputs_and_gradients(kernel, tensors, training), beside, exact)
        del exact, beside
        candidates = (compiled, kernel)
        decision = _decide(around, candidates, tensors, seconds, replay_decides)
        if decision.choice != KERNEL:
            return decision
        elsewhere = inputs.make(facts, inputs.NORMAL, training, seed=1)
        again = _decide(around, candidates, elsewhere, seconds, replay_decides)
        return decision if again.choice == KERNEL else again


def confirm(
    stretch: Stretch,
    *,
    seconds: float,
    replay_decides: bool = False,
    is_kept: Callable[[timing.Samples], bool] = lambda samples: False,
) -> timing.Samples:
    """Times a longer stretch of the graph as it was given against the same with what was chosen.

    Args:
        is_kept: whether these times let the change stand. Such a change is timed a second time, on inputs and memory at
            other addresses, and has to stand again; then it must not lose on the device alone, nor on the host alone
            where the host may be the limit. The times returned are those in which it lost, or the last ones.

    Raises:
        UnmeasurableError: the stretch does not run on its own, or does not fit into memory beside the model.
    """
    facts = [fact for _, fact in stretch.inputs]
    if not _fits(facts, stretch.bytes_written):
        raise UnmeasurableError("the stretch around it does not fit into memory twice")
    kept: list[Any] = []  # so that the second time finds other addresses
    compiled: list[Candidate] = []

    def timed(seed: int, last: bool) -> timing.Samples:
        tensors = inputs.make(inputs.wanted(stretch.inputs), inputs.NORMAL, stretch.training, seed=seed)
        if not compiled:
            compiled.extend(_compile(stretch.graph(chosen=c), tensors, stretch.training) for c in (False, True))
        steps = [_step(f, tensors, stretch.training) for f in compiled]
        replays = _replays(steps) if replay_decides else None
        kept.append((tensors, replays))
        device = tensors[0].device.type
        samples = _timed(replays or steps, device, seconds, _told_apart)
        if not last or replay_decides or device != "cuda" or not is_kept(samples):
            return samples
        return _lost_on_one_side(steps, samples, seconds) or samples

    with _compat.aside():
        try:
            first = timed(seed=0, last=False)
            return timed(seed=1, last=True) if is_kept(first) else first
        except Exception as error:
            raise UnmeasurableError(f"the stretch around it does not compile alone ({type(error).__name__})") from error


def _lost_on_one_side(steps: list[Step], called: timing.Samples, seconds: float) -> timing.Samples | None:
    """The times in which the second is slower on the device, or on the host where that may be the limit; None without.

    Which of the two is the limit depends on what else the host does, and a model has more for it to do than a stretch.
    """
    replays = _replays(steps)
    if replays is not None:
        on_device = _timed(replays, "cuda", seconds, _told_apart)
        if timing.judge(on_device).second_is_slower:
            return on_device
    on_host = timing.until_returned(*steps, synchronise=torch.cuda.synchronize)
    near = on_host.medians[1] + _SECONDS_A_CALL > called.medians[1]
    return on_host if near and timing.judge(on_host).second_is_slower else None


def _told_apart(verdict: timing.Verdict) -> bool:
    return verdict.second_is_faster or verdict.second_is_slower


def verify(around: Neighbourhood) -> None:
    """Runs the kernel's form of the surroundings once, uncompiled, compares it with float64, and runs it on fake
    tensors, as the compile will.

    Raises:
        UnmeasurableError: there is nothing to compare with.
        Exception: what the kernel raised, or ``checking.WrongValueError``.
    """
    with _compat.aside():
        try:
            reference = around.graph(kernel=False)
            tensors, exact = _inputs_and_values(inputs.wanted(around.inputs), reference, around.training)
            beside = checking.outputs_and_gradients(reference, tensors, around.training)
        except Exception as error:
            raise UnmeasurableError(f"its reference does not run here ({type(error).__name__})") from error
        kernel = around.graph(kernel=True)
        checking.check(checking.outputs_and_gradients(kernel, tensors, around.training), beside, exact)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            checking.outputs_and_gradients(kernel, [mode.from_tensor(x) for x in tensors], around.training)


def _inputs_and_values(
    facts: list[inputs.Wanted], reference: torch.fx.GraphModule, training: bool
) -> tuple[list[torch.Tensor], checking.Values]:
    for kind in (inputs.NORMAL, inputs.POSITIVE):
        tensors = inputs.make(facts, kind, training)
        exact = checking.in_float64(reference, tensors, training)
        if checking.mostly_finite(exact):
            break
    return tensors, exact


def _compile(module: torch.fx.GraphModule, tensors: Sequence[torch.Tensor], training: bool) -> Candidate:
    # Graph replay is timed by this package itself; Inductor's own would keep its memory pools for good.
    with torch.set_grad_enabled(training):
        compiled: Candidate = _compat.compile_alone(
            module, list(tensors), {"triton.cudagraphs": False, "freezing": False}
        )
    return compiled


def _fits(facts: list[TensorFacts], written: int) -> bool:
    """True where inputs, their gradients and all that is written take at most half of the free memory."""
    read = sum(fact.bytes for fact in facts)
    return 2 * (2 * read + 2 * written) < _compat.free_memory(facts[0].device)


def _step(function: Candidate, tensors: Sequence[torch.Tensor], training: bool) -> Step:
    if not training:

        def forward() -> None:
            with torch.no_grad():
                function(*tensors)

        return forward

    wanted = [x for x in tensors if x.requires_grad]
    with torch.enable_grad():
        results = [r for r in function(*tensors) if isinstance(r, torch.Tensor) and r.requires_grad]
    seeds = [torch.ones_like(r) for r in results]

    def both() -> None:
        with torch.enable_grad():
            found = [r for r in function(*tensors) if isinstance(r, torch.Tensor) and r.requires_grad]
            torch.autograd.grad(found, wanted, seeds, allow_unused=True)

    return both


def _timed(
    steps: Sequence[Step], device: str, seconds: float, enough: Callable[[timing.Verdict], bool]
) -> timing.Samples:
    synchronise: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else _nothing
    collecting = gc.isenabled()
    gc.disable()
    try:
        return timing.until(
            enough,
            *steps,
            seconds=seconds,
            patience=_PATIENCE * seconds,
            synchronise=synchronise,
            tick=timing.busy if device == "cpu" and torch.get_num_threads() == 1 else None,
        )
    finally:
        if collecting:
            gc.enable()


def _decide(
    around: Neighbourhood,
    candidates: tuple[Candidate, Candidate],
    tensors: Sequence[torch.Tensor],
    seconds: float,
    replay_decides: bool,
) -> Decision:
    device = tensors[0].device.type
    steps = [_step(f, tensors, around.training) for f in candidates]
    replays = _replays(steps) if device == "cuda" else None
    replayed = _timed(replays, device, seconds, _clear) if replays else None
    if replayed is not None and replay_decides:
        return decide(replayed, where=" under CUDA-graph replay", sizes=span.words(around))
    samples = _timed(steps, device, seconds, _clear)
    if replayed is None:
        return decide(samples, where="", sizes=span.words(around))
    return both_ways(samples, replayed, span.words(around))


def _clear(verdict: timing.Verdict) -> bool:
    return verdict.clear


def both_ways(called: timing.Samples, replayed: timing.Samples, sizes: str = "") -> Decision:
    """On a GPU without CUDA graphs either the host or the device may be the limit.

    A kernel that wins on one and loses on the other is an open case: the stretch of the model around it, which has its
    own limit, has the word; without one the compiler's code stays.
    """
    on_device, on_host = decide(replayed, where=" on the device", sizes=sizes), decide(called, where="", sizes=sizes)
    device, host = timing.judge(replayed), timing.judge(called)
    if on_device.choice == KERNEL:
        return dataclasses.replace(on_device, open=host.second_loses)
    if on_host.choice == KERNEL:
        return dataclasses.replace(on_host, open=device.second_loses)
    return on_device


def decide(samples: timing.Samples, *, where: str, sizes: str = "") -> Decision:
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
        range=sizes,
    )


def _nothing() -> None:
    return None


def _replays(steps: list[Step]) -> list[Step] | None:
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
