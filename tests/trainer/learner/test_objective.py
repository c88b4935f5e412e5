"""Promises of the objective's settings: from groups to one gradient, each is its formula in float64."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training import VOCABULARY, config, error, gradients_of_step, learner, oracle, plain_logprobs, save
from transformers import AutoModelForCausalLM

import kernels
from kernels.objectives import OBJECTIVES
from trainer.config import Config, ConfigError, CriticConfig, KLConfig, ModelConfig, ObjectiveConfig
from trainer.controller.batch import build_batch
from trainer.controller.scores import to_score
from trainer.learner.objective import make_objective
from trainer.types import Group, Prompt, Rollout, TokenScores, TrainSequence

Surrogate = Callable[
    [Tensor, Tensor, Tensor, Tensor], Tensor
]  # of log π, the anchor, log π_gen, Â; each (T,)


def groups() -> list[Group]:
    """Three prompts of four rollouts, with injected tokens; the generator is far from the model."""
    rng, out = np.random.default_rng(3), []
    for g in range(3):
        prompt = Prompt(str(g), "", tuple(rng.integers(0, VOCABULARY, 4 + g).tolist()), "", {})
        rollouts = []
        for i, n in enumerate((2, 5, 8, 4)):
            sampled = np.ones(n, bool)
            sampled[1:3] = n != 8
            logprobs = np.where(sampled, rng.normal(-3.4, 0.5, n), 0).astype(np.float32)
            tokens = rng.integers(0, 5, n).astype(np.int32)
            versions, reward = np.zeros(n, np.int32), float(i % 2) + g
            rollouts.append(Rollout(tokens, logprobs, versions, sampled, "", reward, "wrong", False, False))
        out.append(Group(g, 0, prompt, tuple(rollouts)))
    return out


def scores() -> list[TokenScores]:
    """What an older policy, nearer to the model than the generator, and a reference say of the groups."""
    rng = np.random.default_rng(4)
    of = lambda s, spread: rng.normal(-3.5, spread, len(s.token_ids)).astype(np.float32)  # noqa: E731
    return [TokenScores(of(s, 0.3), of(s, 0.4)) for s in to_score(groups())]


def settings(**objective: Any) -> Config:
    plain = {"aggregation": "token", "advantage_norm": "none", "max_ratio": 1.3}
    return replace(config(micro_batch_tokens=40), objective=ObjectiveConfig(**{**plain, **objective}))


def expected(model_dir: str, surrogate: Surrogate, penalty: Any, old: bool) -> Any:
    """Loss and gradient straight from groups and scores: the mean over sampled tokens, Â = r − group mean."""
    raw = [(r, r.reward - np.mean([x.reward for x in g.rollouts])) for g in groups() for r in g.rollouts]
    tokens = sum(r.sampled.sum() for r, _ in raw)
    batch = [
        replace(s, token_weights=(r.sampled / tokens).astype(np.float64))
        for s, (r, _) in zip(to_score(groups()), raw, strict=True)
    ]
    given = {id(s): (r, a, x) for s, (r, a), x in zip(batch, raw, scores(), strict=True)}

    def terms(s: TrainSequence, logp: Tensor, entropy: Tensor) -> Tensor:
        r, a, x = given[id(s)]
        gen, anchor, ref = (
            torch.from_numpy(v.astype(np.float64))
            for v in (r.logprobs_gen, x.logprobs if old else r.logprobs_gen, x.logprobs_ref)
        )
        kept = torch.from_numpy(r.sampled)
        inside = [v[kept] for v in (logp, anchor, gen, torch.full_like(logp, a))]
        out = torch.zeros_like(logp)
        out[kept] = surrogate(*inside) + penalty(logp, ref, entropy)[kept]
        return out

    return oracle(model_dir, batch, terms)


def nothing(logp: Tensor, ref: Tensor, entropy: Tensor) -> Tensor:
    return torch.zeros_like(logp)


def cispo(logp: Tensor, old: Tensor, gen: Tensor, a: Tensor) -> Tensor:
    return -(logp - old).exp().detach().clamp(max=1.3) * a * logp


def clip(low: float, high: float, mean: bool = False) -> Surrogate:
    """PPO's clip of each token's ratio, or GSPO's of their geometric mean."""

    def surrogate(logp: Tensor, old: Tensor, gen: Tensor, a: Tensor) -> Tensor:
        ratio = (logp - old).mean().exp().expand(len(a)) if mean else (logp - old).exp()
        return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)

    return surrogate


