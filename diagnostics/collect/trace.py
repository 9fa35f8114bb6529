"""H1: torch's structured trace events -> our events. One translator a recorder; it keeps only what joins events."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.collect import events
from opgraft.diagnostics.collect.events import RECOMPILE_LIMIT
from opgraft.diagnostics.collect.guards import guarded_value
from opgraft.diagnostics.collect.message_text import parse_messages
from opgraft.diagnostics.collect.place import from_summaries, place
from opgraft.diagnostics.model import Location

_WHERE = re.compile(r"^Graph break in user code at (?P<path>.+):(?P<line>\d+)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+), in (?P<name>\S+)', re.MULTILINE)
_SKIPPED = (
    "cannot properly resume from this graph break",
    "will skip tracing the frame",
    "Skipping the function and falling back to eager",
    "Skipping the frame and falling back to eager",
    "Skipping frame",
)
_LINE = re.compile(r"# File: (?P<path>.+?):(?P<line>\d+) in (?P<name>\S+), code:")
_OP = re.compile(r"torch\.ops\.(?P<op>\w+\.\w+(?:\.\w+)?)\(")
OWN_NAMESPACES = frozenset(
    [
        "aten",
        "prims",
        "prim",
        "higher_order",
        "inductor",
        "_c10d_functional",
        "c10d_functional",
        "c10d",
        "rngprims",
        "quantized",
        "mkldnn",
        "mkl",
        "onednn",
        "xnnpack",
        "quantized_decomposed",
        "sparse",
        "triton",
        "debugprims",
        "_quantized",
        "bundled",
        "streams",
        "fsdp",
        "dtensor",
        "symm_mem",
        "_c10d_functional_autograd",
        "_dtensor",
        "profiler",
        "cuda",
        "export",
        "nvprims",
    ]
)
_ITEM_BYTES = {
    **dict.fromkeys(("b8", "i8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("f16", "bf16", "i16", "u16"), 2),
    **dict.fromkeys(("f32", "i32", "u32", "c32"), 4),
    **dict.fromkeys(("f64", "i64", "u64", "c64"), 8),
    "c128": 16,
}
_LONGEST = 4000
_SHORT = 200

Emit = Callable[[events.Event], None]


class TraceReader:
    """Called with the metadata and payload of every trace record; emits events. Keeps the messages not yet joined."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._files: dict[int, str] = {}
        self._open: OrderedDict[str, list[events.Message]] = OrderedDict()
        self._frames: OrderedDict[str, Location] = OrderedDict()
        self._names: dict[str, str] = {}
        self._told: deque[int] = deque(maxlen=64)
        self._unheard = -(1 << 20)

    def message(self, message: events.Message) -> None:
        """A message of the tracer, before the record that says what became of it.

        It is an event of the stream only once a break or an error repeats its words: most are handled by the tracer.
        """
        waiting = self._open.setdefault(message.id, [])
        waiting.append(message)
        del waiting[:-64]
        if len(self._open) > 64:
            self._open.popitem(last=False)
        if message.gb_type.startswith(RECOMPILE_LIMIT):
            self._emit(message)

    def read(self, metadata: dict[str, Any], payload: Any) -> None:
        """One record of the trace log."""
        for name, reader in _READERS.items():
            if name in metadata:
                reader(self, metadata, metadata[name], payload if isinstance(payload, str) else "")
                return

    def _common(self, metadata: dict[str, Any]) -> dict[str, Any]:
        frame, compiled = metadata.get("frame_id"), metadata.get("frame_compile_id")
        autograd = metadata.get("compiled_autograd_id")
        identity = f"{frame}/{compiled}" if frame is not None else ""
        if autograd is not None:
            identity = f"!{autograd}/{identity}" if identity else f"!{autograd}"
        return {"id": identity, "attempt": int(metadata.get("attempt") or 0), "rank": metadata.get("rank")}

    def _stack(self, frames: Any) -> tuple[Location, ...]:
        if not isinstance(frames, list):
            return ()
        if any(frame.get("filename") not in self._files for frame in frames if isinstance(frame.get("filename"), int)):
            self._files.update({number: name for name, number in _compat.intern_table().items()})
        named = []
        for frame in frames:
            path = frame.get("filename")
            path = self._files.get(path, "") if isinstance(path, int) else str(path)
            named.append(place(path, int(frame.get("line") or 0), str(frame.get("name", ""))))
        return tuple(named)

    def _string(self, metadata: dict[str, Any], value: Any, payload: str) -> None:
        if isinstance(value, (list, tuple)) and len(value) == 2:
            self._files[int(value[1])] = str(value[0])

    def _start(self, metadata: dict[str, Any], value: Any, payload: str) -> None:
        common = self._common(metadata)
        self._open.pop(common["id"], None) if common["attempt"] == 0 else None
        stack = self._stack(value.get("stack"))
        if stack:
            self._names[common["id"].partition("/")[0]] = str(value["stack"][-1].get("name", ""))
            self._frames[common["id"].partition("/")[0]] = stack[-1]
            if len(self._frames) > 256:
                self._names.pop(self._frames.popitem(last=False)[0], None)
        self._emit(events.CompileBegan(stack=stack, **common))

    def _artifact(self, metadata: dict[str, Any], value: Any, payload: str) -> None:
        name = value.get("name", "")
        if name == "dynamo_graph_break_reason":
            self._broke(metadata, payload)
        elif name == "dynamo_error":
            self._failed(metadata, payload)
        elif name == "recompile_reasons":
            self._recompiled(metadata, payload)
        elif "cache" in name and any(name.endswith(end) for end in ("_hit", "_miss", "_bypass")):
            self._cached(metadata, name, payload)

    def _broke(self, metadata: dict[str, Any], payload: str) -> None:
        common = self._common(metadata)
        joined = self._join(common["id"], payload)
        found = _WHERE.search(payload)
        frames = list(_FRAME.finditer(payload.split("Traceback (most recent call last)")[0]))
        stack = tuple(place(f["path"], int(f["line"]), f["name"]) for f in frames)
        if found:
            location = place(found["path"], int(found["line"]), frames[-1]["name"] if frames else "")
        elif stack:
            location = stack[-1]
        else:
            location = Location(path="", line=0)
        skipped = any(text in payload for text in _SKIPPED)
        reason = _reason(payload)
        if not joined:  # nobody listened to the fields: they are read out of the words again
            self._unheard -= 8
            joined = parse_messages(reason, stack, self._unheard, common)
            for message in joined:
                self._emit(message)
        self._emit(
            events.Broke(
                location=location,
                reason=reason[: _SHORT if joined else _LONGEST],
                skipped=skipped,
                messages=tuple(m.number for m in joined),
                stack=stack,
                **common,
            )
        )

    def _failed(self, metadata: dict[str, Any], payload: str) -> None:
        common = self._common(metadata)
        joined = self._join(common["id"], payload, keep=True)
        user = payload.partition("from user code:")[2]
        stack = tuple(place(f["path"], int(f["line"]), f["name"]) for f in _FRAME.finditer(user))
        stack = stack or from_summaries(_compat.user_stack())
        kind, text = _last_error(payload)
        self._emit(events.Failed(type=kind, text=text, stack=stack, messages=tuple(m.number for m in joined), **common))

    def _join(self, identity: str, payload: str, keep: bool = False) -> list[events.Message]:
        """The messages whose words the payload repeats, in the order in which they came; the last one if none does.

        They are used up, unless ``keep``: the record of an error can come before that of the break that it becomes.
        """
        waiting = self._open.get(identity, []) if keep else self._open.pop(identity, [])
        flat = " ".join(payload.split())
        joined = [m for m in waiting if m.gb_type in payload and " ".join(m.context.split()) in flat] or waiting[-1:]
        for message in joined:
            if message.number not in self._told:
                self._told.append(message.number)
                self._emit(message)
        return joined

    def _recompiled(self, metadata: dict[str, Any], payload: str) -> None:
        try:
            found = json.loads(payload)
        except ValueError:
            found = [payload] if payload else []
        reasons = found if isinstance(found, list) else [found]
        texts = tuple(str(reason)[:_LONGEST] for reason in reasons)
        common = self._common(metadata)
        frame = self._frames.get(common["id"].partition("/")[0])
        self._emit(
            events.Recompiled(
                reasons=texts[:8],
                place=guarded_value(texts[0] if texts else "", frame),
                function=self._names.get(common["id"].partition("/")[0], ""),
                path=frame.path if frame is not None else "",
                **common,
            )
        )

    def _cached(self, metadata: dict[str, Any], name: str, payload: str) -> None:
        cache, _, outcome = name.rpartition("_")
        try:
            detail = json.loads(payload)
        except ValueError:
            detail = {}
        if not isinstance(detail, dict):
            detail = {}
        self._emit(
            events.Cached(
                cache=cache,
                outcome=outcome,
                key=str(detail.get("key", ""))[:200],
                reason=str(detail.get("cache_bypass_reason") or "")[:_LONGEST],
                **self._common(metadata),
            )
        )

    def _graph(self, metadata: dict[str, Any], value: Any, payload: str) -> None:
        uses: list[events.OpUse] = []
        higher: list[events.OpUse] = []
        first: Location | None = None
        here: Location | None = None
        ops = 0
        for line in payload.splitlines():
            mark = _LINE.search(line)
            if mark:
                here = place(mark["path"], int(mark["line"]), mark["name"])
                first = first or here
                continue
            if " = " in line and "(" in line and not line.lstrip().startswith(("l_", "L_", "def ", "class ")):
                ops += 1
            for used in _OP.finditer(line):
                namespace = used["op"].partition(".")[0]
                if namespace == "higher_order" or namespace not in OWN_NAMESPACES:
                    found = higher if namespace == "higher_order" else uses
                    found.append(events.OpUse(op=used["op"].replace(".", "::", 1), location=here))
        common = self._common(metadata)
        self._emit(
            events.Graph(
                ops=ops,
                custom_ops=tuple(uses),
                higher_order=tuple(higher),
                output_bytes=output_bytes(payload),
                eager_inputs=len(re.findall(r"\bL_stack\d+_: \"", payload.partition("\n\n")[0])),
                location=first,
                **common,
            )
        )

    def _metrics(self, metadata: dict[str, Any], value: Any, payload: str) -> None:
        self._emit(read_metrics(value, self._common(metadata)))

    def _symbol(self, metadata: dict[str, Any], value: Any, payload: str) -> None:
        self._emit(
            events.Symbol(
                symbol=str(value.get("symbol", "")),
                sources=tuple(str(source) for source in value.get("sources") or ()),
                value=str(value.get("value", "")),
                reason=str(value.get("reason", "")),
                stack=self._stack(value.get("user_stack")),
                **self._common(metadata),
            )
        )


