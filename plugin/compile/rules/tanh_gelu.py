"""GELU in its tanh form: the call ``F.gelu(x, approximate="tanh")``, and the formula written out.

Written out it is x (1 + tanh(c (x + 0.044715 x^3))) / 2 with c = sqrt(2/pi), or the same by a sigmoid, in any order of
factors and with casts and views in between. The erf form is another function and has a rule of its own.
"""

from __future__ import annotations

import math

import torch

from opgraft.compile.rules.gelu_chain import called, written_out
from opgraft.compile.rules.node_kind import kind_of
from opgraft.compile.rules.polynomial import Polynomial
from opgraft.compile.rules.rule import Match, Rule

_C = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def match(node: torch.fx.Node) -> Match | None:
    kind = kind_of(node)
    if kind == "gelu":
        return called(node, "tanh", torch.ops.opgraft.gelu.default)
    if kind not in ("tanh", "sigmoid") or len(node.args) != 1:
        return None
    scale = 1.0 if kind == "tanh" else 2.0

    def inner(x: torch.fx.Node) -> Polynomial:
        return {(x,): scale * _C, (x, x, x): scale * _C * _CUBIC}

    return written_out(node, inner, gated=kind == "sigmoid", op=torch.ops.opgraft.gelu.default)


RULE = Rule("tanh-gelu", "opgraft::gelu", match)
