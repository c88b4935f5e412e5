"""Promises of replayed experts: the learner takes those of the engine, and its own weights of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tr
from engine_process import VOCAB, load, prompt_of, request
from fakes import having
from numpy.typing import NDArray
from torch import Tensor
from training import (
    cispo,
    config,
    error,
    generate,
    gradients_of_step,
    learner,
    same,
    save,
    save_words,
    sequence,
    weights_of,
)

from trainer.config import ConfigError, KLConfig, LoraConfig
from trainer.engines.torch.engine import TorchEngine
from trainer.learner.packing import pack
from trainer.mismatch import PARITY_NATS
from trainer.models.experts import FAMILIES, Routers
from trainer.types import Completion, TrainBatch, TrainSequence

LAYERS, TOP_K, EXPERTS = 4, 2, 64
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15,
    "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    "num_experts_per_tok": TOP_K, "intermediate_size": 48}  # fmt: skip
CONFIGS = {
    "flex_olmo": tr.FlexOlmoConfig(**SHAPE, num_experts=EXPERTS),
    "mixtral": tr.MixtralConfig(**SHAPE, num_local_experts=EXPERTS),
    "olmoe": tr.OlmoeConfig(**SHAPE, num_experts=EXPERTS),
    "qwen2_moe": tr.Qwen2MoeConfig(
        **SHAPE, num_experts=EXPERTS, moe_intermediate_size=48, shared_expert_intermediate_size=32
    ),
    "qwen3_moe": tr.Qwen3MoeConfig(
        **SHAPE, num_experts=EXPERTS, moe_intermediate_size=48, head_dim=16, norm_topk_prob=True
    ),
}
# Families whose weights are not divided by their sum weigh 2 of 64 experts little: these have larger ones.
SUM_BELOW_1 = ("flex_olmo", "olmoe", "qwen2_moe")


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mixtures")
    for name, one in CONFIGS.items():
        torch.manual_seed(0)
        lm = tr.AutoModelForCausalLM.from_config(one)
        for key, weight in lm.named_parameters():
            if name in SUM_BELOW_1 and key.endswith("experts.down_proj"):
                weight.data *= 8
        lm.save_pretrained(folder / name)
        save_words(folder / name, VOCAB)
    return {name: str(folder / name) for name in CONFIGS}


PROMPTS = {f"p{i}": prompt_of(9 + 7 * i) for i in range(4)}


def completions(
    folder: str, dtype: str = "float32", tokens: int = 48, decoder: bool = False
) -> list[Completion]:
    """Of several lengths, so that sequences move to other slots."""
    engine = TorchEngine(folder, getattr(torch, dtype), True, slots=16, decoder=decoder)
    asked = [
        request(n, p, n=4, max_tokens=tokens + 3 * i, experts_from=0)
        for i, (n, p) in enumerate(PROMPTS.items())
    ]
    return sorted(generate(engine, *asked), key=lambda c: (c.request_id, c.index))


def trained(done: Sequence[Completion]) -> tuple[TrainSequence, ...]:
    return tuple(
        replace(sequence(PROMPTS[c.request_id], c.token_ids, c.logprobs_gen, 0.01), experts=c.experts)
        for c in done
    )


def gaps(folder: str, batch: Sequence[TrainSequence], dtype: str) -> NDArray[np.float32]:
    """|log π_learner − log π_engine| in nats, of all tokens."""
    scores = learner(folder, having(config(), model={"dtype": dtype})).score(batch)
    return np.concatenate([np.abs(x.logprobs - s.logprobs_gen) for x, s in zip(scores, batch, strict=True)])


def test_every_family_is_tested() -> None:
    assert tuple(CONFIGS) == FAMILIES


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe"])
def test_in_bfloat16_learner_and_engine_agree_with_replayed_experts_alone(
    family: str, mixtures: dict[str, str]
) -> None:
    batch = trained(completions(mixtures[family], "bfloat16"))
    replayed = gaps(mixtures[family], batch, "bfloat16")
    own = gaps(mixtures[family], [replace(s, experts=None) for s in batch], "bfloat16")
    print(
        f"{family}, bfloat16, {len(own)} tokens, |log π_learner − log π_engine| in nats: replayed mean "
        f"{replayed.mean():.3f}, at most {replayed.max():.2f}; own mean {own.mean():.3f}, at most "
        f"{own.max():.2f}"
    )
    assert replayed.mean() < PARITY_NATS["bfloat16"] < own.mean() and 4 * replayed.max() < own.max()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_routers_own_choice_replayed_is_the_same_to_the_bit(
    family: str, mixtures: dict[str, str]
) -> None:
    """In float32 the engine chooses as the learner does."""
    done = completions(mixtures[family], tokens=8)
    batch = trained(done)
    for s in batch:
        assert s.experts is not None and s.experts.dtype == np.uint8
        assert s.experts.shape == (len(s.prompt_ids) + len(s.token_ids) - 1, LAYERS * TOP_K)
    one = learner(mixtures[family])
    own = one.score([replace(s, experts=None) for s in batch])
    for a, b in zip(one.score(batch), own, strict=True):
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
    for c, as_on_a_gpu in zip(done, completions(mixtures[family], tokens=8, decoder=True), strict=True):
        np.testing.assert_array_equal(c.experts, as_on_a_gpu.experts)


def routed(mlp: Any, x: Tensor, ids: Tensor, normalised: bool) -> Tensor:
    """A mixture's output (T, H) token by token, expert by expert; `ids` (T, k) chooses, −1: the router."""
    shared = getattr(mlp, "shared_expert", None)
    out = []
    for token, chosen in zip(x, ids, strict=True):
        p = (token @ mlp.gate.weight.T).softmax(-1)
        experts = chosen.where(chosen >= 0, p.topk(len(chosen)).indices)
        share = p[experts].sum() if normalised else 1
        total = torch.zeros_like(token)
        for e in experts.tolist():
            gate, up = (mlp.experts.gate_up_proj[e] @ token).chunk(2)
            total = total + p[e] / share * (mlp.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
        if shared is not None:
            total = total + torch.sigmoid(mlp.shared_expert_gate(token)) * shared(token)
        out.append(total)
    return torch.stack(out)


def looped(folder: str, family: str, batch: Sequence[TrainSequence]) -> dict[str, Tensor]:
    """The gradient of CISPO's loss in float64, one sequence after another and token by token."""
    lm: Any = load(folder, torch.float64)
    terms = cispo(2.0)
    for s in batch:
        full = [*s.prompt_ids.tolist(), *s.token_ids.tolist()]
        ids = torch.full((len(full), LAYERS, TOP_K), -1)
        if s.experts is not None:
            known = s.experts.astype(np.int64).reshape(-1, LAYERS, TOP_K)
            ids[: len(known)] = torch.from_numpy(known)
        for i, layer in enumerate(lm.model.layers):

            def forward(x: Tensor, mlp: Any = layer.mlp, ids: Tensor = ids[:, i]) -> Tensor:
                return routed(mlp, x[0], ids, getattr(mlp.gate, "norm_topk_prob", True))[None]

            layer.mlp.forward = forward
        logp = lm(torch.tensor([full])).logits[0, len(s.prompt_ids) - 1 : -1].log_softmax(-1)
        logp = logp.gather(1, torch.from_numpy(s.token_ids.astype(np.int64))[:, None])[:, 0]
        (torch.from_numpy(s.token_weights.astype(np.float64)) * terms(s, logp, logp)).sum().backward()
    return {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}


def forced() -> tuple[TrainSequence, ...]:
    """Completions of two prompts, by experts that no router would choose: some share their first tokens with
    others but not the experts of those, or not the prompt's; of some tokens, or of all, none are known."""
    rng, batch = np.random.default_rng(0), list[TrainSequence]()
    for prompt in (prompt_of(5), prompt_of(8)):
        of_prompt = rng.permuted(np.arange(EXPERTS)[None].repeat((len(prompt) + 6) * LAYERS, 0), axis=1)
        ids = of_prompt[:, :TOP_K].reshape(-1, LAYERS * TOP_K).astype(np.int16)
        other_token, other_prompt, lacking = ids.copy(), ids.copy(), ids.copy()
        other_token[len(prompt) + 1] = ids[0]
        other_prompt[1] = ids[0]
        lacking[[2, len(prompt) + 2]] = -1
        for experts, last in (
            (ids, 3),
            (ids, 4),
            (other_token, 5),
            (other_prompt, 6),
            (lacking, 7),
            (None, 8),
        ):
            tokens = [1, 2, 3, 4, last, last, 9][: 7 if experts is not ids else 6]
            s = sequence(prompt, tokens, rng.normal(-4, 0.5, len(tokens)), 0.02, rng.normal())
            batch.append(
                replace(s, experts=None if experts is None else experts[: len(prompt) + len(tokens) - 1])
            )
    return tuple(batch)


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[1:])]
)
def test_gradients_are_those_of_a_float64_loop_over_the_given_experts(
    family: str, mixtures: dict[str, str]
) -> None:
    batch, folder = forced(), mixtures[family]
    expected = looped(folder, family, batch)
    for checkpointed in (False, True):
        one = learner(folder, config(micro_batch_tokens=40, checkpoint_activations=checkpointed))
        metrics, gradients = gradients_of_step(one, TrainBatch(1, batch, {}))
        assert metrics["learner/micro_batches"] > 1
        assert error(gradients["policy"], expected) < 2e-5
    without = learner(folder, config(micro_batch_tokens=40))
    _, own = gradients_of_step(without, TrainBatch(1, tuple(replace(s, experts=None) for s in batch), {}))
    assert error(gradients["policy"], own["policy"]) > 0.1


