"""A graph network of torch-geometric that keeps the neighbours nearer than a radius, over graphs of several sizes."""

import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool
from torch_geometric.utils import remove_self_loops


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(3, 16), GATConv(16, 8, heads=2)
        self.head = nn.Linear(16, 1)

    def forward(self, points: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        distances = torch.cdist(points, points)
        edges = (distances < 1.0).nonzero().t()
        edges, _ = remove_self_loops(edges)
        hidden = self.first(points, edges).relu()
        hidden = self.second(hidden, edges).relu()
        return self.head(global_mean_pool(hidden, batch, size=2))


torch.manual_seed(0)
network = torch.compile(Network().eval(), backend="eager")
with torch.no_grad():
    for count in (24, 24, 30, 36):
        batch = (torch.arange(count) >= count // 2).long()
        energies = network(torch.randn(count, 3), batch)
print(energies.shape)
