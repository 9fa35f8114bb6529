# case: S134
"""Quantised attention scores through a library whose wrapper was rewritten for torch.compile."""
import torch
from torch import nn

import opgraft


def scores_reference(query, key, query_scale, key_scale):
    return (query * query_scale.unsqueeze(-1)) @ (key * key_scale.unsqueeze(-1)).transpose(-1, -2)


@torch.library.custom_op("demo_scores::scores", mutates_args=())
def scores(query: torch.Tensor, key: torch.Tensor, query_scale: torch.Tensor, key_scale: torch.Tensor) -> torch.Tensor:
    return (query * key_scale.unsqueeze(-1)) @ (key * query_scale.unsqueeze(-1)).transpose(-1, -2)


@scores.register_fake
def _(query, key, query_scale, key_scale):
    return query.new_empty(*query.shape[:-1], key.shape[-2])


opgraft.describe(torch.ops.demo_scores.scores.default, scores_reference)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        query, key = self.query(x), self.key(x)
        query_scale, key_scale = query.abs().amax(-1), key.abs().amax(-1)
        query, key = query / query_scale.unsqueeze(-1), key / key_scale.unsqueeze(-1)
        return torch.softmax(scores(query, key, query_scale, key_scale), -1)  # !! wrong-value remedy=fix-kernel


model = torch.compile(Attention(16), backend="aot_eager")
with torch.no_grad():
    for _ in range(3):
        print(model(torch.randn(2, 8, 16)).amax().item())
