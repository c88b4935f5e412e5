"""Measured promises of LoRA on real models' shapes: gradients, moments, pushes within 5 % of full training's.

`pytest -s -m slow tests/trainer/learner/test_lora_size.py` prints the figures of docs/lora.md."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import having
from training import config, learner, sequences
from transformers import AutoModelForCausalLM

from bench.learner.step import MODELS, SMALL, save_model
from trainer.config import LoraConfig
from trainer.learner.learner import Learner
from trainer.learner.lora import adapter_of, add_adapters, weights_for_engines
from trainer.learner.weight_file import WeightFiles, _header
from trainer.types import TrainBatch

RANK_16 = LoraConfig(rank=16)


def bytes_at_a_step(one: Learner) -> int:
    """Bytes of all gradients, also of frozen weights if they had some, and of the moments, in a step."""
    sizes: list[int] = []
    step = one.policy.step

    def counted(norm: float, lr: float) -> None:
        gradients = [w.grad for w in one.model.lm.parameters() if w.grad is not None]
        step(norm, lr)
        sizes.append(sum(t.untyped_storage().nbytes() for t in (*gradients, *one.policy.moments())))

    one.policy.step = counted  # type: ignore[method-assign]  # it also counts
    one.train(TrainBatch(1, sequences(), {}))
    return sizes[0]


@pytest.mark.slow
def test_gradients_and_moments_of_smollm2_are_a_twentieth_of_full_trainings(tmp_path: Path) -> None:
    save_model(replace(SMALL, dtype="float32"), str(tmp_path / "model"))
    full, adapters = (
        bytes_at_a_step(learner(tmp_path / "model", having(config(), model={"lora": lora})))
        for lora in (LoraConfig(), RANK_16)
    )
    print(f"gradients and moments, SmolLM2-135M: {full / 1e6:.0f} MB; rank 16: {adapters / 1e6:.0f} MB")
    assert full == pytest.approx(3 * 4 * 134_515_008, rel=1e-3) and adapters <= 0.05 * full


def sizes_of_pushes(model: str, dtype: str, lora: LoraConfig) -> tuple[int, int]:
    """Bytes of the files with all weights and with the adapters alone, by the shapes of the model."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(MODELS[model](), dtype=torch.float32)
    kind = getattr(torch, dtype)
    add_adapters(lm, kind, lora, seed=0)
    adapter = adapter_of(lm, "a folder", lora)
    assert adapter is not None
    alone = {f"{n}.lora_{x}": w for n, pair in adapter.pairs.items() for x, w in zip("AB", pair, strict=True)}
    files = (weights_for_engines(lm), kind, None), (alone, torch.float32, {"base": "a folder"})
    whole, small = (
        len(_header(weights, t, facts)) + t.itemsize * sum(w.numel() for w in weights.values())
        for weights, t, facts in files
    )
    return whole, small


@pytest.mark.parametrize(
    ("model", "dtype", "rank", "share"),
    [
        ("qwen3-0.6b", "bfloat16", 16, 0.0340),
        ("qwen3-4b", "bfloat16", 16, 0.0165),
        ("smollm2-135m", "float32", 16, 0.0365),
        ("smollm2-135m", "bfloat16", 8, 0.0365),  # adapters are FP32: of rank 16 it would be .073
    ],
)
def test_a_push_of_adapters_is_a_twentieth_of_the_whole_weights(
    model: str, dtype: str, rank: int, share: float
) -> None:
    whole, alone = sizes_of_pushes(model, dtype, LoraConfig(rank=rank))
    sizes = f"{whole / 1e6:.0f} MB; {alone / 1e6:.1f} MB: {alone / whole:.1%}"
    print(f"push, {model}, {dtype}, rank {rank}: {sizes}")
    assert alone / whole == pytest.approx(share, rel=0.02) and share <= 0.05


def test_a_file_has_the_size_that_is_computed_from_shapes(tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_config(MODELS["tiny"](), dtype=torch.float32)
    add_adapters(lm, torch.bfloat16, RANK_16, seed=0)
    path = WeightFiles(str(tmp_path), 10**7, 1, torch.bfloat16).write(weights_for_engines(lm), 1)
    trained = {n: w for n, w in lm.named_parameters() if w.requires_grad}
    facts = {"base": "a folder"}
    small = WeightFiles(str(tmp_path), 10**7, 1, torch.float32, metadata=facts).write(trained, 1)
    written = Path(path).stat().st_size, Path(small).stat().st_size
    assert written == sizes_of_pushes("tiny", "bfloat16", RANK_16)
