"""Calls made from nothing but a schema, for an op of which no sample is known.

Shapes are guessed: a few templates that most kernels fit (all alike, matrix and vector, batch of images), tried until
the op accepts one. Names help: an ``index`` is an integer, an ``eps`` is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.facts import Argument, OpFacts

# Each template gives the shapes of the first, second, ... tensor; the last one stands for all that follow.
TEMPLATES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((4, 6),),
    ((6,),),
    ((4, 6), (6,)),
    ((2, 4, 6),),
    ((6, 6),),
    ((2, 3, 8, 8),),
    ((2, 4, 6), (6,)),
    ((4, 6), (4,)),
    ((2, 3, 8, 8), (3,)),
    ((4, 6), (6, 6), (6,)),
    ((4, 6), (4, 6), (6,)),
    ((2, 3, 8, 8), (4, 3, 3, 3), (4,)),
    ((4, 4), (4,)),
    ((8, 6), (8,), (6,)),
    ((4, 6), ()),
    ((2, 3, 4, 8, 8),),
    ((1,),),
)
INDEX_WORDS = ("index", "indices", "idx", "ptr", "col", "row", "offset", "length", "label", "target", "batch", "ids")
MASK_WORDS = ("mask", "keep", "valid")
DTYPES = (
    torch.float32,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.complex64,
    torch.quint8,
    torch.qint8,
)
QUANTIZED = (torch.quint8, torch.qint8)


def _number(argument: Argument) -> Any:
    name = argument.name.lower()
    if argument.has_default:
        return argument.default
    kind = argument.kind.rstrip("?")
    if argument.kind.endswith("?"):
        return None
    if kind in ("int", "SymInt"):
        if "dim" in name or "axis" in name:
            return -1
        return 2 if any(word in name for word in ("size", "num", "group", "head", "window", "len", "n_", "k")) else 1
    if kind.startswith(("int[", "SymInt[")):
        return [2, 2]
    if kind.startswith(("Scalar[", "Scalar?[")):
        return []
    if kind in ("float", "Scalar", "number"):
        return 1e-5 if "eps" in name else 0.5
    known: dict[str, Any] = {
        "bool": False,
        "str": "none" if any(word in name for word in ("attr", "post_op", "activation")) else "mean",
        "complex": 1.5 + 0.5j,
        "ScalarType": torch.float32,
        "Device": torch.device("cpu"),
        "float[]": [0.5, 0.5],
        "bool[]": [True, True],
    }
    if kind in known:
        return known[kind]
    raise LookupError(f"no value is known for an argument of type {argument.kind} ({argument.name})")


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in QUANTIZED:
        # A step of 1/16 and a zero point of 8 hold what a float32 template holds.
        value = torch.quantize_per_tensor(torch.randn(shape, generator=generator), 0.0625, 8, dtype)
    elif dtype.is_floating_point or dtype.is_complex:
        value = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    elif dtype == torch.bool:
        value = torch.rand(shape, generator=generator) > 0.5
    else:
        # Indices have to point into the smallest extent that a template uses.
        value = torch.randint(0, 3, shape, generator=generator).to(dtype)
    return value.to(device)


def _dtype(argument: Argument, default: torch.dtype) -> torch.dtype:
    name = argument.name.lower()
    if any(word in name for word in INDEX_WORDS):
        return torch.int32 if default == torch.int32 else torch.int64
    if any(word in name for word in MASK_WORDS):
        return torch.bool
    return default


def _counts(facts: OpFacts) -> bool:
    """Does the op take a number that may be a size, for which nothing but a guess is known?"""
    return any(
        (argument.is_int or argument.is_size) and not argument.has_default and not argument.kind.endswith("?")
        for argument in facts.arguments
    )


def _may_point(tensors: list[Argument], dtype: torch.dtype) -> bool:
    """Are there integers of which nobody said what they mean? They may be places in another tensor."""
    unnamed = [argument for argument in tensors if _dtype(argument, dtype) == dtype]
    return len(tensors) > 1 and bool(unnamed) and dtype in (torch.int32, torch.int64)


def generated(facts: OpFacts, device: torch.device) -> Iterator[Case]:
    """Guesses at a call, likely ones first.

    Raises:
        LookupError: an argument has a type for which no value is known.
    """
    required = [argument for argument in facts.arguments if argument.is_tensor and not argument.kind.endswith("?")]
    for dtype in DTYPES:
        templates = TEMPLATES if required else TEMPLATES[:1]
        for template in templates:
            if len(template) > max(len(required), 1):
                continue
            count = 0
            args: list[Any] = []
            kwargs: dict[str, Any] = {}
            for argument in facts.arguments:
                value: Any
                if argument.is_tensor and not argument.kind.endswith("?"):
                    shape = template[min(count, len(template) - 1)]
                    value = _tensor(shape, _dtype(argument, dtype), device, count)
                    if argument.kind.startswith("Tensor["):
                        value = [value, _tensor(shape, _dtype(argument, dtype), device, count + 100)]
                    count += 1
                elif argument.is_tensor:
                    value = None
                else:
                    value = _number(argument)
                    if argument.kind.startswith("Device"):
                        value = device
                if argument.keyword:
                    kwargs[argument.name] = value
                else:
                    args.append(value)
            loose = _counts(facts) or _may_point(required, dtype)
            yield Case(args=tuple(args), kwargs=kwargs, origin="generated", name="made from the schema", loose=loose)
