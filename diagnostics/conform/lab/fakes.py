"""Calling an op with fake tensors, of fixed or symbolic sizes, and reading off what the fake promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.tree import is_plain, leaves, map_tensors
from opgraft.diagnostics.conform.lab.vary import extents


@dataclass(frozen=True)
class Promise:
    """What a fake says of one result. ``None`` in ``shape`` stands for a size that depends on data."""

    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    dtype: torch.dtype
    device: str
    offset: int | None
    layout: str
    same_as: int | None = None


@dataclass(frozen=True)
class FakeResult:
    """One call of the fake: a promise a result (or a plain value), or the error."""

    promises: tuple[Any, ...] = ()
    error: BaseException | None = None
    replaced: tuple[tuple[int, int], ...] = ()
    numbers: tuple[str, ...] = ()


def _number(value: Any) -> int | None:
    if isinstance(value, int):
        return value
    hint = getattr(getattr(value, "node", None), "hint", None)
    return int(hint) if hint is not None else None


def promise(tensor: torch.Tensor, arguments: list[torch.Tensor]) -> Promise:
    """What a tensor, fake or real, is; ``same_as`` is the argument whose memory it shares."""
    plain = is_plain(tensor)
    return Promise(
        shape=tuple(_number(size) for size in tensor.shape),
        stride=tuple(_number(step) for step in tensor.stride()) if plain else (),
        dtype=tensor.dtype,
        device=tensor.device.type,
        offset=_number(tensor.storage_offset()) if plain else None,
        layout=str(tensor.layout),
        same_as=shares(tensor, arguments),
    )


def shares(tensor: torch.Tensor, arguments: list[torch.Tensor]) -> int | None:
    """The index of the first argument that has the same storage, None where the result is fresh."""
    if not is_plain(tensor):
        return None
    for index, argument in enumerate(arguments):
        if is_plain(argument) and tensor.untyped_storage()._cdata == argument.untyped_storage()._cdata:
            return index
    return None


def unfakeable(case: Case) -> str:
    """Why torch makes no fakes of this call's arguments, whatever the op; ``""`` where it does."""
    if any(isinstance(leaf, torch.ScriptObject) for leaf in leaves((case.args, case.kwargs))):
        return "an argument is an object of a C++ class, of which torch makes no fake by itself"
    if all(is_plain(tensor) for tensor in case.tensors):
        return ""
    mode = FakeTensorMode()
    for tensor in case.tensors:
        try:
            mode.from_tensor(tensor.detach(), static_shapes=True)
        except Exception as error:
            return f"torch makes no fake of such a tensor: {str(error).strip().splitlines()[0][:100]}"
    return ""


def fake_call(op: Any, case: Case) -> FakeResult:
    """The fake at the sizes of this call."""
    environment = ShapeEnv(allow_dynamic_output_shape_ops=True, allow_scalar_outputs=True)
    mode = FakeTensorMode(shape_env=environment)
    given: list[torch.Tensor] = []

    def one(tensor: torch.Tensor) -> torch.Tensor:
        made = mode.from_tensor(tensor.detach(), static_shapes=True)
        given.append(made)
        return made

    args, kwargs = map_tensors(one, (case.args, case.kwargs))
    try:
        with mode, torch.no_grad():
            if case.autocast:
                with torch.autocast(given[0].device.type, dtype=getattr(torch, case.autocast)):
                    outputs = op(*args, **kwargs)
            else:
                outputs = op(*args, **kwargs)
    except Exception as error:
        return FakeResult(error=error)
    return FakeResult(
        promises=tuple(promise(leaf, given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(outputs))
    )


def symbolic_call(op: Any, case: Case, numbers: bool = False) -> FakeResult:
    """The fake with a symbol for every size but 0 and 1: ``replaced`` lists the sizes that it turned into constants.

    Args:
        numbers: integer arguments that equal a size are given as that size's symbol.
    """
    environment = ShapeEnv(allow_dynamic_output_shape_ops=True, allow_scalar_outputs=True)
    mode = FakeTensorMode(shape_env=environment)
    symbols: dict[int, Any] = {}

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if not is_plain(tensor):
            return mode.from_tensor(tensor.detach(), static_shapes=True)
        context: Any = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DUCK if size > 1 else DimDynamic.STATIC for size in tensor.shape]
        )
        made = mode.from_tensor(tensor.detach(), symbolic_context=context)
        pairs = zip(tensor.shape, made.shape, strict=True)
        symbols.update({size: symbol for size, symbol in pairs if not isinstance(symbol, int)})
        return made

    args, kwargs = map_tensors(one, (case.args, case.kwargs))
    used: list[str] = []
    if numbers:
        args = tuple(symbols.get(value, value) if type(value) is int and value > 1 else value for value in args)
    try:
        with mode, torch.no_grad():
            outputs = op(*args, **kwargs)
    except Exception as error:
        return FakeResult(error=error, replaced=_replaced(environment, symbols))
    return FakeResult(
        promises=tuple(leaf for leaf in leaves(outputs)),
        replaced=_replaced(environment, symbols),
        numbers=tuple(used),
    )


def _replaced(environment: ShapeEnv, symbols: dict[int, Any]) -> tuple[tuple[int, int], ...]:
    """Sizes whose symbol the shape environment has replaced by a number."""
    found = []
    for size, symbol in symbols.items():
        value = environment.replace(symbol.node.expr)
        if getattr(value, "is_number", False):
            found.append((size, int(value)))
    return tuple(found)


def distinct(case: Case) -> int:
    """How many different sizes above 1 the call has."""
    return len([size for size in extents(case) if size > 1])
