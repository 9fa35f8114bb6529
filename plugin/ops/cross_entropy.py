"""Cross entropy of rows of logits: one read of the logits and one write of their gradient.

A compiler reads the logits for the maximum, for the sum and for the gradient, and writes the gradient in a graph of its
own. Here the pass that finds a row's sum also writes its gradient, for an incoming gradient of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from opgraft import _compat
from opgraft.ops import cross_entropy_reference as plain
from opgraft.ops.cross_entropy_reference import MEAN, NONE, SUM, reference
from opgraft.ops.registration import (
    batch_first,
    bind,
    call,
    check_floating,
    require_tensor,
    shard,
    vector_jacobian_product,
)
from opgraft.ops.samples import Maker
from opgraft.registry import Cost, OpSpec, Sample, register

rows_op = torch.ops.opgraft.cross_entropy.default
with_gradient_op = torch.ops.opgraft.cross_entropy_with_gradient.default
backward_op = torch.ops.opgraft.cross_entropy_backward.default
rescale = torch.ops.opgraft.cross_entropy_rescale_.default

_REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM}


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy between rows of logits and their target classes, as ``torch.nn.functional.cross_entropy`` has it.

    Args:
        logits: (..., classes), classes last whatever the number of dimensions; float32, float64, float16 or bfloat16.
            Rows may have any stride; other strides are copied.
        target: (...), int64 or int32 classes; or probabilities in the shape of ``logits``, which plain torch serves.
        weight: (classes,), a factor for every class.
        ignore_index: rows with this target count for nothing, and their gradient is zero whatever their logits are.
        label_smoothing: from 0 to 1, the share of the loss that all classes have alike.
        z_loss: adds ``z_loss * lse ** 2`` to the loss of every row, lse being the log of the sum of exponentials.
        softcap: the logits are seen as ``softcap * tanh(logits / softcap)``.
        reduction: ``"mean"`` (over rows that are not ignored; with ``weight``, over their weights), ``"sum"`` or
            ``"none"``.
        return_lse: also return lse of every row, which has a gradient as well.

    Returns:
        The loss, in float32 for 16-bit logits: everything is computed in float32 (float64 for float64).

    Raises:
        TypeError: ``logits``, ``target`` or ``weight`` is no tensor. ValueError: an unknown reduction, or a soft cap
            that is not positive.
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also a target that is no class. On a GPU such a
            target makes the loss NaN.
    """
    require_tensor("cross_entropy", logits=logits, target=target)
    if weight is not None:
        require_tensor("cross_entropy", weight=weight)
        weight = weight.to(torch.promote_types(logits.dtype, torch.float32))
    if reduction not in _REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction is {reduction!r}, expected 'mean', 'sum' or 'none'")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"cross_entropy: softcap is {softcap!r}, expected a positive number or None")
    options = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0), _REDUCTIONS[reduction])
    if target.is_floating_point():
        loss, lse = plain.of_probabilities(logits, target, weight, *options[1:])
    elif _compat.is_dtensor(logits) and options[-1] == MEAN and weight is None:
        # A mean over rows that are split is a sum over rows and a count.
        loss, lse, _ = apply(logits, target, weight, *options[:-1], SUM)
        loss = loss / (target != ignore_index).sum()
    else:
        loss, lse, _ = apply(logits, target, weight, *options)
    return (loss, lse) if return_lse else loss


