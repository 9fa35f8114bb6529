"""Calls of other people's ops, where guesses do not fit: ``opgraft doctor --import tests/conform/others.py``.

Imports whichever of torchvision, fbgemm_gpu and torch_scatter is installed and gives its ops a record with samples.
There is no reference beside the op itself, so values are compared with themselves only.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator

import torch

from opgraft.registry import Sample, describe, resolve


def boxes(device: torch.device) -> torch.Tensor:
    corners = torch.tensor([[0.0, 0.0, 0.0, 6.0, 6.0], [1.0, 1.0, 2.0, 7.0, 5.0], [1.0, 0.5, 0.5, 5.5, 6.5]])
    return corners.to(device)


def record(name: str, *calls: tuple[object, ...]) -> None:
    """Records the op with these calls, where it is registered."""

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for index, call in enumerate(calls):
            yield Sample(f"call {index}", tuple(part(device) if callable(part) else part for part in call))

    with contextlib.suppress(LookupError):
        op = resolve(name)
        describe(op, op, samples=samples, dtypes=(torch.float32,), owner=name.partition("::")[0])


def randn(*shape: int) -> Callable[[torch.device], torch.Tensor]:
    return lambda device: torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


def ints(*values: int) -> Callable[[torch.device], torch.Tensor]:
    return lambda device: torch.tensor(values, device=device)


def narrow(*values: int) -> Callable[[torch.device], torch.Tensor]:
    return lambda device: torch.tensor(values, device=device, dtype=torch.int32)


for _module in ("torchvision", "fbgemm_gpu", "torch_scatter"):
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        importlib.import_module(_module)

_image = randn(2, 4, 8, 8)
record("torchvision::nms", (lambda d: boxes(d)[:, 1:], ints(3, 1, 2), 0.5), (lambda d: boxes(d)[:, 1:], randn(3), 0.5))
record("torchvision::roi_align", (_image, boxes, 1.0, 2, 2, 2, False), (_image, boxes, 0.5, 3, 2, -1, True))
record("torchvision::roi_pool", (_image, boxes, 1.0, 2, 2))
record("torchvision::ps_roi_align", (_image, boxes, 1.0, 2, 2, 2))
record("torchvision::ps_roi_pool", (_image, boxes, 1.0, 2, 2))
record(
    "torchvision::deform_conv2d",
    (randn(1, 2, 6, 6), randn(3, 2, 3, 3), randn(1, 18, 4, 4), randn(1, 9, 4, 4), randn(3),
     1, 1, 0, 0, 1, 1, 1, 1, True),
)  # fmt: skip
for _name in ("asynchronous_complete_cumsum", "asynchronous_exclusive_cumsum", "asynchronous_inclusive_cumsum"):
    record(f"fbgemm::{_name}", (ints(3, 0, 2, 5),))
record("fbgemm::jagged_to_padded_dense", (randn(10, 4), lambda d: [ints(0, 3, 3, 5, 10)(d)], [5], 0.0))
record("fbgemm::dense_to_jagged", (randn(4, 5, 4), lambda d: [ints(0, 3, 3, 5, 10)(d)], None))
record("fbgemm::permute_1D_sparse_data", (narrow(2, 0, 1), ints(1, 2, 3), ints(4, 5, 6, 7, 8, 9), None, None))
record("fbgemm::segment_sum_csr", (1, ints(0, 2, 5), randn(5)))
record("fbgemm::FloatToFused8BitRowwiseQuantized", (randn(4, 8),))
record("fbgemm::FloatToFP8RowwiseQuantized", (randn(4, 8), True))
record("fbgemm::batch_index_select_dim0_tensor", (randn(20), ints(0, 1, 1), ints(1, 2), ints(2, 2), ints(5, 5), False))
record("fbgemm::expand_into_jagged_permute", (ints(1, 0), ints(0, 2, 5), ints(0, 3, 5), 5))
record("fbgemm::invert_permute", (ints(2, 0, 1),))
record("fbgemm::pack_segments", (randn(6, 3), ints(2, 1, 3), 3))
record("fbgemm::segment_csr", (randn(6, 3), ints(0, 2, 6)))
record(
    "torch_scatter::scatter_sum", (randn(6, 4), lambda d: ints(0, 1, 1, 0, 2, 2)(d)[:, None].expand(6, 4), 0, None, 3)
)
record(
    "torch_scatter::scatter_max", (randn(6, 4), lambda d: ints(0, 1, 1, 0, 2, 2)(d)[:, None].expand(6, 4), 0, None, 3)
)
record("torch_scatter::segment_sum_csr", (randn(6, 4), ints(0, 2, 6), None))
record("torch_scatter::gather_csr", (randn(2, 4), ints(0, 2, 6), None))
