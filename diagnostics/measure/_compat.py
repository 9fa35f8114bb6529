"""Every probe of a private torch name of the measurement, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def backend(name: Any, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> Callable[..., Any]:
    """The backend that ``torch.compile(backend=name, mode=mode, options=options)`` would call on a graph."""
    if name == "inductor":
        wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
        if wrapper is not None:
            made: Callable[..., Any] = wrapper(mode, options, dynamic)
            return made
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**(list_mode_options(mode, dynamic) if mode and mode != "default" else {}), **(options or {})}
        return lambda module, inputs, **_: compile_fx(module, inputs, config_patches=patches)
    from torch._dynamo.backends.registry import lookup_backend

    found: Callable[..., Any] = lookup_backend(name)
    given = {key: value for key, value in (("mode", mode), ("options", options)) if value}
    return (lambda module, inputs, **_: found(module, inputs, **given)) if given else found
