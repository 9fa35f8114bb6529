"""Calls of other people's ops, where guesses do not fit: ``opgraft doctor --import tests/conform/others.py``.

Imports whichever of torchvision, fbgemm_gpu and torch-geometric's compiled parts is installed and gives its ops a
record with samples. There is no reference beside the op itself, so values are compared with themselves only.
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


for _module in ("torchvision", "fbgemm_gpu", "torch_scatter", "torch_cluster", "torch_spline_conv", "torch_sparse"):
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
_segments = ints(0, 0, 1, 1, 1, 2)


def _groups(device: torch.device) -> torch.Tensor:
    return ints(0, 1, 1, 0, 2, 2)(device)[:, None].expand(6, 4)


def _open(device: torch.device) -> torch.Tensor:
    return torch.ones(2, dtype=torch.uint8, device=device)


for _name in ("sum", "mean", "mul", "min", "max"):
    record(f"torch_scatter::scatter_{_name}", (randn(6, 4), _groups, 0, None, 3))
for _name in ("sum", "mean", "min", "max"):
    record(f"torch_scatter::segment_{_name}_csr", (randn(6, 4), ints(0, 2, 6), None))
    record(f"torch_scatter::segment_{_name}_coo", (randn(6, 4), _segments, None, 3))
record("torch_scatter::gather_csr", (randn(2, 4), ints(0, 2, 6), None))
record("torch_scatter::gather_coo", (randn(3, 4), _segments, None))
record("torch_cluster::knn", (randn(6, 3), randn(4, 3), None, None, 2, False, 1))
record("torch_cluster::radius", (randn(6, 3), randn(4, 3), None, None, 1.0, 8, 1))
record("torch_cluster::fps", (randn(6, 3), ints(0, 6), lambda d: torch.tensor(0.5, device=d), False))
record("torch_cluster::grid", (randn(6, 3), lambda d: torch.ones(3, device=d), None, None))
record("torch_cluster::nearest", (randn(6, 3), randn(4, 3), ints(0, 6), ints(0, 4)))
record("torch_cluster::graclus", (ints(0, 2, 4, 6), ints(1, 2, 0, 2, 0, 1), None))
record("torch_cluster::random_walk", (ints(0, 2, 4, 6), ints(1, 2, 0, 2, 0, 1), ints(0, 1), 3, 1.0, 1.0))
record(
    "torch_spline_conv::spline_basis",
    (lambda d: randn(6, 2)(d).sigmoid(), ints(3, 3), _open, 1),
)
