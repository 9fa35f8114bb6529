import torch

@torch.compile(mode="reduce-overhead")
def step(x, table):
    h = x.sin() * 2
    bias = table.cos() + 1
    return (h + bias.to(h.device)).relu()

x, table = torch.ones(1024, device="cuda"), torch.ones(1024)
for _ in range(12):
    y = step(x, table)
torch.cuda.synchronize()
print(y.sum())
