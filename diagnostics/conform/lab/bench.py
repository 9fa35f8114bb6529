"""The bench on which a check puts an op: it calls it, for real or with fakes, and says so before each call.

It runs in a process that the op may take down with it: what was announced last is what did it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab import arrive, compare, vary
from opgraft.diagnostics.conform.lab.allocations import FILLING, ZONE, Allocations, guarded_allocations
from opgraft.diagnostics.conform.lab.case import Case, describe, snippet
from opgraft.diagnostics.conform.lab.facts import OpFacts
from opgraft.diagnostics.conform.lab.fakes import FakeResult, fake_call, unfakeable
from opgraft.diagnostics.conform.lab.memory import Zone, fresh_call, guarded_call
from opgraft.diagnostics.conform.lab.tree import is_plain, leaves, tensors
from opgraft.diagnostics.conform.lab.witness import PLAIN
from opgraft.diagnostics.model import Severity

# Types of an error that no kernel raises on purpose to refuse an input.
ACCIDENTS = (ZeroDivisionError, IndexError, SystemError, RecursionError, UnboundLocalError, NameError, AttributeError)
ACCIDENT_WORDS = ("INTERNAL ASSERT FAILED", "illegal memory")
# What CUDA says of a launch that no device can do. Raised at the call it is a refusal, though no clear one.
LAUNCH_WORDS = ("invalid configuration", "invalid argument", "CUDA error", "cudaError")


class NotApplicable(Exception):  # noqa: N818 - no error: the check has nothing to say about this op
    """A check that does not concern this op, with the reason."""


class NotRun(Exception):  # noqa: N818 - no error: the check could not be made here
    """A check that could not be made, with the reason."""


@dataclass(frozen=True)
class Fault:
    """What a check found: one sentence about the op, the call that shows it, and what else speaks for it."""

    message: str
    case: Case | None = None
    evidence: tuple[str, ...] = ()
    kind: str = ""
    remedies: tuple[str, ...] = ()
    severity: Severity = "error"
    tail: str = ""


@dataclass(frozen=True)
class Result:
    """One real call: its results, the arguments as they are after it, and the error where it raised."""

    outputs: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    zones: tuple[Zone, ...] = ()
    allocations: Allocations | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def all(self) -> list[Any]:
        """Results and then arguments: everything that the call may have changed."""
        return [*leaves(self.outputs), *leaves((self.args, self.kwargs))]


@dataclass
class Bench:
    """One op on the bench.

    Attributes:
        cases: the calls to start from, each of which the op accepts.
        announce: says what is called next, before it is.
        back: is told when a call has returned or raised: silence from then on is not the op's doing.
        lost: is told when an error has taken the device's context; it need not come back.
        avoid: keys of calls that took an earlier process down.
        recorded: the calls are those of a real run; what the run did not meet is then at most a note.
        deadline: ``time.monotonic()`` at which a check should come to an end.
        met: what the run really did: ``"backward"``, ``"create_graph"``, ``"compile"``, ``"autocast"``.
        registrars: modules and libraries that register the op.
    """

    facts: OpFacts
    cases: tuple[Case, ...]
    announce: Callable[[str, str, str, bool], None] = lambda key, change, text, loose: None
    back: Callable[[], None] = lambda: None
    lost: Callable[[str], None] = lambda text: None
    avoid: frozenset[str] = frozenset()
    recorded: bool = False
    thorough: bool = False
    deadline: float = float("inf")
    met: frozenset[str] = frozenset()
    registrars: tuple[str, ...] = ()
    _snippets: dict[str, str] = field(default_factory=dict)

    @property
    def op(self) -> Any:
        return self.facts.op

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def arrive(self) -> tuple[str, ...]:
        """The statements of a script that register the op."""
        return arrive.lines(self.registrars)

    @property
    def device(self) -> torch.device:
        found = [tensor.device for case in self.cases for tensor in case.tensors]
        return found[0] if found else torch.device("cpu")

    def key(self, case: Case) -> str:
        return f"{case.origin}|{case.name}|{case.change}|{case.label}"

    def left(self) -> float:
        """Seconds until the check should be done."""
        return self.deadline - time.monotonic()

    def usable(self, cases: Iterator[Case]) -> Iterator[Case]:
        """The cases that did not take a process down, as long as there is time."""
        for case in cases:
            if self.left() <= 0:
                return
            if self.key(case) not in self.avoid:
                yield case

    def snippet(self, case: Case, tail: str = PLAIN) -> str:
        return snippet(self.name, case, tail, self.arrive)

    def needs_fakes(self, case: Case) -> None:
        """For checks that trace.

        Raises:
            NotRun: torch makes no fakes of these tensors.
        """
        if words := unfakeable(case):
            raise NotRun(words)

    def fake(self, case: Case) -> FakeResult:
        """The fake at the sizes of this call.

        Raises:
            NotRun: torch makes no fakes of these tensors.
        """
        self.needs_fakes(case)
        self.tell(case, doing="fake")
        with _compat.compiled_in_eager():
            return fake_call(self.op, case)

    def tell(self, case: Case, doing: str = "") -> None:
        """Announces a call: whatever happens until the next announcement is its doing.

        ``doing`` is ``"compile"`` where more time may pass, ``"fake"`` where the op's fake runs.
        """
        key = self.key(case)
        if key not in self._snippets:
            self._snippets[key] = self.snippet(case)
        self.announce(key, doing or case.change, f"{describe(case)}\n{self._snippets[key]}", case.loose)

    def real(
        self,
        case: Case,
        *,
        grad: bool = False,
        seed: int = 0,
        pattern: int | None = None,
        filling: int | None = None,
        function: Any = None,
    ) -> Result:
        """Calls the op on fresh copies of the arguments.

        Args:
            grad: keep ``requires_grad`` of the arguments and record the graph.
            pattern: put the arguments into memory between zones of this byte, and what the op allocates too.
            filling: fill what the op allocates with this byte before it is written (0xFF is NaN).
            function: call this in the op's place.
        """
        zones: list[Zone] = []
        if pattern is None:
            args, kwargs = fresh_call(case, requires_grad=None if grad else False)
        else:
            args, kwargs, zones = guarded_call(case, pattern)
        self.tell(case)
        torch.manual_seed(seed)
        allocations = None
        try:
            with contextlib.ExitStack() as stack:
                if pattern is not None or filling is not None:
                    guards = guarded_allocations(
                        ZONE if pattern is None else pattern, FILLING if filling is None else filling
                    )
                    allocations = stack.enter_context(guards)
                stack.enter_context(torch.set_grad_enabled(grad))
                if case.autocast:
                    stack.enter_context(torch.autocast(self.device.type, dtype=getattr(torch, case.autocast)))
                # A body that is compiled itself would be compiled anew in every process of the checks.
                stack.enter_context(_compat.compiled_in_eager())
                outputs = (function or self.op)(*args, **kwargs)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
        except Exception as error:
            if "CUDA" in str(error) and not device_works(self.device):
                self.lost(str(error))
            self.back()
            return Result(None, args, kwargs, error, tuple(zones), allocations)
        self.back()
        return Result(outputs, args, kwargs, None, tuple(zones), allocations)

    def disagree(self, left: Any, right: Any, case: Case) -> str:
        """In what two results differ by more than rounding; ``""`` where they agree."""
        return compare.disagree(left, right, compare.terms_of(case.tensors))

    def differ(self, left: Result, right: Result, case: Case) -> str:
        """In what two calls differ by more than rounding, in their results or in their arguments after the call."""
        words = self.disagree(left.outputs, right.outputs, case)
        if words:
            return f"the result {words}" if words.startswith(("differs", "has", "is")) else words
        names = [argument.name for argument in self.facts.arguments]
        for name, ours, theirs in zip(names, left.args, right.args, strict=False):
            if words := self.disagree(ours, theirs, case):
                return f"{name} after the call {words}"
        for name, ours in left.kwargs.items():
            if words := self.disagree(ours, right.kwargs.get(name), case):
                return f"{name} after the call {words}"
        return ""

    def shrink(self, case: Case, fails: Callable[[Case], bool], seconds: float = 1.5) -> Case:
        """A smaller call that still fails: extents are cut down one after the other."""
        stop = time.monotonic() + min(seconds, max(self.left(), 0.2))
        current = case
        progress = True
        while progress and time.monotonic() < stop:
            progress = False
            for old in sorted(vary.extents(current), reverse=True):
                for new in (1, 2, 3, 4, 8, old // 2):
                    if not 0 < new < old or time.monotonic() > stop:
                        continue
                    smaller = cut(current, old, new)
                    if smaller is None or self.key(smaller) in self.avoid:
                        continue
                    with contextlib.suppress(Exception):
                        if fails(smaller):
                            current, progress = smaller, True
                            break
                if progress:
                    break
        return current


def cut(case: Case, old: int, new: int) -> Case | None:
    """The call with extent ``old`` cut down to ``new`` by slicing, so that strides and values stay."""
    from dataclasses import replace

    from opgraft.diagnostics.conform.lab.tree import map_tensors

    def one(tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach()
        if not is_plain(value) and old not in value.shape:
            return tensor
        dense = value.is_contiguous() and value.storage_offset() == 0
        for dim, size in enumerate(tensor.shape):
            if size == old:
                value = value.narrow(dim, 0, new)
        if dense:
            value = value.contiguous()
        return value.requires_grad_(tensor.requires_grad) if tensor.requires_grad else value

    if any(tensor.layout != torch.strided and old in tensor.shape for tensor in case.tensors):
        return None
    args, kwargs = map_tensors(one, (case.args, case.kwargs))
    args = tuple(new if type(value) is int and value == old and old > 1 else value for value in args)
    if tensors((args, kwargs)) == []:
        return None
    return replace(case, args=args, kwargs=kwargs)


def device_works(device: torch.device) -> bool:
    """Does the device still serve this process? After an illegal access nothing runs on it any more."""
    if device.type != "cuda":
        return True
    try:
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def refuses(error: BaseException | None, launch: bool = True) -> bool:
    """The error says no to an input in words; it is no accident inside the kernel.

    Args:
        launch: a launch that the device refused counts as well.
    """
    if error is None or isinstance(error, ACCIDENTS):
        return False
    text = str(error)
    if not launch and any(word in text for word in LAUNCH_WORDS):
        return False
    if isinstance(error, AssertionError) and not text:
        return False
    return not any(word in text for word in ACCIDENT_WORDS)


def out_of_memory(error: BaseException | None) -> bool:
    """Says the error that there is not enough memory? On the CPU torch has no type for it."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in words)


def sentence(error: BaseException | None) -> str:
    """The first line of an error with its type."""
    if error is None:
        return "no error"
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__
