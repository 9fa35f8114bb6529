"""The data of this package: a tensor's facts, a place in the user's source, a site, and what was decided."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from opgraft.registry import OpSpec

KERNEL = "kernel"
COMPILER = "compiler"

_LONGEST_WAY_IN = 6  # casts and views in a row

_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


class SiteWarning(UserWarning):
    """A site, or a user's pass, could not be served; the compiler's code is used there."""


@dataclass(frozen=True)
class TensorFacts:
    """A tensor as far as a compiled kernel can tell: sizes are numbers, the hints where they are dynamic."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    dynamic: tuple[int, ...] = ()  # the dimensions whose size is symbolic

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Place:
    """The innermost line of the user's own source that led to a node."""

    path: str = "<unknown>"
    line: int = 0
    function: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


def place_of(node: torch.fx.Node) -> Place:
    """The place from a node's stack trace: frames of torch and of this package are not the user's."""
    frames = [
        m for m in _FRAME.finditer(node.meta.get("stack_trace") or "") if not m["path"].startswith(_NOT_THE_USERS)
    ]
    if not frames:
        return Place()
    inner = frames[-1]
    line = int(inner["line"])
    return Place(inner["path"], line, inner["function"], linecache.getline(inner["path"], line).strip())


@dataclass(frozen=True, eq=False)
class Site:
    """One place in one graph where an op could serve: a call of the op, or an idiom of plain torch.

    Attributes:
        spec: the op.
        root: the last node whose value the op's result is.
        nodes: the nodes that only these values need; ``root`` alone at a call of the op.
        args: the op's arguments: nodes and constants.
        idiom: the rule that found it; empty at a call of the op.
        outputs: every node whose value the op gives; ``root`` alone, but where an idiom has several results.
        write: how the op is put in the place of an idiom: ``write(emit, *args)`` gives a node an output.
    """

    spec: OpSpec
    root: torch.fx.Node
    nodes: tuple[torch.fx.Node, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    idiom: str = ""
    outputs: tuple[torch.fx.Node, ...] = ()
    write: Callable[..., tuple[torch.fx.Node, ...]] | None = None

    @property
    def place(self) -> Place:
        return place_of(self.root)

    @property
    def first(self) -> torch.fx.Node:
        """The node in front of which the op stands, or what stands for it: the first whose value it gives."""
        return min(self.outputs or (self.root,))

    @property
    def way_in(self) -> frozenset[torch.fx.Node]:
        """Casts and views between an idiom and its arguments that others read too, so that they are not part of it."""
        own, ends = set(self.nodes), {a for a in self.args if isinstance(a, torch.fx.Node)}
        found: set[torch.fx.Node] = set()
        for read in {read for node in self.nodes for read in node.all_input_nodes} - own - ends:
            path, source = [read], read.args[0] if read.args else None
            while isinstance(source, torch.fx.Node) and source not in ends and len(path) < _LONGEST_WAY_IN:
                path.append(source)
                source = source.args[0] if source.args else None
            if source in ends:
                found.update(path)
        return frozenset(found)

    def moved(self, table: dict[torch.fx.Node, Any]) -> Site:
        """The same site in a copy of the graph; ``table`` has the copy of every node, but of those that only mark."""
        return Site(
            spec=self.spec,
            root=table[self.root],
            nodes=tuple(table[node] for node in self.nodes if node in table),
            args=torch.fx.map_arg(self.args, table.__getitem__),
            kwargs=torch.fx.map_arg(dict(self.kwargs), table.__getitem__),
            idiom=self.idiom,
            outputs=tuple(table[node] for node in self.outputs),
            write=self.write,
        )

    def __str__(self) -> str:
        what = f"{self.idiom} ({self.spec.name})" if self.idiom else self.spec.name
        return f"{what} at {self.place}"


@dataclass(frozen=True)
class Decision:
    """Which candidate serves a site, why, and what was measured.

    Attributes:
        choice: ``"kernel"`` or ``"compiler"``.
        why: one sentence.
        measured: True where both candidates were timed; other decisions are not stored.
        ratio: the compiler's time over the kernel's: above one where the kernel is faster. None where not timed.
        interval: the 95 % interval of ``ratio``.
        noise: how far one and the same candidate differs from itself, as a share.
        compiler_us, kernel_us: medians, microseconds a call.
        range: the sizes of the dynamic dimensions that the choice was taken for; empty where shapes are static.
        open: the kernel wins on the device and loses on the host, or the reverse: the model around decides.
    """

    choice: str
    why: str
    measured: bool = False
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    noise: float | None = None
    compiler_us: float | None = None
    kernel_us: float | None = None
    range: str = ""
    open: bool = False


@dataclass(frozen=True)
class SiteReport:
    """One site, as ``opgraft.sites`` lists it."""

    op: str
    idiom: str
    place: Place
    inputs: tuple[str, ...]
    surroundings: str
    decision: Decision
    key: str = ""  # of the site and its surroundings: equal for the same site in another layer

    @property
    def chosen(self) -> bool:
        """True where the kernel serves the site."""
        return self.decision.choice == KERNEL

    def __str__(self) -> str:
        what = f"{self.op} for {self.idiom}" if self.idiom else self.op
        return f"{self.decision.choice:8}  {what:32}  {self.place}  {', '.join(self.inputs)}  {self.decision.why}"
