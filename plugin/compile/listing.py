"""``opgraft.sites``: every place in a model where an op could serve, with the decision and its reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opgraft.compile.choice import MEASURED, Chooser
from opgraft.compile.options import read_only
from opgraft.compile.site import SiteReport
from opgraft.compile.store import Store


def sites(
    model: Callable[..., Any],
    inputs: Sequence[Any] | torch.Tensor,
    kwargs: Mapping[str, Any] | None = None,
    *,
    choose: str = MEASURED,
    store: Store | str | os.PathLike[str] | None = None,
    tune_seconds: float = 60.0,
) -> list[SiteReport]:
    """Runs a model once and lists its sites; the model itself is traced and not compiled.

    Args:
        model: a module or a function.
        inputs: its positional arguments; a lone tensor counts as one.
        choose, store, tune_seconds: as for ``opgraft.compile_options``.

    Returns:
        One report a site, graph by graph. ``print`` one to see choice, op, place, inputs and reason.
    """
    kept = store if isinstance(store, Store) else Store(store, read_only=read_only())
    chooser = Chooser(choose, kept, tune_seconds)

    def look(module: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        for inner in module.modules():
            if isinstance(inner, torch.fx.GraphModule):
                chooser.look(inner.graph)
        return module.forward

    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    torch.compile(model, backend=look)(*given, **dict(kwargs or {}))
    return chooser.reports
