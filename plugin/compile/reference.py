"""An op's reference as nodes, in the place of a call of the op.

The reference is traced to aten operations with the graph's own example values and inlined before AOTAutograd, which
then derives its gradient like that of any other code. Calling the Python function from the graph would do the same, but
torch's caches take no graph that calls a foreign function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.proxy_tensor import make_fx

from opgraft import _compat
from opgraft.compile.metadata import is_plain, same_strides, same_value, value_of
from opgraft.compile.site import Site

_MOST_NODES = 400
_COPIED_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


class NoReferenceError(Exception):
    """The reference cannot stand for this call; the message says why."""


def trace(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> torch.fx.GraphModule:
    """The graph of ``function`` for these arguments (nodes stand for their example values), its results like ``like``.

    Raises:
        NoReferenceError: it cannot be traced, is too long to compile, or gives another shape, dtype or device.
    """
    leaves: list[torch.fx.Node] = []
    torch.fx.map_arg((tuple(args), kwargs), lambda node: leaves.append(node) if node not in leaves else None)
    values = [value_of(node) for node in leaves]
    if any(v is None for v in values):
        raise NoReferenceError("an argument's shape is unknown")
    mode = _compat.fake_mode_of(*values)
    if mode is None:
        raise NoReferenceError("its arguments are no traced tensors")

    def called(*given: Any) -> Any:
        table = dict(zip(leaves, given, strict=True))
        here_args, here_kwargs = torch.fx.map_arg((tuple(args), kwargs), table.__getitem__)
        return _laid_out(function(*here_args, **here_kwargs), like, given)

    try:
        with torch.no_grad(), torch.autocast(values[0].device.type, enabled=False), mode:
            traced = make_fx(called, tracing_mode="real")(*[_detached(v) for v in values])
    except NoReferenceError:
        raise
    except Exception as error:
        raise NoReferenceError(
            f"its reference cannot be traced ({type(error).__name__}: {_first_line(error)})"
        ) from error
    if len(traced.graph.nodes) > _MOST_NODES:
        raise NoReferenceError(f"its reference is {len(traced.graph.nodes)} operations long, more than is compiled")
    if any(node.op in ("get_attr", "call_module") for node in traced.graph.nodes):
        raise NoReferenceError("its reference uses a tensor of its own")
    return traced


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _laid_out(result: Any, like: Any, inputs: Sequence[Any]) -> Any:
    """The result as fresh memory in the layout of ``like``: views later in the graph rely on the op's own layout."""
    if isinstance(result, (tuple, list)):
        if not isinstance(like, (tuple, list)) or len(like) != len(result):
            raise NoReferenceError("its reference gives another number of results")
        return tuple(_laid_out(r, k, inputs) for r, k in zip(result, like, strict=True))
    if not isinstance(result, torch.Tensor):
        if result is None and like is None:
            return None
        raise NoReferenceError("its reference gives no tensor")
    if not same_value(result, like):
        raise NoReferenceError("its reference gives another shape, dtype or device")
    if not same_strides(result, like):
        if not same_strides(like, like.new_empty(like.shape)):
            raise NoReferenceError("its result has a layout that the reference cannot take")
        return result.clone(memory_format=torch.contiguous_format)
    keys = {i.untyped_storage()._cdata for i in inputs if isinstance(i, torch.Tensor)}
    return result.clone() if result.untyped_storage()._cdata in keys else result


def inline(site: Site, traced: torch.fx.GraphModule, autocast: str = "") -> Any:
    """Copies the traced reference in front of the site's node; gives the node of the result, or a tuple of them.

    ``autocast`` is the device type whose autocast is on at the site, if any.
    """
    leaves: list[torch.fx.Node] = []
    torch.fx.map_arg(
        (tuple(site.args), dict(site.kwargs)), lambda node: leaves.append(node) if node not in leaves else None
    )
    graph = site.root.graph
    table: dict[torch.fx.Node, Any] = {}
    waiting = iter(leaves)
    result: Any = None
    with graph.inserting_before(site.root):
        # An op without an autocast rule runs in its arguments' dtypes, and so does what stands in its place.
        region = graph.call_function(_enter_autocast, (autocast, None, False, None)) if autocast else None
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                table[node] = next(waiting)
            elif node.op == "output":
                result = torch.fx.map_arg(node.args[0], table.__getitem__)
            else:
                copy = graph.node_copy(node, table.__getitem__)
                copy.meta = copied_meta(site.root)
                if "val" in node.meta:
                    copy.meta["example_value"] = node.meta["val"]
                table[node] = copy
        if region is not None:
            graph.call_function(_exit_autocast, (region,))
    return result


def copied_meta(node: torch.fx.Node) -> dict[str, Any]:
    """What a new node takes over: where it comes from. Never the old node's recorded arguments, which are stale."""
    return {key: node.meta[key] for key in _COPIED_META if key in node.meta}


def put_in_place(site: Site, result: Any) -> None:
    """Lets every user of the op's node read ``result``, and removes the node."""
    root = site.root
    if isinstance(result, torch.fx.Node):
        if is_plain(value_of(root)):
            result.meta["example_value"] = value_of(root)
        root.replace_all_uses_with(result)
    else:
        for user in list(root.users):
            if getattr(user.target, "__name__", "") != "getitem":
                raise NoReferenceError("its results are passed on together")
        for user in list(root.users):
            user.replace_all_uses_with(result[user.args[1]])
            user.graph.erase_node(user)
    root.graph.erase_node(root)
