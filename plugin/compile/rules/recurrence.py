"""The recurrence h[t] = a[t] h[t-1] + b[t] unrolled by a Python loop: one product and one sum a step.

Every step reads its a and its b as a slice of one tensor each. The states are then used one by one, or stacked; where
they are only stacked, in order, the stack is the op's own result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opgraft.compile.metadata import same_shape, value_of
from opgraft.compile.rules.node_kind import kind_of
from opgraft.compile.rules.rule import Emit, Match, Rule
from opgraft.compile.rules.walk import Node, Walk, argument, both_orders, like, tensor_of

_FEWEST = 3  # steps


@dataclass(frozen=True)
class _Slice:
    """One index of one dimension of a tensor, the others whole."""

    source: Node
    dim: int
    index: int
    node: Node


@dataclass(frozen=True)
class _Step:
    state: Node
    before: Any  # the state before; None where the first step is b alone
    product: Node | None
    decay: _Slice | None
    update: _Slice


def match(node: Node) -> Match | None:
    """Asked at the last step: the sum that no further step reads."""
    last = _step(node)
    if last is None or last.decay is None or any(_step_reading(user, node) for user in node.users):
        return None
    steps = [last]
    while (before := _step(steps[-1].before)) is not None and _fits(before, steps[-1]):
        steps.append(before)
    steps.reverse()
    return _whole(steps) if len(steps) >= _FEWEST else None


def _whole(steps: list[_Step]) -> Match | None:
    first = steps[0]
    decay = next(step.decay for step in steps if step.decay is not None)
    length = _length(decay)
    indices = [step.update.index for step in steps]
    if indices == list(range(len(steps))):
        reverse = False
    elif indices == list(range(len(steps)))[::-1]:
        reverse = True
    else:
        return None
    if length != len(steps) or _length(first.update) != length or not like(decay.source, first.update.source):
        return None
    if decay.dim != first.update.dim:
        return None
    initial = None if first.decay is None or _is_zero(first.before) else first.before
    if initial is not None and tensor_of(initial) is None:
        return None
    walk = Walk()
    states = [step.state for step in steps]
    for step in steps:
        walk.nodes.update({step.state} if step.product is None else {step.state, step.product})
        walk.shared.add(step.update.node)
        if step.decay is not None:
            walk.shared.add(step.decay.node)
    if first.decay is not None and isinstance(first.before, Node) and initial is None:
        walk.shared.add(first.before)
    dim, stacked = decay.dim, _stacked(states, reverse)
    args = (decay.source, first.update.source, initial)
    if stacked is not None:
        walk.nodes.update(states)
        nodes = walk.closed(stacked)
        place = argument(stacked, 1, "dim", 0)
        rank = tensor_of(stacked)
        assert rank is not None
        return None if nodes is None else Match((stacked,), nodes, args, _one(dim, place % rank.dim(), reverse))
    # States that only the next step reads need no node of their own.
    outputs = tuple(s for s, after in zip(states, [*steps[1:], None], strict=True) if _is_read(s, after))
    nodes = walk.closed(*outputs)
    wanted = [indices[states.index(s)] for s in outputs]
    return None if nodes is None else Match(outputs, nodes, args, _each(dim, wanted, reverse))


def _one(dim: int, place: int, reverse: bool) -> Any:
    def write(emit: Emit, decay: Any, update: Any, initial: Any) -> tuple[Node, ...]:
        states = emit(torch.ops.opgraft.linear_scan.default, decay, update, initial, dim, reverse)
        if place == dim:
            return (states,)
        moved = emit(torch.ops.aten.movedim.int, states, dim, place)
        return (emit(torch.ops.aten.contiguous.default, moved),)

    return write


def _each(dim: int, indices: list[int], reverse: bool) -> Any:
    def write(emit: Emit, decay: Any, update: Any, initial: Any) -> tuple[Node, ...]:
        states = emit(torch.ops.opgraft.linear_scan.default, decay, update, initial, dim, reverse)
        # Time first, so that a state is dense as it was.
        moved = emit(torch.ops.aten.movedim.int, states, dim, 0)
        if dim:
            moved = emit(torch.ops.aten.contiguous.default, moved)
        return tuple(emit(torch.ops.aten.select.int, moved, 0, i) for i in indices)

    return write


def _step(node: Any) -> _Step | None:
    """``decay * before + update``; or ``update`` alone, a first step from zero."""
    if kind_of(node) != "add":
        taken = _sliced(node)
        return _Step(node, None, None, None, taken) if taken is not None else None
    for product, second in both_orders(node):
        update = _sliced(second)
        if update is None or kind_of(product) != "mul":
            continue
        for first, before in both_orders(product):
            decay = _sliced(first)
            if decay is None or decay.source is update.source:
                continue  # a first state may itself be a slice of the updates
            if isinstance(before, Node) and like(product, node) and like(before, node):
                return _Step(node, before, product, decay, update)
    return None


def _step_reading(user: Node, state: Node) -> bool:
    """True where the node that reads a state is the product of the next step."""
    if kind_of(user) != "mul":
        return False
    return any((step := _step(after)) is not None and step.before is state for after in user.users)


def _fits(before: _Step, after: _Step) -> bool:
    """True where two steps slice the same tensors one after the other."""
    if before.update.source is not after.update.source or before.update.dim != after.update.dim:
        return False
    assert after.decay is not None
    if abs(before.update.index - after.update.index) != 1 or after.decay.index != after.update.index:
        return False
    if before.decay is None:
        return before.update.index in (0, _length(before.update) - 1)
    return (
        before.decay.source is after.decay.source
        and before.decay.dim == after.decay.dim
        and before.decay.index == before.update.index
    )


def _sliced(node: Any) -> _Slice | None:
    kind = kind_of(node)
    if kind not in ("getitem", "select") or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    value = tensor_of(source)
    if value is None:
        return _unbound(node)
    if kind == "select":
        dim, index = argument(node, 1, "dim"), argument(node, 2, "index")
    else:
        dim, index = _one_index(node.args[1], value.dim())
    if not isinstance(dim, int) or not isinstance(index, int) or isinstance(index, bool):
        return None
    dim %= value.dim()
    size = value.shape[dim]
    if not isinstance(size, int) or not -size <= index < size:
        return None
    return _Slice(source, dim, index % size, node)


def _unbound(node: Node) -> _Slice | None:
    """One result of ``unbind``."""
    call = node.args[0]
    source = call.args[0] if isinstance(call, Node) and kind_of(call) == "unbind" and call.args else None
    value = tensor_of(source)
    if value is None or not isinstance(source, Node) or not isinstance(node.args[1], int):
        return None
    dim = argument(call, 1, "dim", 0)  # type: ignore[arg-type]
    if not isinstance(dim, int) or not isinstance(value.shape[dim], int):
        return None
    return _Slice(source, dim % value.dim(), node.args[1] % value.shape[dim], node)


def _one_index(index: Any, rank: int) -> tuple[Any, Any]:
    """The dimension and the number of an index such as ``[:, :, 3]``."""
    if isinstance(index, int):
        return 0, index
    if not isinstance(index, tuple):
        return None, None
    numbers = [(i, part) for i, part in enumerate(index) if isinstance(part, int)]
    whole = all(part == slice(None) or part is Ellipsis or isinstance(part, int) for part in index)
    if len(numbers) != 1 or not whole or sum(part is Ellipsis for part in index) > 1:
        return None, None
    place, number = numbers[0]
    after_ellipsis = any(part is Ellipsis for part in index[:place])
    return (place - len(index) + rank if after_ellipsis else place), number


def _length(taken: _Slice) -> int:
    value = value_of(taken.source)
    return int(value.shape[taken.dim])


def _is_zero(node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    return kind_of(node) in ("zeros", "zeros_like", "new_zeros")


def _is_read(state: Node, after: _Step | None) -> bool:
    return after is None or any(user is not after.product for user in state.users)


def _stacked(states: list[Node], reverse: bool) -> Node | None:
    """The stack of all states in the order of time, where nothing else reads them."""
    order = states[::-1] if reverse else states
    stacks = [user for user in order[-1].users if kind_of(user) == "stack"]
    if len(stacks) != 1:
        return None
    (stack,) = stacks
    parts = argument(stack, 0, "tensors")
    if not isinstance(parts, (list, tuple)) or list(parts) != order:
        return None
    readers = {user for state in states for user in state.users} - {stack}
    inside = {user for user in readers if kind_of(user) == "mul"}
    same = all(same_shape(value_of(s), value_of(order[0])) for s in order)
    return stack if same and readers == inside else None


RULE = Rule("recurrence", "opgraft::linear_scan", match)
