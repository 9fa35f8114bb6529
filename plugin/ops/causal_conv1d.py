"""Depthwise causal convolution along time with an optional SiLU: the short convolution of Mamba and of many hybrids.

y[b, c, t] = activation(bias[c] + sum_k weight[c, k] x[b, c, t - (width - 1) + k]). Two ops: one for both layouts of x,
dense channels first (batch, channels, length) or dense channels last (batch, length, channels), and one for a single
decoding step (causal_conv1d_update.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from opgraft.ops.causal_conv1d_channels import channel_rule, map_channels
from opgraft.ops.registration import (
    bind,
    bind_backward,
    call,
    check_floating,
    check_like,
    require_tensor,
    shard,
    vector_jacobian_product,
)
from opgraft.ops.samples import Maker
from opgraft.registry import Cost, OpSpec, Sample, register

_op = torch.ops.opgraft.causal_conv1d.default
_backward_op = torch.ops.opgraft.causal_conv1d_backward.default

MAX_WIDTH = 8


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: torch.Tensor | None = None,
    return_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal convolution of (batch, channels, length).

    Args:
        x: (batch, channels, length), float32, float64, float16 or bfloat16. Read at full speed where it is dense with
            either length or channels last (a transposed view of (batch, length, channels)); other strides are copied.
        weight: (channels, width), width from 1 to 8; the last tap is the current step.
        bias: (channels,).
        initial_state: (batch, channels, width - 1), the inputs before the first step; zero where it is left out.
        activation: None or ``"silu"`` (``"swish"`` is the same).
        seq_idx: (batch, length), int32: which sequence a step of a packed row belongs to. Steps see only their own
            sequence; ``initial_state`` belongs to the first one; negative numbers mark padding, whose result is 0.
        return_final_state: also return (batch, channels, width - 1), the inputs that a continuation needs.

    Returns:
        A fresh tensor of the shape and dtype of ``x``, in the layout of ``x``; sums are taken in float32 for 16-bit
        types. With ``return_final_state`` a pair.

    Raises:
        TypeError: an argument is no tensor. ValueError: an unknown activation.
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument.
    """
    require_tensor("causal_conv1d", x=x, weight=weight)
    given = {"bias": bias, "initial_state": initial_state, "seq_idx": seq_idx}
    require_tensor("causal_conv1d", **{name: value for name, value in given.items() if value is not None})
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"causal_conv1d: activation is {activation!r}, expected None or 'silu'")
    channel_last = is_channel_last(x)
    dense = x.transpose(1, 2) if channel_last else x
    out, final_state = apply(dense, weight, bias, initial_state, seq_idx, activation is not None, channel_last)
    if channel_last:
        out = out.transpose(1, 2)
    return (out, final_state) if return_final_state else out


