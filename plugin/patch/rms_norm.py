"""RMS norms of any model, found by what they compute: a module is tried on numbers, not looked up by name.

A candidate is a module without children whose only parameter, if any, is a vector ``weight``, and whose forward takes
one tensor. A copy of it with a random weight is given random rows, some so small that eps decides their length. It
must give x / sqrt(mean(x^2) + eps) times its weight, its weight plus one (Gemma) or nothing, with an eps that it
keeps under any name. In bfloat16 the same rows tell where it rounds: before the weight, as transformers' Llama, Qwen
and Mistral do, or once at the end, as Gemma does. What fits none of these to the last digits is left alone.

Under torch.compile the original runs: there it is fused with its neighbours, and what the op can do better is decided
at its site by measuring (opgraft.compile).
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from opgraft.ops.rms_norm import reference, rms_norm
from opgraft.patch.change import Swap

ROWS = 32
PLAIN_LENGTH = 64  # of the rows on which a module without a weight is tried
LARGEST_EPS = 0.1


@dataclass(frozen=True)
class Meaning:
    """What a module computes: ``rms_norm(x, weight or None, eps, offset, cast_before_weight)``.

    Attributes:
        mixed: 16-bit rows under a float32 weight keep their dtype.
    """

    weighted: bool
    eps: float
    offset: float
    cast_before_weight: bool
    mixed: bool = False


def swaps(module: nn.Module) -> list[Swap]:
    """The forward of one module: other modules of its class keep theirs."""
    if not _is_candidate(module):
        return []
    meaning = meaning_of(module)
    if meaning is None:
        return []
    return [Swap(module, "forward", lambda original: MethodType(_normed(original, meaning), module))]


def _is_candidate(module: nn.Module) -> bool:
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return False
    given = dict(module.named_parameters())
    weight = given.get("weight")
    if len(given) > 1 or (given and weight is None) or not _epsilons(module):
        return False
    if weight is not None and not (
        weight.dim() == 1
        and weight.numel() > 1
        and weight.is_floating_point()
        and weight.device.type in ("cpu", "cuda")
    ):
        return False
    try:
        wanted = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return len([p for p in wanted if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]) == 1


def _epsilons(module: nn.Module) -> list[float]:
    """The numbers that the module keeps, under any name, which may be its eps."""
    return sorted({v for v in vars(module).values() if isinstance(v, float) and 0 < v < LARGEST_EPS})


def meaning_of(module: nn.Module) -> Meaning | None:
    """What the module computes, found by trying; None where it is no RMS norm of its last dimension."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns where the dtypes of rows and weight differ
            return _found(module)
    except Exception:  # a stranger's copy or forward may raise anything: then it is left alone
        return None


def _found(module: nn.Module) -> Meaning | None:
    narrow, wide = _tried(module, torch.bfloat16), _tried(module, torch.float32)
    given = _rows(narrow, torch.bfloat16)
    answer, answer_of_wide = _answer(narrow, given), _answer(wide, given)
    for meaning in _meanings(narrow):
        if _agree(answer, given, narrow, meaning) and _agrees_in_float32(wide, meaning):
            mixed = meaning.weighted and not meaning.cast_before_weight and _agree(answer_of_wide, given, wide, meaning)
            return replace(meaning, mixed=mixed)
    return None


def _tried(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with a random weight, in which every choice of offset and rounding shows, and without hooks."""
    tried = copy.deepcopy(module).to(dtype)
    tried._forward_hooks.clear()
    tried._forward_pre_hooks.clear()
    weight = getattr(tried, "weight", None)
    if isinstance(weight, torch.Tensor):
        with torch.no_grad():
            weight.copy_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) * 1.5 + 0.25)
    return tried


def _rows(module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    length = weight.shape[0] if isinstance(weight, torch.Tensor) else PLAIN_LENGTH
    device = weight.device if isinstance(weight, torch.Tensor) else torch.device("cpu")
    rows = torch.randn(ROWS, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[: ROWS // 4] *= 1e-3
    return rows.to(device=device, dtype=dtype)


def _answer(module: nn.Module, given: torch.Tensor) -> torch.Tensor | None:
    with torch.no_grad():
        answer = module(given)
    fits = isinstance(answer, torch.Tensor) and answer.shape == given.shape and answer.dtype == given.dtype
    return answer if fits else None


def _meanings(module: nn.Module) -> Iterator[Meaning]:
    weighted = isinstance(getattr(module, "weight", None), torch.Tensor)
    for eps in _epsilons(module):
        for offset in (0.0, 1.0) if weighted else (0.0,):
            for cast in (False, True) if weighted else (False,):
                yield Meaning(weighted, eps, offset, cast)


def _agree(answer: torch.Tensor | None, given: torch.Tensor, module: nn.Module, meaning: Meaning) -> bool:
    """To two roundings of every element and, in 16-bit types, to the last bit of nearly all: that tells roundings."""
    if answer is None:
        return False
    weight = getattr(module, "weight", None) if meaning.weighted else None
    with torch.no_grad():
        wanted = reference(given, weight, meaning.eps, meaning.offset, meaning.cast_before_weight)
    slack = (2 if given.element_size() == 2 else 16) * torch.finfo(given.dtype).eps
    close = (answer.double() - wanted.double()).abs() <= slack * wanted.double().abs()
    exact = given.element_size() > 2 or (answer == wanted).double().mean().item() > 0.98
    return bool(close.all()) and exact


def _agrees_in_float32(module: nn.Module, meaning: Meaning) -> bool:
    given = _rows(module, torch.float32)
    return _agree(_answer(module, given), given, module, meaning)


def _normed(original: Any, meaning: Meaning) -> Any:
    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or args or kwargs or not _serves(self, hidden_states, meaning):
            return original(hidden_states, *args, **kwargs)
        weight = self.weight if meaning.weighted else None
        assert weight is None or isinstance(weight, torch.Tensor)
        return rms_norm(hidden_states, weight, meaning.eps, meaning.offset, meaning.cast_before_weight)

    return forward


def _serves(module: nn.Module, x: Any, meaning: Meaning) -> bool:
    if not isinstance(x, torch.Tensor) or x.device.type not in ("cpu", "cuda") or not x.dim():
        return False
    weight = getattr(module, "weight", None)
    if not meaning.weighted or weight is None:
        return not meaning.weighted and x.is_floating_point()
    alike = weight.dtype == x.dtype and x.is_floating_point()
    wider = meaning.mixed and weight.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16)
    return weight.device == x.device and (alike or wider)
