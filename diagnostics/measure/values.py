"""Values and gradients of every arm against float64, before anything is timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from opgraft.diagnostics.measure.arms import BASELINE, Arm
from opgraft.diagnostics.measure.sites import overload_of
from opgraft.diagnostics.measure.subject import Subject, floating_in, make_backward, seeded, tensors_in
from opgraft.registry import qualified_name

# An arm may be this many times as far from float64 as the compiler's own code, plus this many units in the last place.
_FACTOR = 4.0
_UNITS = 32.0


@dataclass(frozen=True)
class Values:
    """What one run left: outputs and gradients, in a fixed order, with a name each."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Agreement:
    """How far an arm is from the reference: the largest difference over the root mean square of the reference."""

    error: float
    where: str
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


class References(TorchFunctionMode):
    """While this is on, calls of the ops run their references, in eager, gradients included."""

    def __init__(self, references: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.references = references

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, (OpOverload, OpOverloadPacket)) and (op := overload_of(func)) is not None:
            func = self.references.get(qualified_name(op), func)
        return func(*args, **(kwargs or {}))


def run_once(subject: Subject, entry: Callable[..., Any]) -> Values:
    """One forward (and backward) from a fixed seed; copies of outputs and gradients."""
    if subject.device.type == "cuda":
        torch.compiler.cudagraph_mark_step_begin()
    with seeded(subject.device):
        if not subject.train:
            with torch.no_grad():
                outputs = [t.detach().clone() for t in tensors_in(entry(*subject.args, **subject.kwargs))]
            return Values(tuple(f"output {i}" for i in range(len(outputs))), tuple(outputs))
        _clear_gradients(subject)
        output = entry(*subject.args, **subject.kwargs)
        outputs = [t.detach().clone() for t in tensors_in(output)]
        make_backward(subject)(output)
        names = [f"output {i}" for i in range(len(outputs))]
        for name, leaf in _leaves(subject):
            if leaf.grad is not None:
                names.append(f"gradient of {name}")
                outputs.append(leaf.grad.detach().clone())
        _clear_gradients(subject)
    return Values(tuple(names), tuple(outputs))


def _leaves(subject: Subject) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(subject.model, torch.nn.Module):
        yield from subject.model.named_parameters()
    for index, tensor in enumerate(floating_in((subject.args, subject.kwargs))):
        if tensor.requires_grad and tensor.is_leaf:
            yield f"input {index}", tensor


def _clear_gradients(subject: Subject) -> None:
    for _, leaf in _leaves(subject):
        leaf.grad = None


@contextlib.contextmanager
def kept_buffers(subject: Subject) -> Iterator[None]:
    """Buffers (running statistics, caches) as they were, whatever ran inside."""
    buffers = list(subject.model.buffers()) if isinstance(subject.model, torch.nn.Module) else []
    saved = [b.detach().clone() for b in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, saved, strict=True):
                buffer.copy_(value)


def in_float64(subject: Subject, references: Mapping[str, Callable[..., Any]]) -> tuple[Values | None, str]:
    """The model in float64 with the references in place, on the device or, where that has no room, on the CPU.

    Returns:
        The values, or None and a sentence that says why there are none.
    """
    reasons = []
    for device in (None, torch.device("cpu")):
        if device is not None and subject.device.type == "cpu":
            break
        try:
            double = subject.in_double(device)
            with References(references):
                return run_once(double, double.model), ""
        except torch.OutOfMemoryError:
            reasons.append("it does not fit in memory a second time")
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
            reasons.append(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        finally:
            if subject.device.type == "cuda":
                torch.cuda.empty_cache()
    return None, f"the model does not run in float64 ({reasons[0]})"


def distance(values: Values, reference: Values) -> tuple[float, str]:
    """The largest difference over the reference's root mean square, and the tensor that has it.

    Raises:
        ValueError: the two runs returned different tensors.
    """
    if values.names != reference.names:
        gone = sorted(set(reference.names) ^ set(values.names))
        raise ValueError(f"the arms return different tensors ({', '.join(gone[:3])} in one of them only)")
    worst, where = 0.0, ""
    for name, got, want in zip(values.names, values.tensors, reference.tensors, strict=True):
        if got.shape != want.shape:
            raise ValueError(f"{name} has shape {tuple(got.shape)}, the reference {tuple(want.shape)}")
        if got.numel() == 0:
            continue
        if not want.is_floating_point():
            difference = (got.to(want.device) != want).double().mean().item()
        else:
            exact = want.double()
            scale = exact.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
            difference = ((got.to(exact.device).double() - exact).abs().max() / scale).item()
            if difference != difference:
                same_places = torch.equal(got.to(exact.device).isnan(), exact.isnan())
                difference = 0.0 if same_places and bool(exact.isnan().all()) else float("inf")
        if difference > worst or not where:
            worst, where = max(worst, difference), name if difference >= worst else where
    return worst, where


def agreement(values: Values, reference: Values, yardstick: float, dtype: torch.dtype) -> Agreement:
    error, where = distance(values, reference)
    return Agreement(error, where, _FACTOR * yardstick + _UNITS * torch.finfo(dtype).eps)


def yardstick_of(arms: Mapping[str, Values], reference: Values) -> float:
    """How far plain torch itself is from the reference: the baseline's distance."""
    return distance(arms[BASELINE], reference)[0] if BASELINE in arms else 0.0


def snapshot(subject: Subject) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tensors_in((subject.args, subject.kwargs))]


def inputs_changed(subject: Subject, before: list[torch.Tensor]) -> bool:
    return any(
        not torch.equal(now.detach(), then) and not (now.isnan().any() and then.isnan().any())
        for now, then in zip(tensors_in((subject.args, subject.kwargs)), before, strict=True)
    )


def run_arm(arm: Arm, subject: Subject) -> Values:
    assert arm.entry is not None
    with arm.installed(), kept_buffers(subject):
        return run_once(subject, arm.entry)
