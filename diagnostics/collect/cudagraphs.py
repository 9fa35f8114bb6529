"""CUDA graphs that are skipped or split (H14), in torch's words and with the user's lines.

Two places of Inductor are listened to. ``cudagraph_utils.cudagraphs_log`` is the logger that every skip is told to: the
function that tells it is imported by name all over Inductor, the logger is looked up in its own module. And
``Scheduler.graph_partition`` cuts a graph around what cannot be recorded: it is asked afterwards which nodes those
were."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.collect.events import CudagraphsSkipped
from opgraft.diagnostics.collect.place import frames_of

Tell = Callable[[CudagraphsSkipped], None]
_LONGEST = 4000
_MOST_NODES = 32


class ListenedLogger:
    """Stands for Inductor's logger of CUDA graphs; what it is told goes on to the logger itself."""

    def __init__(self, logger: Any, tell: Tell) -> None:
        self._logger, self._tell = logger, tell

    def warning(self, message: Any, *args: Any, **kwargs: Any) -> None:
        try:
            text = str(message) % args if args else str(message)
            self._tell(CudagraphsSkipped(reason=text[:_LONGEST], id=_compat.trace_id()[0], stack=frames_of(text)))
        finally:
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line in torch, not this one
            self._logger.warning(message, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


def listening_partition(original: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    """``Scheduler.graph_partition`` that tells which nodes cut the graph."""

    @functools.wraps(original)
    def graph_partition(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for event in cuts(self, result):
            tell(event)
        return result

    return graph_partition


def cuts(scheduler: Any, result: Any) -> Iterator[CudagraphsSkipped]:
    """One event a reason and place for which a node is kept out of CUDA graphs; none where they are not in use."""
    try:
        partitions, signatures = result
        if not _compat.cudagraphs_on() or not any(node.is_gpu() for part in partitions for node in part):
            return
        kept_out = [
            node
            for part, signature in zip(partitions, signatures, strict=False)
            if signature.skip_cudagraph
            for node in part
        ]
        told = set()
        for node in kept_out[:_MOST_NODES]:
            words = scheduler.should_partition(node)
            reason = words if isinstance(words, str) else "kept out of CUDA graphs"
            origin = _origin(node)
            target = str(getattr(origin, "target", "") or "")
            stack = frames_of(str(getattr(origin, "meta", {}).get("stack_trace") or ""))
            key = (reason, target, stack[-1:])
            if key in told:
                continue
            told.add(key)
            yield CudagraphsSkipped(
                reason=f"{reason}: {target}" if target else reason,
                partitions=len(partitions),
                stack=stack,
                id=_compat.trace_id()[0],
            )
    except (AttributeError, TypeError, ValueError):
        return


def _origin(node: Any) -> Any:
    """The node of the FX graph that a scheduler's node was made from; the last of several."""
    inner = getattr(node, "node", None)
    if inner is None:
        parts = getattr(node, "snodes", None) or ()
        return _origin(parts[-1]) if parts else None
    found = inner.get_origin_node() if hasattr(inner, "get_origin_node") else None
    if found is not None:
        return found
    origins = list(getattr(inner, "origins", None) or ())
    return origins[-1] if origins else None
