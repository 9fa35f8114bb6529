"""The sizes that a choice holds for, where shapes are dynamic: outside of them the model is compiled and chosen again.

A choice is taken at one size. Where it changed the graph, its range becomes a guard, like one that the model's own code
sets. The guards of a frame are few, so that a model with sizes of every kind ends with a graph that serves them all;
``dynamic=True`` asks for that graph at once, and gets it.
"""

from __future__ import annotations

from collections.abc import Iterable

from opgraft import _compat
from opgraft.compile.metadata import value_of
from opgraft.compile.neighbourhood import Neighbourhood, bucket

_MOST_COMPILES = 4  # of one frame, those with static shapes counted; torch gives a frame up at eight


def hold(changed: Iterable[Neighbourhood]) -> None:
    """Guards the dynamic sizes that the choices at these places were taken for."""
    ranges = {}
    for around in changed:
        for node, fact in around.inputs:
            for dim in fact.dynamic:
                size, top = value_of(node).shape[dim], bucket(fact.shape[dim])
                ranges[_compat.expression(size)] = (size, top // 2 + 1, top)
    if not ranges or _compat.compiles_of_this_frame() >= _MOST_COMPILES or not _compat.may_recompile():
        return
    # A range that the user gave a size is an assertion, which a guard inside it would break.
    free = [found for found in ranges.values() if _compat.is_unbounded(found[0])]
    for size, low, top in free:
        bool(size >= low), bool(size <= top)


def words(around: Neighbourhood) -> str:
    """The range in words; empty where shapes are static."""
    found = []
    for i, (_, fact) in enumerate(around.inputs):
        for dim in fact.dynamic:
            top = bucket(fact.shape[dim])
            found.append(f"input {i} dim {dim}: {top // 2 + 1} to {top}")
    return ", ".join(found)
