"""A small Mamba from a config, scoring a batch of sentences without its CUDA kernels."""

import torch
from transformers import MambaConfig, MambaForCausalLM

torch.manual_seed(0)
config = MambaConfig(vocab_size=96, hidden_size=32, state_size=8, num_hidden_layers=2, time_step_rank=4)
model = MambaForCausalLM(config).eval()
step = torch.compile(model, backend="eager")
with torch.no_grad():
    for _ in range(3):
        logits = step(input_ids=torch.randint(0, 96, (2, 6)), use_cache=False).logits
print(logits.shape)
