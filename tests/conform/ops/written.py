"""Ops that write what they do not say, or return memory twice."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.conform.ops.pairs import NS, add, double, lib, op


def count(x: Tensor, total: Tensor) -> Tensor:
    total.add_(1)
    return x.contiguous() * 1


op("count_hidden", count)
op("count_declared", count, mutates=("total",))
add("undeclared-mutation", "count_hidden", "count_declared")

op("double_writes", double, mutates="unknown")
op("count_some", count, mutates=("total",))
add("overdeclared-mutation", "double_writes", "count_some")

lib.define("halves(Tensor x) -> (Tensor, Tensor)")
lib.define("halves_fresh(Tensor x) -> (Tensor, Tensor)")


def halves(x):
    packed = x.contiguous().flatten() * 1
    return packed[: packed.numel() // 2], packed[packed.numel() // 2 :]


def _halves_fake(x):
    n = x.numel()
    return x.new_empty(n // 2), x.new_empty(n - n // 2)


lib.impl("halves", halves, "CPU")
lib.impl("halves_fresh", lambda x: tuple(part.clone() for part in halves(x)), "CPU")
for name in ("halves", "halves_fresh"):
    torch.library.register_fake(f"{NS}::{name}", _halves_fake, lib=lib)
add("output-alias", "halves", "halves_fresh")


def clip(x: Tensor, most: float) -> None:
    """Writes into a copy where the input is strided: what it did is lost."""
    x.contiguous().clamp_(max=most)


def clip_any(x: Tensor, most: float) -> None:
    x.clamp_(max=most)


lib.define("clip_copy_(Tensor(a!) x, float most) -> ()")
lib.define("clip_(Tensor(a!) x, float most) -> ()")
lib.impl("clip_copy_", clip, "CPU")
lib.impl("clip_", clip_any, "CPU")
for name in ("clip_copy_", "clip_"):
    torch.library.register_fake(f"{NS}::{name}", lambda x, most: None, lib=lib)
add("layout-assumed", "clip_copy_", "clip_", name="layout-assumed: a write that is lost")
