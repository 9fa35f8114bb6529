"""A small Mixtral from a config: the router sends every token to two of four experts."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    experts_implementation="eager",
)
model = MixtralForCausalLM(config).eval()
step = torch.compile(model, backend="eager")
with torch.no_grad():
    for _ in range(3):
        logits = step(input_ids=torch.randint(0, 96, (2, 10)), use_cache=False).logits
print(logits.shape)
