"""The linear recurrence h[t] = decay[t] h[t-1] + update[t] along one dimension: minGRU, RG-LRU, S5, discounted sums.

A compiler has no plan for it: a loop is unrolled step by step, and a parallel prefix written in plain torch moves the
tensors once for every power of two. The kernels read every input once and write every output once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from opgraft.ops.registration import (
    batch_first,
    bind,
    call,
    check_floating,
    check_like,
    require_tensor,
    shard,
    vector_jacobian_product,
)
from opgraft.ops.samples import Maker
from opgraft.registry import Cost, OpSpec, Sample, register

_op = torch.ops.opgraft.linear_scan.default
_backward_op = torch.ops.opgraft.linear_scan_backward.default


def linear_scan(
    decay: torch.Tensor,
    update: torch.Tensor,
    initial: torch.Tensor | None = None,
    dim: int = -1,
    reverse: bool = False,
) -> torch.Tensor:
    """Every state of h[t] = decay[t] h[t-1] + update[t].

    Args:
        decay: any shape and strides, float32, float64, float16 or bfloat16, on the CPU or a CUDA device.
        update: the shape, dtype and device of ``decay``. Expand the smaller of the two where they differ.
        initial: h before the first step, of the shape of ``decay`` without ``dim``; zero where it is left out.
        dim: the dimension to walk along.
        reverse: walk from the last index to the first, h[t] = decay[t] h[t+1] + update[t].

    Returns:
        A fresh contiguous tensor of the shape and dtype of ``update``. The state is kept in float32 for 16-bit types.

    Raises:
        TypeError: ``decay``, ``update`` or ``initial`` is not a tensor.
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument.
    """
    require_tensor("linear_scan", decay=decay, update=update)
    if initial is not None:
        require_tensor("linear_scan", initial=initial)
    out: torch.Tensor = call(_op, reference, decay, update, initial, dim, reverse)
    return out


def states(decay: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """The states along the last dimension, from zero, in plain torch.

    A parallel prefix (Hillis and Steele, 1986): after step k every position has combined the 2^k updates before it.
    """
    length, reach = decay.shape[-1], 1
    while reach < length:
        carried = decay[..., reach:] * update[..., :-reach]
        update = torch.cat([update[..., :reach], update[..., reach:] + carried], dim=-1)
        decay = torch.cat([decay[..., :reach], decay[..., reach:] * decay[..., :-reach]], dim=-1)
        reach *= 2
    return update


def reference(
    decay: torch.Tensor,
    update: torch.Tensor,
    initial: torch.Tensor | None = None,
    dim: int = -1,
    reverse: bool = False,
) -> torch.Tensor:
    """The meaning, in plain torch: a parallel prefix in float32 (float64 for float64)."""
    a, b = _timed(decay, dim, reverse), _timed(update, dim, reverse)
    if initial is not None and a.shape[-1]:
        b = torch.cat([b[..., :1] + a[..., :1] * initial.to(b.dtype).unsqueeze(-1), b[..., 1:]], dim=-1)
    return _untimed(states(a, b), dim, reverse).to(update.dtype).contiguous()


def _timed(tensor: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    """Time last and forward, in the type in which states are kept."""
    wide = tensor.movedim(dim, -1).to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.flip(-1) if reverse else wide


def _untimed(tensor: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    return (tensor.flip(-1) if reverse else tensor).movedim(-1, dim)


def _check(
    op: str, decay: torch.Tensor, name: str, whole: torch.Tensor, initial: torch.Tensor | None, dim: int
) -> None:
    check_floating(op, "decay", decay)
    check_like(op, name, whole, "decay", decay)
    torch._check(decay.dim() > 0, lambda: f"{op}: decay has no dimension to scan over, expected at least one")
    torch._check(
        -decay.dim() <= dim < decay.dim(),
        lambda: f"{op}: dim is {dim}, expected a dimension of decay, which has {decay.dim()}",
    )
    if initial is not None:
        _check_step(op, initial, decay, dim)


def _check_step(op: str, initial: torch.Tensor, decay: torch.Tensor, dim: int) -> None:
    wanted = list(decay.shape)
    del wanted[dim]
    fits = initial.dim() == len(wanted) and all(a == b for a, b in zip(initial.shape, wanted, strict=True))
    torch._check(
        fits,
        lambda: f"{op}: initial has shape {tuple(initial.shape)}, expected that of decay, {tuple(decay.shape)}, "
        f"without dimension {dim}",
    )
    torch._check(
        initial.dtype == decay.dtype and initial.device == decay.device,
        lambda: f"{op}: initial is {initial.dtype} on {initial.device}, expected {decay.dtype} on {decay.device}",
    )


def _fake(
    decay: torch.Tensor,
    update: torch.Tensor,
    initial: torch.Tensor | None = None,
    dim: int = -1,
    reverse: bool = False,
) -> torch.Tensor:
    _check("linear_scan", decay, "update", update, initial, dim)
    return update.new_empty(update.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    decay, _, initial, ctx.dim, ctx.reverse = inputs
    ctx.save_for_backward(decay, output, initial)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    decay, output, initial = ctx.saved_tensors
    grad_decay, grad_update, grad_initial = _backward_op(grad, decay, output, initial, ctx.dim, ctx.reverse)
    return grad_decay, grad_update, None if initial is None else grad_initial, None, None


def _batched_dim(dim: int) -> int:
    return dim if dim < 0 else dim + 1


def _batch(info: Any, in_dims: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    """Every tensor that is there with the mapped dimension first."""
    there = [(d, t) for d, t in zip(in_dims, tensors, strict=False) if t is not None]
    moved = iter(batch_first([d for d, _ in there], info.batch_size, *(t for _, t in there)))
    return [None if t is None else next(moved) for t in tensors]


def _vmap(
    info: Any,
    in_dims: tuple[Any, ...],
    decay: torch.Tensor,
    update: torch.Tensor,
    initial: torch.Tensor | None = None,
    dim: int = -1,
    reverse: bool = False,
) -> tuple[torch.Tensor, int]:
    decay_, update_, initial_ = _batch(info, in_dims, (decay, update, initial))
    return _op(decay_, update_, initial_, _batched_dim(dim), reverse), 0


def _rule(tensors: int, outputs: int, steps: int) -> Any:
    """Sharding: every dimension but the one that is walked. The last ``steps`` outputs are of a step's shape."""

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Replicate, Shard

        initial, dim = args[tensors], args[tensors + 1] if len(args) > tensors + 1 else -1
        dims = args[0].ndim
        walked = dim % dims
        choices: list[tuple[Any, Any]] = [(Replicate(), Replicate())]
        choices += [(Shard(d), Shard(d if d < walked else d - 1)) for d in range(dims) if d != walked]
        return [
            (
                [whole] * (outputs - steps) + [step] * steps,
                [*[whole] * tensors, None if initial is None else step, *[None] * (len(args) - tensors - 1)],
            )
            for whole, step in choices
        ]

    return rule


