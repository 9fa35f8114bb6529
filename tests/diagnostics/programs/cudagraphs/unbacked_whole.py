import torch._inductor.config as c
c.graph_partition = False
import torch
torch._dynamo.config.capture_dynamic_output_shape_ops = True

@torch.compile(mode="reduce-overhead", fullgraph=True)
def step(x):
    h = x.sin()
    picked = h[h > 0]
    return (picked * 2).sum() + h.sum()

x = torch.randn(4096, device="cuda")
for _ in range(12):
    y = step(x)
torch.cuda.synchronize()
print(y)