def read_metrics(value: dict[str, Any], common: dict[str, Any]) -> events.CompileEnded:
    """A row of compilation metrics, from the trace or from ``get_compilation_metrics``."""
    micros = value.get("entire_frame_compile_time_s") or value.get("duration_us")
    seconds = None
    if isinstance(micros, (int, float)):
        seconds = float(micros) if value.get("entire_frame_compile_time_s") else micros / 1e6
    return events.CompileEnded(
        function=str(value.get("co_name") or ""),
        path=str(value.get("co_filename") or ""),
        line=int(value.get("co_firstlineno") or 0),
        seconds=seconds,
        ops=value.get("graph_op_count"),
        forward=value.get("is_forward"),
        run_time=bool(value.get("is_runtime")),
        fail_type=str(value.get("fail_type") or ""),
        fail_reason=str(value.get("fail_reason") or "")[:_LONGEST],
        fail_path=str(value.get("fail_user_frame_filename") or ""),
        fail_line=value.get("fail_user_frame_lineno"),
        restarts=tuple(str(reason).splitlines()[0][:200] for reason in value.get("restart_reasons") or ()),
        recompile_reason=str(value.get("recompile_reason") or "")[:_LONGEST],
        cudagraph_skip=str(value.get("cudagraph_skip_reason") or "")[:_LONGEST],
        compliant_ops=tuple(sorted(str(op) for op in value.get("compliant_custom_ops") or ())),
        other_ops=tuple(sorted(str(op) for op in value.get("non_compliant_ops") or ())),
        **common,
    )


