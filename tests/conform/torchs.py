"""Calls of the ops that torch registers for its packed and quantized tensors, which no guess from a schema makes:
``opgraft doctor --import tests/conform/torchs.py 'quantized::*'``.

A value is made from an argument's type and name, and from the number of dimensions that the op's name tells. There is
no reference beside the op itself.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch

from opgraft.diagnostics.conform.lab import names
from opgraft.diagnostics.conform.lab.facts import Argument, facts_of
from opgraft.registry import Sample, describe, resolve

SPACES = ("quantized", "_quantized", "onednn", "mkldnn")
# Ops whose arguments have to fit one another, though none of them is packed.
FAMILIES = ("prepack", "pointwise", "norm", "embedding", "prelu", "cell")
# Rows of a cell's weights are so many times the hidden size.
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
HIDDEN = 3
STEP, ZERO = 0.0625, 8


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def quantized(*shape: int, dtype: torch.dtype = torch.quint8, zero: int = ZERO) -> torch.Tensor:
    return torch.quantize_per_tensor(randn(*shape), STEP, zero, dtype)


def dims(name: str) -> int:
    """How many dimensions the windows of an op have: ``conv2d`` has 2."""
    found = re.search(r"(\d)d", name)
    return int(found[1]) if found else 2 if "conv" in name else 0


def window(name: str, value: int) -> list[int]:
    return [value] * dims(name)


def weight(name: str) -> torch.Tensor:
    return quantized(4, 4, *window(name, 3), dtype=torch.qint8, zero=0)


def gates(name: str) -> int:
    return next((count for cell, count in GATES.items() if cell in name), 4)


def rows_of_codes(name: str) -> torch.Tensor:
    """An embedding whose rows have a step of their own."""
    bits = torch.quint4x2 if "4bit" in name else torch.quint8
    return torch.quantize_per_channel(randn(10, 16), torch.ones(10) * STEP, torch.zeros(10), 0, bits)


def packed(kind: str, name: str) -> Any:
    """The object that an op of this name takes as its packed weight."""
    ops = torch.ops.quantized
    if "Linear" in kind:
        if "fp16" in name:
            return ops.linear_prepack_fp16(randn(4, 6), randn(4))
        rows = gates(name) * HIDDEN if "cell" in name else 4
        columns = HIDDEN if "w_hh" in name else 6
        return ops.linear_prepack(quantized(rows, columns, dtype=torch.qint8, zero=0), randn(rows))
    if "Embedding" in kind:
        return ops.embedding_bag_prepack(rows_of_codes(name))
    ones, none = window(name, 1), window(name, 0)
    if "conv_transpose" in name:
        pack = getattr(ops, f"conv_transpose{dims(name)}d_prepack")
        return pack(weight(name), randn(4), ones, none, none, ones, 1)
    return getattr(ops, f"conv{dims(name)}d_prepack")(weight(name), randn(4), ones, none, ones, 1)


def value(name: str, argument: Argument, plain: bool) -> Any:
    """One argument; ``plain`` makes tensors of float32 where quantized ones are refused.

    Raises:
        LookupError: nothing is known for this type.
    """
    word, kind = argument.name.lower(), argument.kind
    if "embedding_bag" in name and word == "offsets":
        return torch.tensor([0, 2])
    if argument.has_default:
        return argument.default
    if kind.startswith("__torch__"):
        return packed(kind, f"{name} {word}")
    if kind.startswith("Tensor") and (not kind.endswith("?") or "batch_norm" in name):
        return tensor(name, word, kind, plain)
    if kind.endswith("?"):
        return None
    if kind.startswith(("int[", "SymInt[")):
        if "shape" in word:
            return [6]
        return window(name, 0 if "padding" in word else 3 if "kernel" in word else 1) or [1]
    if "alpha" in word:
        return 1.0
    if kind == "str" and ".binary" in name and ("binary" in word or word == "attr"):
        return "sum" if name.startswith("onednn") else "add"
    known = {"float": STEP, "int": ZERO if "zero" in word else 1, "Scalar": 0.5, "bool": False, "str": "none"}
    known["ScalarType"] = torch.uint8
    if kind == "int" and "groups" in word:
        return 2 if "num" in word else 1
    if kind == "int" and ("dim" in word or "channel" in word):
        return -1 if "dim" in word else 4
    if kind in known:
        return known[kind]
    if kind.startswith("Scalar?["):
        return []
    raise LookupError(f"no value for {kind} {word}")


def tensor(name: str, word: str, kind: str, plain: bool) -> Any:
    """A tensor argument, by its name."""
    if "cell" in name:
        rows = gates(name) * HIDDEN
        shapes = {"input": (2, 6), "hx": (2, HIDDEN), "w_ih": (rows, 6), "w_hh": (rows, HIDDEN)}
        made = randn(*shapes.get(word, (rows,)))
        return [made, made.clone()] if kind.startswith("Tensor[") else made
    if "embedding" in name and word == "indices":
        return torch.tensor([0, 3, 2, 9])
    if "embedding" in name and word == "rowwise_min_max":
        return torch.tensor([[-3.0, 3.0]] * 10)
    if name.endswith("::embedding_bag_prepack"):
        return rows_of_codes(name)
    if "embedding" in name:
        return (randn(10, 16) * 8).to(torch.uint8) if "unpack" in name or "offsets" in name else randn(10, 16)
    if "norm" in name and word in ("mean", "var", "weight", "bias"):
        return randn(4).abs()
    if "pointwise" in name:
        return pointwise(name, word)
    if word in ("w", "weight") and "prepack" in name:
        if name.startswith("onednn") and "fp16" not in name:
            shape = (4, 4, 3, 3) if "conv" in name else (4, 6)
            return (randn(*shape) * 20).to(torch.int8)
        if plain or "fp16" in name:
            return randn(4, 4, *window(name, 3)) if "conv" in name else randn(4, 6)
        return weight(name) if "conv" in name else quantized(4, 6, dtype=torch.qint8, zero=0)
    if "scale" in word or "zero_point" in word:
        return torch.tensor(STEP) if "scale" in word else torch.tensor(0)
    if "bias" in word or (word == "b" and "linear" in name):
        return randn(4)
    count = dims(name)
    shape = (2, 4, *[6] * count) if count else (2, 4, 6, 6) if "norm" in name else (2, 6)
    made = randn(*shape) if plain else quantized(*shape)
    return [made, made.clone()] if kind.startswith("Tensor[") else made


def pointwise(name: str, word: str) -> torch.Tensor:
    """A tensor of a fused convolution or matrix product: float32 for mkldnn, codes and their scales for onednn."""
    conv, codes = "conv" in name, name.startswith("onednn")
    count = dims(name)
    if word in ("w", "qw"):
        made = randn(4, 4, *[3] * count) if conv else randn(4, 6)
        if not codes:
            return made
        ops, ints = torch.ops.onednn, (made * 20).to(torch.int8)
        ones, none = [1] * count, [0] * count
        if conv:
            return ops.qconv_prepack(ints, torch.ones(4) * STEP, STEP, 0, ones, none, ones, 1, None)
        return ops.qlinear_prepack(ints, None)
    if word in ("w_scale", "w_zero_point"):
        return torch.ones(4) * STEP if "scale" in word else torch.zeros(4, dtype=torch.int64)
    if "scale" in word or "zero_point" in word:
        return torch.tensor(STEP) if "scale" in word else torch.tensor(0)
    result = word in ("other", "qaccum")
    shape = (2, 4, *[4 if result else 6] * count) if conv else (2, 4 if result else 6)
    return (randn(*shape).abs() * 20).to(torch.uint8) if codes else randn(*shape)


def call(op: Any, name: str) -> tuple[Any, ...] | None:
    """Arguments that the op takes; where it takes none, those that it refused last."""
    args = None
    for plain in (False, True):
        with contextlib.suppress(Exception):
            args = tuple(value(name, argument, plain) for argument in facts_of(op).arguments)
            op(*args)
            return args
    return args


def record(name: str) -> None:
    op = resolve(name)
    packs = any(argument.kind.startswith("__torch__") for argument in facts_of(op).arguments)
    if not packs and not any(part in name for part in FAMILIES):
        return

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        args = call(op, name)
        if args is not None:
            yield Sample("packed", args)

    describe(op, op, samples=samples, dtypes=(torch.float32,), owner="torch")


for _space in SPACES:
    for _name in names.expanded(f"{_space}::*"):
        with contextlib.suppress(LookupError):
            record(_name)
