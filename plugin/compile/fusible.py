"""Which nodes a compiler would fuse with a pointwise neighbour: found by running them without data, not by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgraft import _compat, registry
from opgraft.compile.answers import Answers, fact_word, names, spelled
from opgraft.compile.find import overload_of
from opgraft.compile.metadata import facts, value_of
from opgraft.compile.mutation import writes
from opgraft.compile.site import TensorFacts

# Reductions and normalisations that Inductor writes as loops of its own. Pointwise operations carry a tag.
_REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "prod",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "any",
        "all",
        "norm",
        "linalg_vector_norm",
        "logsumexp",
        "argmax",
        "argmin",
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_fused_rms_norm",
        "_native_batch_norm_legit",
        "cumsum",
    ]
)
_MOVERS = frozenset(
    [
        "_to_copy",
        "clone",
        "cat",
        "stack",
        "constant_pad_nd",
        "index",
        "select_scatter",
        "slice_scatter",
        "where",
        "copy",
        "gather",
        "embedding",
        "empty_like",
        "full_like",
        "zeros_like",
        "ones_like",
        "full",
        "zeros",
        "ones",
        "arange",
        "scalar_tensor",
        "repeat",
        "flip",
        "roll",
        "lift_fresh_copy",
        "lift_fresh",
    ]
)


class _Recorder(TorchDispatchMode):
    """Notes whether every operation that reaches the device is one that a compiler writes itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fusible = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fusible = self.fusible and _is_fusible(func)
        return func(*args, **(kwargs or {}))


def _is_fusible(op: Any) -> bool:
    if op.namespace not in ("aten", "prims"):
        return bool(op.namespace == "prim")
    if op._schema.is_mutable:
        return False
    name = op._schema.name.partition("::")[2]
    return bool(torch.Tag.pointwise in op.tags or op.is_view or name in _REDUCTIONS or name in _MOVERS)


class Fusibility:
    """Asks each kind of call once: the answer depends on the call's target and on what its arguments are."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def __call__(self, node: torch.fx.Node) -> bool:
        """True for a node whose work a compiler fuses; False for everything else and everything unknown."""
        if node.op not in ("call_function", "call_method") or writes(node) or value_of(node) is None:
            return False
        leaves: list[torch.fx.Node] = []
        torch.fx.map_arg((node.args, node.kwargs), leaves.append)
        known: list[Any] = [_stand_in(value_of(leaf)) for leaf in leaves]
        if not known or any(fact is None for fact in known):
            return False
        fact_of = dict(zip(leaves, known, strict=True))
        name, keep = names([(node.op, node.target)])
        question = f"fuses: {name} {spelled((node.args, dict(node.kwargs)), lambda leaf: fact_word(fact_of[leaf]))}"
        device = next((fact.device.type for fact in known if isinstance(fact, TensorFacts)), "")
        return self._answers.ask(question, device, lambda: _run(node, fact_of), keep=keep)


def _stand_in(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return facts(value)
    if isinstance(value, torch.SymInt):
        return _compat.hint(value)
    return value if isinstance(value, (int, float, bool)) else None


def _run(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> bool:
    """On meta tensors, and on fake ones, which take forty times as long, where a call does not run on those.

    Raises:
        Exception: it runs on neither.
    """
    from torch._subclasses import FakeTensorMode

    with _compat.aside(), torch.no_grad():
        try:
            return _reaches_only_fusible(node, known, torch.device("meta"))
        except Exception:
            pass
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _reaches_only_fusible(node, known, None)


def _reaches_only_fusible(node: torch.fx.Node, known: dict[torch.fx.Node, Any], device: torch.device | None) -> bool:
    op = overload_of(node.target) if node.op == "call_function" else None
    spec = registry.find(op) if op is not None else None
    table = {leaf: _make(fact, device) for leaf, fact in known.items()}

    def given(leaf: Any) -> Any:
        if isinstance(leaf, torch.fx.Node):
            return table[leaf]
        return device if device is not None and isinstance(leaf, torch.device) else leaf

    args, kwargs = torch.fx.node.map_aggregate((node.args, dict(node.kwargs)), given)
    with _Recorder() as recorder:
        if node.op == "call_method":
            getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            function: Any = spec.reference if spec is not None else node.target
            function(*args, **kwargs)
    return bool(recorder.fusible)


def _make(fact: Any, device: torch.device | None) -> Any:
    if isinstance(fact, TensorFacts):
        return torch.empty_strided(fact.shape, fact.stride, dtype=fact.dtype, device=device or fact.device)
    return fact
