"""OpSpec, the spine: one record an op, read by tests, doctor, benchmarks, choice and compare alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload


@dataclass(frozen=True)
class Cost:
    """What an ideal kernel needs: bytes moved to and from memory, each input once and each output once, and FLOPs.

    ``exponentials`` counts special-function evaluations, the second limit of the scans and of GELU.
    """

    bytes: int
    flops: int = 0
    exponentials: int = 0


@dataclass(frozen=True)
class Sample:
    """One call: positional and keyword arguments, and a name that says what is particular about it.

    Samples of one ``family`` differ in sizes alone: one dynamic compile must serve them all.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    family: str = ""


@dataclass(frozen=True)
class OpSpec:
    """One op.

    Attributes:
        op: the overload, such as ``torch.ops.opgraft.gelu.default``.
        reference: pure torch, same signature as ``op``: decomposition, numerical reference and competitor at once.
        samples: ``samples(device, dtype)`` yields the calls that tests and the doctor start from.
        cost: ``cost(*args, **kwargs)`` gives the ideal bytes and FLOPs of a call.
        public: the function that users call, where it is not the overload itself.
        dtypes: the floating dtypes that the op takes.
        backward: the overload that computes the gradient, where there is one.
        surrogate: the gradient is deliberately not that of the reference (then it is not compared).
        derived: names of arguments that follow from the others, such as what a forward kept of its rows: they are no
            free inputs, and values and gradients are judged only where they fit.
        large: ``large(device, dtype)`` gives a call over more than 2^31 elements, and a check of its result.
        owner: the distribution that ships the op.
    """

    op: OpOverload
    reference: Callable[..., Any]
    samples: Callable[[torch.device, torch.dtype], Iterator[Sample]] | None = None
    cost: Callable[..., Cost] | None = None
    public: Callable[..., Any] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    backward: OpOverload | None = None
    surrogate: bool = False
    derived: tuple[str, ...] = ()
    large: Callable[[torch.device, torch.dtype], tuple[Sample, Callable[[Any], None]]] | None = None
    owner: str = "unknown"

    @property
    def name(self) -> str:
        """``ns::op``, or ``ns::op.overload`` where the overload is not the default one."""
        return qualified_name(self.op)


def qualified_name(op: OpOverload) -> str:
    """``ns::op`` of an overload, with ``.overload`` where that is not ``default``."""
    name = op._schema.name
    return name if op._overloadname == "default" else f"{name}.{op._overloadname}"


_TABLE: dict[str, OpSpec] = {}


def register(spec: OpSpec) -> OpSpec:
    """Puts a record into the table. An op described again replaces its record."""
    _TABLE[spec.name] = spec
    return spec


def specs(namespace: str | None = None) -> tuple[OpSpec, ...]:
    """Every record, or those of one namespace, in order of registration."""
    return tuple(s for s in _TABLE.values() if namespace is None or s.name.startswith(f"{namespace}::"))


def find(op: OpOverload | str) -> OpSpec | None:
    """The record of an overload or of a name such as ``"ns::op"``; None where there is none."""
    return _TABLE.get(op if isinstance(op, str) else qualified_name(op))


def resolve(name: str) -> OpOverload:
    """The overload called ``ns::op`` or ``ns::op.overload``.

    Raises:
        LookupError: there is no such op, or it has several overloads and none was named.
    """
    namespace, separator, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if not separator or not base:
        raise LookupError(f"{name!r} is not the name of an op: write ns::op, for example opgraft::gelu")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        raise LookupError(f"no op {namespace}::{base} is registered: is the module that registers it imported?")
    overloads = packet.overloads()
    chosen = overload or ("default" if "default" in overloads else overloads[0] if len(overloads) == 1 else "")
    if chosen not in overloads:
        raise LookupError(f"{namespace}::{base} has the overloads {', '.join(overloads)}: name one, ns::op.overload")
    found: OpOverload = getattr(packet, chosen)
    return found


def _arguments(op: OpOverload, names: Sequence[str]) -> tuple[str, ...]:
    known = {argument.name for argument in op._schema.arguments}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"describe: {qualified_name(op)} has no argument {unknown[0]!r}: it has {', '.join(known)}")
    return tuple(names)


def describe(
    op: OpOverload | str,
    reference: Callable[..., Any],
    *,
    samples: Callable[[torch.device, torch.dtype], Iterator[Sample]] | Sequence[Sample] | None = None,
    cost: Callable[..., Cost] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    backward: OpOverload | None = None,
    surrogate: bool = False,
    derived: Sequence[str] = (),
    owner: str = "unknown",
) -> OpSpec:
    """Gives a third-party op a record, so that doctor, compare, benchmarks and choice serve it like our own.

    Args:
        op: the overload or its name, ``"ns::op"``.
        reference: pure torch with the same signature.
        samples: calls to start from: a function of device and dtype, or a plain list.
        cost: ideal bytes and FLOPs of a call; where it is left out, inputs and outputs are counted once each.
        surrogate: the op's gradient is meant to differ from the reference's.
        derived: names of arguments that follow from the others and cannot be chosen freely.

    Returns:
        The record, which is also in the table now.
    """
    overload = resolve(op) if isinstance(op, str) else op
    if not isinstance(overload, OpOverload):
        raise TypeError(
            f"describe: op is a {type(op).__name__}, expected an overload (torch.ops.ns.op.default) or a name"
        )
    given = samples
    as_function: Callable[[torch.device, torch.dtype], Iterator[Sample]] | None
    if given is None or callable(given):
        as_function = given
    else:
        fixed = tuple(given)

        def as_function(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
            yield from fixed

    return register(
        OpSpec(
            op=overload,
            reference=reference,
            samples=as_function,
            cost=cost,
            dtypes=dtypes or OpSpec.dtypes,
            backward=backward,
            surrogate=surrogate,
            derived=_arguments(overload, derived),
            owner=owner,
        )
    )
