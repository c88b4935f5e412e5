"""Promises of sigmoid-rl-kernels, the wheel: it works alone, and beside Hugging Face's `kernels` and TRL.

`make test-wheel` runs this in an environment of its own, with the real packages and without the checkout.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import pytest
import sigmoid_rl_kernels
import torch
from sigmoid_rl_kernels.adapters import ChunkedLogProbFunction


def test_it_is_the_installed_wheel_with_its_native_library() -> None:
    assert Path(sigmoid_rl_kernels.__file__).is_relative_to(sys.prefix)
    assert sigmoid_rl_kernels.backend_info()["cpu"]["available"]
    assert importlib.util.find_spec("trainer") is None  # the checkout is not on the path


def test_a_policy_learns_its_rewarded_token() -> None:
    torch.manual_seed(0)
    hidden = torch.rand(64, 16)
    weight = torch.nn.Parameter(0.01 * torch.randn(100, 16))
    optimizer = torch.optim.Adam([weight], lr=0.05)
    ones = torch.ones(64)
    for _ in range(30):
        scored = sigmoid_rl_kernels.linear_logprob(hidden, weight.detach(), torch.full((64,), 7))
        out = sigmoid_rl_kernels.policy_loss(
            hidden, weight, torch.full((64,), 7),
            logprobs_gen=scored.logprobs, advantages=ones, token_weights=ones / 64,
        )  # fmt: skip
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert float(scored.logprobs.exp().mean()) > 0.5  # 0.01 at first


def test_hugging_face_s_kernels_loads_a_kernel_beside_it(tmp_path: Path) -> None:
    import kernels

    variant = tmp_path / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    metadata = {"name": "twice", "id": "twice_1", "version": 1, "license": "MIT", "python-depends": [],
                "backend": {"type": "cpu"}}  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(metadata))
    (variant / "__init__.py").write_text("def twice(x):\n    return x + x\n")
    loaded = kernels.get_local_kernel(tmp_path, backend="cpu", trust_remote_code=True)
    assert loaded.twice(torch.ones(1)).item() == 2
    assert sigmoid_rl_kernels.policy_loss.__module__ == "sigmoid_rl_kernels.loss"


def test_transformers_sees_the_other_kernels() -> None:
    from transformers.utils import is_kernels_available

    assert is_kernels_available()


SETTINGS: dict[str, Any] = {
    "max_steps": 10, "per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 8,
    "learning_rate": 1e-3, "use_cpu": True, "bf16": False, "seed": 0, "logging_steps": 1, "report_to": [],
    "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False,
}  # fmt: skip


def train(folder: Path) -> list[dict[str, Any]]:
    """Ten steps of TRL's GRPOTrainer on a tiny random model: what it logged."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    letters = ["<pad>", "<eos>", *"0123456789+="]
    words = Tokenizer(models.WordLevel({x: i for i, x in enumerate(letters)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
    ))  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [text.count("7") / 8 for text in completions],
        args=GRPOConfig(str(folder), **SETTINGS),
        train_dataset=Dataset.from_list([{"prompt": f"{digit}="} for digit in range(10)] * 4),
        processing_class=tokenizer,
    )
    trainer.train()
    return list(trainer.state.log_history)


def test_trl_trains_on_it_as_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.trainer.utils

    theirs, calls = train(tmp_path), 0

    class Counted(ChunkedLogProbFunction):
        @staticmethod
        def apply(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return ChunkedLogProbFunction.apply(*arguments)

    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Counted)
    ours = train(tmp_path)
    steps = [(a, b) for a, b in zip(ours, theirs, strict=True) if "loss" in a]
    assert len(steps) == 10 and calls >= 10 and any(b["loss"] for _, b in steps)
    for a, b in steps:
        for name in ("loss", "grad_norm", "entropy", "reward"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-4), (name, b["step"])
