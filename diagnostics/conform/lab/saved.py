"""Calls as files for another process: tensors as torch saves them for ``weights_only`` loading, the rest as JSON.

Shapes, strides, offset, alignment and device come back as they were.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch

from opgraft.diagnostics.conform.lab import met
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.met import Book, Kept
from opgraft.diagnostics.model import Location

_PLAIN = (int, float, str, bool, type(None))


class _Everything(Book):
    """A book without a bound: the caller chose the tensors."""

    def room(self, size: int) -> bool:
        return True


def _kept(tensor: torch.Tensor) -> Kept:
    kept: Kept = met.keep(tensor, _Everything())
    if kept.flat is None and kept.values is None:
        form = "quantized Tensor" if tensor.is_quantized else f"{type(tensor).__name__} of layout {tensor.layout}"
        raise TypeError(f"a {form} cannot be handed to another process")
    return kept


def _put(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        value = _kept(value)
    if isinstance(value, Kept):
        entry = {
            "shape": value.shape,
            "stride": value.stride,
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": value.device,
            "offset": value.offset,
            "align": value.align,
            "grad": value.requires_grad,
        }
        for part in ("flat", "values"):
            held = getattr(value, part)
            if held is not None:
                tensors.append(held.detach().cpu())
                entry[part] = len(tensors) - 1
        return {"tensor": entry}
    if isinstance(value, (list, tuple)):
        return {"items": [_put(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"entries": {str(key): _put(item, tensors) for key, item in value.items()}}
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return {"name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"place": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, _PLAIN):
        return {"value": value}
    raise TypeError(f"a {type(value).__name__} among the arguments cannot be handed to another process")


def _get(value: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
    if "tensor" in value:
        entry = value["tensor"]
        held = {part: tensors[entry[part]] for part in ("flat", "values") if part in entry}
        kept = Kept(
            shape=tuple(entry["shape"]),
            stride=tuple(entry["stride"]),
            dtype=getattr(torch, entry["dtype"]),
            device=entry["device"],
            offset=entry["offset"],
            align=entry["align"],
            requires_grad=entry["grad"],
            **held,
        )
        return met.rebuild(kept)
    if "items" in value:
        return [_get(item, tensors) for item in value["items"]]
    if "entries" in value:
        return {key: _get(item, tensors) for key, item in value["entries"].items()}
    if "name" in value:
        return getattr(torch, value["name"])
    if "complex" in value:
        return complex(*value["complex"])
    return torch.device(value["place"]) if "place" in value else value["value"]


def save_cases(path: Path, cases: tuple[Case, ...]) -> None:
    """Writes ``path.json`` and ``path.pt``. Arguments may be tensors or what was kept of them in a run.

    Raises:
        TypeError: an argument is of a type that has no place in such a file.
    """
    tensors: list[torch.Tensor] = []
    calls = [
        {
            "args": _put(case.args, tensors),
            "kwargs": _put(case.kwargs, tensors),
            "name": case.name,
            "origin": case.origin,
            "autocast": case.autocast,
            "location": msgspec.to_builtins(case.location),
        }
        for case in cases
    ]
    torch.save(tensors, path.with_suffix(".pt"))
    path.with_suffix(".json").write_text(json.dumps(calls))


def load_cases(path: Path) -> tuple[Case, ...]:
    """Reads what ``save_cases`` wrote; no code of the file is run."""
    tensors = torch.load(path.with_suffix(".pt"), weights_only=True)
    found = []
    for call in json.loads(path.with_suffix(".json").read_text()):
        args, kwargs = _get(call["args"], tensors), _get(call["kwargs"], tensors)
        found.append(
            Case(
                tuple(args),
                kwargs,
                origin=call["origin"],
                name=call["name"],
                autocast=call["autocast"],
                location=msgspec.convert(call["location"], Location | None),
            )
        )
    return tuple(found)
