"""Loads the planted faults and gives each op a fake, a gradient and a record: only the planted fault is left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from opgraft.registry import Sample, describe

LIBRARY = Path(os.environ.get("FAULTY_OPS", Path(__file__).parent)) / "libfaulty_ops.so"
# the op that fails a check -> (the kind of the finding, the mended twin)
PAIRS = {
    "wrong_stream": ("wrong-stream", "good"),
    "no_guard": ("wrong-device", "good"),
    "unchecked": ("unchecked-launch", "checked"),
    "unchecked_rows": ("unchecked-launch", "good"),
    "int_index": ("index-overflow", "wide_index"),
    "misaligned": ("misaligned", "aligned"),
    "syncs": ("hidden-sync", "good"),
    "allocates": ("hidden-sync", "good"),
    "too_far": ("out-of-bounds", "good"),
    "sums_past": ("out-of-bounds", "sums_exact"),
}
SUMS = ("sums_past", "sums_exact")
BLOCK = 256
_keep = []


def load() -> None:
    """Registers the ops once.

    Raises:
        FileNotFoundError: the library has not been built; ``build.sh`` does that.
    """
    if _keep:
        return
    if not LIBRARY.exists():
        raise FileNotFoundError(f"{LIBRARY} is missing: build it with tests/gpu/faulty_ops/build.sh")
    torch.ops.load_library(str(LIBRARY))
    library = torch.library.Library("faulty_gpu", "FRAGMENT")
    _keep.append(library)

    def samples(device, dtype):
        yield Sample("matrix", (torch.randn(8, 24, device=device, dtype=torch.float32),))

    for name in sorted({*PAIRS, *(twin for _, twin in PAIRS.values())}):
        op = f"faulty_gpu::{name}"
        if name in SUMS:
            torch.library.register_fake(op, lambda x: x.new_empty(-(-x.numel() // BLOCK)), lib=library)
            torch.library.register_autograd(op, _spread, setup_context=_keep_shape, lib=library)
            describe(op, block_sums, samples=samples, dtypes=(torch.float32,), owner="faulty-ops")
        else:
            torch.library.register_fake(op, lambda x: x.new_empty(x.shape), lib=library)
            torch.library.register_autograd(op, lambda ctx, grad: grad * 2, lib=library)
            describe(op, lambda x: x * 2, samples=samples, dtypes=(torch.float32,), owner="faulty-ops")


def block_sums(x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK).sum(1)


def _keep_shape(ctx, inputs, output):
    ctx.shape = inputs[0].shape


def _spread(ctx, grad):
    return grad.repeat_interleave(BLOCK)[: ctx.shape.numel()].view(ctx.shape)


load()
