"""Pitfall: the wrong device. The kernel gets an address, and no address says which memory it belongs to.

Run:    python examples/from_prototype_to_op/pitfall_wrong_device.py
Expect: on any machine, a meta tensor (no memory at all: its address is 0) kills a process of its own; checked first,
        the same call is one clear error. On two GPUs also: with device 0 current, a kernel on a tensor of device 1
        runs on device 0, in device 0's stream, and reads before device 1 has written; under a device guard, right.
In C++: TORCH_CHECK(x.is_cuda(), "gelu: x is on ", x.device(), ", expected CUDA");
        const c10::cuda::CUDAGuard guard(x.device());
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import torch
from pitfall_raw import DEVICE, ON_GPU, current_stream, launch, report
from reference import sample


def wrong(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    launch(x, y, stream=torch.cuda.current_stream().cuda_stream if ON_GPU else 0)
    return y


def mended(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != DEVICE.type:
        raise RuntimeError(f"gelu: x is on {x.device}, expected {DEVICE.type}: move it with x.to({DEVICE.type!r})")
    y = torch.empty_like(x)
    if x.is_cuda:
        with torch.cuda.device(x.device):
            launch(x, y, stream=current_stream(x))
    else:
        launch(x, y)
    return y


def crash() -> None:
    """Runs in a process of its own, which dies."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wrong(torch.empty(16, device="meta"))


def tensor_without_memory() -> None:
    # The child sees no GPU: a segmentation fault of its own is as far as this goes, and the device is left alone.
    command = [sys.executable, __file__, "--crash"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    died = subprocess.run(command, capture_output=True, timeout=120, env=hidden).returncode
    print(f"WRONG  meta tensor, unchecked kernel: the process died with signal {-died}")
    assert died < 0
    try:
        mended(torch.empty(16, device="meta"))
    except RuntimeError as error:
        print(f"MENDED meta tensor, checked: {error}")
    else:
        raise AssertionError("the meta tensor was not refused")


def tensor_of_the_other_gpu() -> None:
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    x, factor = torch.zeros(4096, device=second), torch.randn(4096, 4096, device=second)
    # Copies in both directions open each GPU's memory to the other: without them the wrong launch would be a fault.
    new = sample(4096).to(first).to(second)
    new.to(first)
    if not torch.cuda.can_device_access_peer(first, second):
        print("The launch on the other GPU is not shown: these two cannot read each other's memory.")
        return
    outcome = {}
    for name, call in (("WRONG ", wrong), ("MENDED", mended)):
        x.zero_()
        torch.cuda.synchronize(second)
        with torch.cuda.device(second):
            for _ in range(20):
                factor = torch.tanh(factor @ factor)
            x.copy_(new)
        y = call(x)
        torch.cuda.synchronize(first)
        torch.cuda.synchronize(second)
        outcome[name] = report(f"{name} tensor of cuda:1 while cuda:0 is current", y, x)
    assert outcome == {"WRONG ": False, "MENDED": True}


def main() -> None:
    x = sample(4096).to(DEVICE)
    assert report("right device", mended(x), x)
    tensor_without_memory()
    if torch.cuda.device_count() > 1 and ON_GPU:
        tensor_of_the_other_gpu()
    else:
        print("The launch on the other GPU needs two GPUs.")


if __name__ == "__main__":
    if sys.argv[1:] == ["--crash"]:
        crash()
    else:
        main()
