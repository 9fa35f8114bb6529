"""The Dynamo backend ``opgraft``: Inductor, with the choice of kernels in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from opgraft.compile.choice import MEASURED, Chooser
from opgraft.compile.options import read_only, with_chooser
from opgraft.compile.store import Store

_OWN = ("choose", "store", "tune_seconds")


def opgraft(
    module: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="opgraft")``, with ``mode=`` or ``options=`` as for Inductor.

    ``options`` may also hold ``choose``, ``store`` and ``tune_seconds``, as for ``opgraft.compile_options``.
    """
    given = dict(options or {})
    own = {key: given.pop(key) for key in _OWN if key in given}
    chooser = _chooser(own.get("choose", MEASURED), own.get("store"), float(own.get("tune_seconds", 60.0)))
    inductor = torch._TorchCompileInductorWrapper(mode, with_chooser(given, chooser), None)
    compiled: Callable[..., Any] = inductor(module, inputs)
    return compiled


@lru_cache(64)
def _chooser(choose: str, store: Any, tune_seconds: float) -> Chooser:
    """One chooser for all graphs with the same settings: they share the time for measuring."""
    return Chooser(choose, store if isinstance(store, Store) else Store(store, read_only=read_only()), tune_seconds)
