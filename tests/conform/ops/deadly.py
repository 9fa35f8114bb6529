"""Ops that take their process down."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tests.conform.ops.pairs import op


def hangs(x: Tensor) -> Tensor:
    while True:
        pass


def leaves_process(x: Tensor) -> Tensor:
    import os

    os._exit(3)


def exits(x: Tensor) -> Tensor:
    raise SystemExit(4)


def kills_itself(x: Tensor) -> Tensor:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)
    return x


def crashes(x: Tensor) -> Tensor:
    ctypes.string_at(8)
    return x


def crashes_when_empty(x: Tensor) -> Tensor:
    if x.numel() == 0:
        ctypes.string_at(8)
    return x.contiguous() * 2


def eats_memory(x: Tensor) -> Tensor:
    torch.ones(1 << 40, dtype=torch.uint8)
    return x * 2


def eats_memory_slowly(x: Tensor) -> Tensor:
    kept = []
    while True:
        kept.append(torch.ones(1 << 26, dtype=torch.uint8))


for _name, _fn in (
    ("hangs", hangs),
    ("exits", exits),
    ("kills_itself", kills_itself),
    ("eats_memory_slowly", eats_memory_slowly),
    ("leaves_process", leaves_process),
    ("crashes", crashes),
    ("crashes_when_empty", crashes_when_empty),
    ("eats_memory", eats_memory),
):
    op(_name, _fn)
