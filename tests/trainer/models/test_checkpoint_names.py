"""Promise of checkpoint names: a saved model's tensors, one by one, from the parameters in memory."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer.models.checkpoint_names import as_in_checkpoint


def test_stacked_experts_get_the_names_and_values_that_transformers_saves(tmp_path: Path) -> None:
    shape = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads, **experts, tie_word_embeddings=False))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    named = dict(pair for name, p in model.named_parameters() for pair in as_in_checkpoint(name, p.detach()))
    assert named.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in named.items())
