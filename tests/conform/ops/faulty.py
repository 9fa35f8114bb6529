"""Ops that each break one rule, and their mended twins: ``PAIRS``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NS = "faulty"


@dataclass(frozen=True)
class Pair:
    """A check, the kind of what it finds, the op that fails it and the twin that passes.

    Attributes:
        notes: the finding is no more than a note.
        setup: is called before either is examined.
        cases: arguments of one call, by the op's short name, where the schema does not tell them.
    """

    check: str
    kind: str
    bad: str
    good: str
    notes: bool = False
    thorough: bool = False
    setup: Callable[[], None] | None = None
    cases: dict[str, tuple[Any, ...]] = field(default_factory=dict)


PAIRS: dict[str, Pair] = {}
lib = torch.library.Library(NS, "DEF")


def add(check: str, bad: str, good: str, kind: str = "", name: str = "", **more: Any) -> None:
    names = [word if "::" in word else f"{NS}::{word}" for word in (bad, good)]
    PAIRS[name or check] = Pair(check, kind or check, *names, **more)


def op(name, fn, mutates=(), fake="like", backward=None, setup=None, tags=()):
    """A custom op with a fake (contiguous, like the first argument) and a gradient."""
    made = torch.library.custom_op(f"{NS}::{name}", fn, mutates_args=mutates, tags=tags)
    if fake == "like":
        made.register_fake(lambda x, *rest: x.new_empty(x.shape))
    elif fake is not None:
        made.register_fake(fake)
    if backward is not None:
        made.register_autograd(backward, setup_context=setup)
    return made


def save_first(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def double_backward_rule(ctx, grad):
    return 2 * grad


# ---- registration


def double(x: Tensor) -> Tensor:
    return x.contiguous() * 2


op("good_double", double, backward=double_backward_rule, setup=lambda ctx, inputs, output: None)
op("no_fake", double, fake=None, backward=double_backward_rule, setup=lambda ctx, inputs, output: None)
add("missing-fake", "no_fake", "good_double")

op(
    "fake_keeps_layout",
    double,
    fake=lambda x: torch.empty_like(x),
    backward=double_backward_rule,
    setup=lambda ctx, inputs, output: None,
)
add("fake-mismatch", "fake_keeps_layout", "good_double")


def _int_fake(x):
    return x.new_empty((int(x.shape[0]), *x.shape[1:]))


op("fake_int", double, fake=_int_fake, backward=double_backward_rule, setup=lambda ctx, inputs, output: None)
add("fake-specializes", "fake_int", "good_double")


def reduced(x: Tensor, mode: int) -> Tensor:
    """Mode 0 keeps the rows, 1 and 2 give a scalar: a number that changes the rank and is no size."""
    torch._check(mode in (0, 1, 2), lambda: f"mode must be 0, 1 or 2, it is {mode}")
    rows = x.contiguous().sum(-1)
    return rows if mode == 0 else rows.mean() if mode == 1 else rows.sum()


op("reduced", reduced, fake=lambda x, mode: x.new_empty(x.shape[:-1] if mode == 0 else ()))
MEAN = {"reduced": (torch.randn(3, 4), 1)}
add("fake-specializes", "fake_int", "reduced", name="fake-specializes: a mode", cases=MEAN)

lib.define("composite(Tensor x) -> Tensor")
lib.define("per_backend(Tensor x) -> Tensor")


def raw_double(x: Tensor) -> Tensor:
    """As a raw kernel does: through the address, unseen by the dispatcher."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    count = x.numel() * x.element_size()
    if count:
        ctypes.memmove(out.data_ptr(), x.data_ptr(), count)
    return out


lib.impl("composite", raw_double, "CompositeImplicitAutograd")
lib.impl("per_backend", raw_double, "CPU")
torch.library.register_fake(f"{NS}::per_backend", lambda x: x.new_empty(x.shape), lib=lib)
torch.library.register_autograd(f"{NS}::per_backend", lambda ctx, grad: grad.clone(), lib=lib)
add("composite-kernel", "composite", "per_backend")

