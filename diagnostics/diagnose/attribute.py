"""Who was called: name, kind of thing and distribution, from what the tracer held. Unknown is a value."""

from __future__ import annotations

import re

from opgraft.diagnostics.collect.events import Argument, Called
from opgraft.diagnostics.diagnose.incident import Incident
from opgraft.diagnostics.model import Callee, Owner

_CONTEXT = re.compile(r"module: (?P<module>[\w.]+|None), qualname: (?P<name>[\w.<>\[\]]+)")
_MANGLED = re.compile(r"pybind11_detail_function_record_\w+\.|PyCapsule\.|instancemethod\.")
STANDARD = frozenset(
    [
        "builtins",
        "math",
        "random",
        "time",
        "os",
        "sys",
        "io",
        "logging",
        "warnings",
        "subprocess",
        "threading",
        "_thread",
        "re",
        "json",
        "functools",
        "itertools",
        "collections",
        "operator",
        "socket",
        "pathlib",
        "posix",
        "_warnings",
        "copy",
        "pickle",
        "hashlib",
        "struct",
        "gc",
        "weakref",
        "inspect",
        "contextlib",
        "importlib",
        "datetime",
        "uuid",
        "queue",
        "select",
        "signal",
        "_io",
        "_socket",
        "_random",
        "_operator",
        "types",
        "enum",
        "platform",
        "shutil",
        "tempfile",
        "traceback",
        "dis",
        "tokenize",
        "ast",
        "codecs",
        "string",
        "textwrap",
        "multiprocessing",
        "concurrent",
        "asyncio",
        "atexit",
        "glob",
        "getpass",
    ]
)
FOREIGN = ("_ctypes", "ctypes", "_cffi_backend", "cffi")
_TENSOR_MODULES = ("torch",)


def short_name(called: Called) -> str:
    """``module.function`` as a reader would write it, without pybind11's mangled record names."""
    name = _MANGLED.sub("", called.name)
    if called.type in ("builtin_function_or_method", "function", "type", "method", "PyCapsule", "method_descriptor"):
        return f"{called.module}.{name}" if called.module not in ("", "builtins", "__main__") else name
    if called.method and called.method != "__call__":
        return f"{called.type}.{called.method}"
    module = called.type_module
    return f"{module}.{called.type}" if module not in ("", "builtins", "__main__") else called.type


def callee(incident: Incident) -> Callee | None:
    """The callee of an incident; from the object where there was one, else from the words of torch's message."""
    called = incident.called
    if called is not None and (called.module or called.type):
        return Callee(name=short_name(called), distribution=called.distribution or "unknown", owner=owner(called))
    found = _CONTEXT.search(incident.text)
    if found:
        module = "" if found["module"] == "None" else found["module"]
        name = _MANGLED.sub("", found["name"])
        return Callee(name=f"{module}.{name}".strip("."), owner="unknown")
    return None


def owner(called: Called) -> Owner:
    """One of the owners of :class:`~opgraft.diagnostics.model.Callee`."""
    top = called.module.partition(".")[0]
    type_top = called.type_module.partition(".")[0]
    if is_triton(called):
        return "triton"
    if is_foreign(called):
        return "extension"
    if top == "torch" or called.variable.startswith("TorchInGraph"):
        return "op" if called.type in ("OpOverload", "OpOverloadPacket") else "torch"
    if called.type in ("OpOverload", "OpOverloadPacket", "CustomOpDef"):
        return "op"
    if top in STANDARD or (type_top in STANDARD and called.type not in ("type",) and top in ("", "builtins")):
        return "user" if not called.native else "unknown"
    if called.native:
        return "extension"
    return "user"


def is_triton(called: Called) -> bool:
    return called.type_module.startswith("triton.") or "Triton" in called.variable


def is_foreign(called: Called) -> bool:
    """ctypes and cffi: calls into a library that Python knows nothing about."""
    return any(name.partition(".")[0] in FOREIGN for name in (called.module, called.type_module)) or called.type in (
        "_FuncPtr",
        "CFunctionType",
        "PyCFuncPtrType",
        "PyCSimpleType",
        "PyCPointerType",
    )


def is_standard(called: Called) -> bool:
    """A function of Python itself."""
    return called.module.partition(".")[0] in STANDARD


def schema(called: Called, arguments: tuple[Argument, ...], gives_tensor: bool | None) -> str:
    """The schema that a call suggests, as torch.library writes it: ``gelu(Tensor x) -> Tensor``."""
    known = _SIGNATURE.match(called.doc)
    names = re.findall(r"(\w+)\s*:", known["arguments"]) if known else []
    words = [
        f"{_SCHEMA_TYPES.get(item.type, '?')} {_argument_name(index, item, names)}"
        for index, item in enumerate(arguments)
    ]
    name = short_name(called).rpartition(".")[2] or "kernel"
    return f"{name}({', '.join(words)}) -> {'()' if gives_tensor is False else 'Tensor'}"


_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor[]": "Tensor[]",
    "int": "SymInt",
    "SymInt": "SymInt",
    "SymNodeVariable": "SymInt",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "NoneType": "Tensor?",
}
_SIGNATURE = re.compile(r"\w+\((?P<arguments>.*)\)")
_LETTERS = ("x", "y", "z", "u", "v", "w")


def _argument_name(index: int, item: Argument, names: list[str]) -> str:
    if item.keyword:
        return item.keyword
    if index < len(names) and not re.fullmatch(r"arg\d+|self", names[index]):
        return names[index]
    return _LETTERS[index] if index < len(_LETTERS) else f"a{index}"