def cost(
    decay: torch.Tensor,
    update: torch.Tensor,
    initial: torch.Tensor | None = None,
    dim: int = -1,
    reverse: bool = False,
) -> Cost:
    """Two reads and one write, one multiply-add an element."""
    first = 0 if initial is None else initial.numel()
    return Cost(bytes=(3 * update.numel() + first) * update.element_size(), flops=2 * update.numel())


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every layout and dimension, both directions, and decays at which a product form overflows or loses digits."""
    for seed, (name, update) in enumerate(Maker(device, dtype).layouts()):
        if not update.dim():
            continue
        maker = Maker(device, dtype, seed=100 + seed)
        decay = maker.uniform(*update.shape)
        for dim in range(update.dim()):
            step = [*update.shape[:dim], *update.shape[dim + 1 :]]
            initial = maker.normal(*step) if (seed + dim) % 2 else None
            title = name if dim == update.dim() - 1 else f"{name}, dim {dim}"
            yield Sample(title, (decay, update, initial, dim - update.dim() if dim % 2 else dim, bool(seed % 2)))
    maker = Maker(device, dtype, seed=1)
    for rows, length in ((4, 33), (7, 65), (19, 8)):
        args = (maker.uniform(rows, length), maker.normal(rows, length), maker.normal(rows), -1, False)
        yield Sample(f"{rows} by {length}", args, family="rows")
    for batch, length, width in ((2, 9, 5), (3, 17, 8), (4, 6, 11)):
        shape = (batch, length, width)
        args = (maker.uniform(*shape), maker.normal(*shape), maker.normal(batch, width), 1, True)
        yield Sample(f"{batch} by {length} by {width}", args, family="middle")
    shape = (2, 517, 34)
    args = (maker.uniform(*shape), maker.normal(*shape), maker.normal(2, 34), 1, False)
    yield Sample("long, walked across rows", args)
    yield Sample("one step", (maker.uniform(5, 1), maker.normal(5, 1), maker.normal(5), 1, False))
    yield Sample("no step", (maker.uniform(5, 0), maker.normal(5, 0), maker.normal(5), 1, False))
    yield Sample("decay near one", (1 - maker.uniform(3, 129, high=1e-3), maker.normal(3, 129), None, 1, False))
    yield Sample("decay near zero", (maker.uniform(3, 129, high=1e-3), maker.normal(3, 129), None, 1, True))
    yield Sample(
        "decay one", (maker.uniform(4, 99, low=1.0), maker.normal(4, 99, scale=0.01), maker.normal(4), 1, False)
    )
    yield Sample("decay negative", (maker.uniform(4, 700, low=-1.0), maker.normal(4, 700), None, 1, False))


def large(device: torch.device, dtype: torch.dtype) -> tuple[Sample, Callable[[Any], None]]:
    """Over 2^31 elements; the first and the last row are compared, the latter out of reach of a 32-bit index."""
    shape = (2**19 + 1, 4099)
    decay, update = (torch.full(shape, value, device=device, dtype=dtype) for value in (0.5, 1.0))
    decay[-1], update[-1] = Maker(device, dtype).uniform(4099), Maker(device, dtype, seed=1).normal(4099)

    def check(h: torch.Tensor) -> None:
        for row in (0, -1):
            torch.testing.assert_close(h[row], reference(decay[row], update[row]))

    return Sample("over 2^31 elements", (decay, update, None, -1, False)), check


def reference_backward(
    grad: torch.Tensor,
    decay: torch.Tensor,
    output: torch.Tensor,
    initial: torch.Tensor | None,
    dim: int,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient with respect to decay, update and initial, given the states. Also a scan, the other way."""
    return _gradients(states, grad, decay, output, initial, dim, reverse)


