"""Ops that break what a compiler, an exporter, a mesh or another process asks of them, and their mended twins."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import opgraft  # noqa: F401 - the twin of an op that exists in Python alone
from tests.conform.ops.pairs import NS, add, double, op, plain


def under_autocast(x: Tensor) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return (x.contiguous() * 1).to(dtype)


op("under_autocast", under_autocast)
add("autocast", "under_autocast", "good_double")

seen: list[float] = []


def note(x: Tensor) -> None:
    seen.append(float(x.numel()))


op("note", note, fake=lambda x: None)
op("note_declared", note, fake=lambda x: None)
from torch._library.effects import EffectType  # noqa: E402

torch.library._register_effectful_op(f"{NS}::note_declared", EffectType.ORDERED) if hasattr(
    torch.library, "_register_effectful_op"
) else None
add("dropped-effect", "note", "note_declared")

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
