"""Every probe of a private torch name of the diagnostics, and nothing else. A missing name takes one part away, by
name.

Nothing here imports ``torch._dynamo`` before the watched program does: what needs it returns ``None`` until it is
there."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from types import CodeType, ModuleType
from typing import Any

TRACE_LOGGER = "torch.__trace"


def loaded(name: str) -> ModuleType | None:
    """A module that the watched program has already imported, else None."""
    return sys.modules.get(name)


def trace_logger() -> logging.Logger:
    """The logger that carries torch's structured trace events (H1)."""
    return logging.getLogger(TRACE_LOGGER)


def intern_table() -> dict[str, int]:
    """The table that turns the numbers in trace events back into file names; empty where torch keeps none."""
    module = loaded("torch._logging.structured")
    table = getattr(module, "INTERN_TABLE", None)
    return table if isinstance(table, dict) else {}


def trace_id() -> tuple[str, int]:
    """The compile id and the attempt of the compile that runs in this thread, ("", 0) outside one."""
    context = getattr(loaded("torch._guards"), "CompileContext", None)
    try:
        current = context.current_trace_id() if context is not None else None
        return (str(current.compile_id), int(current.attempt)) if current is not None else ("", 0)
    except Exception:
        return "", 0


def translator_class() -> type | None:
    """The class whose instances trace bytecode; its frames carry the user's stack with columns."""
    found = getattr(loaded("torch._dynamo.symbolic_convert"), "InstructionTranslatorBase", None)
    return found if isinstance(found, type) else None


def variable_class() -> type | None:
    """The base class of the tracer's stand-ins for values."""
    found = getattr(loaded("torch._dynamo.variables.base"), "VariableTracker", None)
    return found if isinstance(found, type) else None


def user_stack() -> list[Any]:
    """The user's stack as torch itself keeps it while tracing: FrameSummary objects, outermost first."""
    context = getattr(loaded("torch._guards"), "TracingContext", None)
    try:
        return list(context.extract_stack()) if context is not None else []
    except Exception:
        return []


def skip_code(code: CodeType) -> bool:
    """Tells the tracer never to look into ``code``. False where torch has no such call."""
    call = getattr(loaded("torch._dynamo.eval_frame"), "skip_code", None)
    if call is None:
        return False
    call(code)
    return True


def counters() -> dict[str, dict[str, int]]:
    """torch's own counters (H4) as plain data."""
    found = getattr(loaded("torch._dynamo.utils"), "counters", None)
    if found is None:
        return {}
    return {group: dict(values) for group, values in list(found.items())}


def break_reasons() -> list[Any]:
    """torch's own list of graph breaks (H3), oldest first: objects with ``reason`` and ``user_stack``. Breaks of frames
    that fell back whole are not in it."""
    found = getattr(loaded("torch._dynamo.utils"), "graph_break_reasons", None) or ()
    return [one for one in list(found) if hasattr(one, "reason") and hasattr(one, "user_stack")]


def compilation_rows() -> list[dict[str, Any]]:
    """torch's metrics of the newest compiles (H5), oldest first, as plain dictionaries; empty where it keeps none."""
    rows = getattr(loaded("torch._dynamo.utils"), "get_compilation_metrics", None)
    return [dict(vars(row)) for row in rows()] if rows is not None else []


def keeps_compiles() -> bool:
    """Does this torch keep metrics of its compiles? True as well while its compiler is not imported."""
    utils = loaded("torch._dynamo.utils")
    return utils is None or hasattr(utils, "get_compilation_metrics")


def callback_handler() -> Any:
    """What calls back when a compile, or the recording of a CUDA graph, begins and ends (H6); None without one."""
    handler = getattr(loaded("torch._dynamo.callback"), "callback_handler", None)
    names = ("start_callbacks", "end_callbacks", "register_start_callback", "register_end_callback")
    return handler if all(hasattr(handler, name) for name in names) else None


