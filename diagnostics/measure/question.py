"""What a comparison asks of every process alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opgraft.diagnostics.measure.swap import Swap

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Question:
    """What is asked of every process alike.

    Attributes:
        ops: names of the registered ops; ``references`` has one for each.
        swapped: unregistered functions to compare, each with its reference.
        raw: unregistered forms brought in beside the registered ops.
        seconds: time for the interleaved blocks of this process, in seconds.
        alone_seconds: time for the op alone.
        apart: whether the steps are taken apart as well, where they are timed (on a GPU).
    """

    ops: tuple[str, ...]
    references: Mapping[str, Callable[..., Any]]
    swapped: tuple[Swap, ...] = ()
    raw: tuple[Swap, ...] = ()
    wanted: tuple[str, ...] | None = None
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 20.0
    alone_seconds: float = 2.0
    check: bool = True
    alone: bool = True
    apart: bool = False
    most_blocks: int = 200
    seed: int = 0