def _gradients(
    scan: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    grad: torch.Tensor,
    decay: torch.Tensor,
    output: torch.Tensor,
    initial: torch.Tensor | None,
    dim: int,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g, a, h = (_timed(t, dim, reverse) for t in (grad, decay, output))
    if not a.shape[-1]:
        return torch.zeros_like(decay), torch.zeros_like(decay), a.sum(-1).to(decay.dtype)
    later = torch.cat([a[..., 1:], torch.zeros_like(a[..., :1])], dim=-1)
    total = scan(later.flip(-1), g.flip(-1)).flip(-1)
    first = torch.zeros_like(h[..., :1]) if initial is None else initial.to(h.dtype).unsqueeze(-1)
    before = torch.cat([first, h[..., :-1]], dim=-1)
    grad_initial = a[..., 0] * total[..., 0]
    whole = [_untimed(t, dim, reverse).to(decay.dtype).contiguous() for t in (total * before, total)]
    return whole[0], whole[1], grad_initial.to(decay.dtype).contiguous()


def _backward_fake(
    grad: torch.Tensor,
    decay: torch.Tensor,
    output: torch.Tensor,
    initial: torch.Tensor | None,
    dim: int,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check("linear_scan_backward", decay, "output", output, initial, dim)
    check_like("linear_scan_backward", "grad", grad, "output", output)
    step = list(decay.shape)
    del step[dim]
    return decay.new_empty(decay.shape), decay.new_empty(decay.shape), decay.new_empty(step)


def _setup_backward_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.dim, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _double_backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    # The op itself is differentiable any number of times, so the formula is built on it: as fast as the first
    # derivative, and of one graph for every length, which the reference's prefix is not.
    inputs = (_op, *ctx.saved_tensors, ctx.dim, ctx.reverse)
    return vector_jacobian_product(_gradients, inputs, grads)[1:]


def _backward_vmap(
    info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], tuple[int, int, int]]:
    *tensors, dim, reverse = args
    batched = _batch(info, in_dims[:4], tuple(tensors))
    return _backward_op(*batched, _batched_dim(dim), reverse), (0, 0, 0)


def backward_cost(grad: torch.Tensor, decay: torch.Tensor, *others: Any) -> Cost:
    """Three reads and two writes, two multiplications and a multiply-add an element; a step for the initial state."""
    dim = others[-2]
    steps = decay.numel() // decay.shape[dim] if decay.shape[dim] else decay.movedim(dim, 0).sum(0).numel()
    return Cost(bytes=(5 * decay.numel() + steps) * decay.element_size(), flops=4 * decay.numel())


def backward_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The forward's samples with its own states and incoming gradients that are dense, expanded or permuted."""
    maker = Maker(device, dtype, seed=3)
    for sample in samples(device, dtype):
        decay, update, initial, dim, reverse = sample.args
        output = reference(decay, update, initial, dim, reverse)
        grad = maker.normal(*update.shape)
        yield Sample(sample.name, (grad, decay, output, initial, dim, reverse), family=sample.family)
    decay, output = maker.uniform(6, 10), maker.normal(6, 10)
    yield Sample("gradient of a sum", (maker.normal().expand(6, 10), decay, output, None, 1, False))
    yield Sample("gradient transposed", (maker.normal(10, 6).t(), decay, output, maker.normal(6), 1, True))


bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap)
bind(
    _backward_op,
    fake=_backward_fake,
    backward=_double_backward,
    setup_context=_setup_backward_context,
    vmap=_backward_vmap,
)
shard(_op, _rule(tensors=2, outputs=1, steps=0))
shard(_backward_op, _rule(tensors=3, outputs=3, steps=1))

SPEC = register(
    OpSpec(
        _op,
        reference,
        samples=samples,
        cost=cost,
        public=linear_scan,
        backward=_backward_op,
        large=large,
        owner="opgraft",
    )
)
BACKWARD_SPEC = register(
    OpSpec(_backward_op, reference_backward, samples=backward_samples, cost=backward_cost, owner="opgraft")
)
