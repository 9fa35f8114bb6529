"""Step 8, the registered native op: ``torch.ops.opgraft.gelu``, behind ``opgraft.gelu``.

Shows: where the way ends. The schema is in C++ and the kernel behind torch's stable ABI: no Python.h and no ATen
header, so one build serves every torch from 2.11 and every Python. It has what step 4 has (fake, autograd, vmap),
needs no compiler where it is used, and one record (OpSpec) by which opgraft's doctor, compare and benchmarks know it.
Run:    python examples/from_prototype_to_op/step8_native_op.py        (pip install --no-build-isolation -e . before)
Expect: opcheck passes; torch.compile(fullgraph=True) with dynamic sizes, torch.export and torch.vmap take it, with
        the right values and gradients.
"""

from __future__ import annotations

import importlib.util

import torch
from reference import check, expected, expected_gradient, sample, unavailable

if importlib.util.find_spec("opgraft") is None:
    unavailable("opgraft is not installed: run `pip install --no-build-isolation -e .` in the root of the repository.")

import opgraft

gelu = opgraft.gelu


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(x * 2) + 1


def main() -> None:
    x = sample(3, 1000)
    for given in (x, x.t(), x[:, ::3], x[:0], x.double(), x.half(), x.bfloat16()):
        check("step 8, native op", gelu(given), given)

    op = torch.ops.opgraft.gelu.default
    print(f"schema: {op._schema}")
    torch.library.opcheck(op, (x.clone().requires_grad_(),))
    torch.library.opcheck(torch.ops.opgraft.gelu_backward.default, (torch.ones_like(x), x))
    print("opcheck: forward and backward pass")

    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 7):
        leaf = sample(rows, 64).requires_grad_()
        (gradient,) = torch.autograd.grad(compiled(leaf).sum(), leaf)
        torch.testing.assert_close(gradient, 2 * expected_gradient(2 * leaf))
    print("torch.compile(fullgraph=True, dynamic=True): right gradients at two sizes")

    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), expected(2 * x) + 1)
    torch.testing.assert_close(torch.vmap(gelu)(x), expected(x))
    assert gelu(x.to("meta")).shape == x.shape
    print("torch.export, torch.vmap, meta tensors: right")


if __name__ == "__main__":
    main()
