# case: S52
"""Frames audio for a recogniser; the framing kernel gives its result with time innermost, and its fake says so."""
import torch
from torch import nn


@torch.library.custom_op("demo_audio::frames", mutates_args=())
def frames(x: torch.Tensor) -> torch.Tensor:
    batch, time, channels = x.shape
    out = torch.empty_strided((batch, time, channels), (time * channels, 1, time), dtype=x.dtype)
    out.copy_(x * 2)
    return out


@frames.register_fake
def _(x):
    batch, time, channels = x.shape
    return torch.empty_strided((batch, time, channels), (time * channels, 1, time), dtype=x.dtype, device=x.device)


class Recogniser(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        h = frames(x).unsqueeze(1)
        h = h.reshape(x.shape[0], 1, x.shape[1], -1, 4) + self.bias
        return torch.relu(h).sum(1) * 0.5


recogniser = Recogniser(16)
fast = torch.compile(recogniser)
with torch.no_grad():
    for _ in range(3):
        x = torch.randn(2, 8, 16)
        torch.testing.assert_close(fast(x), recogniser(x))

# !! clean
