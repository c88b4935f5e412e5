"""What tests of the learner train: small models, uneven batches, the gradient by float64 autograd."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

import kernels
from trainer.config import Config, LearnerConfig, ModelConfig, ObjectiveConfig, PipelineConfig
from trainer.learner import checkpoint
from trainer.learner.learner import Learner
from trainer.learner.lora import adapted_layers
from trainer.learner.ranks import Ranks
from trainer.learner.sharding import as_dtensor, full_tensor
from trainer.types import Completion, Request, TrainBatch, TrainSequence

VOCABULARY = 31
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
}
MODELS = {
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "untied": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, norm_topk_prob=True, tie_word_embeddings=False),
}


def plain_logprobs(lm: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """(T,) log-probs of the tokens after the prompt by transformers alone."""
    ids = torch.tensor([[*map(int, prompt), *map(int, tokens)]])
    with torch.no_grad():
        logp = lm(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logp.gather(1, ids[0, len(prompt) :, None])[:, 0]


class NoClock:
    """Stands in for the role's clock."""

    def state(self, state: str) -> Any:
        return nullcontext()

    def split(self, shares: dict[str, float]) -> None:
        pass


def of_the_data(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that do not depend on the machine and the moment."""
    of_the_machine = ("seconds", "per_s", "mfu", "memory")
    return {k: v for k, v in metrics.items() if not any(part in k for part in of_the_machine)}


def make_model(kind: str, folder: Path) -> str:
    """A model with random weights and a tokenizer in the folder; its path."""
    torch.manual_seed(2)
    lm = AutoModelForCausalLM.from_config(MODELS[kind])
    for p in lm.parameters():
        p.data.normal_(0, 0.2) if p.dim() > 1 else None
    lm.save_pretrained(folder)
    save_words(folder)
    return str(folder)


def save_words(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """A tokenizer of numbers, in the folder."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="1").save_pretrained(folder)


def gradients_of_step(
    one: Learner, batch: TrainBatch
) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """The metrics of a step, and the whole gradients it was taken with, by network and name."""
    kept: dict[str, dict[str, torch.Tensor]] = {}
    update = one._update

    def keep(stats: Any) -> None:
        for network, trained in one.networks.items():
            shards = zip(trained.weights.items(), trained.parameters, strict=True)
            kept[network] = {
                name: full_tensor(as_dtensor(shard.grad, weight), torch.float32).clone() / trained.scale.value  # type: ignore[arg-type]
                for (name, weight), shard in shards
            }
        update(stats)

    one._update = keep  # type: ignore[method-assign]
    return one.train(batch), kept


def save(one: Learner, path: Path) -> None:
    """A checkpoint of the learner, without a tokenizer."""
    tokenizer: Any = SimpleNamespace(save_pretrained=lambda folder: None)
    state = {"version": one.version}
    checkpoint.save(
        path, one.model.lm, tokenizer, one.weights, one.networks, one.version, state, one.ranks, one.adapter
    )


def config(**learner: Any) -> Config:
    settings = LearnerConfig(**{"lr": 1e-3, "grad_clip": 0.0, **learner})
    model, objective = ModelConfig(dtype="float32"), ObjectiveConfig(max_ratio=2.0)
    return Config(model=model, learner=settings, pipeline=PipelineConfig(max_lag=2), objective=objective)


def learner(
    model_dir: str | Path, c: Config | None = None, resume_from: str | Path | None = None,
    ranks: Ranks | None = None,
) -> Learner:  # fmt: skip
    """A learner of the model, or one that goes on from a checkpoint."""
    clock: Any = NoClock()
    folder = None if resume_from is None else str(resume_from)
    return Learner(c or config(), str(model_dir), clock, folder, ranks)


def sequence(
    prompt: Sequence[int] | Any, tokens: Sequence[int] | Any, logprobs: Any = -1.0, weights: Any = 1.0,
    advantage: Any = 0.5, version: Any = 0,
) -> TrainSequence:  # fmt: skip
    """A completion; a number stands for a column of it."""

    def column(values: Any, kind: Any = np.float32) -> Any:
        return np.array(np.broadcast_to(values, len(tokens)), kind)

    ids, versions = (np.array(prompt, np.int32), np.array(tokens, np.int32)), column(version, np.int32)
    return TrainSequence(*ids, column(logprobs), versions, column(weights), column(advantage))


def sequences(seed: int = 0, version: int = 0) -> tuple[TrainSequence, ...]:
    """Prompts of several lengths, shared prefixes, unsampled tokens, ratios beyond the bound."""
    rng = np.random.default_rng(seed)
    out = []
    for g in range(4):
        prompt = rng.integers(0, VOCABULARY, 3 + 2 * g)
        for n in (2, 5, 9, 4):
            weights = rng.uniform(0.01, 0.1, n)
            weights[1:2] = 0 if n == 9 else weights[1:2]
            tokens, logprobs = rng.integers(0, 3, n), rng.normal(-3, 0.7, n)
            out.append(sequence(prompt, tokens, logprobs, weights, rng.normal(), version))
    return tuple(out)


def scored(batch: Sequence[TrainSequence], seed: int = 0) -> tuple[TrainSequence, ...]:
    """The sequences with returns that depend on prompt and position, and with what an older policy, a
    reference and a critic said of them."""
    rng, out = np.random.default_rng(seed), []
    for s in batch:
        n = len(s.token_ids)
        values, old, ref = rng.normal(0, 0.3, (3, n)).astype(np.float32)
        returns = (len(s.prompt_ids) / 5 - 1 + np.arange(n) / 10).astype(np.float32)
        columns = {"logprobs_old": s.logprobs_gen + old, "logprobs_ref": s.logprobs_gen + ref}
        out.append(replace(s, values=values, returns=returns, **columns))
    return tuple(out)


def with_values(one: Learner) -> Learner:
    """The learner with a value head that is not zero, so that a critic's body has a gradient."""
    assert one.critic is not None
    torch.manual_seed(1)
    for name, weight in one.critic.optimizer.weights.items():
        if name.removeprefix("head.") in ("weight", "bias"):
            weight.data.copy_(torch.randn(weight.shape) / 4)
    return one


def moved(one: Learner) -> Learner:
    """The learner with adapters, if any, that are not zero: so both of their factors have a gradient."""
    torch.manual_seed(3)
    for layer in adapted_layers(one.model.lm).values():
        layer.lora_B.data.normal_(0, 0.2)
    return one


def weights_of(one: Learner) -> dict[str, torch.Tensor]:
    """A copy of all weights, those of a critic too; on several ranks whole ones."""
    return {
        f"{network} {name}": full_tensor(weight, torch.float32).clone()
        for network, trained in one.networks.items()
        for name, weight in trained.weights.items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """True if all tensors are bitwise the same."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def generate(engine: Any, *requests: Request) -> list[Completion]:
    """All completions of an embedded engine."""
    for request in requests:
        engine.submit(request)
    completions: list[Completion] = []
    while not engine.idle:
        completions += engine.step()
    return completions


# (sequence, log-probs, entropies) to the (T,) terms of the sequence's loss; log-probs and entropies are (T,).
Terms = Callable[[TrainSequence, torch.Tensor, torch.Tensor], torch.Tensor]


def cispo(max_ratio: float) -> Terms:
    """−sg(min(ρ, ρ_max)) · Â · log π"""

    def terms(s: TrainSequence, logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        gen, advantages = (torch.from_numpy(x.astype(np.float64)) for x in (s.logprobs_gen, s.advantages))
        return -torch.exp(logp - gen).detach().clamp(max=max_ratio) * advantages * logp

    return terms


def half_reinforce(logp: torch.Tensor, logprobs_gen: torch.Tensor, advantages: torch.Tensor) -> kernels.Term:
    """A user's own objective: −½ Â log π."""
    nothing = torch.zeros_like(logp, dtype=torch.bool)
    return kernels.Term(-advantages * logp / 2, -advantages / 2, torch.ones_like(logp), nothing)


def oracle(
    model_dir: str, batch: Sequence[TrainSequence], terms: float | Terms
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss in float64 by plain transformers and autograd: padded, no packing, no kernel.

    `terms` of a number are CISPO's with this bound.
    """
    terms = terms if callable(terms) else cispo(terms)
    lm = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    longest = max(len(s.prompt_ids) + len(s.token_ids) for s in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, s in zip(ids, batch, strict=True):
        full = np.concatenate([s.prompt_ids, s.token_ids])
        row[: len(full)] = torch.from_numpy(full.astype(np.int64))
    logprobs = lm(ids).logits.log_softmax(-1)
    loss = torch.zeros((), dtype=torch.float64)
    for i, s in enumerate(batch):
        of_tokens = logprobs[i, len(s.prompt_ids) - 1 :][: len(s.token_ids)]
        logp = of_tokens.gather(1, torch.from_numpy(s.token_ids.astype(np.int64))[:, None])[:, 0]
        entropy = -(of_tokens.exp() * of_tokens).sum(1)
        loss = loss + (torch.from_numpy(s.token_weights.astype(np.float64)) * terms(s, logp, entropy)).sum()
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}


def error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative error of all tensors together."""
    assert got.keys() == expected.keys()
    difference = sum(float(((got[n].double() - expected[n].double()) ** 2).sum()) for n in got)
    return float(np.sqrt(difference / sum(float((g.double() ** 2).sum()) for g in expected.values())))
