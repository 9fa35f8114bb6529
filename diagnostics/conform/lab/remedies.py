"""The ways out that the doctor names, in words, with their price and the torch versions that they hold for."""

from __future__ import annotations

from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Remedy

_TEXT: dict[str, tuple[str, str]] = {
    "add-fake": (
        "give the op a fake: torch.library.register_fake(name) with the shapes and strides of the outputs",
        "",
    ),
    "register-per-backend": (
        "register the kernel for its device (CPU, CUDA) and not as CompositeImplicitAutograd, then give it a fake",
        "the gradient needs register_autograd, where one is wanted",
    ),
    "fix-fake": (
        "make the fake say what the kernel does: same number of results, shape, strides, dtype and device, and a fresh "
        "tensor wherever the kernel makes one (x.new_empty(shape) for a contiguous result)",
        "",
    ),
    "use-symint": ("write SymInt for every size-like argument in the schema, and no int() of a size in the fake", ""),
    "add-kernel": ("register a kernel for this device and dtype", ""),
    "load-library": ("load the library that registers the op before it is called, in every process that calls it", ""),
    "keep-library": ("keep the torch.library.Library object at module level: its ops go when it is collected", ""),
    "fix-schema": ("write the schema with types that the dispatcher knows (Tensor, int, float, bool, str, lists)", ""),
    "unique-namespace": ("use a namespace of its own for each build, or Library(ns, 'FRAGMENT') for a second part", ""),
    "add-autograd": (
        "give the op a gradient: torch.library.register_autograd(name, backward, setup_context=...)",
        "a backward kernel, or a formula in torch ops",
    ),
    "fix-autograd": ("correct the backward formula: any strides, every argument, every dtype", ""),
    "compile-inner-gradient": (
        "compile a function that takes the first gradient inside, so that the compiler sees both",
        "the inner gradient must be of torch ops",
    ),
    "keep-eager": ("leave the part that is differentiated twice out of torch.compile", "that part runs in eager"),
    "declare-mutation": (
        'say in the schema what is written: mutates_args=("x",), or Tensor(a!) x',
        "no autograd for it",
    ),
    "make-functional": ("return a fresh result and write no argument", "one allocation a call"),
    "return-fresh": ("return a fresh tensor in place of an argument or a view of one", "one copy a call"),
    "add-out-variant": ("add an .out overload that writes a given result", ""),
    "reorder-writes": ("read the tensor for the last time before the op writes it", ""),
    "set-layout-tag": (
        "tag the op with the layout that the kernel takes: torch.Tag.needs_contiguous_strides where it reads dense "
        "memory, flexible_layout where it walks strides",
        "the compiler may copy an input before the call",
    ),
    "honour-strides": (
        "walk the strides that the tensor has, or call .contiguous() first in the kernel",
        "a copy then",
    ),
    "handle-unaligned": ("test the address and take scalar loads where it is no multiple of the vector's width", ""),
    "use-current-stream": ("launch on the current stream (at::cuda::getCurrentCUDAStream, or the stable ABI's)", ""),
    "remove-sync": ("wait for nothing in the op: no cudaDeviceSynchronize, no read of a result on the host", ""),
    "add-device-guard": ("put a device guard on the first tensor's device at the start of the kernel", ""),
    "check-launch": ("check cudaGetLastError() after every launch and raise what it says", ""),
    "use-int64": ("count elements and offsets in int64_t, and widen before the multiplication", "a few registers"),
    "handle-empty": ("return early, with a result of the right shape, where there are no elements", ""),
    "fix-kernel": ("correct the kernel", ""),
    "declare-effect": (
        "say that the op does more than compute its results: "
        "register_effect(torch._library.effects.EffectType.ORDERED), "
        "or torch.Tag.nondeterministic_seeded for random numbers",
        "it is kept in order and never merged",
    ),
    "pass-state": ("hand the state in and out as tensors", ""),
    "keep-on-device": ("keep the work on the device: nothing that the host waits for or allocates in the op", ""),
    "leave-it": ("leave it as it is", ""),
    "add-autocast-rule": (
        "give the op an autocast rule: op.register_autocast('cuda', torch.bfloat16), or cast in a wrapper",
        "a cast of each input",
    ),
    "add-sharding-rule": ("register a sharding rule (torch.distributed.tensor.experimental.register_sharding)", ""),
    "fix-dispatch": ("register the kernel for the key that the call reaches", ""),
    "clear-cache": (
        "clear the compile caches (TORCHINDUCTOR_CACHE_DIR) whenever a registration changes",
        "cold compiles",
    ),
    "make-cacheable": ("give passes a uuid() and the op a stable, importable registration", ""),
    "update-torch": ("try a newer torch", ""),
    "work-around": ("write the statement differently or keep it out of torch.compile", ""),
    "capture-dynamic-size": ("set torch._dynamo.config.capture_dynamic_output_shape_ops = True", ""),
    "declare-dynamic-size": ("return new_empty(torch.library.get_ctx().new_dynamic_size()) from the fake", ""),
    "read-shape": ("compute the number from shapes in Python: it does not depend on the data", ""),
    "use-upper-bound": ("return a result of the largest size, and the count beside it", "memory for the rest"),
    "mark-dynamic": ("mark the size with torch._dynamo.mark_dynamic", ""),
    "register-in-cpp": ("register the op in C++, in a library that the other process can load", ""),
}
_VERSIONS: dict[str, str] = {"declare-effect": ">=2.13", "register-in-cpp": ">=2.11"}


def remedies(kind: str, *chosen: str) -> tuple[Remedy, ...]:
    """The named remedies, or all those of the kind; each with its words."""
    return tuple(
        Remedy(id=name, text=_TEXT[name][0], price=_TEXT[name][1], torch=_VERSIONS.get(name, ">=2.11"))
        for name in chosen or KINDS[kind].remedies
    )
