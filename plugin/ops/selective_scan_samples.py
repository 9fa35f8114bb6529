"""Inputs that selective_scan and its gradients are tested with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from opgraft.ops.samples import Maker
from opgraft.ops.selective_scan_reference import reference
from opgraft.ops.selective_scan_rules import MAX_STATES
from opgraft.registry import Sample


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
