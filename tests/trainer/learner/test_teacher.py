"""Promises of on-policy distillation: a teacher scores the policy's tokens, by the formula."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import make_model as make_character_model
from test_objective import groups, scores, settings
from training import VOCABULARY, error, gradients_of_step, learner, moved, oracle, plain_logprobs
from transformers import AutoModelForCausalLM

from trainer import cli
from trainer.config import ConfigError, KLConfig, LoraConfig
from trainer.controller.batch import build_batch
from trainer.controller.scores import to_score
from trainer.types import TrainSequence

TEACHER: dict[str, Any] = {"coefficient": 0.7, "estimator": "k1"}


@pytest.mark.axis("objective.kl.place", "in_advantage", "as_advantage")
@pytest.mark.parametrize(("place", "reward"), [("in_advantage", 1), ("as_advantage", 0)])
def test_the_gradient_is_that_of_a_float64_loop(place: Any, reward: float, model_dir: str) -> None:
    c = settings(kl=KLConfig(place=place, **TEACHER))
    batch = build_batch(groups(), 1, c.objective, 0, scores())
    metrics, gradients = gradients_of_step(learner(model_dir, c), batch)

    raw = [(r, r.reward - np.mean([x.reward for x in g.rollouts])) for g in groups() for r in g.rollouts]
    tokens = sum(int(r.sampled.sum()) for r, _ in raw)
    plain, loop, gaps = [], {}, []
    for s, (r, a), x in zip(to_score(groups()), raw, scores(), strict=True):
        plain.append(replace(s, token_weights=(r.sampled / tokens).astype(np.float64)))
        by_token = []
        for t in range(len(r.token_ids)):
            gap = float(r.logprobs_gen[t]) - float(x.logprobs_ref[t])
            gaps += [gap] * bool(r.sampled[t])
            by_token.append(reward * a - 0.7 * gap)
        loop[id(plain[-1])] = torch.tensor(by_token, dtype=torch.float64)

    def terms(s: TrainSequence, logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        ratio = (logp - torch.from_numpy(s.logprobs_gen.astype(np.float64))).exp().detach().clamp(max=1.3)
        return -ratio * loop[id(s)] * logp

    loss, exact = oracle(model_dir, plain, terms)
    assert metrics["learner/loss"] == pytest.approx(loss, rel=1e-5)
    assert error(gradients["policy"], exact) < 1e-5
    assert batch.stats["kl/ref"] == pytest.approx(np.mean(gaps), rel=1e-5)


def test_no_group_is_dropped_and_the_reward_s_norm_comes_first(model_dir: str) -> None:
    equal = [replace(g, rollouts=tuple(replace(r, reward=1.0) for r in g.rollouts)) for g in groups()]
    objective = settings(kl=KLConfig(place="in_advantage", **TEACHER), advantage_norm="batch").objective
    assert objective.zero_variance == "drop"
    assert len(build_batch(equal, 1, objective, 0, scores()).sequences) == 12
    twice = [
        replace(g, rollouts=tuple(replace(r, reward=2 * r.reward) for r in g.rollouts)) for g in groups()
    ]
    one, two = (build_batch(x, 1, objective, 0, scores()).sequences for x in (groups(), twice))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a.advantages, b.advantages, rtol=1e-5)


def test_the_teacher_is_a_model_of_its_own_and_the_policy_is_not_scored_again(models: dict[str, str]) -> None:
    c = settings(kl=KLConfig(place="as_advantage", to=models["untied"], **TEACHER))
    assert c.objective.needs_scores and not c.objective.needs_logprobs
    one = learner(models["tied"], c)
    teacher = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float64)
    sequences = to_score(groups())
    for s, x in zip(sequences, one.score(sequences, c.objective.needs_logprobs), strict=True):
        exact = plain_logprobs(teacher, s.prompt_ids, s.token_ids)
        assert x.logprobs is None
        np.testing.assert_allclose(x.logprobs_ref, exact.numpy(), atol=1e-5)
    assert one.reference_parameters == sum(p.numel() for p in teacher.parameters()) > one.active_parameters


def test_a_teacher_that_cannot_be_is_one_clear_line(model_dir: str, tmp_path: Path) -> None:
    other = str(make_character_model(tmp_path / "other"))
    for name, says in {
        other: "tokenizer differs",
        "/no/where": "objective.kl.to '/no/where': no such",
    }.items():
        with pytest.raises(ConfigError, match=says):
            learner(model_dir, settings(kl=KLConfig(place="as_advantage", to=name, **TEACHER)))


MISFITS = {
    "--objective.kl.top_k=5": "kl.top_k takes .* expected kl.place loss",
    "--objective.kl.to=generator": "kl.place as_advantage needs kl.to initial or a model",
    "--objective.kl.estimator=k3": "kl.place as_advantage takes .* expected estimator k1, given k3",
    "--objective.loss=gspo": "gspo has one advantage a completion",
    "--objective.zero_variance=resample": "resample replaces groups",
}


@pytest.mark.parametrize("flag", MISFITS)
def test_settings_that_do_not_go_with_it_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=MISFITS[flag]):
        cli.parse(["--recipe", "distill", flag])


@pytest.mark.parametrize(("loss", "k"), [("none", 5), ("cispo", 5), ("none", VOCABULARY + 9)])
def test_the_forward_kl_over_the_top_k_is_that_of_a_float64_loop(
    loss: str, k: int, models: dict[str, str]
) -> None:
    kl = KLConfig(place="loss", to=models["untied"], coefficient=0.7, top_k=k)
    c = settings(kl=kl, loss=loss, zero_variance="keep")
    assert c.objective.needs_reference and not c.objective.needs_scores
    batch = build_batch(groups(), 1, c.objective, 0)
    assert all(s.logprobs_ref is None for s in batch.sequences)
    c = replace(c, engine=replace(c.engine, temperature=0.8))
    metrics, gradients = gradients_of_step(learner(models["tied"], c), batch)

    policy, teacher = (
        AutoModelForCausalLM.from_pretrained(models[m], dtype=torch.float64) for m in ("tied", "untied")
    )
    total, divergences = torch.zeros((), dtype=torch.float64), []
    for s in batch.sequences:
        ids = torch.tensor([[*s.prompt_ids.tolist(), *s.token_ids.tolist()]])
        logp, logq = (
            (lm(ids).logits[0, len(s.prompt_ids) - 1 : -1] / 0.8).log_softmax(1) for lm in (policy, teacher)
        )
        for t, weight in enumerate(s.token_weights.tolist()):
            if not weight:
                continue
            order = logq[t].detach().argsort(descending=True)[:k]
            q, p = logq[t][order].exp().detach(), logp[t][order].exp()
            divergence = (q * (q / p).log()).sum()
            if k < VOCABULARY:
                divergence = divergence + (1 - q.sum()) * ((1 - q.sum()) / (1 - p.sum())).log()
            divergences.append(divergence.item())
            total = total + weight * 0.7 * divergence
            if loss == "cispo":
                token = logp[t][int(s.token_ids[t])]
                ratio = (token - float(s.logprobs_gen[t])).exp().detach().clamp(max=1.3)
                total = total - weight * ratio * float(s.advantages[t]) * token
    total.backward()
    exact = {name: w.grad for name, w in policy.named_parameters() if w.grad is not None}
    assert metrics["learner/loss"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["kl/ref"] == pytest.approx(np.mean(divergences), rel=1e-5)
    assert error(gradients["policy"], exact) < 1e-5


@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_the_base_without_adapters_is_a_teacher_as_its_folder_is(kind: str, models: dict[str, str]) -> None:
    """A mixture's base routes as itself, also where the policy's experts are replayed."""
    rng, results = np.random.default_rng(0), []
    for to in ("initial", models[kind]):
        c = settings(
            kl=KLConfig(place="loss", to=to, coefficient=0.7, top_k=5), zero_variance="keep", loss="none"
        )
        c = replace(c, model=replace(c.model, lora=LoraConfig(rank=2)))
        one, batch = moved(learner(models[kind], c)), build_batch(groups(), 1, c.objective, 0)
        if not results:
            lengths = [len(s.prompt_ids) + len(s.token_ids) - 1 for s in batch.sequences]
            experts = [rng.integers(0, 4, (n, 2 * 2), np.uint8) for n in lengths]
        chosen = zip(batch.sequences, experts, strict=True)
        batch = replace(batch, sequences=tuple(replace(s, experts=x) for s, x in chosen))
        results.append(gradients_of_step(one, batch))
    (a, ours), (b, expected) = results
    assert a["kl/ref"] == pytest.approx(b["kl/ref"], rel=1e-6) and a["kl/ref"] > 0.01
    assert error(ours["policy"], expected["policy"]) < 1e-6


def test_a_top_k_needs_a_distribution_in_the_learner() -> None:
    url = ("--objective.kl.place=loss", "--objective.kl.to=http://host:8000", "--objective.kl.top_k=5")
    with pytest.raises(ConfigError, match="top_k takes the distribution of a model in the learner"):
        cli.parse(["--recipe", "distill", *url])
    split = ("--objective.kl.place=loss", "--objective.kl.top_k=5", "--learner.vocab_parallel=true")
    with pytest.raises(ConfigError, match="top_k needs whole rows of the head"):
        cli.parse(["--recipe", "distill", *split])
