"""Fakes, schemas, meta device, vmap, autocast and errors: what makes an op a first-class citizen before any compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from opgraft.registry import OpSpec, Sample

from table import calls, differentiable, every_dtype, every_op, map_tensors, same_layout, tensors, widened

pytestmark = pytest.mark.core


def _assert_described_alike(fake: Any, real: Any, what: str) -> None:
    for said, is_ in zip(tensors(fake), tensors(real), strict=True):
        assert said.shape == is_.shape, what
        assert said.stride() == is_.stride(), f"{what}: fake says strides {said.stride()}, the kernel {is_.stride()}"
        assert said.storage_offset() == is_.storage_offset(), what
        assert said.dtype == is_.dtype, what
        assert said.layout == is_.layout, what


@every_op
@every_dtype
def test_the_fake_says_what_the_kernel_does(spec: OpSpec, dtype: torch.dtype, device: torch.device) -> None:
    for sample in calls(spec, device, dtype):
        real = spec.op(*sample.args, **sample.kwargs)
        with FakeTensorMode() as mode:
            args, kwargs = map_tensors(mode.from_tensor, (sample.args, sample.kwargs))
            fake = spec.op(*args, **kwargs)
        _assert_described_alike(fake, real, f"{spec.name}, {sample.name}")
        assert [t.device for t in tensors(fake)] == [t.device for t in tensors(real)]


@every_op
def test_outputs_are_fresh_and_contiguous(spec: OpSpec, device: torch.device) -> None:
    for sample in calls(spec, device):
        inputs = {t.untyped_storage().data_ptr() for t in tensors((sample.args, sample.kwargs)) if t.numel()}
        for out in tensors(spec.op(*sample.args, **sample.kwargs)):
            assert out.is_contiguous(), sample.name
            assert not out.numel() or out.untyped_storage().data_ptr() not in inputs, sample.name


@every_op
def test_meta_device(spec: OpSpec) -> None:
    for sample in calls(spec, torch.device("cpu")):
        real = spec.op(*sample.args, **sample.kwargs)
        args, kwargs = map_tensors(lambda t: t.to("meta"), (sample.args, sample.kwargs))
        found = spec.op(*args, **kwargs)
        _assert_described_alike(found, real, f"{spec.name}, {sample.name}")
        assert all(t.device.type == "meta" for t in tensors(found))


@every_op
def test_opcheck(spec: OpSpec, device: torch.device) -> None:
    for sample in calls(spec, device):
        args, kwargs = same_layout(sample.args), same_layout(sample.kwargs)
        if not any(0 in t.stride() and t.numel() for t in tensors((args, kwargs))):  # opcheck writes its inputs
            args, kwargs = differentiable(args), differentiable(kwargs)
        torch.library.opcheck(spec.op, args, kwargs, test_utils=("test_schema", "test_autograd_registration"))
        torch.library.opcheck(spec.op, args, kwargs, test_utils="test_faketensor")


@every_op
def test_opcheck_through_aot_autograd_with_dynamic_sizes(spec: OpSpec, device: torch.device) -> None:
    for sample in calls(spec, device):
        if sample.family or sample.name in ("dense", "permuted"):
            args, kwargs = sample.args, sample.kwargs
            # For a gradient opcheck sums every output, which torch cannot do with 8-bit floats.
            if all(out is widened(out) for out in tensors(spec.op(*args, **kwargs))):
                args, kwargs = differentiable(args), differentiable(kwargs)
            torch.library.opcheck(spec.op, args, kwargs, test_utils="test_aot_dispatch_dynamic")


@every_op
def test_the_layout_tag_is_explicit(spec: OpSpec) -> None:
    from torch._library.utils import get_layout_constraint_tag

    assert get_layout_constraint_tag(spec.op, with_default=False) is not None
    assert torch.Tag.pt2_compliant_tag in spec.op.tags


def _stack(sample: Sample, dims: tuple[int | None, ...], copies: int) -> tuple[Any, ...]:
    stacked, index = [], 0
    for value in sample.args:
        if isinstance(value, torch.Tensor):
            dim = dims[index]
            index += 1
            if dim is not None:
                scale = torch.arange(1, copies + 1, dtype=torch.float64)
                parts = [
                    (value * s.to(value.device, value.dtype)) if value.is_floating_point() else value for s in scale
                ]
                value = torch.stack(parts, dim=dim)
        stacked.append(value)
    return tuple(stacked)


@every_op
def test_vmap_equals_a_loop(spec: OpSpec, device: torch.device) -> None:
    copies = 3
    for sample in [s for s in calls(spec, device) if s.family or s.name in ("dense", "permuted", "ragged")]:
        count = len(tensors(sample.args))
        choices: list[tuple[int | None, ...]] = [(0,) * count, (-1,) * count]
        choices += [tuple(0 if i == j else None for i in range(count)) for j in range(count) if count > 1]
        for dims in choices:
            args = _stack(sample, dims, copies)
            per_arg = iter(dims)
            in_dims = tuple(next(per_arg) if isinstance(v, torch.Tensor) else None for v in sample.args)
            found = torch.vmap(lambda *a, s=sample: spec.op(*a, **s.kwargs), in_dims=in_dims)(*args)
            for index in range(copies):
                one = tuple(v.select(d, index) if d is not None else v for v, d in zip(args, in_dims, strict=True))
                for got, want in zip(tensors(found), tensors(spec.op(*one, **sample.kwargs)), strict=True):
                    got, want = widened(got[index]), widened(want)
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=f"{sample.name}, {in_dims}")


@every_op
def test_autocast_changes_no_dtype(spec: OpSpec, device: torch.device) -> None:
    sample = calls(spec, device)[0]
    plain = spec.op(*sample.args, **sample.kwargs)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        cast = spec.op(*sample.args, **sample.kwargs)
    assert [t.dtype for t in tensors(plain)] == [t.dtype for t in tensors(cast)]


@every_op
def test_a_wrong_dtype_is_refused_by_name(spec: OpSpec, device: torch.device) -> None:
    sample = calls(spec, device)[0]
    for index, value in enumerate(sample.args):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            for wrong in (torch.int64, torch.complex64):
                args = [*sample.args[:index], value.to(wrong), *sample.args[index + 1 :]]
                with pytest.raises(RuntimeError, match=spec.op._schema.name.partition("::")[2]):
                    spec.op(*args, **sample.kwargs)
                with pytest.raises(RuntimeError, match=spec.op._schema.name.partition("::")[2]):
                    spec.op(*map_tensors(lambda t: t.to("meta"), args), **sample.kwargs)


@every_op
def test_a_wrong_device_or_shape_is_refused_by_name(spec: OpSpec, device: torch.device) -> None:
    sample = calls(spec, device)[0]
    places = [i for i, value in enumerate(sample.args) if isinstance(value, torch.Tensor)]
    name = spec.op._schema.name.partition("::")[2]
    for index in places if len(places) > 1 else ():
        args = list(sample.args)
        args[index] = args[index].to("meta")
        with pytest.raises(RuntimeError, match=name):
            spec.op(*args, **sample.kwargs)
        args[index] = sample.args[index].unsqueeze(0).repeat_interleave(2, 0)
        with pytest.raises(RuntimeError, match=name):
            spec.op(*args, **sample.kwargs)


@every_op
def test_no_tensor_at_all_is_refused(spec: OpSpec) -> None:
    sample = calls(spec, torch.device("cpu"))[0]
    for wrong in ("text", 1.5, None, [1.0, 2.0]):
        if spec.public is not None:
            with pytest.raises(TypeError, match=f"{spec.name.partition('::')[2]}: .* expected a Tensor"):
                spec.public(wrong, *sample.args[1:], **sample.kwargs)
        with pytest.raises((TypeError, RuntimeError)):
            spec.op(wrong, *sample.args[1:], **sample.kwargs)


@every_op
def test_cost_counts_bytes(spec: OpSpec) -> None:
    assert spec.cost is not None
    for sample in calls(spec, torch.device("cpu")):
        found = spec.cost(*sample.args, **sample.kwargs)
        moved = sum(t.numel() * t.element_size() for t in tensors(spec.op(*sample.args, **sample.kwargs)))
        assert found.bytes >= moved, f"{sample.name}: cost says less than the outputs' own bytes"
