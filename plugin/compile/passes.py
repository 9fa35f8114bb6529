"""The objects that sit in Inductor's hooks: the pass itself, passes in order, and the seal on the cache key."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from opgraft.compile import identity
from opgraft.compile.choice import Chooser
from opgraft.compile.site import SiteWarning


class SitePass(CustomGraphPass):
    """Rewrites the sites of a graph before AOTAutograd, from which gradients and cache keys follow."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser

    def __call__(self, graph: torch.fx.Graph) -> None:
        try:
            self.chooser.apply(graph)
        except Exception as error:
            warnings.warn(
                f"opgraft: a graph is left as it was ({type(error).__name__}: {error})", SiteWarning, stacklevel=2
            )

    def uuid(self) -> str:
        """Covers builds, schemas, rules, references, fakes, the mode and every decision that could be used."""
        chooser = self.chooser
        decisions = chooser.store.digest() if chooser.choose == "measured" else ""
        return f"opgraft/{chooser.choose}/{identity.of_package()}/{decisions}"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """As its identity: torch 2.11 pickles what stands at this hook into its cache keys.

        Decisions are in those keys by the rewritten graph.
        """
        return str, (f"opgraft/{self.chooser.choose}/{identity.of_package()}",)

    def __copy__(self) -> SitePass:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SitePass:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SitePass) and self._settings == other._settings

    def __hash__(self) -> int:
        return hash(self._settings)

    @property
    def _settings(self) -> tuple[Any, ...]:
        return (self.chooser.choose, self.chooser.store, self.chooser.tune_seconds)


class Seal(CustomGraphPass):
    """Does nothing to a graph, but puts the package's identity into the key of every cached compile.

    A pass that runs before the cache look-up is left out of the key by torch. Its decisions are in the key all the
    same, since the key covers the rewritten graph; what no graph shows (a fake, a native build) is put in here.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        return None

    def uuid(self) -> str:
        return f"opgraft/{identity.of_package()}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seal)

    def __hash__(self) -> int:
        return hash(Seal)


class InOrder(CustomGraphPass):
    """Several passes at one hook. A user's pass that raises is undone and named in a warning; the rest still run."""

    def __init__(self, passes: tuple[Callable[[torch.fx.Graph], None], ...]) -> None:
        self.passes = passes

    def __call__(self, graph: torch.fx.Graph) -> None:
        module = graph.owning_module
        for run in self.passes:
            current = module.graph if module is not None else graph
            if isinstance(run, (SitePass, Seal)):
                run(current)
                continue
            saved = _copied(current)
            try:
                run(current)
            except Exception as error:
                if module is None:
                    raise
                module.graph = saved
                warnings.warn(
                    f"opgraft: the pass {_name(run)} raised {type(error).__name__}: {error}; "
                    "the graph is compiled without it",
                    SiteWarning,
                    stacklevel=2,
                )

    def uuid(self) -> Any:
        """All identities in order; None, which keeps torch from caching, where a pass has none."""
        found = [getattr(run, "uuid", lambda: None)() for run in self.passes]
        return None if any(f is None for f in found) else repr(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InOrder) and self.passes == other.passes

    def __hash__(self) -> int:
        return hash(self.passes)


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy with everything that Dynamo pins to its nodes, which ``deepcopy`` leaves out."""
    saved = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, saved.nodes, strict=True):
        for name, value in vars(old).items():
            if name not in vars(new):
                setattr(new, name, value)
    return saved


def _name(run: Any) -> str:
    return getattr(run, "__qualname__", None) or type(run).__qualname__
