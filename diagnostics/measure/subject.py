"""What is compared: a model, its inputs, and what one step of it is."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Subject:
    """A model and one batch of inputs.

    Attributes:
        model: an ``nn.Module`` or a plain function.
        args, kwargs: the inputs of one call.
        train: a step is forward, backward and optimiser; else forward without gradients.
        loss: takes the model's output and gives a scalar; by default every floating output gets a fixed random
            gradient, which adds no kernel of its own to the step.
        optimizer: takes the parameters and gives an optimiser; plain SGD by default. Its learning rate is set to 0,
            so that every step does the same work on the same values.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    train: bool = False
    loss: Callable[[Any], torch.Tensor] | None = None
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, else of the first tensor among the inputs, else the CPU."""
        for tensor in [*self.parameters, *tensors_in((self.args, self.kwargs))]:
            return tensor.device
        return torch.device("cpu")

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters()) if isinstance(self.model, torch.nn.Module) else []

    @property
    def dtype(self) -> torch.dtype:
        """The floating dtype of the first parameter or input that has one."""
        for tensor in [*self.parameters, *tensors_in((self.args, self.kwargs))]:
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.float32

    def moved(self, device: torch.device) -> Subject:
        """The same subject on a device; modules move in place, as ``nn.Module.to`` does."""
        model = self.model.to(device) if isinstance(self.model, torch.nn.Module) else self.model
        move = _mapper(lambda t: t.to(device))
        return replace(self, model=model, args=move(self.args), kwargs=move(self.kwargs))

    def in_double(self, device: torch.device | None = None) -> Subject:
        """A copy in float64: the reference that no arm shares rounding with."""
        model = copy.deepcopy(self.model) if isinstance(self.model, torch.nn.Module) else self.model
        if isinstance(model, torch.nn.Module):
            model = model.to(device=device, dtype=torch.float64) if device else model.to(dtype=torch.float64)

        def convert(t: torch.Tensor) -> torch.Tensor:
            t = t.detach().to(device) if device else t.detach()
            return t.to(torch.float64) if t.is_floating_point() else t

        move = _mapper(convert)
        return replace(self, model=model, args=move(self.args), kwargs=move(self.kwargs))


def subject_of(
    model: Any, inputs: Any, *, train: bool, loss: Any = None, optimizer: Any = None, device: Any = None
) -> Subject:
    """Reads what a user gives: a tensor, a tuple of arguments, or a mapping of keyword arguments.

    Raises:
        TypeError: the model cannot be called, or nothing was returned where a model is due.
    """
    if not callable(model):
        raise TypeError(f"compare: the model is a {type(model).__name__}, expected an nn.Module or a function")
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    elif isinstance(inputs, (tuple, list)):
        args = tuple(inputs)
    elif inputs is not None:
        args = (inputs,)
    subject = Subject(model, args, kwargs, train, loss, optimizer)
    return subject.moved(torch.device(device)) if device is not None else subject


def built(build: Callable[[], Any], **options: Any) -> Subject:
    """What ``build()`` returns: ``(model, inputs)`` or ``(model, inputs, loss)``.

    Raises:
        TypeError: it returns something else.
    """
    made = build()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        shown = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise TypeError(f"{build.__name__}() returned {shown}: return (model, inputs), or (model, inputs, loss)")
    return subject_of(made[0], made[1], loss=made[2] if len(made) == 3 else None, **options)


def _mapper(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda tree: pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Every tensor of a nested structure; mappings and dataclasses that torch does not know are opened too."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found.extend(tensors_in(dict(leaf)))
        elif hasattr(leaf, "__dataclass_fields__"):
            found.extend(tensors_in([getattr(leaf, name) for name in leaf.__dataclass_fields__]))
    return found


def floating_in(tree: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in(tree) if t.is_floating_point()]


def is_functional(entry: Callable[..., Any]) -> bool:
    return inspect.isfunction(entry)


@contextlib.contextmanager
def seeded(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Random numbers from a seed inside, and the generators as they were afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def make_step(subject: Subject, entry: Callable[..., Any]) -> Callable[[], Any]:
    """One step of ``subject`` with ``entry`` in the model's place. What it returns is the model's output."""
    args, kwargs = subject.args, subject.kwargs
    mark = torch.compiler.cudagraph_mark_step_begin if subject.device.type == "cuda" else None
    if not subject.train:

        def forward() -> Any:
            if mark is not None:
                mark()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                return entry(*args, **kwargs)

        return forward

    backward = make_backward(subject)
    optimizer = make_optimizer(subject)

    def train() -> Any:
        if mark is not None:
            mark()  # type: ignore[no-untyped-call]
        output = entry(*args, **kwargs)
        backward(output)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return output

    return train


def make_optimizer(subject: Subject) -> torch.optim.Optimizer | None:
    parameters = [p for p in subject.parameters if p.requires_grad]
    if not parameters:
        return None
    optimizer = subject.optimizer(parameters) if subject.optimizer else torch.optim.SGD(parameters, lr=0.0)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    return optimizer


def make_backward(subject: Subject) -> Callable[[Any], None]:
    """Backward from the user's loss, or from fixed random gradients that are made at the first call."""
    if subject.loss is not None:
        loss = subject.loss
        return lambda output: loss(output).backward()
    gradients: list[torch.Tensor] = []

    def backward(output: Any) -> None:
        heads = [t for t in floating_in(output) if t.requires_grad]
        if not heads:
            raise ValueError(
                "no output of the model requires a gradient: a training step needs one, or leave out train"
            )
        # A scalar named loss is what the model itself trains on; its logits get no gradient of their own.
        own = getattr(output, "loss", None)
        if isinstance(own, torch.Tensor) and own.requires_grad and own.ndim == 0:
            own.backward()
            return
        if not gradients:
            generator = torch.Generator(device="cpu").manual_seed(1)
            gradients.extend(
                torch.randn(t.shape, generator=generator, dtype=torch.float64).to(device=t.device, dtype=t.dtype)
                for t in heads
            )
        torch.autograd.backward(heads, gradients)

    return backward
