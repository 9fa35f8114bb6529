"""Patterns of op names, as a shell has them: ``mylib::*``, ``mylib::*_backward``. ``NEW`` stands for every op that
the imports register."""

from __future__ import annotations

import fnmatch

import torch

from opgraft.diagnostics import _compat

NEW = "*"


def registered() -> list[str]:
    return sorted(_compat.registered_ops())


def is_pattern(name: str) -> bool:
    return any(letter in name for letter in "*?[")


def asks_for(asked: str, name: str) -> bool:
    """Is ``name`` the op, or one of the ops, that ``asked`` stands for?"""
    return name == asked or (is_pattern(asked) and fits(asked, name))


def fits(pattern: str, name: str) -> bool:
    """A pattern without an overload fits all of an op's overloads."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.partition(".")[0], pattern)


def expanded(name: str, before: frozenset[str] = frozenset()) -> list[str]:
    """The registered ops that a pattern stands for, in order; a name stands for itself, and so does a pattern that
    fits nothing.

    Args:
        before: what was registered before the imports; ``NEW`` leaves it out.
    """
    if not is_pattern(name):
        return [name]
    found = []
    for op in registered():
        if fits(name, op) and not (name == NEW and op in before) and _compat.is_defined(op):
            namespace, _, rest = op.partition("::")
            # Loading a packet is what makes its overloads known; a name that torch.ops cannot give is no op to call.
            if getattr(getattr(torch.ops, namespace), rest.partition(".")[0], None) is not None:
                found.append(op)
    return found or [name]
