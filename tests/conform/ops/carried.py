"""Ops that break what a compiler, an exporter, a mesh or another process asks of them, and their mended twins."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

import opgraft  # noqa: F401 - the twin of an op that exists in Python alone
from opgraft.registry import describe
from tests.conform.ops.faulty import NS, add, double, lib, op

_kept: list[object] = []


def plain(name: str, function: Callable[..., object], schema: str = "(Tensor x) -> Tensor", tags=(), fake=None) -> None:
    lib.define(name + schema, tags=tags)
    lib.impl(name, function, "CPU")
    torch.library.register_fake(f"{NS}::{name}", fake or (lambda x, *rest: x.new_empty(x.shape)), lib=lib)


# ---- values


def sum_rows(x: Tensor) -> Tensor:
    return x.contiguous().sum(-1)


def sum_whole_vectors(x: Tensor) -> Tensor:
    """As a vector loop without a tail does."""
    return x.contiguous()[..., : x.shape[-1] // 4 * 4].sum(-1)


for _name, _function in (("sum_rows", sum_rows), ("sum_whole_vectors", sum_whole_vectors)):
    op(_name, _function, fake=lambda x: x.new_empty(x.shape[:-1]))
    describe(f"{NS}::{_name}", lambda x: x.sum(-1))
add("wrong-value", "sum_whole_vectors", "sum_rows")


def count_up(x: Tensor) -> Tensor:
    """The last element is never written; integers have no NaN to give that away."""
    made = torch.empty(x.numel(), dtype=torch.int64)
    made[:-1].copy_(torch.arange(max(x.numel() - 1, 0)))
    return made


plain("count_up", count_up, fake=lambda x: x.new_empty(x.numel(), dtype=torch.int64))
plain("count_all", lambda x: torch.arange(x.numel()), fake=lambda x: x.new_empty(x.numel(), dtype=torch.int64))
add("unstable-result", "count_up", "count_all", name="unstable-result: integers")


def writes_on(x: Tensor, extra: int) -> Tensor:
    made = torch.empty(x.shape, dtype=torch.float32)
    count = x.numel() + extra
    if x.numel():
        ctypes.memset(made.data_ptr(), 0, 4 * count)
    return made


plain("writes_past_its_result", lambda x: writes_on(x, 1))
plain("writes_its_result", lambda x: writes_on(x, 0))
add("out-of-bounds", "writes_past_its_result", "writes_its_result", name="out-of-bounds: result")


def take_rows(x: Tensor, index: Tensor, checked: bool = False) -> Tensor:
    """Rows by number, as a kernel takes them that does not look whether they are there."""
    x = x.contiguous().float()
    if checked and index.numel() and int(index.max()) >= x.shape[0]:
        raise ValueError(f"take_rows: index {int(index.max())} is past the {x.shape[0]} rows of x")
    width = x.shape[1]
    rows = [list((ctypes.c_float * width).from_address(x.data_ptr() + 4 * width * i)) for i in index.tolist()]
    return torch.tensor(rows).view(index.numel(), width)


_rows = (torch.randn(4, 6), torch.tensor([0, 3, 2]))
for _name, _checked in (("take_rows_blindly", False), ("take_rows", True)):
    plain(
        _name,
        functools.partial(take_rows, checked=_checked),
        "(Tensor x, Tensor index) -> Tensor",
        fake=lambda x, index: x.new_empty(index.shape[0], x.shape[1]),
    )
add(
    "out-of-bounds",
    "take_rows_blindly",
    "take_rows",
    name="out-of-bounds: index",
    cases={"take_rows_blindly": _rows, "take_rows": _rows},
)


_buffers: dict[tuple[int, ...], Tensor] = {}


def double_into_kept(x: Tensor) -> Tensor:
    """One result buffer a shape, kept between calls."""
    kept = _buffers.setdefault(tuple(x.shape), torch.empty(x.shape, dtype=x.dtype))
    return torch.mul(x, 2, out=kept)


plain("double_into_kept", double_into_kept)
add("unstable-result", "double_into_kept", "good_double", name="unstable-result: kept buffer")

# ---- torch's own second opinion
add("opcheck", "count_hidden", "count_declared", kind="undeclared-mutation")

# ---- vmap

for _name, _where in (("mapped_astray", 1), ("mapped", 0)):
    op(_name, double)

    def _rule(info, in_dims, x, where=_where, name=_name):
        result = getattr(torch.ops.faulty, name)(x.movedim(in_dims[0], 0))
        return result, where

    torch.library.register_vmap(f"{NS}::{_name}", _rule)
add("vmap", "mapped_astray", "mapped", kind="wrong-value")

# ---- a mesh of devices

op("unsharded", double)
op("sharded", double)


@functools.cache
def shard() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.faulty.sharded.default)
    def _(x):
        return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]


add("sharding", "unsharded", "sharded", kind="not-exportable", setup=shard, notes=True)

# ---- export, packages, pickles

add("not-exportable", "no_fake", "opgraft::gelu")
add("not-exportable", "good_double", "opgraft::gelu", name="not-exportable: Python alone", notes=True)

plain("times_complex", lambda x, factor: x * factor.real, "(Tensor x, complex factor) -> Tensor")
plain("times_float", lambda x, real, imag: x * real, "(Tensor x, float real, float imag) -> Tensor")
add("aotinductor", "times_complex", "times_float", kind="not-exportable", thorough=True)

settings = {"scale": 2.0}


@functools.cache
def configure() -> None:
    settings["scale"] = 3.0


def scaled(x: Tensor) -> Tensor:
    return x.contiguous() * settings["scale"]


def scaled_by(x: Tensor, scale: float) -> Tensor:
    return x.contiguous() * scale


op("scaled", scaled)
op("scaled_by", scaled_by)
add("pickling", "scaled", "scaled_by", kind="not-exportable", setup=configure)

# ---- the compiler

op("lowered_astray", double)
op("stand_in", double)


@functools.cache
def lower() -> None:
    from torch._inductor import lowering

    overload = torch.ops.faulty.lowered_astray.default

    def rule(x):
        kernel = lowering.fallback_handler(overload, add_to_fallback_set=False)
        return lowering.lowerings[torch.ops.aten.mul.Tensor](kernel(x), 1.5)

    lowering.register_lowering(overload, type_promotion_kind=None)(rule)


@functools.cache
def decompose() -> None:
    from torch._inductor.decomposition import register_decomposition

    register_decomposition([torch.ops.faulty.stand_in.default])(lambda x: x.contiguous() + x)


add("compiled", "lowered_astray", "good_double", kind="compiler-bug", setup=lower)
add("kernel-not-run", "stand_in", "good_double", setup=decompose)
add("cache-bypass", "note_declared", "good_double", notes=True)

plain("wants_dense", double, tags=(torch.Tag.needs_contiguous_strides,))
plain("takes_any", double, tags=(torch.Tag.flexible_layout,))
add("layout-copy", "wants_dense", "takes_any", notes=True)


def fill_bytes(x: Tensor, workspace: Tensor) -> Tensor:
    workspace.fill_(7)
    return x.contiguous() * 2


plain("fill_bytes", fill_bytes, "(Tensor x, Tensor(a!) workspace) -> Tensor")
plain("fill_workspace", fill_bytes, "(Tensor x, Tensor(a!) workspace) -> Tensor")
add(
    "functional-copy",
    "fill_bytes",
    "fill_workspace",
    notes=True,
    cases={
        "fill_bytes": (torch.randn(4, 6), torch.zeros(64, dtype=torch.uint8)),
        "fill_workspace": (torch.randn(4, 6), torch.zeros(64)),
    },
)


def codes(x: Tensor) -> Tensor:
    return x.contiguous().to(torch.float8_e4m3fn)


op("codes", codes, fake=lambda x: x.new_empty(x.shape, dtype=torch.float8_e4m3fn))
add("opcheck", "count_hidden", "codes", name="opcheck: 8-bit floats", kind="undeclared-mutation")
