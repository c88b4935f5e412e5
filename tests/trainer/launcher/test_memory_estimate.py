"""Promises of the memory estimate: it counts what is held; what cannot fit is refused before it is loaded."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import having
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer.cli import parse
from trainer.config import Config, ConfigError, CriticConfig, InterruptionConfig, KLConfig, LoraConfig
from trainer.launcher import memory_estimate as memory
from trainer.launcher.memory_estimate import GIB, SIZES, ModelSize, check_fits, estimate, rank_bytes
from trainer.launcher.placement import Devices, assign
from trainer.launcher.room import fitted
from trainer.main import planned
from trainer.models.tiny import make_model

ONE = Devices(2, ((),), ((),))
BESIDE = Devices(64, (("0",),), (("0",),))
TINY, BIG = SIZES["tiny"], SIZES["Qwen/Qwen3-8B-Base"]
QWEN_SMALL = ModelSize(596_049_920, 28, 1024, 3072, 1024, 151_936)  # 0.6B
Check = Callable[[Config, Devices], tuple[int, str]]
Machine = Callable[..., Check]
ON_THE_CPU = having(Config(), model={"path": "big"})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Sets the size of the model, and the GiB of a GPU and of the host; returns the check of that machine."""

    def set_to(size: ModelSize, gpu: float | None = None, ram: float = 1e4) -> Check:
        monkeypatch.setattr(memory, "_ram", lambda: ram * GIB)
        return lambda config, devices: check_fits(config, size, devices, gpu and gpu * GIB)

    return set_to


def on_gpus(ranks: int, engines: int = 1) -> Devices:
    return Devices(64, tuple((str(i),) for i in range(ranks)), (("9",),) * engines)


def learner(tokens: int, kind: Any = "vllm", **more: Any) -> Config:
    settings = {"micro_batch_tokens": tokens, **more}
    return having(ON_THE_CPU, model={"dtype": "bfloat16"}, engine={"kind": kind}, learner=settings)


def rank_and_host(config: Config, devices: Devices = ONE) -> tuple[int, int]:
    held = estimate(config, TINY, devices)
    return sum(held.rank.values()), sum(held.host.values())


def test_sizes_are_read_from_a_models_files_of_a_mixture_by_the_experts_that_work(tmp_path: Path) -> None:
    make_model(seed=0).save_pretrained(tmp_path / "tiny")
    assert memory.size_of(tmp_path / "tiny") == TINY
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, moe_intermediate_size=48, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "moe")
    parameters = sum(p.numel() for p in model.parameters())
    assert memory.size_of(tmp_path / "moe") == ModelSize(
        parameters, 2, 64, 96, 32, 32, tied=False, positions=config.max_position_embeddings
    )