def weighted(k: Callable[[Tensor], Tensor], surrogate: Surrogate) -> Surrogate:
    """Each term times k(π_old / π_gen)."""
    return lambda logp, old, gen, a: k((old - gen).exp()) * surrogate(logp, old, gen, a)


def masked(k: Tensor) -> Tensor:
    return k * ((k >= 0.6) & (k <= 2.0))


def near_generator(logp: Tensor, old: Tensor, gen: Tensor, a: Tensor) -> Tensor:
    ratio = (logp - gen).exp()
    return cispo(logp, old, gen, a) + 0.3 * ratio * (1 / ratio - 1 + logp - gen)


BOUNDS = {"mask_low": 0.6, "mask_high": 2.0}


@pytest.mark.axis("objective.sequence_mask", "none", "product", "mean", "negative")
@pytest.mark.axis(
    "objective.loss", "cispo", "tis", "reinforce", "grpo", "ppo", "dapo", "dual_clip", "gspo", "sapo", "gmpo",
    "luspo", "dppo", "dppo_kl", "drpo", "seq_tis", "seq_mis", "vespo", "m2po", "clip_cov", "kl_cov", "sft",
    "none",
)  # fmt: skip
def test_every_loss_is_the_kernels_objective_with_the_settings_given() -> None:
    """tests/kernels/test_objectives.py holds each of these to its formula."""
    clips = kernels.Clip(0.2, 0.2)
    made = {
        "cispo": kernels.CISPO(1.3), "tis": kernels.CISPO(1.3), "reinforce": kernels.REINFORCE(),
        "grpo": clips, "ppo": clips, "dapo": kernels.Clip(0.2, 0.28), "sapo": kernels.SAPO(1.0, 1.05),
        "dual_clip": kernels.Clip(0.2, 0.2, 3.0), "gspo": kernels.GSPO(3e-4, 4e-4),
        "icepop": kernels.IcePop(0.6, 2.0), "luspo": kernels.GSPO(3e-4, 4e-4), "gmpo": kernels.GMPO(0.4, 0.4),
        "dppo": kernels.DPPO(0.2, 0.2), "dppo_kl": kernels.DPPO(0.05, 0.05, "kl"), "drpo": kernels.DRPO(12.5),
        "seq_tis": kernels.SequenceTIS(1.3), "seq_mis": kernels.SequenceMIS(0.6, 2.0),
        "vespo": kernels.VESPO(), "m2po": kernels.M2PO(0.04), "clip_cov": kernels.ClipCov(1.0, 1.0),
        "kl_cov": kernels.KLCov(2e-4, 1.0), "sft": kernels.SFT(), "none": kernels.NoReward(),
    }  # fmt: skip
    assert made.keys() == OBJECTIVES.keys()
    for loss, objective in made.items():
        assert make_objective(settings(loss=loss, **BOUNDS).objective) == objective
        assert make_objective(ObjectiveConfig(loss=loss)) == OBJECTIVES[loss].make()
    assert make_objective(settings(loss="ppo", clip_low=0.1).objective) == kernels.Clip(0.1, 0.2)
    assert make_objective(settings(loss="icepop", anchor="recomputed").objective) == clips
    dppo = settings(loss="dppo", clip_low=0.1, clip_high=0.3).objective
    assert make_objective(dppo) == kernels.DPPO(0.1, 0.3)
    rules = {
        "product": kernels.OutsideBand(0.6, 2.0, mean=False), "mean": kernels.OutsideBand(0.6, 2.0),
        "negative": kernels.OutsideBand(0.6, math.inf, negative=True),
    }  # fmt: skip
    for kind, rule in rules.items():
        masks = settings(sequence_mask=kind, **BOUNDS).objective
        assert make_objective(masks) == kernels.Masked(kernels.CISPO(1.3), rule)


