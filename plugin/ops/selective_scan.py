"""The selective state-space scan of Mamba (Gu and Dao, arXiv 2312.00752, algorithm 2), with real A.

With d = delta + delta_bias (through a softplus where asked for), for every channel and state:
h[t] = exp(d[t] A) h[t-1] + d[t] u[t] B[t];  y[t] = (sum over states of C[t] h[t] + D u[t]) silu(z[t]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from opgraft.ops.folding import fold_mapped
from opgraft.ops.linear_scan import linear_scan
from opgraft.ops.linear_scan import states as scan_states
from opgraft.ops.registration import (
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

_op = torch.ops.opgraft.selective_scan.default
_backward_op = torch.ops.opgraft.selective_scan_backward.default

MAX_STATES = 256


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: torch.Tensor | None = None,
    *,
    return_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Mamba's selective scan over (batch, channels, length).

    Args:
        u: (batch, channels, length), float32, float64, float16 or bfloat16.
        delta: the step sizes, alike.
        A: (channels, states), 1 to 256 states; real, as a rule negative.
        B: (channels, states), or (batch, states, length), or (batch, groups, states, length): constant, a step, or a
            step and group of neighbouring channels.
        C: as B.
        D: (channels,). z: as u. delta_bias: (channels,).
        delta_softplus: step sizes are softplus(delta + delta_bias).
        initial_state: (batch, channels, states), the state before the first step; zero where it is left out.
        return_final_state: also return the state after the last step, (batch, channels, states).

    Returns:
        A fresh contiguous tensor of the shape and dtype of ``u``. A, D, delta_bias, the state and all sums are float32
        (float64 for float64); the final state has that type.

    Raises:
        TypeError: an argument is no tensor. RuntimeError: shapes, dtypes or devices do not fit.
    """
    require_tensor("selective_scan", u=u, delta=delta, A=A, B=B, C=C)
    given = {"D": D, "z": z, "delta_bias": delta_bias, "initial_state": initial_state}
    require_tensor("selective_scan", **{name: value for name, value in given.items() if value is not None})
    wide = torch.promote_types(u.dtype, torch.float32) if u.is_floating_point() else u.dtype
    y, final_state = apply(
        u,
        delta,
        _to(A, wide),
        _per_step(_to(B, u.dtype), u),
        _per_step(_to(C, u.dtype), u),
        _to(D, wide),
        z,
        _to(delta_bias, wide),
        delta_softplus,
        _to(initial_state, wide),
    )
    return (y, final_state) if return_final_state else y