def graph_names() -> dict[str, str]:
    """The compile id of every graph that is alive, by the name of the global that generated code calls it through."""
    convert, utils = loaded("torch._dynamo.convert_frame"), loaded("torch._dynamo.utils")
    entries = getattr(loaded("torch._C._dynamo.eval_frame"), "_debug_get_cache_entry_list", None)
    seen = getattr(getattr(convert, "output_codes", None), "seen", ())
    originals = getattr(utils, "orig_code_map", None)
    found: dict[str, str] = {}
    if entries is None or originals is None:
        return found
    for reference in list(seen):
        code = reference()
        original = originals.get(code) if code is not None else None
        if original is None:
            continue
        for entry in entries(original):
            identity = getattr(entry, "compile_id", None)
            if entry.code is code and identity is not None:
                found.update({name: str(identity) for name in code.co_names if name.startswith("__compiled_fn")})
    return found


def cudagraphs_on() -> bool:
    """Does the compile that runs now make CUDA graphs?"""
    return bool(getattr(getattr(loaded("torch._inductor.config"), "triton", None), "cudagraphs", False))


# ---- ops, as the doctor reads them


def schema_text(op: Any) -> str:
    """The schema as written; its text alone tells ``SymInt`` from ``int``."""
    return str(op._schema)


def has_kernel(name: str, key: str) -> bool:
    """Has the op of this name (``ns::op`` or ``ns::op.overload``) a kernel registered under ``key`` itself?"""
    import torch

    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
    except (AttributeError, RuntimeError):
        return False


def is_registered(name: str) -> bool:
    """Does the dispatcher know an op of this name (``ns::op`` or ``ns::op.overload``)?"""
    import torch

    base, _, overload = name.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(base, "" if overload == "default" else overload)
    except (AttributeError, RuntimeError):
        return False
    return True


def op_definition(op: Any) -> Any:
    """The ``CustomOpDef`` behind an overload that ``torch.library.custom_op`` made, else None."""
    module = loaded("torch._library.custom_ops")
    return getattr(module, "OPDEFS", {}).get(op._schema.name)


def python_kernel(op: Any) -> Any:
    """The Python function that is the op's kernel, where it is one and torch keeps it, else None."""
    definition = op_definition(op)
    return getattr(definition, "_init_fn", None)


def python_fake(op: Any) -> Any:
    """The function that was given to ``register_fake``, else None."""
    holder = getattr(loaded("torch._library.simple_registry"), "singleton", None)
    entry = holder.find(op._schema.name) if holder is not None else None
    kernel = getattr(getattr(entry, "fake_impl", None), "kernel", None)
    return getattr(kernel, "func", None)


def declares_effect(op: Any) -> bool:
    """Has the op been registered as one with a side effect, so that no pass may drop it?"""
    holder = getattr(loaded("torch._library.simple_registry"), "singleton", None)
    entry = holder.find(op._schema.name) if holder is not None else None
    if getattr(getattr(entry, "effect", None), "effect", None) is not None:
        return True
    effects = loaded("torch._higher_order_ops.effects")
    for table in ("SIDE_EFFECTS", "_op_to_effects"):
        found = getattr(effects, table, None)
        if found is not None and op in found:
            return True
    impure = getattr(loaded("torch.fx.node"), "_side_effectful_functions", ())
    return op in impure


def registered_at(op: Any) -> tuple[str, int]:
    """File and line at which the schema or a kernel was registered in C++; ("", 0) where torch does not say."""
    import re

    import torch

    try:
        text = torch._C._dispatch_dump(op.name())
    except (AttributeError, RuntimeError):
        return "", 0
    places = re.findall(r"registered at ([^\n]+?):(\d+)", text)
    outside = [(path, int(line)) for path, line in places if "/torch/" not in path and not path.startswith("/dev/null")]
    return outside[0] if outside else ("", 0)


def layout_tag(op: Any) -> str:
    """The layout rule that the compiler applies to the op's inputs, such as ``needs_exact_strides``."""
    try:
        from torch._library.utils import get_layout_constraint_tag

        tag = get_layout_constraint_tag(op)
    except Exception:
        return ""
    return str(tag).rpartition(".")[2] if tag is not None else ""


