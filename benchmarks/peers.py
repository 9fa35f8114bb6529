"""Published kernels for the sequence ops, called with the ops' own arguments: what benchmarks/ops.py compares with.

A peer is offered where its package can be imported: causal-conv1d, mamba_ssm and flash-linear-attention. Where there is
no wheel, `--peer-sources DIR` of benchmarks/ops.py builds the first two from their source distributions for the GPU at
hand, which takes about six minutes on 16 cores.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Peer:
    """One published kernel.

    Attributes:
        name: package, and kernel where it has several.
        call: from the op's arguments to the op's first result, differentiable in the tensors of ``leaves``.
        leaves: indices of the op's arguments that get gradients.
    """

    name: str
    call: Callable[..., torch.Tensor]
    leaves: tuple[int, ...]


def build(sources: Path) -> None:
    """Builds the CUDA halves of causal_conv1d-*/ and mamba_ssm-*/ (unpacked source distributions) under ``sources``."""
    from torch.utils.cpp_extension import load

    flags = ["-O3", "--use_fast_math", "--expt-relaxed-constexpr", "--expt-extended-lambda"]
    flags += [f"-U__CUDA_NO_{kind}_{what}__" for kind in ("HALF", "BFLOAT16") for what in ("OPERATORS", "CONVERSIONS")]
    for package, folder, module in (
        ("causal_conv1d", "csrc", "causal_conv1d_cuda"),
        ("mamba_ssm", "csrc/selective_scan", "selective_scan_cuda"),
    ):
        roots = sorted(sources.glob(f"{package}-*/"))
        if not roots:
            raise FileNotFoundError(f"no folder {package}-* in {sources}: unpack its source distribution there")
        files = [str(f) for f in sorted((roots[-1] / folder).iterdir()) if f.suffix in (".cpp", ".cu")]
        sys.modules[module] = load(module, files, extra_cuda_cflags=flags, extra_cflags=["-O3"])
        sys.path.append(str(roots[-1]))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def peers(op: str, args: tuple[Any, ...]) -> Iterator[Peer]:
    """The peers of one op that take a call such as ``args``."""
    if op == "causal_conv1d":
        yield from _convolutions(channel_last=args[6], width=args[1].shape[1])
    elif op == "selective_scan":
        module = _module("mamba_ssm.ops.selective_scan_interface")
        if module is not None:
            yield Peer("mamba_ssm", _mamba(module.selective_scan_fn), (0, 1, 2, 3, 4, 5, 6, 7))
    elif op == "linear_scan" and args[3] == 1 and args[0].dim() == 3:
        module = _module("fla.ops.hgrn")
        if module is not None:
            yield Peer("fla hgrn", _hgrn(module.fused_recurrent_hgrn), (1,))
            yield Peer("fla hgrn, chunks", _hgrn(module.chunk_hgrn), (1,))


def _convolutions(channel_last: bool, width: int) -> Iterator[Peer]:
    module = _module("causal_conv1d")
    if module is not None and width <= 4:
        function = module.causal_conv1d_fn

        def cuda(x: Any, weight: Any, bias: Any, initial: Any, seq_idx: Any, silu: bool, last: bool) -> torch.Tensor:
            out = function(x.transpose(1, 2) if last else x, weight, bias, activation="silu" if silu else None)
            return out.transpose(1, 2) if last else out

        yield Peer("causal-conv1d", cuda, (0, 1, 2))
    fla = _module("fla.modules.convolution")
    if fla is not None and channel_last:

        def triton(x: Any, weight: Any, bias: Any, initial: Any, seq_idx: Any, silu: bool, last: bool) -> torch.Tensor:
            out = fla.causal_conv1d(x, weight, bias, activation="silu" if silu else None)
            return out[0] if isinstance(out, tuple) else out

        yield Peer("fla", triton, (0, 1, 2))


def _mamba(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def call(
        u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, bias: Any, softplus: bool, initial: Any
    ) -> Any:
        return function(u, delta, A, B, C, D, z, bias, softplus)

    return call


def _hgrn(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Takes the decay's logarithm. Taking it, and what leads its gradient on to the decay, is left out of the time."""
    logarithms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by address, with the tensor that has it

    def call(decay: Any, update: Any, initial: Any, dim: int, reverse: bool) -> Any:
        if decay.data_ptr() not in logarithms:
            taken = decay.detach().float().log().to(decay.dtype).requires_grad_()
            logarithms[decay.data_ptr()] = decay, taken
        return function(x=update, g=logarithms[decay.data_ptr()][1])[0]

    return call