@pytest.mark.parametrize(
    ("dtype", "engine", "reference"),  # the FP32 head counts twice; the reference's embedding is FP32
    [
        ("float32", 2 * 4 * 162_112, 4 * 162_112),
        ("bfloat16", 2 * 2 * 162_112 + 2 * 4 * 27 * 64, 2 * 162_112 + 2 * 27 * 64),
        ("float16", 2 * 162_112 + 2 * 4 * 27 * 64, 2 * 162_112 + 2 * 27 * 64),  # only the head is packed
    ],
)
def test_packed_weights_a_reference_and_a_critic_count(dtype: Any, engine: int, reference: int) -> None:
    config = having(Config(), model={"dtype": dtype})
    held = estimate(config, TINY, ONE).engine
    assert sum(size for name, size in held.items() if "KV" not in name) == engine
    with_kl = having(config, objective={"kl": KLConfig(coefficient=0.1)})
    for ranks in (1, 2):
        devices = replace(ONE, learner=((),) * ranks)
        assert rank_and_host(with_kl, devices)[0] - rank_and_host(config, devices)[0] == reference // ranks
    taught = having(config, objective={"kl": KLConfig(coefficient=0.1, to="smollm2-135m")})
    head = (4 - held["weights"] // TINY.parameters) * 49_152 * 576  # a teacher counts by its own size
    teacher = held["weights"] // TINY.parameters * 134_515_008 + head
    assert rank_and_host(taught, ONE)[0] - rank_and_host(config, ONE)[0] == teacher

    def of_critic(body: Any, **more: Any) -> tuple[int, int]:
        return rank_and_host(having(config, objective={"critic": CriticConfig(body=body)}, engine=more))

    assert of_critic("shared") == of_critic("none")
    assert of_critic("own")[0] - of_critic("none")[0] == 16 * TINY.parameters
    shared_gpus = {"kind": "vllm", "colocate": True}
    more = of_critic("own", **shared_gpus)[1] - of_critic("none", **shared_gpus)[1]
    assert more == 16 * TINY.parameters  # 12, pinned


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
        # Few tokens: the backward's end outweighs the loss. Shards 30.5; embedding and head gathered in FP32,
        # and twice their gradients: 13.9; a layer (193 M) twice in bf16 and its gradients in FP32: 2.2; a
        # layer's activations, 1,024 x 224 KiB: .2.
        (BIG, 1024, True, 4, 30.5 + 13.9 + 2.16 + 0.2 + 1.5),
    ],
)  # fmt: skip
def test_the_account_of_a_rank_is_one_made_by_hand(
    size: ModelSize, tokens: int, checkpointed: bool, ranks: int, gib: float
) -> None:
    config = learner(tokens, checkpoint_activations=checkpointed)
    assert rank_bytes(config, size, on_gpus(ranks)) / GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "gib"),
    [
        # 8.19 G x 2 bytes: 15.3. Adapters: 36 layers x 16 x (4 x 8,192 and 5,120 for k and v, 3 x 16,384) =
        # 43.6 M x 16 bytes: .65. Residual streams 36 x 16,384 x 16 KiB: 9.0. Logits: 4.64; no dW and no copy.
        # A weight of 4,096 x 12,288 in 10 bytes: .47. No reference, though there is a KL.
        (1, 15.26 + 0.65 + 9.0 + 4.64 + 0.47 + 1.5),
        # Half of the base, all adapters; embedding and head (1.24 G) are gathered in bf16: 2.32.
        (2, 7.63 + 0.65 + 9.0 + 4.64 + 0.47 + 2.32 + 1.5),
    ],
)
def test_lora_has_a_frozen_base_in_its_type_and_no_reference(ranks: int, gib: float) -> None:
    config = having(learner(16384, checkpoint_activations=True), model={"lora": LoraConfig(rank=16)})
    config = having(config, objective={"kl": KLConfig(coefficient=0.1)})
    assert memory.adapter_numbers(BIG, config.model.lora) == 36 * 16 * (2 * 8192 + 2 * 5120 + 3 * 16384)
    assert memory.adapter_numbers(BIG, LoraConfig(rank=1, targets=("q_proj", "v_proj"))) == 36 * (8192 + 5120)
    assert rank_bytes(config, BIG, on_gpus(ranks)) / GIB == pytest.approx(gib, rel=0.01)
    name, server = "published weights (at most)", having(config, engine={"urls": ("http://x",)})
    whole, alone = (estimate(c, BIG, ONE).host[name] for c in (server, config))
    assert alone * 2 * BIG.parameters == whole * 4 * 43_646_976 and alone < 0.011 * whole
    shared = having(config, engine={"kind": "vllm", "colocate": True, "weight_push": "ipc"})
    kept = estimate(shared, BIG, BESIDE).host["offloaded from the GPUs, pinned"]
    adapters = 36 * 16 * (2 * 8192 + 2 * 5120 + 3 * 16384)
    assert kept == pytest.approx(4 / 3 * (4 * BIG.parameters + 12 * adapters), rel=1e-6)  # base and engine


def test_a_teachers_top_k_counts_while_it_scores_and_in_the_backward() -> None:
    """The head of QWEN_SMALL (156 M) has an FP32 gradient more: .58 GiB. With LoRA it has none, but the
    loss needs less (activations 28 x 1,024 x 1,024 x 4, logits 1,024 x 151,936 x 4, a weight of 1,024 x 3,072
    in 10 bytes: .72) than the 8B teacher's head (622 M) in bf16 and FP32 and its logits, 2 x 4 x 32 Mi: 3.73.
    """

    def more(teacher: str, config: Config) -> float:
        kinds = (KLConfig(coefficient=1, to=teacher, top_k=k) for k in (0, 20))
        devices = ONE if config.model.dtype == "float32" else on_gpus(1)
        sampled, top = (rank_bytes(having(config, objective={"kl": k}), QWEN_SMALL, devices) for k in kinds)
        return (top - sampled) / GIB

    full = having(learner(1024, checkpoint_activations=True), engine={"max_new_tokens": 512})
    lora = having(full, model={"lora": LoraConfig(rank=16)})
    assert more("initial", full) == pytest.approx(0.58, abs=0.005)
    assert more("initial", having(full, model={"dtype": "float32"})) == pytest.approx(0.58, abs=0.005)
    assert more("Qwen/Qwen3-8B", lora) == pytest.approx(3.73 - 0.72, abs=0.02)
    assert more("initial", lora) == pytest.approx(0.58 + 0.25 - 0.72, abs=0.02)  # the base's, in FP32


