"""Writes a tiny Llama model of random weights, and what transformers computes with it.

python tests/training/llama/golden.py    # needs torch and transformers, which no test does
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent

if __name__ == "__main__":
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-3,  # so large that it tells
        rope_theta=500.0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and attention that tell, too
            parameter.add_(0.3 * torch.randn_like(parameter))
        tokens = torch.randint(0, 40, (2, 50))
        logits = model(tokens).logits
    model.save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink()
    np.savez(FOLDER / "golden.npz", tokens=tokens.numpy(), logits=logits.numpy())