GSPO = {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.3}
OLD = {"anchor": "recomputed"}
FORMULAS: dict[str, tuple[dict[str, Any], Surrogate]] = {
    "cispo": ({}, cispo),
    "dapo": ({"loss": "dapo"}, clip(0.2, 0.28)),
    "gspo": (GSPO, clip(0.2, 0.3, mean=True)),
    "own": ({"loss": "training:half_reinforce"}, lambda logp, old, gen, a: -a * logp / 2),
    "icepop": ({"loss": "icepop"}, lambda logp, old, gen, a: -masked((logp - gen).exp().detach()) * a * logp),
    "cispo, recomputed": (OLD, cispo),
    "dapo, recomputed": ({"loss": "dapo", **OLD}, clip(0.2, 0.28)),
    "gspo, recomputed": (GSPO | OLD, clip(0.2, 0.3, mean=True)),
    "icepop, recomputed": ({"loss": "icepop", **OLD}, weighted(masked, clip(0.2, 0.2))),
    "truncate": ({"mismatch": "truncate", **OLD}, weighted(lambda k: k.clamp(max=1.3), cispo)),
    "mask": ({"loss": "dapo", "mismatch": "mask", **OLD}, weighted(masked, clip(0.2, 0.28))),
    "KL": ({"kl": KLConfig(coefficient=0.3, estimator="unbiased", to="generator")}, near_generator),
}


@pytest.mark.axis("objective.loss", "icepop")
@pytest.mark.axis("objective.anchor", "generator", "recomputed")
@pytest.mark.axis("objective.mismatch", "none", "truncate", "mask")
@pytest.mark.axis("objective.kl.to", "initial", "generator")
@pytest.mark.axis("objective.kl.estimator", "unbiased")
@pytest.mark.parametrize("case", FORMULAS)
def test_the_gradient_of_a_loss_is_its_formula_s(model_dir: str, case: str) -> None:
    named, surrogate = FORMULAS[case]
    check(model_dir, settings(**BOUNDS, **named), surrogate)


def check(model_dir: str, c: Config, surrogate: Surrogate, penalty: Any = nothing) -> dict[str, Any]:
    """Train one step on the groups; compares with the formula and returns the metrics."""
    given = scores() if c.objective.needs_scores else ()
    batch = build_batch(groups(), 1, c.objective, 0, given)
    metrics, gradients = gradients_of_step(learner(model_dir, c), batch)
    loss, exact = expected(model_dir, surrogate, penalty, c.objective.anchor == "recomputed")
    assert metrics["learner/loss"] == pytest.approx(loss, rel=1e-5)
    assert error(gradients["policy"], exact) < 1e-5
    return metrics


def kl_estimate(estimator: str, logp: Tensor, ref: Tensor) -> Tensor:
    x = logp - ref
    return {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}[estimator]


@pytest.mark.axis("objective.kl.estimator", "k1", "k2", "k3")
@pytest.mark.axis("objective.kl.place", "loss")
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_to_the_reference_is_a_term_of_the_loss(model_dir: str, estimator: str) -> None:
    c = settings(kl=KLConfig(coefficient=0.3, estimator=estimator))  # type: ignore[arg-type]
    penalty = lambda logp, ref, entropy: 0.3 * kl_estimate(estimator, logp, ref)  # noqa: E731
    metrics = check(model_dir, c, cispo, penalty)
    lm = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    estimates = []
    for s, x in zip(to_score(groups()), scores(), strict=True):
        logp = plain_logprobs(lm, s.prompt_ids, s.token_ids)
        estimates.append(kl_estimate(estimator, logp, torch.from_numpy(x.logprobs_ref))[s.token_weights > 0])
    assert metrics["kl/ref"] == pytest.approx(float(torch.cat(estimates).mean()), rel=1e-5)


@pytest.mark.axis("objective.entropy_bonus", 0.2)
def test_entropy_bonus_is_subtracted_from_each_token_s_term(model_dir: str) -> None:
    penalty = lambda logp, ref, entropy: -0.2 * entropy  # noqa: E731
    check(model_dir, settings(entropy_bonus=0.2), cispo, penalty)


