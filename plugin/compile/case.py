"""A site with what is needed to decide for it: its surroundings, its reference, the key of its decision."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from opgraft.compile import identity, reference
from opgraft.compile.change import Change
from opgraft.compile.fusible import Fusibility
from opgraft.compile.metadata import facts_of, value_of
from opgraft.compile.neighbourhood import Neighbourhood, around, digest
from opgraft.compile.scope import Scope
from opgraft.compile.site import Decision, Site, SiteReport
from opgraft.compile.store import architecture, torch_minor
from opgraft.registry import OpSpec

# What changes the code that Inductor writes enough to turn a choice.
_OPTIONS = [
    "max_autotune",
    "max_autotune_pointwise",
    "max_autotune_gemm",
    "coordinate_descent_tuning",
    "epilogue_fusion",
    "freezing",
    "cpp_wrapper",
    "triton.cudagraphs",
    "emulate_precision_casts",
    "size_asserts",
]


@dataclass(frozen=True)
class Case:
    """A site with what is needed to decide for it. ``surroundings`` is None where shapes are unknown."""

    site: Site
    scope: Scope
    surroundings: Neighbourhood | None
    inlined: torch.fx.GraphModule | None  # the traced reference, at a call of an op
    obstacle: str  # why the reference cannot stand there
    key: str  # of the surroundings: equal for the same site in another layer

    @property
    def is_idiom(self) -> bool:
        return bool(self.site.idiom)

    @property
    def device(self) -> str:
        assert self.surroundings is not None
        return self.surroundings.inputs[0][1].device.type

    @property
    def change(self) -> Change:
        """What differs from the graph as given: the kernel in place of an idiom, or the reference in place of an op."""
        return Change(self.site, None if self.is_idiom else self.inlined, self.autocast)

    @property
    def autocast(self) -> str:
        fact = facts_of(self.site.root) or next((f for a in self.site.args if (f := facts_of(a))), None)
        kind = fact.device.type if fact is not None else "cpu"
        on = bool(self.scope.autocast) or torch.is_autocast_enabled(kind)
        return kind if on else ""


def case_of(site: Site, scope_of: dict[torch.fx.Node, Scope], fusible: Fusibility, traced: dict[Any, Any]) -> Case:
    """What is known of a site; ``traced`` keeps the references traced so far."""
    scope = scope_of[site.root]
    inlined, obstacle = None, ""
    if not site.idiom:
        try:
            inlined = _traced_once(site, scope, traced)
        except reference.NoReferenceError as error:
            obstacle = str(error)
    # Without its fusible neighbours a site is still worth measuring: some neighbour may have an unknown shape.
    surroundings = around(site, scope_of, fusible) or around(site, scope_of, _nothing)
    key = ""
    if surroundings is not None:
        device = surroundings.inputs[0][1].device.type
        key = digest({**surroundings.signature(), **setting(device, [site.spec])})
    return Case(site, scope, surroundings, inlined, obstacle, key)


def _nothing(node: torch.fx.Node) -> bool:
    return False


def _traced_once(site: Site, scope: Scope, traced: dict[Any, Any]) -> torch.fx.GraphModule:
    wants = [a for a in site.root.all_input_nodes if getattr(value_of(a), "requires_grad", False)]
    if scope.grad and wants:
        if site.spec.surrogate:
            raise reference.NoReferenceError("its gradient is a surrogate, which only the op has")
        if not _has_gradient(value_of(site.root)):
            raise reference.NoReferenceError("the op gives no gradient where its reference would")
    key = (site.spec.name, repr(torch.fx.map_arg((site.args, dict(site.kwargs)), _spelled)))
    if key not in traced:
        traced[key] = reference.trace(site.spec.reference, site.args, dict(site.kwargs), value_of(site.root))
    found: torch.fx.GraphModule = traced[key]
    return found


def _spelled(node: torch.fx.Node) -> Any:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        # Sizes and strides as expressions: in one graph equal expressions are equal numbers.
        return f"{value.dtype}{[str(s) for s in value.shape]}{[str(s) for s in value.stride()]}{value.device}"
    return f"{node.name}:{value}"


def _has_gradient(value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else (value,)
    floating = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return not floating or any(v.requires_grad for v in floating)


def setting(device: str, specs: list[OpSpec]) -> dict[str, Any]:
    return {
        "architecture": architecture(device),
        "torch": torch_minor(),
        "spec": [identity.of_op(spec) for spec in specs],
        "options": {name: str(option(name)) for name in _OPTIONS},
    }


def option(name: str) -> Any:
    import torch._inductor.config as config

    found: Any = config
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def described(surroundings: Neighbourhood) -> dict[str, Any]:
    """What a reader of the store wants to see beside the decision."""
    device = surroundings.inputs[0][1].device.type
    return {
        "op": surroundings.site.spec.name,
        "idiom": surroundings.site.idiom,
        "surroundings": surroundings.describe(),
        "inputs": [str(fact) for _, fact in surroundings.inputs],
        "training": surroundings.training,
        "architecture": architecture(device),
        "build": identity.of_op(surroundings.site.spec),
        "measured_on": today(),
    }


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def report(case: Case, decision: Decision) -> SiteReport:
    facts = [facts_of(a) for a in case.site.args]
    return SiteReport(
        op=case.site.spec.name,
        idiom=case.site.idiom,
        place=case.site.place,
        inputs=tuple(str(f) for f in facts if f is not None),
        surroundings=case.surroundings.describe() if case.surroundings is not None else "",
        decision=decision,
        key=case.key,
    )
