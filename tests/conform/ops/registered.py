"""Ops that are registered for the wrong key, with tags that clash, or for no kernel here."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tests.conform.ops.pairs import NS, add, double, double_backward_rule, lib

lib.define("composite(Tensor x) -> Tensor")
lib.define("per_backend(Tensor x) -> Tensor")


def raw_double(x: Tensor) -> Tensor:
    """As a raw kernel does: through the address, unseen by the dispatcher."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    count = x.numel() * x.element_size()
    if count:
        ctypes.memmove(out.data_ptr(), x.data_ptr(), count)
    return out


lib.impl("composite", raw_double, "CompositeImplicitAutograd")
lib.impl("per_backend", raw_double, "CPU")
torch.library.register_fake(f"{NS}::per_backend", lambda x: x.new_empty(x.shape), lib=lib)
torch.library.register_autograd(f"{NS}::per_backend", lambda ctx, grad: grad.clone(), lib=lib)
add("composite-kernel", "composite", "per_backend")

lib.define("tags_clash(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout, torch.Tag.needs_exact_strides))
lib.impl("tags_clash", double, "CPU")
torch.library.register_fake(f"{NS}::tags_clash", lambda x: x.new_empty(x.shape), lib=lib)
torch.library.register_autograd(f"{NS}::tags_clash", double_backward_rule, lib=lib)
add("bad-schema", "tags_clash", "per_backend")

lib.define("defaulted(Tensor x, float scale=2.0) -> Tensor")
lib.define("defaulted_too(Tensor x, float scale=2.0) -> Tensor")
lib.impl("defaulted", lambda x, scale: x.contiguous() * scale, "CPU")
lib.impl("defaulted_too", lambda x, scale=2.0: x.contiguous() * scale, "CPU")
for _name in ("defaulted", "defaulted_too"):
    torch.library.register_fake(f"{NS}::{_name}", lambda x, scale=2.0: x.new_empty(x.shape), lib=lib)
add("bad-schema", "defaulted", "defaulted_too", name="bad-schema: a default that the kernel lacks")

lib.define("cuda_only(Tensor x) -> Tensor")
lib.impl("cuda_only", double, "CUDA")
add("missing-kernel", "cuda_only", "per_backend")
