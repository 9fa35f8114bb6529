"""Loads the planted faults and gives each op a fake, a gradient and a record: only the planted fault is left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from opgraft.registry import Sample, describe

LIBRARY = Path(os.environ.get("FAULTY_OPS", Path(__file__).parent)) / "libfaulty_ops.so"
# check -> (the op that fails it, its mended twin)
PAIRS = {
    "wrong-stream": ("wrong_stream", "good"),
    "wrong-device": ("no_guard", "good"),
    "unchecked-launch": ("unchecked", "checked"),
    "index-overflow": ("int_index", "wide_index"),
    "misaligned": ("misaligned", "aligned"),
    "hidden-sync": ("syncs", "good"),
}
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

    for name in sorted({op for pair in PAIRS.values() for op in pair}):
        torch.library.register_fake(f"faulty_gpu::{name}", lambda x: x.new_empty(x.shape), lib=library)
        torch.library.register_autograd(f"faulty_gpu::{name}", lambda ctx, grad: grad * 2, lib=library)
        describe(f"faulty_gpu::{name}", lambda x: x * 2, samples=samples, dtypes=(torch.float32,), owner="faulty-ops")


load()
