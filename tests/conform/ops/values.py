"""Ops that give wrong numbers, or read and write memory that is not theirs."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from opgraft.registry import describe
from tests.conform.ops.pairs import NS, add, op, plain


def noisy(x: Tensor) -> Tensor:
    return x.contiguous() + torch.rand(x.shape)


op("noisy", noisy)
op("noisy_tagged", noisy, tags=(torch.Tag.nondeterministic_seeded,))
add("unstable-result", "noisy", "noisy_tagged")


def half_written(x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    out.flatten()[: max(x.numel() - 1, 0)].copy_(x.flatten()[: max(x.numel() - 1, 0)])
    return out


op("half_written", half_written)
add("unstable-result", "half_written", "good_double", name="unstable-result: memory")


def _floats(x: Tensor, extra: int):
    return (ctypes.c_float * (x.numel() + extra)).from_address(x.data_ptr())


def sum_too_far(x: Tensor) -> Tensor:
    x = x.contiguous()
    wide = -(-x.numel() // 8) * 8
    total = sum(_floats(x, wide - x.numel())) if x.dtype == torch.float32 and x.numel() else 0.0
    return x.new_full((), total)


def sum_exact(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.new_full((), sum(_floats(x, 0)) if x.dtype == torch.float32 and x.numel() else 0.0)


op("sum_too_far", sum_too_far, fake=lambda x: x.new_empty(()))
op("sum_exact", sum_exact, fake=lambda x: x.new_empty(()))
add("out-of-bounds", "sum_too_far", "sum_exact")


def reads_dense(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    if x.numel():
        flat = (
            x.as_strided((x.numel(),), (1,), x.storage_offset())
            if x.untyped_storage().nbytes() >= (x.storage_offset() + x.numel()) * x.element_size()
            else x.flatten()
        )
        out.view(-1).copy_(flat)
    return out


op("reads_dense", reads_dense)
add("layout-assumed", "reads_dense", "good_double")


def wants_aligned(x: Tensor) -> Tensor:
    if x.data_ptr() % 16:
        raise RuntimeError("the address is no multiple of 16")
    return x.contiguous() * 2


op("wants_aligned", wants_aligned)
add("misaligned", "wants_aligned", "good_double")


def divides(x: Tensor) -> Tensor:
    block = min(x.numel(), 4)
    for _ in range((x.numel() + block - 1) // block):
        pass
    return x.contiguous() * 2


op("divides", divides)
add("empty-input", "divides", "good_double")


def int_offsets(x: Tensor) -> Tensor:
    if x.dim() != 2:
        return x.contiguous() * 1
    rows = []
    for row in range(x.shape[0]):
        offset = ctypes.c_int32(row * x.stride(0)).value
        rows.append(x[row] if offset == row * x.stride(0) else x[0])
    return torch.stack(rows) if rows else x.clone()


op("int_offsets", int_offsets)
add("index-overflow", "int_offsets", "good_double")


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
    """One number too many, and only where malloc leaves room for it (8 bytes behind a multiple of 16), so that the
    process lives."""
    made = torch.empty(x.shape, dtype=torch.float32)
    count = x.numel() + (extra if made.nbytes % 16 == 0 else 0)
    if x.numel():
        ctypes.memset(made.data_ptr(), 0, 4 * count)
    return made


plain("writes_past_its_result", lambda x: writes_on(x, 1))
plain("writes_its_result", lambda x: writes_on(x, 0))
add("out-of-bounds", "writes_past_its_result", "writes_its_result", name="out-of-bounds: result")


def grown(x: Tensor) -> Tensor:
    """A result that is made small and resized, as functions with ``out`` do."""
    made = torch.empty(())
    return made.resize_(x.shape).copy_(x)


plain("grows_its_result", grown)
add("out-of-bounds", "writes_past_its_result", "grows_its_result", name="out-of-bounds: a result that grows")


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
