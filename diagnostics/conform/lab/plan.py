"""What is to be examined of one op, and the calls to start from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from opgraft.diagnostics.conform.lab import arrive
from opgraft.diagnostics.conform.lab.bench import Bench, sentence
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.facts import OpFacts
from opgraft.diagnostics.conform.lab.generate import generated
from opgraft.diagnostics.model import Location

# Guessed calls to go on with: so many with tensors of one shape, and so many with several shapes.
GUESSES = 2
# Elements of a sample that is used by default; more with ``thorough``.
SAMPLE_ELEMENTS = 1 << 18
SAMPLES = 6
NO_CALL = "no call is known"


@dataclass(frozen=True)
class Plan:
    """What is to be examined, and how long that may take.

    Attributes:
        cases: calls that are known (recorded or given); without any, the spec's samples or guesses are used.
        fresh: this process has run no kernel yet, so that a fork may use several threads.
        imports: modules, files and libraries that register the op, as the user named them.
        patience: how many times longer than usual everything takes, under a sanitizer.
        load: makes the calls that are known, in place of ``cases``.
        place: where the calls that ``load`` makes are written.
    """

    facts: OpFacts
    cases: tuple[Case, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    recorded: bool = False
    thorough: bool = False
    seconds: float = 30.0
    met: frozenset[str] = frozenset()
    fresh: bool = False
    distribution: str = "unknown"
    imports: tuple[str, ...] = ()
    patience: float = 1.0
    load: Callable[[], tuple[Case, ...]] | None = None
    place: Location | None = None

    @cached_property
    def known(self) -> tuple[Case, ...]:
        """The calls that are known. To be asked for in a fork only: ``load`` may put tensors on a GPU."""
        return self.cases or (self.load() if self.load is not None else ())

    @cached_property
    def registrars(self) -> tuple[str, ...]:
        """Modules and libraries that register the op in a fresh process."""
        return arrive.registrars(self.facts, self.imports)


def candidates(plan: Plan) -> Iterator[Case]:
    """Calls to start from, the best known first."""
    if plan.known:
        yield from plan.known
        return
    spec = plan.facts.spec
    if spec is not None and spec.samples is not None:
        limit = SAMPLE_ELEMENTS * (64 if plan.thorough else 1)
        for sample in spec.samples(plan.device, torch.float32):
            case = Case(args=tuple(sample.args), kwargs=dict(sample.kwargs), origin="sample", name=sample.name)
            if sum(tensor.numel() for tensor in case.tensors) <= limit:
                yield case
        return
    yield from generated(plan.facts, plan.device)


def _mixed(case: Case) -> bool:
    """Do the tensors of a guessed call have several shapes?"""
    return len({tensor.shape for tensor in case.tensors}) > 1


def _enough(found: list[Case]) -> bool:
    """Two calls of one shape, and two of several where there can be such."""
    if not found:
        return False
    alike = sum(not _mixed(case) for case in found)
    several = len(found[0].tensors) > 1
    return alike >= GUESSES and (not several or len(found) - alike >= GUESSES)


def accepted(plan: Plan, bench: Bench) -> tuple[tuple[Case, ...], str]:
    """The candidates that the op takes, and why there is none."""
    found: list[Case] = []
    last = NO_CALL
    guessed = not plan.known and (plan.facts.spec is None or plan.facts.spec.samples is None)
    stop = time.monotonic() + plan.seconds / 5
    try:
        for case in candidates(plan):
            if bench.key(case) in bench.avoid and guessed:
                continue
            if plan.recorded:
                found.append(case)
                continue
            result = bench.real(case)
            if guessed and sum(_mixed(other) == _mixed(case) for other in found) >= GUESSES:
                continue
            # torch itself refuses results that share memory: that is a fault, and no wrong guess.
            if result.ok or "must not also be an input" in str(result.error):
                found.append(case)
            elif not (found or (any(tensor.is_quantized for tensor in case.tensors) and last != NO_CALL)):
                last = (
                    f"the last guess at a call was refused: {sentence(result.error)}"
                    if guessed
                    else sentence(result.error)
                )
            if (guessed and _enough(found)) or len(found) >= SAMPLES or time.monotonic() > stop:
                break
    except LookupError as error:
        last = str(error)
    return tuple(found), last