def apply(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The op with its own arguments: loss, lse, and what the backward starts from. ``softcap`` 0 stands for none."""
    require_tensor("cross_entropy", logits=logits, target=target)
    args = (logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, reduction)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    if _one_pass_serves(logits, target, reduction):
        found = _OnePass.apply(*args)  # type: ignore[no-untyped-call]
    elif _scaling_serves(logits, reduction):
        found = with_gradient_op(*args)[:3]
    else:
        found = call(rows_op, reference, *args)
    return found


def _one_pass_serves(logits: torch.Tensor, target: torch.Tensor, reduction: int) -> bool:
    """Where the gradient may be written in the forward and looked after by the backward: eager autograd, one incoming
    gradient for all rows."""
    if torch.compiler.is_compiling() or reduction == NONE or not torch.is_grad_enabled() or not logits.requires_grad:
        return False
    plain_tensors = all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in (logits, target))
    return plain_tensors and not _compat.is_mapped() and _compat.graph_is_kept is not None


def _scaling_serves(logits: torch.Tensor, reduction: int) -> bool:
    """Where a compiled backward multiplies the forward's gradient by the incoming one."""
    return (
        torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and torch.is_grad_enabled()
        and logits.requires_grad
        and not _compat.is_dtensor(logits)
        and scaling_pays(logits, reduction)
    )


def scaling_pays(logits: torch.Tensor, reduction: int) -> bool:
    """Whether a compiled backward does better with the forward's gradient, times an incoming one whose value no graph
    knows, than with the logits.

    Inductor multiplies in place. On a CPU, where exponentials cost more than that pass, it is faster than to read the
    logits again; on a GPU it moves a quarter more. Not in float16: small gradients are lost before a loss scale, which
    is there to save them, has a say.
    """
    return logits.device.type == "cpu" and logits.dtype != torch.float16 and reduction != NONE


class _OnePass(torch.autograd.Function):
    """Loss and gradient in one pass. The gradient that it saves is its own: nobody else can hold it."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        logits, target, weight, *ctx.options = args
        loss, lse, statistics, gradient = with_gradient_op(*args)
        ctx.save_for_backward(logits, target, weight, statistics, gradient)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return loss, lse, statistics

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_loss, grad_lse, _ = grads
        logits, target, weight, statistics, gradient = ctx.saved_tensors
        # A graph that is run again, or differentiated, needs what was saved as it was saved.
        ours = grad_loss is not None and grad_lse is None and not torch.is_grad_enabled()
        if not ours or weight_wanted(ctx) or torch.compiler.is_compiling() or _compat.graph_is_kept():
            return saved_gradients(ctx, grad_loss, grad_lse, logits, target, weight, statistics, ctx.options)
        rescale(gradient, grad_loss, logits, target, weight, statistics, *ctx.options)
        return gradient, *(None,) * 7


def weight_wanted(ctx: Any) -> bool:
    return bool(ctx.needs_input_grad[2])


def saved_gradients(
    ctx: Any,
    grad_loss: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
    options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The gradient for every argument of the op, from what it saved."""
    grad_logits = grad_weight = None
    if grad_loss is not None or grad_lse is not None:
        if ctx.needs_input_grad[0]:
            grad_logits = backward_op(logits, target, weight, statistics, grad_loss, grad_lse, *options)
        if weight_wanted(ctx):
            # Rarely asked for: the reference's.
            inputs = (logits, target, weight, *options)
            grad_weight = vector_jacobian_product(reference, inputs, (grad_loss, grad_lse, None))[2]
    return grad_logits, None, grad_weight, None, None, None, None, None


def check_inputs(
    op: str, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, label_smoothing: float
) -> torch.dtype:
    """The kernels' checks; returns the dtype of losses and sums."""
    check_floating(op, "logits", logits)
    wide = torch.promote_types(logits.dtype, torch.float32)
    torch._check(logits.dim() >= 1, lambda: f"{op}: logits has no dimension of classes, expected (..., classes)")
    torch._check(
        logits.shape[-1] >= 1, lambda: f"{op}: logits has shape {tuple(logits.shape)}, expected at least one class"
    )
    torch._check(
        target.dtype in (torch.int64, torch.int32), lambda: f"{op}: target has dtype {target.dtype}, expected int64"
    )
    check_part(op, "target", target, target.dtype, logits, tuple(logits.shape[:-1]), "that of logits without classes")
    if weight is not None:
        check_part(op, "weight", weight, wide, logits, (logits.shape[-1],), "one value a class")
    torch._check(0 <= label_smoothing <= 1, lambda: f"{op}: label_smoothing is {label_smoothing}, expected 0 to 1")
    return wide


def check_part(
    op: str,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    logits: torch.Tensor,
    shape: tuple[Any, ...],
    meaning: str,
) -> None:
    torch._check(tensor.dtype == dtype, lambda: f"{op}: {name} has dtype {tensor.dtype}, expected {dtype}")
    torch._check(
        tensor.device == logits.device,
        lambda: f"{op}: {name} is on {tensor.device}, expected the device of logits, {logits.device}",
    )
    torch._check(
        tensor.dim() == len(shape) and all(a == b for a, b in zip(tensor.shape, shape, strict=True)),
        lambda: f"{op}: {name} has shape {tuple(tensor.shape)}, expected {meaning}, {shape}",
    )


def _fake(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = check_inputs("cross_entropy", logits, target, weight, label_smoothing)
    rows = tuple(logits.shape[:-1])
    return tuple(logits.new_empty(size, dtype=wide) for size in (() if reduction else rows, rows, (2, *rows)))  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, target, weight, *ctx.options = inputs
    statistics = output[2]
    ctx.save_for_backward(logits, target, weight, statistics)
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    grad_loss, grad_lse, _ = grads
    logits, target, weight, statistics = ctx.saved_tensors
    return saved_gradients(ctx, grad_loss, grad_lse, logits, target, weight, statistics, ctx.options)


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_rows(rows_op, info, in_dims, args, (0, 0, 1))


def map_rows(op: Any, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...], out_dims: tuple[int, ...]) -> Any:
    """Rows that are not reduced need no loop: the mapped dimension is one more of them."""
    names = [a.name for a in op._schema.arguments]
    weight = names.index("weight")
    tensors = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor) and i != weight]
    if args[-1] == NONE and in_dims[weight] is None:
        moved = list(args)
        first = batch_first([in_dims[i] for i in tensors], info.batch_size, *(args[i] for i in tensors))
        for place, value in zip(tensors, first, strict=True):
            # Statistics are (2, ...): the mapped dimension comes second.
            moved[place] = value.movedim(0, 1) if names[place] == "statistics" else value
        found = op(*moved)
        return found, out_dims if isinstance(found, tuple) else 0
    calls = []
    for index in range(info.batch_size):
        one = [a if d is None else a.select(d, index) for a, d in zip(args, in_dims, strict=True)]
        found = op(*one)
        calls.append(found if isinstance(found, tuple) else (found,))
    stacked = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
    return (stacked, (0,) * len(stacked)) if len(stacked) > 1 else (stacked[0], 0)


