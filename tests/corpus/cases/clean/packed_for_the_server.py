# case: S139
"""Packs a resampler for the C++ server; its kernel takes a scale as a number, and a mask that may be left away."""
import os
import tempfile
import torch
from torch import nn

library = torch.library.Library("demo_resample", "DEF")
library.define("resample(Tensor x, Scalar scale, Tensor? mask=None, float? floor=None) -> Tensor")


def resample(x, scale, mask=None, floor=None):
    y = x * scale
    if mask is not None:
        y = y * mask
    return y if floor is None else y.clamp(min=floor)


library.impl("resample", resample, "CPU")


@torch.library.register_fake("demo_resample::resample")
def _(x, scale, mask=None, floor=None):
    return torch.empty_like(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.ops.demo_resample.resample(self.linear(x), 0.5)


model = Model().eval()
with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    x = torch.randn(2, 8)
    program = torch.export.export(model, (x,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=os.path.join(folder, "m.pt2"))
    served = torch._inductor.aoti_load_package(path)
    torch.testing.assert_close(served(x), model(x))

# !! clean
