"""What was chosen at a site, as a change of the graph; many changes are made together, or rehearsed on a copy first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opgraft.compile import reference
from opgraft.compile.rewrite import put_kernel
from opgraft.compile.site import Site


@dataclass(frozen=True)
class Change:
    """The kernel in place of an idiom, or the traced reference in place of a call of an op."""

    site: Site
    inlined: torch.fx.GraphModule | None = None
    autocast: str = ""

    def moved(self, table: dict[torch.fx.Node, Any]) -> Change:
        """The same change of a copy of the graph."""
        return Change(self.site.moved(table), self.inlined, self.autocast)

    def make(self) -> None:
        """Rewrites the site."""
        if self.inlined is None:
            put_kernel(self.site)
        else:
            reference.put_in_place(self.site, reference.inline(self.site, self.inlined, self.autocast))


def make_all(changes: Sequence[Change]) -> None:
    """Makes changes of one graph, the last place first.

    A site's arguments may be another site's results. Those stand before it, so that they are still the nodes that the
    site was found with while it is rewritten, and rewriting them afterwards puts the new nodes everywhere.
    """
    if changes:
        order = {node: i for i, node in enumerate(changes[0].site.root.graph.nodes)}
        for change in sorted(changes, key=lambda c: order[c.site.first], reverse=True):
            change.make()


def rehearsed(graph: torch.fx.Graph, changes: Sequence[Change]) -> tuple[list[Change], dict[Change, Exception]]:
    """Those of the changes that together leave a sound graph, and why the others do not; ``graph`` is not changed."""
    if not changes or _fails(graph, changes) is None:
        return list(changes), {}
    sound: list[Change] = []
    failed = {}
    for change in changes:
        error = _fails(graph, [*sound, change])
        if error is None:
            sound.append(change)
        else:
            failed[change] = error
    return sound, failed


def _fails(graph: torch.fx.Graph, changes: Sequence[Change]) -> Exception | None:
    """What goes wrong when the changes are made on a copy of the graph."""
    copy = torch.fx.Graph()
    table: dict[torch.fx.Node, Any] = {}
    try:
        copy.output(copy.graph_copy(graph, table))
        make_all([change.moved(table) for change in changes])
        copy.lint()
    except Exception as error:
        return error
    return None
