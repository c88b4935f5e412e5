"""A run of seconds, as a user would start it: a random model of 16 characters, 40 prompts, 4 steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARS = ["<eos>", "<pad>", *"0123456789+=\n "]


def make_model(folder: Path) -> Path:
    """A random model and its tokenizer, in `folder`."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(CHARS), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=True, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_data(folder: Path) -> Path:
    """Sums of two digits, in `folder`."""
    path = folder / "digits.jsonl"
    rows = ({"question": f"{a}+{b}=", "answer": str(a)} for a in range(10) for b in range(4))
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def command(model_dir: Path, data: Path, run_dir: Path, *more: str) -> list[str]:
    flags = {
        "--run-dir": run_dir,
        "--model.path": model_dir,
        "--data.source": data,
        "--data.template": "{question}",
        "--data.held_out": 8,
        "--verifier.kind": "tests_reward:first_digit_even",
        "--engine.max_new_tokens": 8,
        "--engine.stop": "[]",
        "--objective.drop_truncated": "false",
        "--learner.lr": "1e-3",
        "--pipeline.steps": 4,
        "--pipeline.prompts_per_step": 4,
        "--pipeline.completions_per_prompt": 4,
        "--pipeline.no_positive_resampling": "false",
        "--pipeline.deadline_s": 60,
        "--logging.checkpoint_every": 0,
        "--evaluation.every": 2,
        "--evaluation.samples": 2,
    }
    return [sys.executable, "-m", "trainer.main", *(str(x) for kv in flags.items() for x in kv), *more]


def environment(tmp: Path) -> dict[str, str]:
    (tmp / "tests_reward.py").write_text(
        "def first_digit_even(completion, answer, metadata):\n"
        "    digits = [c for c in completion if c.isdigit()]\n"
        "    return float(bool(digits) and int(digits[0]) % 2 == 0)\n"
    )
    path = os.pathsep.join([str(tmp), os.getcwd()])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
