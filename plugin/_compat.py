"""Every probe of a private torch name of the plugin, and nothing else. A missing name takes one thing away, by name."""

from __future__ import annotations

from typing import Any

import torch


def add_tags(op: torch._ops.OpOverload, *names: str) -> tuple[str, ...]:
    """Adds torch.Tag members to an overload whose schema is defined in C++; returns those that this torch lacks.

    The stable ABI takes tags in C++ from 2.12 on, above this project's floor, and torch has no public way to tag an
    overload after its definition. ``OpOverload.tags`` reads the list ``_tags`` on 2.11 to 2.15.
    """
    missing = []
    for name in names:
        tag = getattr(torch.Tag, name, None)
        tags = getattr(op, "_tags", None)
        if tag is None or not isinstance(tags, list):
            missing.append(name)
        elif tag not in tags:
            tags.append(tag)
    return tuple(missing)


def plans_results() -> bool:
    """Does Inductor lower an op to its overload that takes memory for its result? It begins to in 2.13, and fails on
    symbolic sizes there."""
    return torch.__version__ >= "2.14"  # compared as versions, not as text


def is_dtensor(value: Any) -> bool:
    """True for a DTensor, without importing torch.distributed.tensor."""
    return type(value).__name__ == "DTensor" and type(value).__module__.startswith("torch.distributed")


# Excludes the autograd keys on this thread while it lives: what torch itself does around a kernel. None where missing.
below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)


_functorch: Any = getattr(torch._C, "_functorch", None)


def is_transformed() -> bool:
    """True where a derivative is taken by a transform that ``torch.library.register_autograd`` cannot serve:
    forward mode (``torch.func.jvp``, ``torch.autograd.forward_ad``) or ``torch.func.grad`` at any level."""
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return True
    if _functorch is None or _functorch.maybe_current_level() is None:
        return False
    stack = _functorch.get_interpreter_stack() or ()
    return any(level.key() in (_functorch.TransformType.Grad, _functorch.TransformType.Jvp) for level in stack)


def is_mapped() -> bool:
    """True inside ``torch.vmap`` or any other functorch transform."""
    return _functorch is not None and _functorch.maybe_current_level() is not None


# In a backward: whether autograd keeps the graph, so that it may be run again. None where torch does not say.
graph_is_kept: Any = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None)


def is_plain_fake(value: Any) -> bool:
    """True for a tensor, a parameter or a fake tensor; False for every other subclass."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return True
    return kind.__name__ == "FakeTensor" and kind.__module__ == "torch._subclasses.fake_tensor"


def hint(size: Any) -> int | None:
    """The number that a symbolic size had in the run that is compiled; None where its value depends on data."""
    node = getattr(size, "node", None)
    if node is None or not node.has_hint():
        return None
    return int(node.hint)


def expression(size: Any) -> str:
    """A number, or the expression of a symbolic one, as text that is equal for equal sizes."""
    return str(getattr(getattr(size, "node", None), "expr", size))


def is_unbounded(size: Any) -> bool:
    """True for a size that is a symbol of its own, with no upper end that a user or another guard gave it."""
    node = getattr(size, "node", None)
    ranges = getattr(getattr(node, "shape_env", None), "var_to_range", {})
    found = ranges.get(getattr(node, "expr", None))
    return found is not None and str(found.upper) in ("int_oo", "oo")


def compiles_of_this_frame() -> int:
    """How often the frame that is being compiled was compiled before; a large number where torch does not say."""
    context = getattr(torch._guards, "CompileContext", None)
    found = context.current_compile_id() if context is not None else None
    count = getattr(found, "frame_compile_id", None)
    return int(count) if count is not None else 1 << 30


def may_recompile() -> bool:
    """False where the user asked for one graph for all sizes, or forbade a second compile."""
    config = torch._dynamo.config
    return bool(getattr(config, "assume_static_by_default", True)) and not getattr(config, "error_on_recompile", False)


def fake_mode_of(*values: Any) -> Any:
    """The FakeTensorMode that example values belong to; None where there is none."""
    for value in values:
        if (mode := getattr(value, "fake_mode", None)) is not None:
            return mode
    return None


def free_memory(device: torch.device) -> int:
    """Bytes that a process could still take on a device; for a CPU what the system calls available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 1 << 62


def aside() -> Any:
    """A context in which real tensors run as if no compile were open: no modes, no tracing, no Python dispatcher."""
    import contextlib

    from torch.utils._python_dispatch import _disable_current_modes

    stack = contextlib.ExitStack()
    stack.enter_context(torch._guards.tracing(None))
    stack.enter_context(_disable_current_modes())
    no_python_dispatcher = getattr(__import__("torch._dispatch.python", fromlist=["x"]), "no_python_dispatcher", None)
    if no_python_dispatcher is not None:
        stack.enter_context(no_python_dispatcher())
    return stack


# Every slot of Inductor's config that holds somebody's pass: all are emptied around a compile inside a compile.
_PASS_HOOKS = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
)


def compile_alone(module: torch.fx.GraphModule, inputs: list[torch.Tensor], patches: dict[str, Any]) -> Any:
    """Compiles a graph with Inductor, forward and backward at once, while another compile may be open.

    The nested compile gets a tracing context and a shape environment of its own, or it would put its sizes into the
    outer one and pass the caches by; the backward is compiled at once, since torch allows no second lazy one inside.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    hooks = {name: None for name in _PASS_HOOKS if hasattr(inductor_config, name)}
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
    eager_backward = {"force_non_lazy_backward_lowering": True}
    known = {k: v for k, v in eager_backward.items() if hasattr(functorch_config, k)}
    with functorch_config.patch(known), torch._guards.tracing(torch._guards.TracingContext(mode)):
        return compile_fx(module, fakes, config_patches={**hooks, **patches})


def default_store() -> Any:
    """The key-value store of the default process group; None where torch.distributed is not in use."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    getter = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return getter() if getter is not None else None


def fake_kernel_of(op: torch._ops.OpOverload) -> Any:
    """The Python function registered as an op's fake; None where there is none or torch keeps it elsewhere."""
    try:
        from torch._library.simple_registry import singleton

        kernel = singleton.find(op._schema.name).fake_impl.kernel
    except Exception:
        return None
    return getattr(kernel, "func", None)
