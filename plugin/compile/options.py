"""The options for ``torch.compile`` that put the choice of kernels into Inductor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opgraft.compile.choice import MEASURED, Chooser
from opgraft.compile.store import Store

PRE_GRAD = "pre_grad_custom_pass"
JOINT = "joint_custom_pre_pass"
TIMING = "pre_grad_pass_timing"


def compile_options(
    base: Mapping[str, Any] | str | None = None,
    *,
    choose: str = MEASURED,
    store: Store | str | os.PathLike[str] | None = None,
    tune_seconds: float = 60.0,
) -> dict[str, Any]:
    """Options for ``torch.compile(model, options=...)`` with the kernels put where they were measured faster.

    Args:
        base: options of your own, or the name of a mode such as ``"max-autotune"``. Passes in them, and passes that
            Inductor's config holds now, still run; at the same hook they run before this package's.
        choose: ``"measured"`` takes the faster candidate at each site; ``"kernel"`` and ``"compiler"`` take one at
            all, without timing.
        store: where decisions are kept: a folder, a ``.json`` file, or a ``Store``. By default ``$OPGRAFT_STORE`` or
            the user's cache folder.
        tune_seconds: time for measuring; sites beyond it get the compiler's code.

    Returns:
        A new dictionary. ``base`` and torch's config are not changed.

    Raises:
        ValueError: ``choose`` is none of the three.
    """
    kept = store if isinstance(store, Store) else Store(store, read_only=read_only())
    return with_chooser(base, Chooser(choose, kept, tune_seconds))


def with_chooser(base: Mapping[str, Any] | str | None, chooser: Chooser) -> dict[str, Any]:
    """The options that run ``chooser`` on every graph."""
    import torch._inductor.config as config
    from torch._inductor import list_mode_options

    from opgraft.compile.passes import InOrder, Seal, SitePass

    if isinstance(base, str):
        base = list_mode_options(base) if base != "default" else {}
    found = {key.replace("-", "_"): value for key, value in (base or {}).items()}
    for hook, own in ((PRE_GRAD, SitePass(chooser)), (JOINT, Seal())):
        given = _passes(found.get(hook, getattr(config, hook, None)))
        others = tuple(p for p in given if p != own)
        found[hook] = InOrder((*others, own)) if others else own
    if hasattr(config, TIMING):
        # Before the cache look-up, so that the key is that of the rewritten graph and a warm start decides the same.
        found.setdefault(TIMING, "early")
    return found


def _passes(value: Any) -> tuple[Any, ...]:
    from opgraft.compile.passes import InOrder
    from opgraft.compile.watching import LookPass

    if value is None or isinstance(value, LookPass):
        return ()
    if isinstance(value, InOrder):
        return value.passes
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def read_only() -> bool:
    """True where the environment forbids to write to the store."""
    return os.environ.get("OPGRAFT_STORE_READ_ONLY", "0") not in ("", "0")
