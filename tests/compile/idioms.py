"""What the tests of the idioms share: the sites of a function, and that one is written with the function's values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from stand_ins import all_ops  # noqa: F401

from opgraft.compile.find import find_sites
from opgraft.compile.rewrite import put_kernel
from opgraft.compile.site import Site

from models import captured

BF16 = torch.bfloat16


def sites_of(function: Callable[..., Any], inputs: Sequence[Any], idiom: str | None = None) -> list[Site]:
    found = find_sites(captured(function, *inputs).graph)
    return [site for site in found if idiom in (None, site.idiom)]


def check(function: Callable[..., Any], inputs: Sequence[Any], idiom: str, *, tolerance: float = 1e-5) -> None:
    """One site of the idiom; written, the op gives the function's values and the idiom is gone."""
    module = captured(function, *inputs)
    (site,) = [s for s in find_sites(module.graph) if s.idiom == idiom]
    before = len(module.graph.nodes)
    put_kernel(site)
    module.graph.lint()
    module.recompile()
    assert any(site.spec.name.replace("::", ".") in str(n.target) for n in module.graph.nodes)
    assert not any(n in site.nodes for n in module.graph.nodes if n not in site.outputs and not n.users), before
    # Dynamo's own order of inputs, without those that it does not need.
    by_name = dict(zip(inspect.signature(function).parameters, inputs, strict=True))
    names = [str(n.target).removeprefix("L_").removesuffix("_") for n in module.graph.find_nodes(op="placeholder")]
    got, want = module(*(by_name[name] for name in names)), function(*inputs)
    for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)
