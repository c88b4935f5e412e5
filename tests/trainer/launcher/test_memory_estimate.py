"""Promises of the memory estimate: it counts what is held; what cannot fit is refused before it is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer.cli import parse
from trainer.config import (
    Config,
    ConfigError,
    CriticConfig,
    EngineConfig,
    InterruptionConfig,
    KLConfig,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
)
from trainer.launcher import memory_estimate as memory
from trainer.launcher.memory_estimate import (
    GIB,
    SIZES,
    ModelSize,
    check_fits,
    describe,
    estimate,
    kv_tokens,
    size_of,
    with_room,
    with_slots,
)
from trainer.launcher.placement import Devices, assign
from trainer.main import derived_slots
from trainer.models.tiny import make_model

ONE = Devices(2, ((),), ((),))
BIG = SIZES["Qwen/Qwen3-8B-Base"]
QWEN_SMALL = ModelSize(596_049_920, 28, 1024, 3072, 1024, 151_936)  # 0.6B


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
    assert size_of(tmp_path) == ModelSize(parameters, 2, 64, 96, 32, 32, tied=False)


def test_the_memory_estimate_counts_the_engines_packed_weights() -> None:
    parameters = SIZES["tiny"].parameters
    for dtype, expected in (
        ("float32", 2 * 4 * parameters),
        ("bfloat16", 2 * 2 * parameters + 2 * 4 * 27 * 64),  # the FP32 head twice
        ("float16", 2 * parameters + 2 * 4 * 27 * 64),  # not packed, but the head
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
    assert more == 16 * parameters  # 12, pinned


def test_a_model_too_big_for_the_machine_is_refused_with_by_how_much(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "size_of", lambda folder: BIG)
    monkeypatch.setattr(memory, "_ram", lambda: 24 * GIB)
    config = Config(model=ModelConfig(path="big"))
    with pytest.raises(
        ConfigError, match=r"^model.path big: 8.19 G parameters: about \d+\.\d GiB .* 24.0, \d+\.\d too few"
    ):
        check_fits(config, str(tiny), ONE)


def on_gpus(ranks: int, engines: int = 1) -> Devices:
    return Devices(64, tuple((str(i),) for i in range(ranks)), (("9",),) * engines)


def learner(tokens: int, **more: Any) -> Config:
    return Config(
        model=ModelConfig(path="big", dtype="bfloat16"), engine=EngineConfig(kind="vllm"),
        learner=LearnerConfig(micro_batch_tokens=tokens, **more),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "tokens", "checkpointed", "ranks", "gib"),
    [
        # 8.19 G x 16 bytes over 2 ranks: 61.0. Residual streams 36 x 16,384 x 16 KiB: 9.0. Logits 8,192 x
        # 151,936 x 4: 4.6. Head (622 M) in bf16, dW in FP32 and bf16: 4.6. Embedding and head in FP32: 4.6.
        (BIG, 16384, True, 2, 61.0 + 9.0 + 4.64 + 4.64 + 4.64 + 1.5),
        (BIG, 16384, True, 4, 30.5 + 9.0 + 4.64 + 4.64 + 4.64 + 1.5),
        # 0.596 G x 16: 8.9. Each of 4,096 tokens takes 32 x 1,024 + 8 x 3,072 bytes in 28 layers: 6.1.
        # Logits 4,096 x 151,936 x 4: 2.3. The head (156 M) and dW twice in bf16: .9. Nothing is gathered.
        (QWEN_SMALL, 4096, False, 1, 8.9 + 6.1 + 2.3 + 0.9 + 1.5),
    ],
)  # fmt: skip
def test_the_account_of_a_rank_is_one_made_by_hand(
    size: ModelSize, tokens: int, checkpointed: bool, ranks: int, gib: float
) -> None:
    config = learner(tokens, checkpoint_activations=checkpointed)
    assert memory.rank_bytes(config, size, on_gpus(ranks)) / GIB == pytest.approx(gib, rel=0.01)


def test_the_backwards_end_counts_where_it_holds_more_than_the_loss() -> None:
    """Few tokens: gathered ends and their gradients (13.9 GiB) outweigh the loss's logits and activations."""
    held = estimate(learner(1024, checkpoint_activations=True), BIG, on_gpus(4)).rank
    assert "a chunk of logits" not in held
    ends = held["embedding and head, gathered whole in FP32"]
    ends += held["their gradients, and those to be scattered, FP32"]
    assert ends / GIB == pytest.approx(13.9, abs=0.05)


