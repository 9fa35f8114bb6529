"""Puts the op in the place of an idiom."""

from __future__ import annotations

from typing import Any

import torch

from opgraft.compile.metadata import value_of
from opgraft.compile.reference import copied_meta
from opgraft.compile.site import Site


def put_kernel(site: Site) -> None:
    """Replaces an idiom by a call of the op, written in front of the first of its outputs."""
    assert site.write is not None
    graph = site.root.graph
    outputs = site.outputs or (site.root,)
    meta = copied_meta(site.root)

    def emit(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        # The op's layout tag is its own, and the arguments in the user's layout are recorded when this graph is traced.
        node = graph.call_function(target, args, kwargs)
        node.meta = dict(meta)
        return node

    with graph.inserting_before(site.first):
        found = site.write(emit, *site.args)
    for old, new in zip(outputs, found, strict=True):
        if value_of(old) is not None:
            new.meta["example_value"] = value_of(old)
        old.replace_all_uses_with(new)
    for node in reversed(site.nodes):
        if not node.users:
            graph.erase_node(node)