def quiet_compiler() -> None:
    """In a fork: forget what was compiled before, and compile in this process, whose helpers did not come along."""
    import os

    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    dynamo = loaded("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
    inductor: Any = loaded("torch._inductor.config")
    if hasattr(inductor, "compile_threads"):
        inductor.compile_threads = 1


def load_compiler() -> None:
    """Imports the compiler, without the pool of processes that it starts, for forks that will compile."""
    import importlib
    import os

    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for name in ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codegen.cpp"):
        with suppress(Exception):
            importlib.import_module(name)


def know_vector_units() -> None:
    """Has Inductor find out what vector instructions its C++ compiler can make, in the cache of the user.

    Within a fresh cache it would compile a probe for each of them again, many seconds in all; what it found stays known
    for as long as the process lives."""
    with suppress(ImportError, AttributeError, OSError):
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()


def compiled_in_eager() -> AbstractContextManager[Any]:
    """In force, functions that torch.compile made run as they were written; nothing where the compiler is not loaded,
    or has no stance."""
    stance = getattr(loaded("torch.compiler"), "set_stance", None)
    if stance is None or loaded("torch._dynamo") is None:
        return nullcontext()
    context: AbstractContextManager[Any] = stance("force_eager")
    return context


def leave_alone(codes: list[CodeType]) -> bool:
    """Tells Dynamo's frame hook to run these code objects as they are; False where this torch offers no way."""
    module = loaded("torch._C._dynamo.eval_frame")
    direct = getattr(module, "skip_code", None)
    strategy = getattr(module, "_FrameExecStrategy", None)
    action = getattr(module, "_FrameAction", None)
    setter = getattr(module, "set_code_exec_strategy", None)
    if direct is None and (strategy is None or action is None or setter is None):
        return False
    for code in codes:
        if setter is not None and strategy is not None and action is not None:
            setter(code, strategy(action.SKIP, action.DEFAULT))
        elif direct is not None:
            direct(code)
    return True


def without_frame_hook(function: Any, *args: Any) -> Any:
    """Calls ``function(*args)`` while Dynamo looks at no frame of this thread."""
    setter = getattr(loaded("torch._C._dynamo.eval_frame"), "set_eval_frame", None)
    if setter is None:
        return function(*args)
    before = setter(None)
    try:
        return function(*args)
    finally:
        setter(before)


def function_context() -> Any:
    """The class whose methods every autograd function's ``ctx`` has."""
    from torch.autograd.function import FunctionCtx

    return FunctionCtx


def registered_ops() -> list[str]:
    """Every registered op, as ``ns::op`` or ``ns::op.overload``; among them names with a kernel and no schema."""
    import torch

    return [str(name) for name in torch._C._dispatch_get_all_op_names()]


def is_defined(name: str) -> bool:
    """Has the op a schema? A kernel may be registered for a name that nobody defines: it cannot be called."""
    import torch

    base, _, overload = name.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(base, overload)
    except RuntimeError:
        return False
    return True


def cache_hits() -> int:
    """How many compiled graphs of this process came out of torch's compile caches."""
    found = counters()
    return sum(
        int(found.get(group, {}).get(name, 0))
        for group, name in (("inductor", "fxgraph_cache_hit"), ("aot_autograd", "autograd_cache_hit"))
    )


def compiled_graph() -> Any:
    """Inductor's class of compiled graphs, fresh and from a cache."""
    from torch._inductor.output_code import CompiledFxGraph

    return CompiledFxGraph


def planned_overload(op: Any) -> Any:
    """The overload that Inductor calls in an op's place for its tag ``torch.Tag.out``; None for most ops."""
    try:
        from torch._library._out_variant import to_out_variant

        return to_out_variant(op)
    except (ImportError, RuntimeError, AttributeError):  # torch knows of none, or such an op cannot have one
        return None