def output_bytes(graph: str) -> int | None:
    """Bytes of the tensors that a graph returns, from its readable form; None where a size is symbolic."""
    returned = re.findall(r"^\s+return \((.*)\)\s*$", graph, re.MULTILINE)
    if not returned:
        return None
    total = 0
    for name in returned[-1].replace(" ", "").split(","):
        if not name:
            continue
        found = re.search(rf'^\s+{re.escape(name)}: "(\w+)\[([^\]]*)\]', graph, re.MULTILINE)
        if found is None:
            continue
        sizes = [size for size in found[2].replace(" ", "").split(",") if size]
        if found[1] not in _ITEM_BYTES or not all(size.isdigit() for size in sizes):
            return None
        total += _ITEM_BYTES[found[1]] * math.prod(map(int, sizes))
    return total


def _reason(payload: str) -> str:
    text = payload.partition("Graph Break Reason:")[2] or payload
    text = text.partition("User code traceback:")[0]
    return text.strip()[:_LONGEST]


def _last_error(payload: str) -> tuple[str, str]:
    """Type and text of the error at the end of a traceback."""
    head = payload.partition("\nfrom user code:")[0].rstrip()
    starts = re.finditer(r"^(?P<type>[A-Za-z_][\w.]*)(?:: |$)", head, re.MULTILINE)
    typed = [found for found in starts if found["type"].rpartition(".")[2][:1].isupper()]
    if not typed:
        return "", head[-_LONGEST:]
    last = typed[-1]
    return last["type"], head[last.end() :].strip()[:_LONGEST]


_READERS: dict[str, Callable[[TraceReader, dict[str, Any], Any, str], None]] = {
    "artifact": TraceReader._artifact,
    "str": TraceReader._string,
    "dynamo_start": TraceReader._start,
    "dynamo_output_graph": TraceReader._graph,
    "compilation_metrics": TraceReader._metrics,
    "bwd_compilation_metrics": TraceReader._metrics,
    "aot_autograd_backward_compilation_metrics": TraceReader._metrics,
    "symbolic_shape_specialization": TraceReader._symbol,
}