def test_a_head_split_over_the_ranks_is_never_gathered() -> None:
    whole, split = (
        estimate(learner(16384, checkpoint_activations=True, vocab_parallel=given), BIG, on_gpus(4)).rank
        for given in (False, True)
    )
    gathered = "embedding and head, gathered whole in FP32"
    assert (whole[gathered] - split[gathered]) / GIB == pytest.approx(2.32, abs=0.01)  # 622 M in FP32
    assert split["a chunk of logits"] == whole["a chunk of logits"] // 4


def test_fp32_weights_have_a_gradient_of_the_head_twice() -> None:
    config = replace(learner(4096), model=ModelConfig(path="big", dtype="float32"))
    held = estimate(config, QWEN_SMALL, on_gpus(1)).rank
    assert held["the head's gradients, and its 16-bit copy"] == 8 * 151_936 * 1024


def test_on_gpus_a_rank_and_an_engine_must_each_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "size_of", lambda folder: BIG)
    monkeypatch.setattr(memory, "smallest_gpu_memory", lambda: 80 * GIB)
    config = learner(16384, checkpoint_activations=True)
    check_fits(config, str(tiny), on_gpus(3))
    with pytest.raises(
        ConfigError,
        match=r"a learner rank: about 85\.\d .* 8% to spare, has 73\.6.* learner\.ranks more GPUs",
    ):
        check_fits(config, str(tiny), on_gpus(2))
    monkeypatch.setattr(memory, "smallest_gpu_memory", lambda: 16 * GIB)
    with pytest.raises(ConfigError, match=r"an engine's share of the weights: about 15\.3 GiB"):
        check_fits(config, str(tiny), on_gpus(4))


def test_what_colocated_roles_leave_on_the_host_must_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and moments, 12 bytes a parameter, and the engine's 2: 107 GiB, and a third more, pinned."""
    monkeypatch.setattr(memory, "size_of", lambda folder: BIG)
    monkeypatch.setattr(memory, "smallest_gpu_memory", lambda: 200 * GIB)
    config = learner(4096, checkpoint_activations=True)
    config = replace(config, engine=replace(config.engine, colocate=True, weight_push="ipc"))
    shared = Devices(64, (("0",),), (("0",),))
    monkeypatch.setattr(memory, "_ram", lambda: 128 * GIB)
    with pytest.raises(ConfigError, match=r"leaves the GPUs in turns: about 142\.\d GiB"):
        check_fits(config, str(tiny), shared)
    monkeypatch.setattr(memory, "_ram", lambda: 160 * GIB)
    check_fits(config, str(tiny), shared)


@pytest.mark.parametrize(
    ("gib", "ranks", "why"),
    [
        (79.6, 3, "3 ranks: of 2, each would need 85.4 GiB; a GPU has 79.6, and 8% stay free"),
        (140.4, 2, ""),
        (24.0, 2, ""),  # none would do: refused with advice later
        (None, 2, ""),
    ],
)
def test_the_learner_gets_the_ranks_that_its_memory_needs(gib: float | None, ranks: int, why: str) -> None:
    config = learner(16384, checkpoint_activations=True)
    gpus = tuple("01234567")

    def devices_of(asked: int, given: int = 0) -> Devices:
        return assign(replace(config, learner=replace(config.learner, ranks=asked or given)), gpus, 64)

    found = with_room(config, BIG, gib and gib * GIB, devices_of)
    assert len(found.learner) == ranks and len(found.engines) == 8 - ranks
    assert f"({why})" in found.describe() if why else "(" not in found.describe()
    fixed = replace(config, learner=replace(config.learner, ranks=1))
    assert len(with_room(fixed, BIG, 79.6 * GIB, lambda asked: devices_of(asked, 1)).learner) == 1


@pytest.mark.parametrize("size", [None, 80 * GIB])
def test_gpus_whose_memory_the_driver_does_not_tell_are_not_checked_and_that_is_said(
    size: float | None, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "smallest_gpu_memory", lambda: size)
    _, note = check_fits(
        Config(engine=EngineConfig(kind="vllm")), str(tiny), Devices(64, (("0",),), (("1",),))
    )
    said = "the driver does not tell the GPUs' memory, so whether the model fits is not checked"
    assert note == ("" if size else said)


