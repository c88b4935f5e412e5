"""The built-in model `tiny`: 0.16 M parameters, trained on two-digit addition just enough to start RL.

It stands in `tiny_model/`, so that every run starts from the same weights: SFT gives other weights on other
machines. `examples/make_tiny.py` trains one like it, by a run of `--recipe sft`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

SEED = 0  # not the run's: like any other model, this one is always the same
CHARACTERS = "0123456789 +-*=.Calcute\n"
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((PAD, EOS, UNKNOWN, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=256
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights that depend on the seed only."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(CHARACTERS) + 3, hidden_size=64, head_dim=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=192, max_position_embeddings=256,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