def apply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    silu: bool,
    channel_last: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op with its own arguments: the layout is said and not looked for, and the final state is always given."""
    require_tensor("causal_conv1d", x=x, weight=weight)
    out: tuple[torch.Tensor, torch.Tensor] = call(
        _op, reference, x, weight, bias, initial_state, seq_idx, silu, channel_last
    )
    return out


def is_channel_last(x: torch.Tensor) -> bool:
    """True where (batch, channels, length) is stored as (batch, length, channels)."""
    return x.dim() == 3 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    silu: bool,
    channel_last: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning, in plain torch: a sum of shifted products in float32 (float64 for float64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = (x.transpose(1, 2) if channel_last else x).to(wide)
    batch, channels, length = rows.shape
    history = weight.shape[1] - 1
    before = rows.new_zeros(batch, channels, history) if initial_state is None else initial_state.to(wide)
    padded = torch.cat([before, rows], dim=2)
    taps = weight.to(wide)
    total = rows.new_zeros(()) if bias is None else bias.to(wide).unsqueeze(-1)
    for k in range(history + 1):
        product = taps[:, k].unsqueeze(-1) * padded[..., k : k + length]
        total = total + (product if seq_idx is None else product * _seen(seq_idx, history - k).unsqueeze(1))
    out = F.silu(total) if silu else total
    final_state = padded[..., length:]
    if seq_idx is not None:
        out = out.masked_fill(seq_idx.unsqueeze(1) < 0, 0)
        if length and history:
            seen = torch.stack([_seen(seq_idx, history - 1 - j)[:, -1] for j in range(history)], dim=1)
            final_state = final_state * seen.unsqueeze(1)
    out = out.to(x.dtype)
    return (out.transpose(1, 2) if channel_last else out).contiguous(), final_state.to(x.dtype).contiguous()


def _seen(seq_idx: torch.Tensor, back: int) -> torch.Tensor:
    """Whether each step sees the value ``back`` steps before it. What is before the row is of its first sequence."""
    first = seq_idx[:, :1].expand(-1, min(back, seq_idx.shape[1]))
    earlier = torch.cat([first, seq_idx[:, : seq_idx.shape[1] - first.shape[1]]], dim=1)
    return (earlier == seq_idx) & (seq_idx >= 0)


def _check_size(op: str, argument: str, tensor: torch.Tensor, meaning: str, wanted: tuple[Any, ...]) -> None:
    fits = tensor.dim() == len(wanted) and all(a == b for a, b in zip(tensor.shape, wanted, strict=True))
    torch._check(fits, lambda: f"{op}: {argument} has shape {tuple(tensor.shape)}, expected {meaning}, {tuple(wanted)}")


def _check_kind(op: str, argument: str, tensor: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> None:
    torch._check(tensor.dtype == dtype, lambda: f"{op}: {argument} has dtype {tensor.dtype}, expected {dtype}")
    torch._check(
        tensor.device == x.device,
        lambda: f"{op}: {argument} is on {tensor.device}, expected the device of x, {x.device}",
    )


def check_weight(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, channels: Any) -> None:
    """The kernels' checks of x's dtype, weight and bias."""
    check_floating(op, "x", x)
    _check_kind(op, "weight", weight, x, x.dtype)
    torch._check(
        weight.dim() == 2 and weight.shape[0] == channels and weight.shape[1] >= 1 and weight.shape[1] <= MAX_WIDTH,
        lambda: f"{op}: weight has shape {tuple(weight.shape)}, expected ({channels}, width) with width from 1 to "
        f"{MAX_WIDTH}",
    )
    if bias is not None:
        _check_kind(op, "bias", bias, x, x.dtype)
        _check_size(op, "bias", bias, "one value a channel", (channels,))


def _check(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    channel_last: bool,
) -> tuple[Any, Any, Any]:
    """Checks all arguments; returns batch, channels and width - 1."""
    order = "(batch, length, channels)" if channel_last else "(batch, channels, length)"
    torch._check(x.dim() == 3, lambda: f"{op}: x has shape {tuple(x.shape)}, expected {order}")
    batch, channels, length = x.shape[0], x.shape[2 if channel_last else 1], x.shape[1 if channel_last else 2]
    check_weight(op, x, weight, bias, channels)
    history = weight.shape[1] - 1
    if initial_state is not None:
        _check_kind(op, "initial_state", initial_state, x, x.dtype)
        _check_size(op, "initial_state", initial_state, "(batch, channels, width - 1)", (batch, channels, history))
    if seq_idx is not None:
        _check_kind(op, "seq_idx", seq_idx, x, torch.int32)
        _check_size(op, "seq_idx", seq_idx, "(batch, length)", (batch, length))
    return batch, channels, history


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    silu: bool,
    channel_last: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    state = _check("causal_conv1d", x, weight, bias, initial_state, seq_idx, channel_last)
    return x.new_empty(x.shape), x.new_empty(state)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.silu, ctx.channel_last = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor | None, grad_final: torch.Tensor | None) -> tuple[Any, ...]:
    x, weight, bias, initial_state, seq_idx = ctx.saved_tensors
    if grad is None and grad_final is None:
        return (None,) * 7
    grad = torch.zeros_like(x) if grad is None else grad
    inputs = (grad, grad_final, x, weight, bias, initial_state, seq_idx, ctx.silu, ctx.channel_last)
    grad_x, grad_weight, grad_bias, grad_initial = _backward_op(*inputs)
    return (
        grad_x,
        grad_weight,
        None if bias is None else grad_bias,
        None if initial_state is None else grad_initial,
        None,
        None,
        None,
    )


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_channels(_op, info.batch_size, in_dims, args, _KINDS, ("x", "state"))


_KINDS = ("x", "weight", "weight", "state", "seq_idx", "flag", "flag")


def cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    silu: bool,
    channel_last: bool,
) -> Cost:
    """One read and one write of x, the weights and the states once; a multiply-add a tap, an exponential for SiLU."""
    channels = weight.shape[0]
    states = x.shape[0] * channels * (weight.shape[1] - 1) * (1 if initial_state is None else 2)
    moved = 2 * x.numel() + weight.numel() + states + (0 if bias is None else channels)
    packed = 0 if seq_idx is None else 4 * seq_idx.numel()
    exponentials = x.numel() if silu else 0
    return Cost(moved * x.element_size() + packed, 2 * x.numel() * weight.shape[1], exponentials)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Both layouts, every width, states, packed rows, and lengths that divide nothing."""
    maker = Maker(device, dtype, seed=5)

    def sample(
        name: str,
        batch: int,
        channels: int,
        length: int,
        width: int,
        *,
        silu: bool = True,
        last: bool = False,
        bias: bool = True,
        state: bool = True,
        packed: bool = False,
        family: str = "",
    ) -> Sample:
        x = maker.normal(batch, length, channels) if last else maker.normal(batch, channels, length)
        seq_idx = (torch.arange(length, device=device) * 3 // max(length, 1)).to(torch.int32).expand(batch, length)
        args = (
            x,
            maker.normal(channels, width),
            maker.normal(channels) if bias else None,
            maker.normal(batch, channels, width - 1) if state else None,
            seq_idx.contiguous() if packed else None,
            silu,
            last,
        )
        return Sample(name, args, family=family)

    yield sample("dense", 2, 4, 32, 4)
    yield sample("dense, channels last", 2, 16, 32, 4, last=True)
    for last in (False, True):
        layout = ", channels last" if last else ""
        yield sample("ragged" + layout, 3, 5, 7, 3, last=last, silu=False)
        yield sample("shorter than the width" + layout, 2, 3, 2, 5, last=last)
        yield sample("one step" + layout, 2, 3, 1, 4, last=last)
        yield sample("no step" + layout, 2, 3, 0, 4, last=last)
        yield sample("no batch" + layout, 0, 3, 5, 4, last=last)
        yield sample("plain" + layout, 2, 3, 9, 2, last=last, bias=False, state=False, silu=False)
        yield sample("several tiles" + layout, 1, 19, 2053, 4, last=last)
        yield sample("whole tiles" + layout, 1, 12, 2064, 4, last=last)
        yield sample("packed" + layout, 2, 3, 17, 4, last=last, packed=True)
        yield sample("packed, without state" + layout, 2, 8, 300, 3, last=last, packed=True, state=False)
        for width in range(1, MAX_WIDTH + 1):
            yield sample(f"width {width}" + layout, 1, 8, 24, width, last=last, state=width % 2 == 0)
        for batch, channels, length in ((2, 5, 9), (3, 7, 17), (4, 11, 6)):
            name = f"{batch} by {channels} by {length}" + layout
            yield sample(name, batch, channels, length, 4, last=last, family="rows" + layout)
    padding = sample("packed with padding", 2, 3, 17, 4, packed=True)
    seq_idx = padding.args[4].clone()
    seq_idx[:, :2], seq_idx[1, 12:] = -1, -1
    yield Sample(padding.name, (*padding.args[:4], seq_idx, *padding.args[5:]))
    x, weight, bias, state, *rest = sample("permuted", 3, 6, 20, 4).args
    yield Sample("permuted", (x.permute(2, 0, 1).contiguous().permute(1, 2, 0), weight, bias, state, *rest))
    yield Sample("sliced", (maker.normal(3, 6, 31)[..., 5:25], weight, bias, state, *rest))
    yield Sample("offset by one", (maker.normal(3 * 6 * 24 + 1)[1:].view(3, 6, 24), weight, bias, state, *rest))
    yield Sample("expanded", (maker.normal(1, 6, 1).expand(3, 6, 20), weight, bias, state, *rest))


def large(device: torch.device, dtype: torch.dtype) -> tuple[Sample, Callable[[Any], None]]:
    """Over 2^31 elements; the last channels are compared, out of reach of a 32-bit index."""
    channels, length = 2**19 + 1, 4099
    x = torch.ones(1, channels, length, device=device, dtype=dtype)
    x[:, -2:] = Maker(device, dtype).normal(1, 2, length)
    weight, bias = Maker(device, dtype, seed=1).normal(channels, 4), Maker(device, dtype, seed=2).normal(channels)

    def check(found: tuple[torch.Tensor, torch.Tensor]) -> None:
        wanted = reference(x[:, -2:], weight[-2:], bias[-2:], None, None, True, False)
        torch.testing.assert_close((found[0][:, -2:], found[1][:, -2:]), wanted)

    return Sample("over 2^31 elements", (x, weight, bias, None, None, True, False)), check


def reference_backward(
    grad: torch.Tensor, grad_final: torch.Tensor | None, *inputs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the reference with respect to x, weight, bias and initial_state, there or not."""
    x, weight, bias, initial_state, *rest = inputs
    channels = weight.shape[0]
    bias = x.new_zeros(channels) if bias is None else bias
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0], channels, weight.shape[1] - 1)
    found = vector_jacobian_product(reference, (x, weight, bias, initial_state, *rest), (grad, grad_final))[:4]
    given = (x, weight, bias, initial_state)
    one, two, three, four = (
        torch.zeros_like(g) if f is None else f.contiguous() for f, g in zip(found, given, strict=True)
    )
    return one, two, three, four


def _backward_fake(
    grad: torch.Tensor,
    grad_final: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    silu: bool,
    channel_last: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    op = "causal_conv1d_backward"
    state = _check(op, x, weight, bias, initial_state, seq_idx, channel_last)
    check_like(op, "grad", grad, "x", x)
    if grad_final is not None:
        _check_kind(op, "grad_final", grad_final, x, x.dtype)
        _check_size(op, "grad_final", grad_final, "(batch, channels, width - 1)", state)
    return x.new_empty(x.shape), x.new_empty(weight.shape), x.new_empty((state[1],)), x.new_empty(state)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    outputs = ("x", "weight", "weight", "state")
    return map_channels(_backward_op, info.batch_size, in_dims, args, ("x", "state", *_KINDS), outputs)


def backward_cost(grad: torch.Tensor, grad_final: torch.Tensor | None, *inputs: Any) -> Cost:
    """Two reads and one write of x's size; three multiply-adds a tap; an exponential for SiLU."""
    forward = cost(*inputs)
    x, weight = inputs[:2]
    states = x.shape[0] * weight.shape[0] * (weight.shape[1] - 1)
    more = x.numel() + weight.numel() + weight.shape[0] + states
    return Cost(forward.bytes + more * x.element_size(), 3 * forward.flops, forward.exponentials)


def backward_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The forward's samples, with and without a gradient of the final state; gradients dense, expanded, permuted."""
    maker = Maker(device, dtype, seed=16)
    for index, sample in enumerate(samples(device, dtype)):
        x, weight = sample.args[:2]
        final = maker.normal(x.shape[0], weight.shape[0], weight.shape[1] - 1) if index % 3 or sample.family else None
        yield Sample(sample.name, (maker.normal(*x.shape), final, *sample.args), family=sample.family)
    args = next(samples(device, dtype)).args
    shape = args[0].shape
    yield Sample("gradient of a sum", (maker.normal().expand(shape), None, *args))
    yield Sample("gradient transposed", (maker.normal(*reversed(shape)).permute(2, 1, 0), None, *args))


bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap)
bind_backward(_backward_op, reference_backward, fake=_backward_fake, vmap=_backward_vmap)
shard(_op, channel_rule(_KINDS, ("x", "state")))
shard(_backward_op, channel_rule(("x", "state", *_KINDS), ("x", "weight", "weight", "state")))

SPEC = register(
    OpSpec(
        _op,
        reference,
        samples=samples,
        cost=cost,
        public=apply,
        backward=_backward_op,
        large=large,
        owner="opgraft",
    )
)
BACKWARD_SPEC = register(
    OpSpec(_backward_op, reference_backward, samples=backward_samples, cost=backward_cost, owner="opgraft")
)
