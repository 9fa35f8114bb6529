"""One decoding step of causal_conv1d: the state holds the last inputs, the oldest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from opgraft.ops.causal_conv1d import check_weight
from opgraft.ops.causal_conv1d_channels import map_channels
from opgraft.ops.registration import bind, call, meet, require_tensor, shard, vector_jacobian_product
from opgraft.ops.samples import Maker
from opgraft.registry import Cost, OpSpec, Sample, register

_op = torch.ops.opgraft.causal_conv1d_update.default
_in_place_op = torch.ops.opgraft.causal_conv1d_update_.default


def causal_conv1d_update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the convolution, without touching ``state``.

    Args:
        x: (batch, channels), the step's input.
        state: (batch, channels, steps), the inputs before it, at least width - 1 of them.
        weight: (channels, width). bias: (channels,). activation: None or ``"silu"``.

    Returns:
        The step's output, (batch, channels), and the state for the next step, of the shape of ``state``.

    Raises:
        TypeError: an argument is no tensor. ValueError: an unknown activation.
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument.
    """
    silu = _validate("causal_conv1d_update", x, state, weight, bias, activation)
    out, next_state = call(_op, reference, x, state, weight, bias, silu)
    return out, next_state


def causal_conv1d_update_(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """The same, with ``state`` replaced by the next one in its own memory; returns the step's output. No gradient."""
    silu = _validate("causal_conv1d_update_", x, state, weight, bias, activation)
    out: torch.Tensor = _in_place_op(x, state, weight, bias, silu)
    return out


def _validate(
    op: str,
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> bool:
    require_tensor(op, x=x, state=state, weight=weight, **({} if bias is None else {"bias": bias}))
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{op}: activation is {activation!r}, expected None or 'silu'")
    meet(x, state, weight, bias)
    return activation is not None


def reference(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning, in plain torch, in float32 (float64 for float64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    width = weight.shape[1]
    kept = torch.cat([state, x.unsqueeze(-1)], dim=-1)
    total = (kept[..., kept.shape[-1] - width :].to(wide) * weight.to(wide)).sum(-1)
    if bias is not None:
        total = total + bias.to(wide)
    out = F.silu(total) if silu else total
    return out.to(x.dtype).contiguous(), kept[..., 1:].clone(memory_format=torch.contiguous_format)


def _check(op: str, x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    torch._check(x.dim() == 2, lambda: f"{op}: x has shape {tuple(x.shape)}, expected (batch, channels)")
    check_weight(op, x, weight, bias, x.shape[1])
    torch._check(
        state.dtype == x.dtype and state.device == x.device,
        lambda: f"{op}: state is {state.dtype} on {state.device}, expected {x.dtype} on {x.device}",
    )
    fits = (
        state.dim() == 3
        and state.shape[0] == x.shape[0]
        and state.shape[1] == x.shape[1]
        and state.shape[2] >= weight.shape[1] - 1
    )
    torch._check(
        fits,
        lambda: f"{op}: state has shape {tuple(state.shape)}, expected {(*x.shape, 'steps')} with at least width - 1 "
        f"steps, {weight.shape[1] - 1}",
    )


def _fake(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    _check("causal_conv1d_update", x, state, weight, bias)
    return x.new_empty(x.shape), state.new_empty(state.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return vector_jacobian_product(reference, (*ctx.saved_tensors, ctx.silu), grads)


_KINDS = ("step", "state", "weight", "weight", "flag")


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_channels(_op, info.batch_size, in_dims, args, _KINDS, ("step", "state"))


def _rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
    from torch.distributed.tensor import Replicate, Shard

    found = []
    for over in (None, 0, 1):
        row = Replicate() if over is None else Shard(over)
        weight = Shard(0) if over == 1 else Replicate()
        found.append(([row, row], [row, row, weight, None if args[3] is None else weight, None]))
    return found


def cost(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> Cost:
    """The state once in and once out, x, y and the weights once."""
    moved = 2 * state.numel() + 2 * x.numel() + weight.numel() + (0 if bias is None else bias.numel())
    return Cost(moved * x.element_size(), 2 * x.numel() * weight.shape[1], x.numel() if silu else 0)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every width, states that are longer than needed, strided states, empty batches."""
    maker = Maker(device, dtype, seed=21)

    def sample(
        name: str, batch: int, channels: int, width: int, steps: int, bias: bool = True, family: str = ""
    ) -> Sample:
        given = (maker.normal(batch, channels), maker.normal(batch, channels, steps), maker.normal(channels, width))
        return Sample(name, (*given, maker.normal(channels) if bias else None, width % 2 == 0), family=family)

    yield sample("dense", 2, 6, 4, 3)
    yield sample("ragged", 3, 5, 3, 7, bias=False)
    yield sample("width one", 2, 3, 1, 2)
    yield sample("one channel", 1, 1, 2, 1)
    yield sample("widest", 2, 9, 8, 8)
    yield sample("no batch", 0, 4, 4, 3)
    for batch, channels in ((2, 5), (4, 7), (6, 11)):
        yield sample(f"{batch} by {channels}", batch, channels, 4, 3, family="rows")
    x, state, weight, bias, silu = sample("permuted", 3, 6, 4, 4).args
    yield Sample(
        "permuted", (x.t().contiguous().t(), state.transpose(1, 2).contiguous().transpose(1, 2), weight, bias, silu)
    )


def _in_place_fake(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    _check("causal_conv1d_update_", x, state, weight, bias)
    return x.new_empty(x.shape)


bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap)
torch.library.register_fake("opgraft::causal_conv1d_update_", _in_place_fake)
shard(_op, _rule)

SPEC = register(OpSpec(_op, reference, samples=samples, cost=cost, owner="opgraft"))
