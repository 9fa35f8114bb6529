"""GELU in its exact form: the call ``F.gelu(x)``, and x (1 + erf(x / sqrt(2))) / 2 written out."""

from __future__ import annotations

import math

import torch

from opgraft.compile.rules.gelu_chain import called, written_out
from opgraft.compile.rules.node_kind import kind_of
from opgraft.compile.rules.rule import Match, Rule


def match(node: torch.fx.Node) -> Match | None:
    kind = kind_of(node)
    if kind == "gelu":
        return called(node, "none", torch.ops.opgraft.gelu_erf.default)
    if kind != "erf" or len(node.args) != 1:
        return None
    return written_out(node, lambda x: {(x,): math.sqrt(0.5)}, gated=False, op=torch.ops.opgraft.gelu_erf.default)


RULE = Rule("erf-gelu", "opgraft::gelu_erf", match)
