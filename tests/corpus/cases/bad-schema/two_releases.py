# case: S147
"""Two releases of one kernel package are imported into one process."""
import torch


def load(scale):
    library = torch.library.Library("demo_versions", "DEF")  # !! bad-schema remedy=unique-namespace
    library.define("scale(Tensor x) -> Tensor")
    library.impl("scale", lambda x: x * scale, "CPU")
    torch.library.register_fake("demo_versions::scale", lambda x: torch.empty_like(x), lib=library)
    return library


first = load(1.0)
second = load(2.0)

model = torch.compile(lambda x: torch.ops.demo_versions.scale(x) + 1, backend="aot_eager")
print(model(torch.randn(4)).sum().item())

# !! crashes
