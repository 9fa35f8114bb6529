"""The value of a chain of elementwise nodes as a polynomial in a few atoms.

Two chains with the same polynomial mean the same, however their factors are ordered and their brackets set; so a rule
states one polynomial where a pattern matcher would need a pattern for every way of writing it. Casts that widen and
views that keep the elements' order are seen through. Whatever is not understood becomes an atom.
"""

from __future__ import annotations

from typing import Any

import torch

from opgraft.compile.metadata import same_shape, value_of
from opgraft.compile.rules.node_kind import CASTS, ORDER_KEEPING_VIEWS, kind_of

# A monomial is the sorted tuple of its atoms, repeated by exponent; a polynomial gives each its coefficient.
Monomial = tuple[torch.fx.Node, ...]
Polynomial = dict[Monomial, float]

_MOST_TERMS = 16
_MOST_DEGREE = 6
_DEEPEST = 24


class NotAPolynomialError(Exception):
    """The expression is too large, or no polynomial."""


class Reader:
    """Reads polynomials with ``atoms`` kept whole. ``covered`` collects the nodes that were looked through."""

    def __init__(self, *atoms: torch.fx.Node) -> None:
        self.atoms = frozenset(atoms)
        self.covered: list[torch.fx.Node] = []

    def read(self, value: Any, depth: int = 0) -> Polynomial:
        """The polynomial of a node or a number.

        Raises:
            NotAPolynomialError: it has too many terms, too high a degree, or is too deep.
        """
        if depth > _DEEPEST:
            raise NotAPolynomialError
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {(): float(value)}
        if not isinstance(value, torch.fx.Node):
            raise NotAPolynomialError
        if value in self.atoms:
            return {(value,): 1.0}
        inner = see_through(value)
        if inner is not None:
            self.covered.append(value)
            return self.read(inner, depth + 1)
        found = self._arithmetic(value, depth)
        return {(value,): 1.0} if found is None else found

    def _arithmetic(self, node: torch.fx.Node, depth: int) -> Polynomial | None:
        kind = kind_of(node)
        operands = node.args
        if not elementwise(node) or set(node.kwargs) - {"alpha"} or node.kwargs.get("alpha", 1) != 1:
            return None
        if kind in ("add", "sub", "rsub", "mul", "div") and len(operands) == 2:
            self.covered.append(node)
            left, right = (self.read(o, depth + 1) for o in operands)
            if kind == "mul":
                return times(left, right)
            if kind == "div":
                if set(right) != {()} or right[()] == 0.0:
                    raise NotAPolynomialError
                return scaled(left, 1.0 / right[()])
            return (
                plus(left, scaled(right, -1.0))
                if kind == "sub"
                else (plus(right, scaled(left, -1.0)) if kind == "rsub" else plus(left, right))
            )
        if kind == "neg" and len(operands) == 1:
            self.covered.append(node)
            return scaled(self.read(operands[0], depth + 1), -1.0)
        exponent = 2 if kind == "square" else operands[1] if kind == "pow" and len(operands) == 2 else None
        if isinstance(exponent, (int, float)) and exponent == int(exponent) and 1 <= exponent <= 4:
            self.covered.append(node)
            base = self.read(operands[0], depth + 1)
            found = base
            for _ in range(int(exponent) - 1):
                found = times(found, base)
            return found
        return None


def elementwise(node: torch.fx.Node) -> bool:
    """True where every tensor operand has the result's shape: no broadcasting. Dtypes may widen, never narrow."""
    result = value_of(node)
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return False
    for operand in node.args:
        if isinstance(operand, torch.fx.Node):
            value = value_of(operand)
            if not isinstance(value, torch.Tensor) or not same_shape(value, result):
                return False
            if value.device != result.device or not widens(value.dtype, result.dtype):
                return False
    return True


def see_through(node: torch.fx.Node) -> torch.fx.Node | None:
    """What a widening cast or an order-keeping view is of; None for anything else."""
    kind = kind_of(node)
    source = node.args[0] if node.args else None
    before, after = value_of(source), value_of(node)
    if (
        not isinstance(source, torch.fx.Node)
        or not isinstance(before, torch.Tensor)
        or not isinstance(after, torch.Tensor)
    ):
        return None
    if kind in CASTS:
        return source if before.device == after.device and widens(before.dtype, after.dtype) else None
    # Between tensors of one dtype and device: view(dtype) is a reinterpretation, no view of the same elements.
    return source if kind in ORDER_KEEPING_VIEWS and before.dtype == after.dtype else None


def widens(before: torch.dtype, after: torch.dtype) -> bool:
    """True where every value of ``before`` is one of ``after``: the cast changes nothing."""
    return before.is_floating_point and after.is_floating_point and torch.promote_types(before, after) == after


def times(left: Polynomial, right: Polynomial) -> Polynomial:
    found: Polynomial = {}
    for a, x in left.items():
        for b, y in right.items():
            monomial = tuple(sorted((*a, *b), key=lambda node: node.name))
            if len(monomial) > _MOST_DEGREE:
                raise NotAPolynomialError
            found[monomial] = found.get(monomial, 0.0) + x * y
    if len(found) > _MOST_TERMS:
        raise NotAPolynomialError
    return found


def plus(left: Polynomial, right: Polynomial) -> Polynomial:
    found = dict(left)
    for monomial, x in right.items():
        found[monomial] = found.get(monomial, 0.0) + x
    return found


def scaled(polynomial: Polynomial, factor: float) -> Polynomial:
    return {monomial: factor * x for monomial, x in polynomial.items()}


def equal(left: Polynomial, right: Polynomial, tolerance: float = 1e-4) -> bool:
    """True where all coefficients agree within ``tolerance`` of their size: people round 0.7978845608 differently."""
    keys = {m for m, x in left.items() if x != 0.0} | set(right)
    return all(abs(left.get(m, 0.0) - right.get(m, 0.0)) <= tolerance * abs(right.get(m, 0.0)) for m in keys)