def test_the_share_of_tokens_that_lack_experts_is_a_metric(mixtures: dict[str, str]) -> None:
    def share(batch: tuple[TrainSequence, ...], setting: bool | None = None) -> float | None:
        c = having(config(), model={"replay_experts": setting})
        return (
            learner(mixtures["mixtral"], c)
            .train(TrainBatch(1, batch, {}))
            .get("learner/experts_not_replayed")
        )

    known = trained(completions(mixtures["mixtral"], tokens=4))
    assert share(known) == 0 and share(known, False) is None
    assert share(tuple(replace(s, experts=None) for s in known)) == 1
    assert 0 < share(forced()) < 1


def test_all_ids_of_256_experts_are_known_also_beside_tokens_without_ids(tmp_path: Path) -> None:
    """vLLM's ids of up to 256 experts are uint8, so 255 is an expert; the torch engine's are, too."""
    torch.manual_seed(0)
    mixture = tr.MixtralConfig(**SHAPE, num_local_experts=256)
    lm = tr.AutoModelForCausalLM.from_config(mixture)
    routers = Routers(lm)
    assert routers.dtype is np.uint8
    prompt = prompt_of(5)
    ids = np.full((len(prompt) + 2, LAYERS * TOP_K), 255, np.uint8)
    ids[:, ::2] = 7
    one = sequence(prompt, [1, 2, 3])
    columns = ids, ids.astype(np.uint16), None
    (m,) = pack([replace(one, experts=x, token_ids=one.token_ids + i) for i, x in enumerate(columns)], 99)
    assert m.experts is not None
    known = routers.tensor(m.experts)
    assert known.shape == (len(m.input_ids), LAYERS, TOP_K)
    assert sorted(set(known.flatten().tolist())) == [-1, 7, 255]
    assert int((known < 0).any(2).any(1).sum()) == len(prompt) + 2  # those of the third alone


