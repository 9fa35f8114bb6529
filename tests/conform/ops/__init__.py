"""Ops that each break one rule, by family; importing the package registers them all."""

from tests.conform.ops import carried, deadly, fakes, gradients, registered, values, written
from tests.conform.ops.pairs import PAIRS, Pair

__all__ = ["PAIRS", "Pair", "carried", "deadly", "fakes", "gradients", "registered", "values", "written"]