def test_a_completion_longer_than_the_budget_has_a_micro_batch_of_its_own() -> None:
    """128 + 34,000 tokens: residual streams of 36 x 34,128 x 16 KiB are 18.7 GiB, where 16,384 take 9.0."""
    budget, longer = learner(16384, checkpoint_activations=True), learner(34128, checkpoint_activations=True)
    long = having(budget, engine={"max_new_tokens": 34_000})
    assert rank_bytes(long, BIG, on_gpus(2)) == rank_bytes(longer, BIG, on_gpus(2))
    more = rank_bytes(long, BIG, on_gpus(2)) - rank_bytes(budget, BIG, on_gpus(2))
    assert more / GIB == pytest.approx(18.7 - 9.0, abs=0.1)


def test_where_a_gpus_memory_is_known_the_loss_takes_the_rows_that_it_would_take_there() -> None:
    """4B, 2 ranks that share their GPUs of 79.65 GiB, 34,944 tokens. Shards 29.97; residual streams 36 x
    34,944 x 10 KiB: 12.0; the head (389 M) gathered in FP32: 1.45, its copy .72; CUDA twice: 3.0. Of
    32.5 dW has 8 bytes a weight, 2.9: half of the rest holds 3 x 8,192 rows of 4.64 GiB. dW itself: 2.17."""
    colocated = {"colocate": True, "max_new_tokens": 34_816}
    config = having(learner(16384, checkpoint_activations=True), engine=colocated)
    devices = Devices(64, (("0",), ("1",)), (("0",), ("1",)))
    size, beside = SIZES["Qwen/Qwen3-4B"], 29.97 + 12.0 + 1.45 + 0.72 + 3.0 + 2.17
    for rows, gpu in ((3, 81_559 * 2**20), (1, 65 * GIB), (1, None)):
        assert rank_bytes(config, size, devices, gpu) / GIB == pytest.approx(beside + rows * 4.637, abs=0.05)
    split = having(config, learner={"vocab_parallel": True})  # its ranks must have chunks alike
    assert rank_bytes(split, size, devices, 1e12) == rank_bytes(split, size, devices)


def test_a_head_split_over_the_ranks_is_never_gathered_and_fp32_has_its_gradient_twice() -> None:
    whole, split = (
        rank_bytes(learner(16384, checkpoint_activations=True, vocab_parallel=parallel), BIG, on_gpus(4))
        for parallel in (False, True)
    )
    # 622 M in FP32, three quarters of the logits and of the copies
    assert (whole - split) / GIB == pytest.approx(2.32 + 0.75 * (4.64 + 4.64), abs=0.02)
    narrow, wide = (
        estimate(having(learner(4096), model={"dtype": dtype}), QWEN_SMALL, on_gpus(1)).rank
        for dtype in ("bfloat16", "float32")
    )
    name = "logits, and the head's gradients and copies"
    assert wide[name] - narrow[name] == 2 * 151_936 * 1024


PUSHED_BY_IPC = having(learner(4096), engine={"colocate": True, "weight_push": "ipc"})
ON_80_GB = learner(16384, checkpoint_activations=True)
TOO_BIG = [  # settings, devices, GiB of a GPU and of the host, and the error
    (ON_THE_CPU, ONE, (None, 24), r"^model.path big: 8.19 G parameters, on the host: about .* 24.0,"),
    (ON_80_GB, on_gpus(2), (80, 1e4), r"rank: about 85\.\d .* 8% to spare, has 73\.6, 1\d\.\d too few"),
    (learner(16384), on_gpus(4), (16, 1e4), r"an engine's share of the weights: about 15\.3 GiB"),
    # Weights and moments, 12 bytes a parameter, and the engine's 2: 107 GiB, and a third more, pinned.
    (PUSHED_BY_IPC, BESIDE, (200, 128), r"on the host: about 142\.\d GiB"),
]


@pytest.mark.parametrize(("config", "devices", "gib", "error"), TOO_BIG)
def test_an_8b_that_is_too_big_is_refused_with_by_how_much(
    config: Config, devices: Devices, gib: tuple[float | None, float], error: str, machine: Machine
) -> None:
    with pytest.raises(ConfigError, match=error):
        machine(BIG, *gib)(config, devices)
    machine(BIG, 400, 400)(config, devices)


def test_the_torch_engine_must_fit_beside_the_learner_or_on_the_cpu(machine: Machine) -> None:
    """Qwen3-0.6B: a rank of 19.7 GiB (above), and an engine of 1.1 for weights, 3 x 28 x 2 x 1,024 x 64 x 640
    x 2 bytes for KV (13.1), logits 12 x 151,936 x 64 (.1), CUDA 1.5: 35.5 GiB, and 8 % stay free: 38.6."""
    config = learner(4096, "torch")
    assert sum(estimate(config, QWEN_SMALL, BESIDE).engine.values()) / GIB == pytest.approx(15.8, abs=0.1)
    machine(QWEN_SMALL, 39)(config, BESIDE)
    check = machine(QWEN_SMALL, 38)
    error = r"a learner rank and the engine beside it: about 35\.\d GiB .*engine.tensor_parallel 0"
    with pytest.raises(ConfigError, match=error):
        check(config, BESIDE)
    check(config, Devices(64, (("0",),), (("1",),)))
    check = machine(QWEN_SMALL, 39, ram=8)
    with pytest.raises(ConfigError, match=r"on the host: about \d+\.\d GiB .* has 8\.0"):
        check(config, Devices(64, (("0",),), ((),)))


