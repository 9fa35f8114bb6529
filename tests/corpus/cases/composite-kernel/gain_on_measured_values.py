# case: S142
"""Values that carry their unit, as a tensor subclass, go through a gain kernel registered for every backend at once."""
import torch
from torch.utils._pytree import tree_map_only

import rawkernels

library = torch.library.Library("demo_gain", "DEF")
library.define("gain(Tensor x, float factor) -> Tensor")
library.impl("gain", lambda x, factor: rawkernels.scale(x, factor), "CompositeImplicitAutograd")


class Measured(torch.Tensor):
    @staticmethod
    def __new__(cls, values, unit):
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)
        made.values, made.unit = values, unit
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unit = next(arg.unit for arg in args if isinstance(arg, Measured))
        plain = tree_map_only(Measured, lambda t: t.values, args)
        return tree_map_only(torch.Tensor, lambda t: Measured(t, unit), func(*plain, **(kwargs or {})))

    def __repr__(self):
        return f"Measured({self.values}, {self.unit})"


depth = Measured(torch.rand(6), "m")
print(depth * 2 + 1)
print(torch.ops.demo_gain.gain(depth, 0.5))  # !! composite-kernel remedy=register-per-backend

# !! crashes
# !! not out-of-bounds
