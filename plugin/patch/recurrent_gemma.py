"""RecurrentGemma's RG-LRU (Botev et al., arXiv 2404.07839): a loop over time in Python becomes one linear_scan."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from opgraft.ops.linear_scan import linear_scan
from opgraft.patch.change import Swap


def swaps(module: nn.Module) -> list[Swap]:
    """The method of one module: other modules of the class keep theirs."""
    if type(module).__name__ != "RecurrentGemmaRglru" or not hasattr(module, "_rnn_scan"):
        return []
    return [Swap(module, "_rnn_scan", lambda original: MethodType(_scanned(original), module))]


def _scanned(original: Any) -> Any:
    def _rnn_scan(
        self: nn.Module,
        hidden_states: torch.Tensor,
        recurrent_gate: torch.Tensor,
        reset: torch.Tensor,
        recurrent_states: torch.Tensor | None,
        acc_dtype: torch.dtype = torch.float32,
    ) -> Any:
        if hidden_states.shape[1] == 1 or hidden_states.device.type not in ("cpu", "cuda"):
            return original(hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype)
        decay = (recurrent_gate * ~reset).to(acc_dtype)
        initial = None if recurrent_states is None else recurrent_states.to(device=decay.device, dtype=acc_dtype)
        # The state that is kept for decoding has acc_dtype, so the scan runs in it.
        states = linear_scan(decay, hidden_states.to(acc_dtype), initial, dim=1)
        return states.to(hidden_states.dtype), states[:, -1]

    return _rnn_scan