lib.define("tags_clash(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout, torch.Tag.needs_exact_strides))
lib.impl("tags_clash", double, "CPU")
torch.library.register_fake(f"{NS}::tags_clash", lambda x: x.new_empty(x.shape), lib=lib)
torch.library.register_autograd(f"{NS}::tags_clash", double_backward_rule, lib=lib)
add("bad-schema", "tags_clash", "per_backend")

lib.define("cuda_only(Tensor x) -> Tensor")
lib.impl("cuda_only", double, "CUDA")
add("missing-kernel", "cuda_only", "per_backend")


# ---- gradients

lib.define("no_gradient(Tensor x) -> Tensor")
lib.impl("no_gradient", double, "CPU")
torch.library.register_fake(f"{NS}::no_gradient", lambda x: x.new_empty(x.shape), lib=lib)
add("missing-autograd", "no_gradient", "good_double")

# A formula is there, and below it nobody keeps a graph; the twin says that codes have no gradient.
lib.define("signs_of_nobody(Tensor x) -> Tensor")
torch.library.register_fake(f"{NS}::signs_of_nobody", lambda x: x.new_empty(x.shape), lib=lib)
lib.impl("signs_of_nobody", lambda x: x.contiguous().sign(), "CPU")
lib.impl("signs_of_nobody", lambda x: x.detach().contiguous().sign(), "Autograd")


def signs(x: Tensor) -> Tensor:
    return x.contiguous().sign()


op(
    "signs",
    signs,
    backward=lambda ctx, grad: None,
    setup=lambda ctx, inputs, output: ctx.mark_non_differentiable(output),
)
add("missing-autograd", "signs_of_nobody", "signs", name="missing-autograd: results without one")


def square(x: Tensor) -> Tensor:
    return x.contiguous() ** 2


op("square", square, backward=lambda ctx, grad: 2 * grad * ctx.saved_tensors[0], setup=save_first)
op("square_wrong", square, backward=lambda ctx, grad: grad * ctx.saved_tensors[0], setup=save_first)
add("wrong-gradient", "square_wrong", "square")


def square_and_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.contiguous() ** 2, x.contiguous().flatten().mean(0, keepdim=True)


def save_and_mark(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.mark_non_differentiable(output[1])


# The second result moves with x, and the formula says that nobody differentiates it.
for name, factor in (("square_and_mean", 2), ("square_and_mean_wrong", 1)):
    op(
        name,
        square_and_mean,
        fake=lambda x: (x.new_empty(x.shape), x.new_empty(1)),
        backward=lambda ctx, grad, unused, factor=factor: factor * grad * ctx.saved_tensors[0],
        setup=save_and_mark,
    )
add("wrong-gradient", "square_and_mean_wrong", "square_and_mean", name="wrong-gradient: a result without one")


def square_of_floats(x: Tensor) -> Tensor:
    """As a kernel behind a raw pointer would: whatever the dtype, it reads and writes float32."""
    out = x.new_zeros(x.shape)
    n = x.numel()
    out.view(-1).view(torch.float32)[:n] = x.contiguous().view(-1).view(torch.float32)[:n] ** 2
    return out


def square_of_float32(x: Tensor) -> Tensor:
    torch._check(x.dtype == torch.float32, lambda: f"square_of_float32: x must be float32, it is {x.dtype}")
    return square_of_floats(x)


op("square_of_floats", square_of_floats, backward=lambda ctx, g: 2 * g * ctx.saved_tensors[0], setup=save_first)
op("square_of_float32", square_of_float32, backward=lambda ctx, g: 2 * g * ctx.saved_tensors[0], setup=save_first)
add("wrong-value", "square_of_floats", "square_of_float32", name="wrong-value: a dtype taken for another")
op("square_of_float32_wrong", square_of_float32, backward=lambda ctx, g: g * ctx.saved_tensors[0], setup=save_first)
add("wrong-gradient", "square_of_float32_wrong", "square_of_float32", name="wrong-gradient: float32 alone")
# What such an op gives in float64 says nothing of its gradient in float32.
add("wrong-gradient", "square_wrong", "square_of_floats", name="wrong-gradient: no float64")


def _dense_only(ctx, grad):
    flat = (
        grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
        if grad.untyped_storage().nbytes() >= (grad.storage_offset() + grad.numel()) * grad.element_size()
        else grad.flatten()[:1].expand(grad.numel())
    )
    return 2 * flat.reshape(grad.shape)


op("double_dense_gradient", double, backward=_dense_only, setup=lambda ctx, inputs, output: None)
add("gradient-layout", "double_dense_gradient", "good_double")


def _blind(ctx, grad):
    with torch.no_grad():
        return 2 * grad * ctx.saved_tensors[0]


op("square_once", square, backward=_blind, setup=save_first)
add("double-backward", "square_once", "square")


# ---- mutation and aliasing


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


# ---- values and memory


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


def positive(x: Tensor) -> Tensor:
    return x[x > 0]


op("positive", positive, fake=lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
op("positive_fixed", positive, fake=lambda x: x.new_empty(x.numel()))
add("data-dependent-shape", "positive", "good_double", notes=True)
add("data-dependent-shape", "positive_fixed", "positive", name="data-dependent-shape: fixed")


# ---- ops that take their process down


def hangs(x: Tensor) -> Tensor:
    while True:
        pass


def leaves_process(x: Tensor) -> Tensor:
    import os

    os._exit(3)


def exits(x: Tensor) -> Tensor:
    raise SystemExit(4)


def kills_itself(x: Tensor) -> Tensor:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)
    return x


def crashes(x: Tensor) -> Tensor:
    ctypes.string_at(8)
    return x


def crashes_when_empty(x: Tensor) -> Tensor:
    if x.numel() == 0:
        ctypes.string_at(8)
    return x.contiguous() * 2


def eats_memory(x: Tensor) -> Tensor:
    torch.ones(1 << 40, dtype=torch.uint8)
    return x * 2


def eats_memory_slowly(x: Tensor) -> Tensor:
    kept = []
    while True:
        kept.append(torch.ones(1 << 26, dtype=torch.uint8))


for _name, _fn in (
    ("hangs", hangs),
    ("exits", exits),
    ("kills_itself", kills_itself),
    ("eats_memory_slowly", eats_memory_slowly),
    ("leaves_process", leaves_process),
    ("crashes", crashes),
    ("crashes_when_empty", crashes_when_empty),
    ("eats_memory", eats_memory),
):
    op(_name, _fn)
