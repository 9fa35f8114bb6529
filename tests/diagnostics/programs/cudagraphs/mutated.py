import torch

@torch.compile(mode="reduce-overhead")
def step(cache, x):
    cache.add_(x)
    return (cache * 2).relu()

cache, x = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")
for _ in range(12):
    y = step(cache, x)
torch.cuda.synchronize()
print(y.sum())
