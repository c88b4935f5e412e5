"""A reward model (a sequence classifier with one output), in the judge's own process, which sees its own
device only. The functions are called there by a pool of one process."""

import os
import signal
import sys
from typing import Any

from trainer.roles import signal_at_death_of_parent

BATCH_TOKENS = 16_384  # of one forward, padding included; a longer conversation goes alone
_loaded: dict[str, Any] = {}


def load(path: str, device: str, gpu: str) -> None:
    """Load model and tokenizer from a folder or the hub. ValueError unless the model has one output."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is initialised
    signal_at_death_of_parent(signal.SIGKILL)
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    dtype = "float32" if device == "cpu" else "auto"
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, use_safetensors=True)
    if model.config.num_labels != 1:
        raise ValueError(f"it has {model.config.num_labels} outputs; expected a reward model with one")
    tokenizer = AutoTokenizer.from_pretrained(path)
    # If padding is EOS, the model cannot tell where a conversation ends: each goes alone.
    pads = tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    if pads:
        model.config.pad_token_id = tokenizer.pad_token_id
    _loaded.update(model=model.to(device).eval(), tokenizer=tokenizer, pads=pads)


def scores(requests: list[Any]) -> list[float | None]:
    """The model's output for texts and conversations; None for one that exceeds its positions."""
    import torch

    model, tokenizer, ids = _loaded["model"], _loaded["tokenizer"], [_token_ids(r) for r in requests]
    limit = getattr(model.config, "max_position_embeddings", sys.maxsize)
    waiting = sorted((i for i in range(len(ids)) if len(ids[i]) <= limit), key=lambda i: len(ids[i]))
    out: list[float | None] = [None] * len(ids)
    while waiting:
        size = max(1, BATCH_TOKENS // len(ids[waiting[-1]])) if _loaded["pads"] else 1
        batch, waiting = waiting[-size:], waiting[:-size]
        padded = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, padding=size > 1, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**padded.to(model.device)).logits  # (B, 1)
        for i, score in zip(batch, logits[:, 0].tolist(), strict=True):
            out[i] = score
    return out


def _token_ids(request: Any) -> list[int]:
    """The ids of a text, or of a conversation in the model's chat template (without it: the joined texts)."""
    tokenizer = _loaded["tokenizer"]
    if isinstance(request, str) or not tokenizer.chat_template:
        text = request if isinstance(request, str) else "".join(turn["content"] for turn in request)
        return list(tokenizer.encode(text))
    text = tokenizer.apply_chat_template(request, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))  # the template contains them