def test_the_truncated_share_is_the_objective_s_and_the_ratio_the_generator_s(model_dir: str) -> None:
    c = settings(loss="dapo", anchor="recomputed")
    metrics = check(model_dir, c, clip(0.2, 0.28))
    now = learner(model_dir, c).score(to_score(groups()))
    rollouts = [(i, r) for g in groups() for i, r in enumerate(g.rollouts)]
    ratios, clipped = [], []
    for s, (i, r), x in zip(now, rollouts, scores(), strict=True):
        ratios.append(np.exp(s.logprobs - r.logprobs_gen)[r.sampled])
        rho = np.exp(s.logprobs - x.logprobs)[r.sampled]
        clipped.append(rho > 1.28 if i % 2 else rho < 0.8)  # Â is .5 for odd rollouts, -.5 for even ones
    assert 0 < np.concatenate(clipped).mean() < 1
    assert metrics["ratio/truncated"] == pytest.approx(np.concatenate(clipped).mean())
    assert metrics["ratio/mean"] == pytest.approx(np.concatenate(ratios).mean(), rel=1e-5)


def test_the_reference_is_the_initial_model_after_steps_and_a_resume(model_dir: str, tmp_path: Path) -> None:
    c = settings(kl=KLConfig(coefficient=0.1))
    c = replace(c, model=replace(c.model, path=model_dir), run_dir=str(tmp_path))
    one = learner(model_dir, c)
    first = one.score(to_score(groups()))
    for x in first:  # the policy is still the reference
        np.testing.assert_array_equal(x.logprobs, x.logprobs_ref)
    one.train(build_batch(groups(), 1, c.objective, 0, first))
    save(one, tmp_path / "step-000001")
    resumed = learner(tmp_path / "step-000001", c, tmp_path / "step-000001")
    for trained in (one, resumed):
        for before, x in zip(first, trained.score(to_score(groups())), strict=True):
            np.testing.assert_array_equal(x.logprobs_ref, before.logprobs)
            assert not np.allclose(x.logprobs, before.logprobs, atol=1e-3)


def test_a_penalty_in_the_loss_alone_is_scored_without_the_policy(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kl = KLConfig(coefficient=0.1)
    c = settings(kl=kl)
    assert c.objective.needs_scores and not c.objective.needs_logprobs
    in_reward = replace(kl, place="reward")
    for other in ({"anchor": "recomputed"}, {"kl": in_reward}, {"critic": CriticConfig(body="own")}):
        assert settings(**{"kl": kl, **other}).objective.needs_logprobs
    one = learner(model_dir, c)
    both = one.score(to_score(groups()))
    monkeypatch.setattr(one.model, "forward", None)
    alone = one.score(to_score(groups()), c.objective.needs_logprobs)
    for x, y in zip(alone, both, strict=True):
        assert x.logprobs is None
        np.testing.assert_array_equal(x.logprobs_ref, y.logprobs_ref)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_a_16_bit_type_the_reference_still_begins_as_the_policy(model_dir: str, dtype: str) -> None:
    c = replace(settings(kl=KLConfig(coefficient=0.1)), model=ModelConfig(dtype=dtype))  # type: ignore[arg-type]
    one = learner(model_dir, c)
    assert one.reference is not None
    layers = [p for n, p in one.reference.lm.named_parameters() if "proj" in n]
    assert {p.dtype for p in layers} == {getattr(torch, dtype)}
    assert not any(p.requires_grad for p in one.reference.parameters())
    for x in one.score(to_score(groups())):
        np.testing.assert_array_equal(x.logprobs, x.logprobs_ref)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("training:no_such_function", "no attribute 'no_such_function'"),
        ("training:config", "config"),
        ("math:fsum", "fsum"),
    ],
)
def test_an_own_objective_that_cannot_be_used_is_one_clear_line_at_the_start(loss: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"objective.loss {loss}: .*{says}.*; expected a module"):
        make_objective(ObjectiveConfig(loss=loss))
