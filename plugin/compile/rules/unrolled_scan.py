"""The recurrence h[t] = a[t] h[t-1] + b[t] as an ``associative_scan`` with ``combine_mode="generic"``, which Dynamo
takes apart into slices, products, sums and interleavings, level by level.

What consists of products, sums and moves alone is a polynomial of its inputs. So the nodes between the two inputs and
the result are run in float64 on random numbers, in a small stand-in for every other dimension, and compared with the
recurrence: two polynomials that agree at random points are equal (Schwartz 1980).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgraft import _compat
from opgraft.compile.rules.node_kind import kind_of
from opgraft.compile.rules.rule import Emit, Match, Rule
from opgraft.compile.rules.walk import Node, Walk, like, tensor_of

_MOST_NODES = 2000
_LONGEST = 1 << 16
_MOVES = frozenset(
    ["slice", "pad", "constant_pad_nd", "stack", "cat", "flatten", "mul", "add", "movedim", "transpose", "permute"]
)
_LEVELS = ("lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting")
_BATCH = ("_add_batch_dim", "_remove_batch_dim")


def match(node: Node) -> Match | None:
    """Asked at the interleaving that gives the states, time first: a stack of two halves, flattened."""
    value = tensor_of(node)
    if value is None or not value.is_floating_point() or not _interleaves(node):
        return None
    if not value.dim() or not isinstance(value.shape[0], int) or not 2 <= value.shape[0] <= _LONGEST:
        return None
    found = _region(node)
    if found is None:
        return None
    inside, (first, second) = found
    for decay, update in ((first, second), (second, first)):
        if _is_the_recurrence(node, inside, decay, update):
            return _match(node, inside, decay, update)
    return None


def _interleaves(node: Node) -> bool:
    """True for what ends a scan: two halves stacked and flattened, and cut where the length is odd. A result that is
    sliced and stacked again belongs to a longer scan."""
    kind = kind_of(node)
    if kind == "slice":
        node_below = node.args[0]
        ends = kind_of(node_below) == "flatten"
    else:
        ends = kind in ("flatten", "cat") and not any(kind_of(user) == "slice" for user in node.users)
    return ends and not {"slice", "stack"} <= {kind_of(user) for user in node.users}


def _match(node: Node, inside: set[Node], decay: Node, update: Node) -> Match | None:
    walk = Walk()
    walk.nodes = {n for n in inside if n is not node} | _dead(inside)
    nodes = walk.closed(node)
    if nodes is None:
        return None
    nodes = tuple(sorted({*nodes, *_nesting(nodes)}))

    def write(emit: Emit, decay: Any, update: Any) -> tuple[Node, ...]:
        return (emit(torch.ops.opgraft.linear_scan.default, decay, update, None, 0, False),)

    return Match((node,), nodes, (decay, update), write)


def _region(root: Node) -> tuple[set[Node], tuple[Node, Node]] | None:
    """The nodes below a result down to the two tensors that are only sliced, of the result's own shape."""
    inside: set[Node] = set()
    leaves: list[Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node in inside or node in leaves:
            continue
        if node is not root and like(node, root) and all(kind_of(user) == "slice" for user in node.users):
            leaves.append(node)
            if len(leaves) > 2:
                return None
            continue
        if not _is_ring(node) or len(inside) > _MOST_NODES:
            return None
        inside.add(node)
        waiting.extend(node.all_input_nodes)
    return (inside, (leaves[0], leaves[1])) if len(leaves) == 2 else None


def _is_ring(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    if name in _BATCH:
        # Batched over the leading dimension, there and back: between elementwise nodes that changes nothing.
        return bool((node.args[1] if name == _BATCH[0] else node.args[3]) == 0)
    return kind_of(node) in _MOVES


def _dead(inside: set[Node]) -> set[Node]:
    """Nodes outside that read the region and that nothing reads: the products of the decays."""
    found: set[Node] = set()
    again = True
    while again:
        again = False
        for node in [user for n in inside | found for user in n.users]:
            waiting, closure = [node], set()
            while waiting:
                n = waiting.pop()
                closure.add(n)
                waiting.extend(user for user in n.users if user not in closure)
            new = closure - found - inside
            if new and len(closure) < 50 and all(_is_ring(n) for n in closure) and not closure & inside:
                found |= new
                again = True
    return found


def _nesting(nodes: tuple[Node, ...]) -> list[Node]:
    """The calls between them that open and close a level of vmap: without the products they would hold nothing."""
    found, node = [], nodes[0]
    while node is not nodes[-1]:
        name = getattr(node.target, "__name__", "")
        if name in _LEVELS and not node.users:
            found.append(node)
        node = node.next
    return found


def _is_the_recurrence(root: Node, inside: set[Node], decay: Node, update: Node) -> bool:
    value = tensor_of(root)
    assert value is not None
    small = [int(value.shape[0]), *(2 for _ in value.shape[1:])]
    generator = torch.Generator().manual_seed(0)
    with _compat.aside(), torch.no_grad():
        a = torch.rand(small, generator=generator, dtype=torch.float64) + 0.25
        b = torch.randn(small, generator=generator, dtype=torch.float64)
        table: dict[Node, Any] = {decay: a, update: b}
        try:
            for node in sorted(inside):
                table[node] = _run(node, table)
            got = table[root]
        except Exception:
            return False
        want, state = [], torch.zeros_like(b[0])
        for x, y in zip(a, b, strict=True):
            state = x * state + y
            want.append(state)
        return bool(got.shape == b.shape) and bool(torch.allclose(got, torch.stack(want), rtol=1e-9, atol=1e-9))


def _run(node: Node, table: dict[Node, Any]) -> Any:
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), table.__getitem__)
    if getattr(node.target, "__name__", "") in _BATCH:
        return args[0]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    return function(*args, **kwargs)


RULE = Rule("unrolled-scan", "opgraft::linear_scan", match)
