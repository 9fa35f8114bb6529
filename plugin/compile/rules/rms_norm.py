"""RMS norm: see ``norm`` for the ways in which it is written."""

from __future__ import annotations

from typing import Any

import torch

from opgraft.compile.rules import norm
from opgraft.compile.rules.rule import Emit, Match, Rule
from opgraft.compile.rules.walk import Node


def match(node: Node) -> Match | None:
    found = norm.find(node)
    nodes = found.walk.closed(found.root) if found is not None else None
    if found is None or nodes is None:
        return None
    options = found.options

    def write(emit: Emit, x: Any, weight: Any) -> tuple[Node, ...]:
        return (emit(torch.ops.opgraft.rms_norm.default, x, weight, *options),)

    return Match((found.root,), nodes, (found.x, found.weight), write)


RULE = Rule("rms-norm", "opgraft::rms_norm", match)
