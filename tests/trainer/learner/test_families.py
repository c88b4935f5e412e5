"""Model families: what the engine and the learner say of a token is what transformers says."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tr
from training import generate, plain_logprobs, sequence

from trainer.config import ConfigError, ModelConfig
from trainer.engines.torch.engine import TorchEngine
from trainer.learner.packing import pack
from trainer.learner.policy_model import PolicyModel
from trainer.types import Request

NO_TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
COMMON = NO_TOKENS | {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GQA = COMMON | {"num_key_value_heads": 2}
MIXED = ["sliding_attention", "full_attention"]
FAMILIES = {
    "gpt2": tr.GPT2Config(vocab_size=67, n_embd=64, n_layer=2, n_head=4, n_positions=128, **NO_TOKENS),
    "gpt_neox": tr.GPTNeoXConfig(**COMMON),
    "qwen2": tr.Qwen2Config(**GQA),
    "qwen3": tr.Qwen3Config(**COMMON, num_key_value_heads=1, head_dim=16),
    "phi3": tr.Phi3Config(**GQA),
    "olmo2": tr.Olmo2Config(**GQA),
    "gemma": tr.GemmaConfig(**GQA, head_dim=16),
    "gemma3": tr.Gemma3TextConfig(**GQA, head_dim=16),
    "gemma3 with windows": tr.Gemma3TextConfig(**GQA, head_dim=16, sliding_window=4, layer_types=MIXED),
    "mistral": tr.MistralConfig(**GQA, sliding_window=6),
    "smollm3": tr.SmolLM3Config(**GQA),
    "glm4": tr.Glm4Config(**GQA, head_dim=16),
}
PROMPTS = {"a": (3, 5, 7, 9, 11), "b": (3, 5, 7)}


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_learner_agree_with_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = FAMILIES[family]
    config.initializer_range = 0.2
    model = tr.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    engine = TorchEngine(str(tmp_path), torch.float32, True, slots=8)
    sequences = []
    requests = (Request(name, prompt, 3, 10, 1.0, frozenset(), 1) for name, prompt in PROMPTS.items())
    for c in generate(engine, *requests):
        prompt = PROMPTS[c.request_id]
        expected = plain_logprobs(model, prompt, c.token_ids).numpy()
        np.testing.assert_allclose(c.logprobs_gen, expected, atol=2e-5)
        sequences.append(sequence(prompt, c.token_ids, c.logprobs_gen))
    policy = PolicyModel(str(tmp_path), ModelConfig(path=str(tmp_path), dtype="float32"))
    (micro_batch,) = pack(sequences, 1000)
    with torch.no_grad():
        out = policy(micro_batch, None, 1.0)
    np.testing.assert_allclose(out.logprobs.numpy(), micro_batch.logprobs_gen, atol=2e-5)


@pytest.mark.parametrize(
    "config",
    [
        tr.BloomConfig(vocab_size=67, hidden_size=64, n_layer=2, n_head=4),
        tr.Qwen3NextConfig(**GQA, head_dim=16, num_experts=4, num_experts_per_tok=2),
    ],
    ids=lambda c: c.model_type,
)
def test_a_family_that_cannot_run_is_named_at_the_start(config: tr.PretrainedConfig, tmp_path: Path) -> None:
    tr.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"a {config.model_type} has .*expects softmax attention"):
        TorchEngine(str(tmp_path), torch.float32, True, slots=2)