def row_rule(kinds: tuple[str, ...], outputs: tuple[str, ...]) -> Callable[..., Any]:
    """Sharding over rows. A sum over rows that are split is a partial sum; a mean is not, for lack of the count."""

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        reduction = args[-1]
        logits = args[kinds.index("rows")]

        def place(kind: str, dim: int | None) -> Any:
            if dim is None or kind == "whole" or (kind == "loss gradient" and reduction != NONE):
                return Replicate()
            if kind == "loss" and reduction != NONE:
                return Partial()
            return Shard(dim + 1 if kind == "statistics" else dim)

        splits: list[int | None] = [None]
        if reduction != MEAN:
            splits += range(logits.ndim - 1)
        return [
            (
                [place(kind, dim) for kind in outputs],
                [place(k, dim) if k and a is not None else None for k, a in zip(kinds, args, strict=True)],
            )
            for dim in splits
        ]

    return rule


def cost(logits: torch.Tensor, target: torch.Tensor, *others: Any) -> Cost:
    """One read of the logits; losses, sums and targets beside it. One exponential an element."""
    wide = torch.promote_types(logits.dtype, torch.float32).itemsize
    rows = target.numel()
    moved = logits.numel() * logits.element_size() + rows * target.element_size() + (4 * rows + 1) * wide
    return Cost(bytes=moved, flops=3 * logits.numel(), exponentials=logits.numel())


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every layout and option, and the values at which a careless sum overflows or cancels."""
    for seed, (name, logits) in enumerate(Maker(device, dtype).layouts()):
        if logits.dim() and logits.shape[-1]:
            yield _sample(name, logits, seed, _OPTIONS[seed % len(_OPTIONS)])
    maker = Maker(device, dtype, seed=2)
    for rows, classes in ((4, 33), (7, 65), (19, 8)):
        yield _sample(f"{rows} by {classes}", maker.normal(rows, classes), rows, {}, family="rows")
    # Not 2: torch takes equal sizes for one symbol, and statistics have two numbers a row.
    for batch, rows, classes in ((3, 9, 5), (5, 17, 8), (4, 6, 11)):
        options = {"reduction": NONE, "smoothing": 0.1, "z_loss": 1e-2}
        title = f"{batch} by {rows} by {classes}"
        yield _sample(title, maker.normal(batch, rows, classes), rows, options, family="batched")
    for index, options in enumerate(_OPTIONS):
        yield _sample(f"options {index}", maker.normal(5, 13, scale=3.0), index, options)
    shifted = maker.normal(2, 7, 9)[:, :-1]
    yield _sample("all but the last step", shifted, 4, {"reduction": SUM})
    yield _sample("edge values", maker.normal(3, 5), 0, {}, ignored=1)  # every row ignored: the mean of nothing
    yield _sample("large logits", 6e4 * maker.uniform(3, 70, low=-1.0), 1, {"reduction": NONE})
    masked = maker.normal(4, 40).masked_fill(torch.arange(40, device=device) % 3 == 2, -torch.inf)
    yield Sample("masked classes", (masked, torch.arange(4, device=device) * 3, *_arguments({}, None)))
    yield _sample("wide", maker.normal(3, 5003), 2, {"softcap": 5.0})
    spoilt = maker.normal(3, 11)
    spoilt[1, 4] = torch.nan
    yield _sample("not a number", spoilt, 3, {"reduction": NONE}, ignored=0)


_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": SUM, "smoothing": 0.1},
    {"z_loss": 1e-2, "softcap": 2.5},
    {"reduction": NONE},
    {"weight": True},
    {"weight": True, "smoothing": 0.2, "reduction": NONE, "narrow": True},
    {"weight": True, "smoothing": 0.3, "z_loss": 1e-3, "softcap": 4.0},
    {"reduction": SUM, "ignore_index": 0},
)


def _sample(
    name: str, logits: torch.Tensor, seed: int, options: dict[str, Any], family: str = "", ignored: int = 3
) -> Sample:
    """Random targets, every ``ignored``-th of them ignored."""
    maker = Maker(logits.device, torch.float64, seed=200 + seed)
    classes = logits.shape[-1]
    target = (maker.uniform(*logits.shape[:-1]) * classes).long().clamp_max(classes - 1)
    if ignored and target.dim():
        flat = target.view(-1)
        flat[ignored - 1 :: ignored] = options.get("ignore_index", -100)
    weight = None
    if options.get("weight"):
        weight = maker.uniform(classes, low=0.5, high=1.5).to(torch.promote_types(logits.dtype, torch.float32))
    return Sample(
        name, (logits, target.int() if options.get("narrow") else target, *_arguments(options, weight)), family=family
    )


def _arguments(options: dict[str, Any], weight: torch.Tensor | None) -> tuple[Any, ...]:
    numbers = (options.get("smoothing", 0.0), options.get("z_loss", 0.0), options.get("softcap", 0.0))
    return (weight, options.get("ignore_index", -100), *numbers, options.get("reduction", MEAN))


def large(device: torch.device, dtype: torch.dtype) -> tuple[Sample, Callable[[Any], None]]:
    """Over 2^31 elements; the first and the last row are compared, the latter out of reach of a 32-bit index."""
    logits = torch.zeros(2**19 + 1, 4099, device=device, dtype=dtype)
    logits[-1] = Maker(device, dtype).normal(4099)
    target = torch.full((logits.shape[0],), 7, device=device)
    arguments = (None, -100, 0.0, 0.0, 0.0, NONE)

    def check(found: tuple[torch.Tensor, ...]) -> None:
        for row in (slice(0, 1), slice(-1, None)):
            wanted = reference(logits[row], target[row], *arguments)
            torch.testing.assert_close(found[0][row], wanted[0])
            torch.testing.assert_close(found[1][row], wanted[1])

    return Sample("over 2^31 elements", (logits, target, *arguments)), check


FLAGS = ("", "", "", "", "")
bind(rows_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap)
shard(rows_op, row_rule(("rows", "rows", "whole", *FLAGS), ("loss", "rows", "statistics")))
SPEC = register(
    OpSpec(
        rows_op, reference, samples=samples, cost=cost, public=apply, backward=backward_op, large=large, owner="opgraft"
    )
)
