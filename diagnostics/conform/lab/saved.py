"""Calls as files for another process: tensors as torch saves them for ``weights_only`` loading, the rest as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from opgraft.diagnostics.conform.lab.case import Case

_PLAIN = (int, float, str, bool, type(None))


def _put(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().cpu())
        return {"tensor": len(tensors) - 1, "device": value.device.type, "grad": value.requires_grad}
    if isinstance(value, (list, tuple)):
        return {"items": [_put(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"entries": {str(key): _put(item, tensors) for key, item in value.items()}}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"place": str(value)}
    if isinstance(value, _PLAIN):
        return {"value": value}
    raise TypeError(f"a {type(value).__name__} among the arguments cannot be handed to another process")


def _get(value: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
    if "tensor" in value:
        found = tensors[value["tensor"]].to(value["device"])
        return found.requires_grad_(True) if value["grad"] else found
    if "items" in value:
        return [_get(item, tensors) for item in value["items"]]
    if "entries" in value:
        return {key: _get(item, tensors) for key, item in value["entries"].items()}
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    return torch.device(value["place"]) if "place" in value else value["value"]


def save_cases(path: Path, cases: tuple[Case, ...]) -> None:
    """Writes ``path.json`` and ``path.pt``.

    Raises:
        TypeError: an argument is of a type that has no place in such a file.
    """
    tensors: list[torch.Tensor] = []
    calls = [
        {"args": _put(case.args, tensors), "kwargs": _put(case.kwargs, tensors), "name": case.name} for case in cases
    ]
    torch.save(tensors, path.with_suffix(".pt"))
    path.with_suffix(".json").write_text(json.dumps(calls))


def load_cases(path: Path) -> tuple[Case, ...]:
    """Reads what ``save_cases`` wrote; no code of the file is run."""
    tensors = torch.load(path.with_suffix(".pt"), weights_only=True)
    found = []
    for call in json.loads(path.with_suffix(".json").read_text()):
        args, kwargs = _get(call["args"], tensors), _get(call["kwargs"], tensors)
        found.append(Case(tuple(args), kwargs, "sample", call["name"]))
    return tuple(found)
