"""A small Llama from a config, decoding greedily with its own cache."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config).eval()
step = torch.compile(model, backend="eager")
tokens = torch.randint(0, 128, (1, 8))
with torch.no_grad():
    cache = None
    for _ in range(4):
        output = step(input_ids=tokens if cache is None else tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        tokens = torch.cat([tokens, output.logits[:, -1:].argmax(-1)], dim=1)
print(tokens.shape)