def apply(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op with its own arguments: B and C a step and group, parameters in the state's type."""
    require_tensor("selective_scan", u=u, delta=delta, A=A, B=B, C=C)
    out: tuple[torch.Tensor, torch.Tensor] = call(
        _op, reference, u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state
    )
    return out


def _to(tensor: Any, dtype: torch.dtype) -> Any:
    """In the wanted type; a parameter under autocast may have another. What is no number is left to the op's checks."""
    return tensor.to(dtype) if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor


def _per_step(matrix: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """B or C as (batch, groups, states, length). A constant one has as many groups as there are channels."""
    if matrix.dim() == 3:
        return matrix.unsqueeze(1)
    if matrix.dim() == 2 and u.dim() == 3:
        return matrix[None, :, :, None].expand(u.shape[0], -1, -1, u.shape[2])
    return matrix


def reference(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning, in plain torch: every state of every step, by a parallel prefix in float32 (float64 for float64)."""
    return _scanned(scan_states, u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state)


def _scanned(
    scan: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(u.dtype, torch.float32)
    batch, channels, length = u.shape
    groups, states = B.shape[1], A.shape[1]
    inputs, steps, decays = u.to(wide), delta.to(wide), A.to(wide)
    if delta_bias is not None:
        steps = steps + delta_bias.to(wide).unsqueeze(-1)
    if delta_softplus:
        steps = F.softplus(steps)
    by_channel = (batch, channels, states, length)
    expand = (batch, groups, channels // max(groups, 1), states, length)
    b, c = (m.to(wide).unsqueeze(2).expand(expand).reshape(by_channel) for m in (B, C))
    decay = torch.exp(steps.unsqueeze(2) * decays.unsqueeze(-1))
    update = (steps * inputs).unsqueeze(2) * b
    start = u.new_zeros(batch, channels, states, dtype=wide) if initial_state is None else initial_state.to(wide)
    if length:
        update = torch.cat([update[..., :1] + decay[..., :1] * start.unsqueeze(-1), update[..., 1:]], dim=-1)
    h = scan(decay, update)
    y = (h * c).sum(2)
    if D is not None:
        y = y + D.to(wide).unsqueeze(-1) * inputs
    if z is not None:
        y = y * F.silu(z.to(wide))
    final_state = h[..., -1] if length else start
    return y.to(u.dtype).contiguous(), final_state.clone(memory_format=torch.contiguous_format)


def expect(op: str, argument: str, tensor: torch.Tensor, meaning: str, sizes: tuple[Any, ...], like: Any) -> None:
    """Shape ``sizes``, and dtype and device of ``like`` (a dtype and a device)."""
    dtype, device = like
    torch._check(tensor.dtype == dtype, lambda: f"{op}: {argument} has dtype {tensor.dtype}, expected {dtype}")
    torch._check(tensor.device == device, lambda: f"{op}: {argument} is on {tensor.device}, expected {device}")
    fits = tensor.dim() == len(sizes) and all(a == b for a, b in zip(tensor.shape, sizes, strict=True))
    torch._check(fits, lambda: f"{op}: {argument} has shape {tuple(tensor.shape)}, expected {meaning}, {tuple(sizes)}")


def _check(
    op: str,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
) -> torch.dtype:
    """The kernels' checks; returns the dtype of the state."""
    check_floating(op, "u", u)
    torch._check(u.dim() == 3, lambda: f"{op}: u has shape {tuple(u.shape)}, expected (batch, channels, length)")
    batch, channels, length = u.shape
    wide = torch.promote_types(u.dtype, torch.float32)
    narrow_like, wide_like = (u.dtype, u.device), (wide, u.device)
    check_like(op, "delta", delta, "u", u)
    torch._check(
        A.dim() == 2 and A.shape[1] >= 1 and A.shape[1] <= MAX_STATES,
        lambda: f"{op}: A has shape {tuple(A.shape)}, expected (channels, states) with 1 to {MAX_STATES} states",
    )
    states = A.shape[1]
    expect(op, "A", A, "(channels, states)", (channels, states), wide_like)
    torch._check(
        B.dim() == 4 and B.shape[1] >= 1 and channels % B.shape[1] == 0,
        lambda: f"{op}: B has shape {tuple(B.shape)}, expected (batch, groups, states, length) with groups that "
        f"divide the {channels} channels",
    )
    for name, matrix in (("B", B), ("C", C)):
        sizes = (batch, B.shape[1], states, length)
        expect(op, name, matrix, "(batch, groups, states, length)", sizes, narrow_like)
    for name, vector in (("D", D), ("delta_bias", delta_bias)):
        if vector is not None:
            expect(op, name, vector, "one value a channel", (channels,), wide_like)
    if z is not None:
        check_like(op, "z", z, "u", u)
    if initial_state is not None:
        expect(op, "initial_state", initial_state, "(batch, channels, states)", (batch, channels, states), wide_like)
    return wide


def _fake(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _check("selective_scan", u, delta, A, B, C, D, z, delta_bias, initial_state)
    return u.new_empty(u.shape), u.new_empty((u.shape[0], u.shape[1], A.shape[1]), dtype=wide)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.delta_softplus, initial_state = inputs
    ctx.save_for_backward(*tensors, initial_state)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor | None, grad_final: torch.Tensor | None) -> tuple[Any, ...]:
    *tensors, initial_state = ctx.saved_tensors
    if grad is None and grad_final is None:
        return (None,) * 10
    grad = torch.zeros_like(tensors[0]) if grad is None else grad
    found = _backward_op(grad, grad_final, *tensors, ctx.delta_softplus, initial_state)
    u, delta, A, B, C, D, z, delta_bias, start = found
    given = (*tensors[5:], initial_state)
    optional = [None if g is None else f for g, f in zip(given, (D, z, delta_bias, start), strict=True)]
    return (u, delta, A, B, C, *optional[:3], None, optional[3])


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_groups(_op, info.batch_size, in_dims, args, _KINDS, ("row", "state"))


# How a tensor takes part: rows (batch, channels, ...), matrices (batch, groups, ...), values a channel.
_KINDS = ("row", "row", "channel", "matrix", "matrix", "channel", "row", "channel", "flag", "state")
_AXIS = {"row": 1, "state": 1, "matrix": 1, "channel": 0}


def map_groups(
    op: Any,
    size: int,
    in_dims: tuple[Any, ...],
    args: tuple[Any, ...],
    kinds: tuple[str, ...],
    outputs: tuple[str, ...],
) -> tuple[Any, tuple[int, ...]]:
    """A vmap rule by more groups of channels: every channel has an A of its own, every group a B and a C."""
    return fold_mapped(op, size, in_dims, args, kinds, outputs, _AXIS.get)


def sharding_rule(kinds: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    """Sharding over the batch (gradients of what a channel owns are partial sums), or over the channels where every
    rank keeps whole groups or all of a single one's matrices (whose gradients are then partial sums)."""

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        def place(kind: str, over: str | None, output: bool) -> Any:
            if over is None:
                return Replicate()
            if over == "batch":
                return (Partial() if output else Replicate()) if kind == "channel" else Shard(0)
            if kind == "matrix" and single:
                return Partial() if output else Replicate()
            return Shard(_AXIS[kind])

        single = args[kinds.index("matrix")].shape[1] == 1
        return [
            (
                [place(kind, over, True) for kind in outputs],
                [
                    None if k == "flag" or a is None else place(k, over, False)
                    for k, a in zip(kinds, args, strict=False)
                ],
            )
            for over in (None, "batch", "channels")
        ]

    return rule


def cost(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
) -> Cost:
    """Every input once and every output once; an exponential and six operations a step, channel and state."""
    inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    moved = sum(t.numel() * t.element_size() for t in inputs if t is not None)
    states = u.shape[0] * A.numel() * A.element_size()
    work = u.numel() * A.shape[1]
    gates = u.numel() * (2 * int(delta_softplus) + int(z is not None))
    return Cost(moved + u.numel() * u.element_size() + states, 6 * work, work + gates)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Groups, state sizes, states passed on, lengths that divide nothing, and decays near zero and near one."""
    maker = Maker(device, dtype, seed=9)
    wide = Maker(device, torch.promote_types(dtype, torch.float32), seed=10)

    def sample(
        name: str,
        batch: int,
        channels: int,
        length: int,
        states: int,
        groups: int = 1,
        *,
        D: bool = True,
        z: bool = True,
        bias: bool = True,
        softplus: bool = True,
        state: bool = True,
        scale: float = 1.0,
        family: str = "",
    ) -> Sample:
        row = (batch, channels, length)
        matrix = (batch, groups, states, length)
        args = (
            maker.normal(*row),
            maker.normal(*row) if softplus else maker.uniform(*row, high=0.5),
            -scale * wide.uniform(channels, states, low=0.2, high=2.0),
            maker.normal(*matrix),
            maker.normal(*matrix),
            wide.normal(channels) if D else None,
            maker.normal(*row) if z else None,
            wide.normal(channels, scale=0.3) if bias else None,
            softplus,
            wide.normal(batch, channels, states) if state else None,
        )
        return Sample(name, args, family=family)

    yield sample("dense", 2, 4, 32, 16)
    yield sample("small", 1, 2, 3, 2)
    yield sample("small, plain", 2, 2, 4, 1, D=False, z=False, bias=False, softplus=False, state=False)
    yield sample("small, groups", 1, 4, 3, 2, 2)
    yield sample("ragged", 3, 5, 7, 3, z=False)
    yield sample("one step", 2, 3, 1, 4)
    yield sample("no step", 2, 3, 0, 4)
    yield sample("empty", 0, 3, 5, 4)
    yield sample("several tiles", 1, 70, 261, 16, 2, state=False)
    yield sample("many states", 2, 6, 37, 40, 3)
    yield sample("most states", 1, 3, 19, MAX_STATES)
    yield sample("decay near one", 1, 4, 96, 16, scale=1e-4)
    yield sample("decay near zero", 1, 4, 96, 16, scale=10.0)
    for batch, channels, length in ((2, 5, 9), (3, 7, 17), (4, 11, 6)):
        yield sample(f"{batch} by {channels} by {length}", batch, channels, length, 8, family="rows")
    args = list(sample("permuted", 3, 6, 20, 4).args)
    for index in (0, 1, 6):
        args[index] = args[index].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for index in (3, 4):
        args[index] = args[index].transpose(2, 3).contiguous().transpose(2, 3)
    yield Sample("permuted", tuple(args))
    args = list(sample("constant matrices", 2, 4, 12, 3, 4).args)
    args[3], args[4] = (wide.normal(4, 3).to(dtype)[None, :, :, None].expand(2, -1, -1, 12) for _ in range(2))
    yield Sample("expanded", tuple(args))
    args = list(sample("offset by one", 3, 6, 24, 4).args)
    for index in (0, 1, 6):
        args[index] = maker.normal(3 * 6 * 24 + 1)[1:].view(3, 6, 24)
    yield Sample("offset by one", tuple(args))


def large(device: torch.device, dtype: torch.dtype) -> tuple[Sample, Callable[[Any], None]]:
    """Over 2^31 elements; the last channels are compared, out of reach of a 32-bit index."""
    channels, length = 2**19 + 1, 4099
    wide = torch.promote_types(dtype, torch.float32)
    u = torch.ones(1, channels, length, device=device, dtype=dtype)
    u[:, -2:] = Maker(device, dtype).normal(1, 2, length)
    delta = torch.full_like(u, 0.25)
    decay = torch.linspace(-2, -0.5, channels, device=device, dtype=wide).unsqueeze(1)
    matrices = [Maker(device, dtype, seed=seed).normal(1, 1, 1, length) for seed in (1, 2)]

    def check(found: tuple[torch.Tensor, torch.Tensor]) -> None:
        last: tuple[Any, ...] = (u[:, -2:], delta[:, -2:], decay[-2:], *matrices, None, None, None, False, None)
        wanted = reference(*last)
        exact = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(found[0][:, -2:], wanted[0], rtol=exact, atol=exact)
        torch.testing.assert_close(found[1][:, -2:], wanted[1], rtol=1e-5, atol=1e-5)

    return Sample("over 2^31 elements", (u, delta, decay, *matrices, None, None, None, False, None)), check


def reference_backward(grad: torch.Tensor, grad_final: torch.Tensor | None, *inputs: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of the reference with respect to every tensor, there or not, in the order of the arguments."""
    return _gradients(reference, grad, grad_final, *inputs)


def _gradients(
    function: Callable[..., Any], grad: torch.Tensor, grad_final: torch.Tensor | None, *inputs: Any
) -> tuple[torch.Tensor, ...]:
    u, delta, A, B, C, D, z, delta_bias, softplus, initial_state = inputs
    zeros = A.new_zeros(A.shape[0])
    filled = (
        u,
        delta,
        A,
        B,
        C,
        zeros if D is None else D,
        z,
        zeros if delta_bias is None else delta_bias,
        softplus,
        A.new_zeros(u.shape[0], *A.shape) if initial_state is None else initial_state,
    )
    found = list(vector_jacobian_product(function, filled, (grad, grad_final)))
    del found[8]
    given = [*filled[:6], u if z is None else z, filled[7], filled[9]]
    return tuple(
        torch.zeros_like(g, memory_format=torch.contiguous_format) if f is None else f.contiguous()
        for f, g in zip(found, given, strict=True)
    )


def _backward_fake(
    grad: torch.Tensor,
    grad_final: torch.Tensor | None,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    op = "selective_scan_backward"
    wide = _check(op, u, delta, A, B, C, D, z, delta_bias, initial_state)
    check_like(op, "grad", grad, "u", u)
    state = (u.shape[0], u.shape[1], A.shape[1])
    if grad_final is not None:
        expect(op, "grad_final", grad_final, "(batch, channels, states)", state, (wide, u.device))
    row, channel = u.shape, (u.shape[1],)
    return (
        u.new_empty(row),
        u.new_empty(row),
        A.new_empty(A.shape),
        B.new_empty(B.shape),
        C.new_empty(C.shape),
        A.new_empty(channel),
        u.new_empty(row),
        A.new_empty(channel),
        A.new_empty(state),
    )


def _setup_backward_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.delta_softplus, initial_state = inputs
    ctx.save_for_backward(*tensors, initial_state)


def _double_backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *tensors, initial_state = ctx.saved_tensors
    # The reference with linear_scan in it: one graph for every length, which the reference's own prefix is not.
    inputs = (*tensors, ctx.delta_softplus, initial_state)
    return vector_jacobian_product(partial(_gradients, partial(_scanned, linear_scan)), inputs, grads)


_GRADIENT_KINDS = ("row", "row", "channel", "matrix", "matrix", "channel", "row", "channel", "state")


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_groups(_backward_op, info.batch_size, in_dims, args, ("row", "state", *_KINDS), _GRADIENT_KINDS)


def backward_cost(grad: torch.Tensor, grad_final: torch.Tensor | None, *inputs: Any) -> Cost:
    """The forward's inputs and the gradient once, a gradient of each once; the states are computed again."""
    forward = cost(*inputs)
    u, _, A, B = inputs[:4]
    gradients = 4 * u.numel() + 2 * B.numel()
    wide = A.numel() + 2 * A.shape[0] + 2 * u.shape[0] * A.numel()
    more = gradients * u.element_size() + wide * A.element_size()
    return Cost(forward.bytes + more, 4 * forward.flops, 2 * forward.exponentials)


def backward_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The forward's samples, with and without a gradient of the final state; gradients dense, expanded, permuted."""
    maker = Maker(device, dtype, seed=11)
    wide = Maker(device, torch.promote_types(dtype, torch.float32), seed=12)
    for index, sample in enumerate(samples(device, dtype)):
        u, A = sample.args[0], sample.args[2]
        final = wide.normal(u.shape[0], *A.shape) if index % 3 or sample.family else None
        yield Sample(sample.name, (maker.normal(*u.shape), final, *sample.args), family=sample.family)
    args = next(samples(device, dtype)).args
    shape = args[0].shape
    yield Sample("gradient of a sum", (maker.normal().expand(shape), None, *args))
    yield Sample("gradient transposed", (maker.normal(*reversed(shape)).permute(2, 1, 0), None, *args))


bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap, tags=("flexible_layout",))
bind(
    _backward_op,
    fake=_backward_fake,
    backward=_double_backward,
    setup_context=_setup_backward_context,
    vmap=_backward_vmap,
    tags=("flexible_layout",),
)
shard(_op, sharding_rule(_KINDS, ("row", "state")))
shard(_backward_op, sharding_rule(("row", "state", *_KINDS), _GRADIENT_KINDS))

SPEC = register(
    OpSpec(
        _op, reference, samples=samples, cost=cost, public=apply, backward=_backward_op, large=large, owner="opgraft"
    )
)
BACKWARD_SPEC = register(
    OpSpec(_backward_op, reference_backward, samples=backward_samples, cost=backward_cost, owner="opgraft")
)
