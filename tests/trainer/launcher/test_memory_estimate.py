"""Promises of the memory estimate: it counts what is held; what cannot fit is refused before it is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer.config import (
    Config,
    ConfigError,
    CriticConfig,
    EngineConfig,
    KLConfig,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
)
from trainer.launcher import memory_estimate as memory
from trainer.launcher.memory_estimate import GIB, SIZES, ModelSize, check_fits, describe, estimate, size_of
from trainer.launcher.placement import Devices
from trainer.models.tiny import make_model

ONE = Devices(2, ((),), ((),))
BIG = ModelSize(8_000_000_000, 36, 4096, 12288, 1024, 151_936)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_model(seed=0).save_pretrained(folder)
    return folder


def test_the_built_in_models_sizes_are_theirs(tiny: Path) -> None:
    assert size_of(tiny) == SIZES["tiny"]


def test_a_mixtures_size_is_of_all_its_weights_and_its_activations_of_the_experts_that_work(
    tmp_path: Path,
) -> None:
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, moe_intermediate_size=48, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    parameters = sum(p.numel() for p in model.parameters())
    assert size_of(tmp_path) == ModelSize(parameters, 2, 64, 96, 32, 32)


def test_the_memory_estimate_counts_the_engines_packed_weights() -> None:
    parameters = SIZES["tiny"].parameters
    for dtype, expected in (
        ("float32", 2 * 4 * parameters),
        ("bfloat16", 2 * parameters + 2 * 4 * 27 * 64),  # the FP32 head twice
    ):
        engine = estimate(Config(model=ModelConfig(dtype=dtype)), SIZES["tiny"], ONE).engine
        assert sum(size for name, size in engine.items() if "KV" not in name) == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),  # bytes of the layers' weights, and of embedding and head in FP32
    [("float32", 4 * 162_112), ("float16", 2 * 162_112 + 2 * 27 * 64)],
)
def test_a_kl_penalty_adds_a_frozen_reference_in_the_compute_type(dtype: Any, expected: int) -> None:
    without = Config(model=ModelConfig(dtype=dtype))
    with_kl = replace(without, objective=ObjectiveConfig(kl=KLConfig(coefficient=0.1)))
    two = replace(ONE, learner=((),) * 2)
    for devices, share in ((ONE, 1), (two, 2)):
        a, b = (sum(estimate(c, SIZES["tiny"], devices).rank.values()) for c in (without, with_kl))
        assert b - a == expected // share


def test_ranks_share_weights_gradients_and_moments() -> None:
    one = estimate(Config(), SIZES["smollm2-135m"], ONE).rank
    four = estimate(Config(), SIZES["smollm2-135m"], replace(ONE, learner=((),) * 4)).rank
    assert {k: one[k] / four[k] for k in one} == pytest.approx(
        {k: 4.0 if "FP32" in k else 1.0 for k in one}, rel=1e-6
    )


def test_a_critic_of_its_own_counts_as_a_second_model_in_training() -> None:
    def bytes_of(body: Any, **more: Any) -> tuple[int, int]:
        objective = ObjectiveConfig(critic=CriticConfig(body=body))
        memory = estimate(Config(objective=objective, **more), SIZES["tiny"], ONE)
        return sum(memory.rank.values()), sum(memory.host.values())

    parameters = SIZES["tiny"].parameters
    assert bytes_of("own")[0] - bytes_of("none")[0] == 16 * parameters
    assert bytes_of("shared") == bytes_of("none")
    shared_gpus = EngineConfig(kind="vllm", colocate=True)
    more = bytes_of("own", engine=shared_gpus)[1] - bytes_of("none", engine=shared_gpus)[1]
    assert more == 12 * parameters


def test_a_model_too_big_for_the_machine_is_refused_with_by_how_much(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "size_of", lambda folder: BIG)
    monkeypatch.setattr(memory, "_ram", lambda: 24 * GIB)
    config = Config(model=ModelConfig(path="big"))
    with pytest.raises(
        ConfigError, match=r"^model.path big: 8 G parameters: about \d+\.\d GiB .* 24.0, \d+\.\d too few"
    ):
        check_fits(config, str(tiny), ONE)


def test_on_gpus_a_rank_and_an_engine_must_each_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "size_of", lambda folder: BIG)
    monkeypatch.setattr(memory, "smallest_gpu_memory", lambda: 80 * GIB)
    config = Config(
        model=ModelConfig(path="big", dtype="bfloat16"), engine=EngineConfig(kind="vllm"),
        learner=LearnerConfig(checkpoint_activations=True),
    )  # fmt: skip
    split = Devices(64, (("0",), ("1",)), (("2",),))
    check_fits(config, str(tiny), split)  # 60 GiB a rank, 15 for the engine's weights
    with pytest.raises(ConfigError, match=r"a learner rank: about .* give learner\.ranks more GPUs"):
        check_fits(config, str(tiny), replace(split, learner=(("0",),)))
    monkeypatch.setattr(memory, "smallest_gpu_memory", lambda: 16 * GIB)
    with pytest.raises(ConfigError, match=r"an engine's share of the weights: about 14\.9 GiB"):
        check_fits(config, str(tiny), split)


@pytest.mark.parametrize("size", [None, 80 * GIB])
def test_gpus_whose_memory_the_driver_does_not_tell_are_not_checked_and_that_is_said(
    size: float | None, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "smallest_gpu_memory", lambda: size)
    note = check_fits(Config(engine=EngineConfig(kind="vllm")), str(tiny), Devices(64, (("0",),), (("1",),)))
    said = "the driver does not tell the GPUs' memory, so whether the model fits is not checked"
    assert note == ("" if size else said)


def test_a_dry_run_shows_split_and_memory_and_loads_nothing() -> None:
    text = describe(Config(), ONE, SIZES["smollm2-135m"])
    assert "2 CPU cores, shared in time by 1 learner rank and 1 engine" in text
    assert "learner rank: weights, FP32" in text and "together, at most" in text
