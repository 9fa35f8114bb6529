# case: S67
"""The fake of a transform had the wrong strides in the run that filled the cache, and has the right ones now."""
import os
import subprocess
import sys
import tempfile

draft = sys.argv[1:] == ["draft"]
if not draft:
    scratch = tempfile.TemporaryDirectory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch.name
    # The draft ends in an error, as it did then; its compiled code is in the cache by that time.
    subprocess.run([sys.executable, __file__, "draft"], stderr=subprocess.DEVNULL)

import torch


@torch.library.custom_op("demo_dct::rows", mutates_args=())
def rows(x: torch.Tensor) -> torch.Tensor:
    return torch.cos(x.contiguous()) * 2


@rows.register_fake
def _(x):
    return x.new_empty(x.shape[::-1]).t() if draft else x.new_empty(x.shape)


def features(x):
    return torch.ops.demo_dct.rows(x.abs()) + 1  # !! stale-cache remedy=clear-cache


try:
    print(torch.compile(features)(torch.linspace(-1, 1, 40).reshape(5, 8)).sum().item())
except AssertionError as error:
    print(str(error).splitlines()[0])
