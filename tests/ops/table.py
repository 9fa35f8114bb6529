"""The table of ops as test parameters, and what the tests ask of tensors in general."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

import opgraft  # noqa: F401  (fills the table)
from opgraft.registry import OpSpec, Sample, specs

SPECS = specs("opgraft")
every_op = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name.partition("::")[2])
differentiable_op = pytest.mark.parametrize(
    "spec", [s for s in SPECS if s.backward is not None], ids=lambda spec: spec.name.partition("::")[2]
)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:]
)


def calls(spec: OpSpec, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Sample]:
    assert spec.samples is not None, f"{spec.name} has no samples"
    return list(spec.samples(device, dtype))


def families(spec: OpSpec, device: torch.device) -> dict[str, list[Sample]]:
    """Samples by family. Every op must give at least one family of three sizes."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in calls(spec, device):
        if sample.family:
            found[sample.family].append(sample)
    assert any(len(members) >= 3 for members in found.values()), f"{spec.name} has no family of three sizes"
    return found


def map_tensors(function: Any, value: Any) -> Any:
    """Applies ``function`` to every tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(lambda t: found.append(t) or t, value)
    return found


def to_double(value: Any) -> Any:
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, value)


def differentiable(value: Any) -> Any:
    """Detached copies that require a gradient where they can, in the same layout."""
    return map_tensors(lambda t: t.detach().clone().requires_grad_() if t.is_floating_point() else t, value)


def same_layout(value: Any) -> Any:
    """Views of fresh storage with the strides and offset of the originals."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.new_empty(tensor.untyped_storage().nbytes() // tensor.element_size())
        storage.copy_(tensor.as_strided((storage.numel(),), (1,), 0))
        return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return map_tensors(copy, value)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats, for which torch has few kernels, as float32, which holds every value of theirs."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal element by element, NaN with NaN too."""
    return torch.allclose(widened(one), widened(other), rtol=0, atol=0, equal_nan=True)


def worst_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute difference; infinity where one is not finite and the other differs."""
    return largest_difference(found, exact).item()


def largest_difference(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The same as a tensor, for which nobody waits."""
    found, exact = found.double(), exact.double()
    if not found.numel():
        return found.new_zeros(())
    agree = (found == exact) | (found.isnan() & exact.isnan())
    difference = torch.where(agree, 0.0, (found - exact).abs())
    return torch.where(difference.isnan(), torch.inf, difference).max()


def assert_as_exact_as_reference(spec: OpSpec, found: Any, reference: Any, exact: Any, what: str) -> None:
    """The op may err by twice what the reference errs in the same dtype, plus a few roundings of the result's size."""
    for index, (got, own, true) in enumerate(zip(tensors(found), tensors(reference), tensors(exact), strict=True)):
        true = widened(true)
        finite = true[true.isfinite()]
        scale = finite.abs().max().item() if finite.numel() else 0.0
        rounding = torch.finfo(got.dtype).eps * scale if got.is_floating_point() else 0.0
        # What the dtype cannot hold is compared as the dtype holds it.
        true = true.to(got.dtype).double()
        # In float64 the exact result is the reference's own, so its rounding has to be allowed for as well.
        roundings = 16 if got.dtype == torch.float64 else 4
        allowed = 2 * worst_error(own, true) + roundings * rounding
        error = worst_error(got, true)
        assert error <= allowed, f"{spec.name}, {what}, output {index}: error {error:.3g}, allowed {allowed:.3g}"
