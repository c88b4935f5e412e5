"""What a run will hold in memory and on which cores, estimated before anything is loaded (--dry-run)."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from trainer.config import Config
from trainer.models import BUILT_IN

LOGITS_CHUNK = 128 << 20  # bytes of one chunk of logits in the loss
PROMPT_TOKENS = 128  # assumed of a prompt, for the KV cache
PARAMETERS = {"smollm2-135m": 134_515_008, "tiny": 162_112}
SHAPES = {  # layers, hidden, feed-forward, KV width, vocabulary
    "smollm2-135m": (30, 576, 1536, 192, 49_152),
    "tiny": (3, 64, 192, 64, 27),
}


def memory_estimate(config: Config, parameters: int, shape: tuple[int, int, int, int, int]) -> dict[str, int]:
    """Bytes by what they hold; `shape` is layers, hidden, feed-forward, KV width, vocabulary."""
    layers, hidden, feed_forward, kv_width, vocabulary = shape
    size = torch.finfo(getattr(torch, config.model.dtype)).bits // 8
    engine, learner = config.engine, config.learner
    new_tokens = engine.max_new_tokens
    if engine.interruption.enabled:
        new_tokens = engine.interruption.hi + engine.interruption.answer_tokens
    saved = hidden if learner.checkpoint_activations else 12 * hidden + 4 * feed_forward  # numbers a layer
    return {
        "learner: weights, FP32": 4 * parameters,
        "learner: gradients, FP32": 4 * parameters,
        "learner: AdamW's two moments, FP32": 8 * parameters,
        "learner: activations of a micro-batch": 4 * layers * saved * learner.micro_batch_tokens,
        "learner: a chunk of logits": max(LOGITS_CHUNK, 4 * vocabulary),
        "engine: weights": size * parameters,
        "engine: linear layers again, packed": (
            4 * parameters
            if size == 4
            else 8 * vocabulary * hidden * config.model.fp32_head  # FP32 head alone
        ),
        f"engine: KV cache (prompts of {PROMPT_TOKENS} tokens)": (
            2 * layers * kv_width * size * engine.slots * (PROMPT_TOKENS + new_tokens)
        ),
        "published weights (at most)": size * parameters * (config.pipeline.max_lag + 2),
    }


def describe(config: Config) -> str:
    """Device split and memory estimate, for a person."""
    cores = len(os.sched_getaffinity(0))
    split = (
        f"devices: {cores} CPU cores, shared in time by learner ({config.learner.threads or cores} threads) "
    )
    split += (
        f"and engine ({config.engine.threads or cores} threads); {config.verifier.workers} verifier workers"
    )
    path = config.model.path
    if path in BUILT_IN:
        parameters, shape = PARAMETERS[path], SHAPES[path]
    elif Path(path).is_dir():
        parameters, shape = measure(AutoConfig.from_pretrained(path))
    else:
        return f"{split}\nmemory: {path} is not on this machine yet, so its size is not known"
    parts = memory_estimate(config, parameters, shape)
    rows = [f"  {name:<45}{bytes_ / 2**30:8.2f} GiB" for name, bytes_ in parts.items()]
    total = f"  {'together, at most':<45}{sum(parts.values()) / 2**30:8.2f} GiB"
    return "\n".join([split, f"memory, for {parameters / 1e6:.4g} M parameters:", *rows, total])


def measure(model: PreTrainedConfig) -> tuple[int, tuple[int, int, int, int, int]]:
    """Parameters and shape of a model, from its config alone."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(model)
    heads = model.num_attention_heads
    head = getattr(model, "head_dim", None) or model.hidden_size // heads
    kv_width = head * (getattr(model, "num_key_value_heads", None) or heads)
    shape = (model.num_hidden_layers, model.hidden_size, model.intermediate_size, kv_width, model.vocab_size)
    return sum(p.numel() for p in lm.parameters()), shape