def test_a_dry_run_shows_split_and_memory_and_loads_nothing() -> None:
    text = describe(Config(), ONE, SIZES["smollm2-135m"])
    assert "2 CPU cores, shared in time by 1 learner rank and 1 engine" in text
    assert "learner rank: weights, FP32" in text and "together, at most" in text


def test_a_learner_and_the_torch_engine_beside_it_must_fit_into_a_gpu_together(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-0.6B: a rank of 19.7 GiB (above), and an engine of 1.1 for weights, 3 x 28 x 2 x 1,024 x 64 x 640
    x 2 bytes for KV (13.1), logits 12 x 151,936 x 64 (.1), CUDA 1.5: 35.5 GiB, and 8 % stay free: 38.6."""
    monkeypatch.setattr(memory, "size_of", lambda folder: QWEN_SMALL)
    config = replace(learner(4096), engine=EngineConfig(kind="torch", max_new_tokens=512))
    beside = Devices(64, (("0",),), (("0",),))
    assert sum(estimate(config, QWEN_SMALL, beside).engine.values()) / GIB == pytest.approx(15.8, abs=0.1)
    monkeypatch.setattr(memory, "smallest_gpu_memory", lambda: 39 * GIB)
    check_fits(config, str(tiny), beside)
    monkeypatch.setattr(memory, "smallest_gpu_memory", lambda: 38 * GIB)
    with pytest.raises(
        ConfigError,
        match=r"a learner rank and the engine beside it: about 35\.\d GiB .*engine.tensor_parallel 0",
    ):
        check_fits(config, str(tiny), beside)
    check_fits(config, str(tiny), Devices(64, (("0",),), (("1",),)))


def test_engines_on_the_cpu_of_a_learner_on_a_gpu_must_fit_into_its_memory(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "size_of", lambda folder: QWEN_SMALL)
    monkeypatch.setattr(memory, "smallest_gpu_memory", lambda: 39 * GIB)
    monkeypatch.setattr(memory, "_ram", lambda: 8 * GIB)
    config = replace(learner(4096), engine=EngineConfig(kind="torch", tensor_parallel=0))
    with pytest.raises(ConfigError, match=r"engines on the CPU: about \d+\.\d GiB .* has 8\.0"):
        check_fits(config, str(tiny), Devices(64, (("0",),), ((),)))


def test_the_slots_of_an_8b_are_those_whose_sequences_fit_on_average() -> None:
    """By hand, from vLLM's own start-up lines on these cards: 387 and 785 thousand tokens."""
    budget = InterruptionConfig(enabled=True, lo=10_000, hi=12_000, phrase="x" * 86, answer_tokens=2048)
    engine = EngineConfig(kind="vllm", interruption=budget)
    config = Config(model=ModelConfig(dtype="bfloat16"), engine=engine)
    devices = assign(config, tuple(map(str, range(8))), 32)
    for mib, tokens, slots in ((81_559, 387e3, 48), (143_771, 785e3, 104)):
        assert kv_tokens(config, BIG, mib * 2**20) == pytest.approx(tokens, rel=0.01)
        # 128 + 14134 / 2 = 7195 tokens a sequence, in multiples of 8
        assert with_slots(config, BIG, devices, mib * 2**20).engine.slots == slots
    assert with_slots(config, QWEN_SMALL, devices, 143_771 * 2**20).engine.slots == 152
    short = replace(config, engine=EngineConfig(kind="vllm", max_new_tokens=256))
    assert with_slots(short, QWEN_SMALL, devices, 143_771 * 2**20).engine.slots == 512  # of a CUDA graph
    for unknown in (with_slots(config, BIG, ONE, 8e10), with_slots(config, BIG, devices, None)):
        assert unknown.engine.slots == 64


def test_slots_that_are_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.main.smallest_gpu_memory", lambda: 8e10)
    for given, slots in (([], 512), (["--engine.slots", "64"], 64)):
        launch = parse(["--data.source", "mine.jsonl", "--engine.kind", "vllm", *given])
        config = replace(launch.config, engine=replace(launch.config.engine, max_new_tokens=256))
        devices = assign(config, ("0", "1"), 32)
        assert derived_slots(launch, config, QWEN_SMALL, devices).engine.slots == slots
