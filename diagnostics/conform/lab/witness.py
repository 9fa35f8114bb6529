"""The last lines of a snippet: what shows the fault, as an assertion that fails where the fault is.

Placeholders: ``{call}`` is the call; ``{dense}``, ``{faked}`` and ``{halved}`` the call on contiguous copies, on fake
tensors and on half the values; ``{wide}`` are the tensors in float64, ``{names}`` the tensors, ``{args}`` all
arguments, and ``{op}`` is the overload.
"""

from __future__ import annotations

PLAIN = "print({call})"

_PARTS = """\
def parts(value):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
"""

_CLOSE = "torch.testing.assert_close({call}, {dense}, equal_nan=True)"

TAILS: dict[str, str] = {
    "undeclared-mutation": """\
before = [tensor.clone() for tensor in ({names},)]
{call}
for old, new in zip(before, ({names},)):
    torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)""",
    "overdeclared-mutation": """\
before = [tensor.clone() for tensor in ({names},)]
{call}
written = [not torch.equal(old, new) for old, new in zip(before, ({names},))]
assert any(written), "the schema says that an argument is written, and none was: {schema}\"""",
    "output-alias": _PARTS
    + """\
places = [part.untyped_storage().data_ptr() for part in parts([{call}, {names}]) if part.numel()]
assert len(set(places)) == len(places), "a result shares its memory\"""",
    "unstable-result": """\
first = {call}
torch.testing.assert_close({call}, first, rtol=0, atol=0, equal_nan=True)""",
    "unwritten": """\
first = {call}
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True  # fresh memory holds NaN, or the largest integer
torch.testing.assert_close({call}, first)""",
    "overwritten": _PARTS
    + """\
first = parts({call})
before = [part.clone() for part in first]
{halved}
torch.testing.assert_close(first, before, rtol=0, atol=0, equal_nan=True)""",
    "out-of-bounds": _PARTS
    + """\
given = ({names},)
def call(byte):
    # every tensor in the middle of memory that holds this byte
    around = [torch.full((t.nbytes + 8192,), byte, dtype=torch.uint8, device=t.device) for t in given]
    laid = [a[4096:-4096].view(t.dtype).view(t.shape).copy_(t) for a, t in zip(around, given)]
    result = (lambda {names}: {call})(*laid)
    assert all((a[:4096] == byte).all() and (a[-4096:] == byte).all() for a in around), "written outside a tensor"
    return parts(result)
torch.testing.assert_close(call(0x84), call(0x4E), rtol=0, atol=0, equal_nan=True)""",
    "missing-fake": """\
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode() as mode:
    {faked}""",
    "fake-mismatch": _PARTS
    + """\
def facts(value):
    return [(tuple(t.shape), t.stride(), t.dtype, t.device.type, t.storage_offset()) for t in parts(value)]
from torch._subclasses.fake_tensor import FakeTensorMode
with torch.no_grad(), FakeTensorMode() as mode:
    said = facts({faked})
with torch.no_grad():
    found = facts({call})
assert found == said, (found, said)""",
    "fake-specializes": """\
for tensor in ({names},):
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            torch._dynamo.mark_dynamic(tensor, dim)
torch.compile(lambda {names}: {call}, backend="eager", fullgraph=True)({names})""",
    "layout-assumed": _CLOSE,
    "misaligned": _CLOSE,
    "index-overflow": _CLOSE,
    "wrong-value": """\
from opgraft.registry import find
reference = find({op}).reference
torch.testing.assert_close({call}, reference({args}), equal_nan=True)""",
    "missing-autograd": _PARTS
    + """\
floats = [tensor.requires_grad_() for tensor in ({names},) if tensor.dtype.is_floating_point]
function = torch.compile(lambda {names}: {call}, backend="aot_eager")  # eager may differentiate a Python kernel itself
sum(part.sum() for part in parts(function({names})) if part.dtype.is_floating_point).backward()
assert all(tensor.grad is not None for tensor in floats)""",
    "wrong-gradient": "sum(part.sum() for part in torch.utils._pytree.tree_leaves({call})).backward()",
    "finite-differences in float32": "torch.autograd.gradcheck(lambda {names}: {call}, ({names},), "
    "eps=5e-3, atol=0.1, rtol=0.1, nondet_tol=1e-3)",
    "finite-differences": "torch.autograd.gradcheck(lambda {names}: {call}, ({wide}))",
    "gradient-layout": _PARTS
    + """\
result = next(part for part in parts({call}) if part.requires_grad)
inputs = [tensor for tensor in ({names},) if tensor.requires_grad]
steady = torch.randn(result.shape).to(result)
wide = torch.full((*result.shape[:-1], 2 * result.shape[-1] + 1), 7.0).to(result) if result.dim() else steady
part = wide[..., : result.shape[-1]].copy_(steady) if result.dim() else steady
for grad in (torch.full((), 0.75).to(result).expand(result.shape), part, steady.mT.contiguous().mT):
    found = torch.autograd.grad(result, inputs, grad, retain_graph=True)
    dense = torch.autograd.grad(result, inputs, grad.contiguous(), retain_graph=True)
    torch.testing.assert_close(found, dense)""",
    "double-backward": "torch.autograd.gradgradcheck(lambda {names}: {call}, ({wide}))",
    "autocast": """\
found = []
for inside in (True, False):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        found.append([part.dtype for part in torch.utils._pytree.tree_leaves({call})])
assert found[0] == found[1], found""",
    "vmap": """\
batch = torch.vmap(lambda {names}: {call}, randomness="same")(*[torch.stack([t, t / 2, t / 4]) for t in ({names},)])
rows = [(lambda {names}: {call})(*[tensor * scale for tensor in ({names},)]) for scale in (1, 0.5, 0.25)]
torch.testing.assert_close(batch, torch.stack(rows))""",
}


# Two calls are compared by what they return; of an op that writes, by its arguments as well.
_AFTER = (
    _PARTS
    + """\
def after({names}):
    return parts([{call}, {names}])
dense = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in ({names},)]
torch.testing.assert_close(after({names}), after(*dense), equal_nan=True)"""
)


def tail(kind: str, writes: bool = False) -> str:
    """What shows a fault of this kind, where the check that found it says nothing better.

    Args:
        writes: the op writes arguments.
    """
    found = TAILS.get(kind, PLAIN)
    return _AFTER if writes and found == _CLOSE else found