@pytest.mark.parametrize(
    ("kind", "gib", "ranks", "why"),
    [
        ("vllm", 79.6, 5, "5 ranks: the fastest split that fits, at assumed rates"),
        ("vllm", 140.4, 5, "5 ranks: the fastest split that fits, at assumed rates"),  # completions are short
        ("vllm", None, 2, ""),  # whether it fits is not known, so it stays
        ("torch", 79.6, 3, "3 ranks: with fewer it does not fit"),  # no rates are known
        ("torch", 140.4, 2, ""),
        ("torch", 24.0, 2, ""),  # none would do: refused with advice later
    ],
)
def test_the_learner_gets_the_ranks_with_the_shortest_step_or_those_that_its_memory_needs(
    kind: str, gib: float | None, ranks: int, why: str
) -> None:
    config = having(learner(16384, kind, checkpoint_activations=True), engine={"slots": 64})

    def devices_of(asked: Config) -> Devices:
        return assign(asked, tuple("01234567"), 64)

    set_keys = {"learner.micro_batch_tokens", "learner.checkpoint_activations", "engine.slots"}
    _, devices = fitted(config, BIG, gib and gib * GIB, set_keys, devices_of)
    assert len(devices.learner) == ranks and len(devices.engines) == 8 - ranks
    assert f"({why})" in devices.describe() if why else "(" not in devices.describe()
    one = having(config, learner={"ranks": 1})
    assert len(fitted(one, BIG, 79.6 * GIB, set_keys, devices_of)[1].learner) == 1


@pytest.mark.parametrize("gpu", [None, 80])
def test_gpus_of_unknown_memory_are_not_checked_and_that_is_said(gpu: float | None, machine: Machine) -> None:
    _, note = machine(TINY, gpu)(having(Config(), engine={"kind": "vllm"}), on_gpus(1))
    assert ("is not checked" in note) == (gpu is None)


def test_a_dry_run_shows_split_and_memory_and_loads_nothing() -> None:
    text = memory.describe(Config(), ONE, SIZES["smollm2-135m"], None)
    assert "; 1 verifier worker; " in text
    assert "2 CPU cores, shared in time by 1 learner rank and 1 engine" in text
    assert "learner rank: weights, gradients" in text and "together, at most" in text
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30  # a control group may allow less
    assert 0 < float(text.split()[-2]) <= round(ram, 2)
    assert "critic" not in text  # what takes nothing has no line


def test_the_slots_of_an_8b_are_those_whose_sequences_fit_on_average() -> None:
    """By hand, from vLLM's own start-up lines on these cards: 387 and 785 thousand tokens."""
    budget = InterruptionConfig(enabled=True, lo=10_000, hi=12_000, phrase="x" * 86, answer_tokens=2048)
    engine = {"kind": "vllm", "interruption": budget}
    config = having(Config(), model={"dtype": "bfloat16"}, engine=engine)
    devices = assign(config, tuple(map(str, range(8))), 32)
    for mib, tokens, slots in ((81_559, 387e3, 48), (143_771, 785e3, 104)):
        assert memory.kv_tokens(config, BIG, mib * 2**20) == pytest.approx(tokens, rel=0.01)
        # 128 + 14134 / 2 = 7195 tokens a sequence, in multiples of 8
        assert memory.with_slots(config, BIG, devices, mib * 2**20).engine.slots == slots
    assert memory.with_slots(config, QWEN_SMALL, devices, 143_771 * 2**20).engine.slots == 152
    short = having(config, engine={"interruption": InterruptionConfig(), "max_new_tokens": 256})
    # As many as a CUDA graph has.
    assert memory.with_slots(short, QWEN_SMALL, devices, 143_771 * 2**20).engine.slots == 512
    for unknown in (memory.with_slots(config, BIG, ONE, 8e10), memory.with_slots(config, BIG, devices, None)):
        assert unknown.engine.slots == 64


def test_slots_that_are_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.main.smallest_gpu_memory", lambda: 8e10)
    monkeypatch.setattr("trainer.main.usable_gpus", lambda: ("0", "1"))
    for flags, slots in (([], 512), (["--engine.slots", "64"], 64)):
        launch = parse(["--data.source", "mine.jsonl", "--engine.kind", "vllm", *flags])
        config = having(launch.config, engine={"max_new_tokens": 256})
        assert planned(replace(launch, config=config), QWEN_SMALL)[0].engine.slots == slots
