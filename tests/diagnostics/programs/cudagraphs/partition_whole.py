import torch._inductor.config as c
c.graph_partition = False
import torch

@torch.library.custom_op("mine::swap", mutates_args=(), tags=(torch._C.Tag.cudagraph_unsafe,))
def swap(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1)

@swap.register_fake
def _(x):
    return torch.empty_like(x)

@torch.compile(mode="reduce-overhead")
def step(x):
    h = x.sin() * 2
    h = swap(h)
    return h.cos() + 1

x = torch.randn(4096, device="cuda")
for _ in range(12):
    y = step(x)
torch.cuda.synchronize()
print(y.sum())