def test_a_mixture_whose_routers_are_not_found_is_an_error(mixtures: dict[str, str]) -> None:
    lm: Any = load(mixtures["mixtral"], torch.float32)
    for layer in lm.model.layers:
        type(layer.mlp.gate).__name__ = "Router"
    try:
        with pytest.raises(RuntimeError, match="mixtral: no router of it is found"):
            Routers(lm)
    finally:
        type(lm.model.layers[0].mlp.gate).__name__ = "MixtralTopKRouter"


def test_a_resumed_learner_goes_on_bit_for_bit(mixtures: dict[str, str], tmp_path: Path) -> None:
    def batch(step: int) -> TrainBatch:
        return TrainBatch(step, forced(), {})

    c = having(config(), model={"dtype": "bfloat16"})
    unbroken = learner(mixtures["mixtral"], c)
    unbroken.train(batch(1))
    save(unbroken, tmp_path / "step-000001")
    resumed = learner(tmp_path / "step-000001", c, tmp_path / "step-000001")
    assert unbroken.train(batch(2))["learner/loss"] == resumed.train(batch(2))["learner/loss"]
    assert same(weights_of(unbroken), weights_of(resumed))


def test_an_unknown_family_is_named_and_by_itself_it_routes_as_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    unknown = tr.PhimoeConfig(**SHAPE, num_local_experts=4)
    tr.AutoModelForCausalLM.from_config(unknown).save_pretrained(tmp_path)
    save_words(tmp_path, VOCAB)
    with pytest.raises(ConfigError, match="replay_experts cannot be true: phimoe is none of flex_olmo,"):
        learner(tmp_path, having(config(), model={"replay_experts": True}))
    with pytest.raises(ConfigError, match="phimoe is none of"):
        TorchEngine(str(tmp_path), torch.float32, True, 4, experts=True)
    by_itself = learner(tmp_path).model
    assert by_itself.routers is None
    assert by_itself.kernels.startswith(
        "experts are not replayed, since phimoe is none of flex_olmo, mixtral"
    )
    (done,) = generate(
        TorchEngine(str(tmp_path), torch.float32, True, 4), request("a", (1, 2), experts_from=0)
    )
    assert done.experts is None


def test_a_reference_routes_as_itself(mixtures: dict[str, str]) -> None:
    """The initial weights, in another model or, under LoRA, without the adapters."""
    known = trained(completions(mixtures["mixtral"], tokens=6))
    batch = tuple(replace(s, experts=np.roll(s.experts, 1, 1)) for s in known if s.experts is not None)
    penalty = {"kl": KLConfig(coefficient=0.1)}
    for model in ({}, {"lora": LoraConfig(rank=2)}):
        c = having(config(), objective=penalty, model=model)
        with_ids = learner(mixtures["mixtral"], c).score(batch)
        without = learner(mixtures["mixtral"], c).score([replace(s, experts=None) for s in batch])
        for a, b, s in zip(with_ids, without, batch, strict=True):
            assert a.logprobs is not None and b.logprobs is not None and a.logprobs_ref is not None
            np.testing.assert_allclose(a.logprobs_ref, s.logprobs_gen, atol=1e-5)
            np.testing.assert_array_equal(a.logprobs_ref, b.logprobs_ref)
            assert np.abs(a.logprobs - b.logprobs).max() > 1e-2
