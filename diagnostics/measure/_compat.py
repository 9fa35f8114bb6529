"""Every probe of a private torch name of the measurement, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch


def backend(name: Any, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> Callable[..., Any]:
    """The backend that ``torch.compile(backend=name, mode=mode, options=options)`` would call on a graph."""
    if name == "inductor":
        wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
        if wrapper is not None:
            made: Callable[..., Any] = wrapper(mode, options, dynamic)
            return made
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**(list_mode_options(mode, dynamic) if mode and mode != "default" else {}), **(options or {})}
        return lambda module, inputs, **_: compile_fx(module, inputs, config_patches=patches)
    from torch._dynamo.backends.registry import lookup_backend

    found: Callable[..., Any] = lookup_backend(name)
    given = {key: value for key, value in (("mode", mode), ("options", options)) if value}
    return (lambda module, inputs, **_: found(module, inputs, **given)) if given else found


def backend_of(options: Mapping[str, Any]) -> Callable[..., Any]:
    """The backend that the keyword arguments of a ``torch.compile`` call name."""
    return backend(
        options.get("backend", "inductor"), options.get("mode"), options.get("options"), options.get("dynamic")
    )


def scheduler_hook(hook: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
    """Inductor settings under which ``hook`` sees the scheduler's nodes after fusion, with no cache in the way.

    Generated CPU kernels are bracketed for the profiler meanwhile, so that they have names and times in it. Names that
    this torch lacks are left out; without the hook's own name the result is empty.
    """
    from torch._inductor import config

    wanted = {"_post_fusion_custom_pass": hook, "force_disable_caches": True, "cpp.enable_kernel_profile": True}
    found = {}
    for name, value in wanted.items():
        owner: Any = config
        for part in name.split("."):
            owner = getattr(owner, part, _MISSING)
        if owner is not _MISSING:
            found[name] = value
    return found if "_post_fusion_custom_pass" in found else {}


_MISSING = object()


def patched(settings: dict[str, Any]) -> Any:
    """A context with Inductor settings in force."""
    from torch._inductor import config

    return config.patch(settings)


def node_bytes(node: Any) -> int:
    """Bytes that a scheduler node reads and writes, each buffer once; 0 where torch cannot say."""
    try:
        return int(node.get_read_write_buffers_sizes())
    except Exception:
        return 0


def node_parts(node: Any) -> list[Any]:
    """The nodes that were fused into this one."""
    try:
        return list(node.get_nodes())
    except Exception:
        return [node]


def node_overload(node: Any) -> Any:
    """The overload that an extern node calls, None for generated code and for kernels called by another way."""
    inner = getattr(node, "node", None)
    return getattr(inner, "op_overload", None)


def node_is_nothing(node: Any) -> bool:
    """True for nodes that run no kernel: views of a tuple, aliases, inputs."""
    kind, inner = type(node).__name__, type(getattr(node, "node", None)).__name__
    return kind == "NopKernelSchedulerNode" or inner in ("MultiOutput", "NoneAsConstantBuffer", "MutationOutput")


def node_is_extern(node: Any) -> bool:
    try:
        return bool(node.is_extern())
    except Exception:
        return type(node).__name__ == "ExternKernelSchedulerNode"


def body_operations(node: Any) -> frozenset[str]:
    """What the loop body of a generated node does: ``load``, ``store``, ``to_dtype``, ``mul`` ... Empty if unknown."""
    found: set[str] = set()
    for part in node_parts(node):
        counts = getattr(getattr(part, "_body", None), "op_counts", None)
        if not counts:
            return frozenset()
        found.update(counts)
    return frozenset(found)


def node_origins(node: Any) -> tuple[str, ...]:
    """Names of the graph operations that went into a node."""
    names: dict[str, None] = {}
    for part in node_parts(node):
        try:
            origins = part.node.get_origins()
        except Exception:
            continue
        for origin in origins:
            names[str(origin.target)] = None
    return tuple(sorted(names))


def node_reads(node: Any) -> frozenset[str]:
    try:
        return frozenset(dependency.name for dependency in node.read_writes.reads)
    except Exception:
        return frozenset()


def node_writes(node: Any) -> frozenset[str]:
    try:
        return frozenset(node.get_buffer_names())
    except Exception:
        return frozenset()


def compile_id() -> str:
    """The id of the compile that runs in this thread, as the profiler names its region: "3/0"; "" where unknown."""
    try:
        from torch._guards import CompileContext

        return str(CompileContext.current_compile_id() or "")
    except Exception:
        return ""


def cuda_graph_counts() -> tuple[int, int]:
    """CUDA-graph partitions and skips that Inductor has counted in this process; zeros where it counts none."""
    try:
        from torch._dynamo.utils import counters

        found = counters["inductor"]
        return int(found["cudagraph_partitions"]), int(found["cudagraph_skips"])
    except Exception:
        return 0, 0


def hold_stream(seconds: float, device: Any) -> bool:
    """Keeps the current stream of a GPU busy for about ``seconds`` without memory traffic; False where torch cannot."""
    spin = getattr(torch.cuda, "_sleep", None)
    if spin is None:
        return False
    with torch.cuda.device(device):
        spin(int(seconds * _spin_rate(spin, device)))
    return True


@functools.cache
def _spin_rate(spin: Callable[[int], None], device: Any) -> float:
    """Cycles that a spinning kernel counts in a second, at the clock of the moment."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 2_000_000
    spin(cycles)
    first.record()
    spin(cycles)
    last.record()
    torch.cuda.synchronize(device)
    return cycles / max(1e-6, float(first.elapsed_time(last)) * 1e-3)


def in_the_order_given() -> dict[str, Any]:
    """Inductor settings under which kernels are issued in the order of the graph's nodes, where torch has them."""
    from torch._inductor import config

    return {name: False for name in ("reorder_for_locality", "reorder_for_peak_memory") if hasattr(config, name)}


def as_static(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as the graph that is being compiled should see it: fake, and none of its sizes a symbol."""
    try:
        from torch._guards import TracingContext

        context = TracingContext.try_get()
        mode = context.fake_mode if context is not None else None
    except Exception:
        mode = None
    return tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
