"""Promises of the objective's settings: from groups to one gradient, each is its formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_ranks import on_ranks
from torch import Tensor
from training import (
    VOCABULARY,
    config,
    error,
    gradients_of_step,
    learner,
    make_model,
    oracle,
    plain_logprobs,
    save,
)
from transformers import AutoModelForCausalLM

import kernels
from kernels.objectives import OBJECTIVES
from trainer.config import Config, ConfigError, CriticConfig, KLConfig, ModelConfig, ObjectiveConfig
from trainer.controller.batch import build_batch
from trainer.controller.scores import to_score
from trainer.learner.objective import make_objective
from trainer.learner.ranks import Ranks
from trainer.learner.sharding import full_tensor
from trainer.types import Group, Prompt, Rollout, TokenScores, TrainBatch, TrainSequence

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


def gradient(
    model_dir: str, c: Config, batch: TrainBatch, ranks: Ranks | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metrics of one step, and the gradient it was taken with."""
    one = learner(model_dir, c, None, ranks)
    metrics, gradients = gradients_of_step(one, batch)
    return metrics, gradients["policy"]


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


def truncated(bound: float) -> Surrogate:
    return lambda logp, old, gen, a: -(logp - old).exp().detach().clamp(max=bound) * a * logp


def clipped(ratio: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def clip(low: float, high: float) -> Surrogate:
    return lambda logp, old, gen, a: clipped((logp - old).exp(), a, low, high)


def gspo(low: float, high: float) -> Surrogate:
    return lambda logp, old, gen, a: clipped((logp - old).mean().exp().expand(len(a)), a, low, high)


def icepop(logp: Tensor, old: Tensor, gen: Tensor, a: Tensor) -> Tensor:
    ratio = (logp - gen).exp().detach()
    return -ratio * ((ratio >= 0.6) & (ratio <= 2.0)) * a * logp


def weighted(k: Callable[[Tensor], Tensor], surrogate: Surrogate) -> Surrogate:
    """Each term times k(π_old / π_gen)."""
    return lambda logp, old, gen, a: k((old - gen).exp()) * surrogate(logp, old, gen, a)


def masked(k: Tensor) -> Tensor:
    return k * ((k >= 0.6) & (k <= 2.0))


def own(logp: Tensor, old: Tensor, gen: Tensor, a: Tensor) -> Tensor:
    return -a * logp / 2


BOUNDS = {"mask_low": 0.6, "mask_high": 2.0}
LOSSES: dict[str, tuple[dict[str, Any], Surrogate]] = {
    "cispo": ({"loss": "cispo"}, truncated(1.3)),
    "dapo": ({"loss": "dapo"}, clip(0.2, 0.28)),
    "dapo, bounds": ({"loss": "dapo", "clip_low": 0.5, "clip_high": 0.0}, clip(0.5, 0.0)),
    "gspo, bounds": ({"loss": "gspo", "clip_low": 0.2, "clip_high": 0.3}, gspo(0.2, 0.3)),
    "own": ({"loss": "training:half_reinforce"}, own),
}


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
    assert make_objective(settings(loss="ppo", clip_low=0.1).objective) == kernels.Clip(0.1, 0.2)
    assert make_objective(settings(loss="icepop", anchor="recomputed").objective) == clips
    dppo = settings(loss="dppo", clip_low=0.1, clip_high=0.3).objective
    assert make_objective(dppo) == kernels.DPPO(0.1, 0.3)


MISMATCH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like, "truncate": lambda k: k.clamp(max=1.3), "mask": masked,
}  # fmt: skip


def sequences_within(s: Callable[[Tensor], Tensor], high: float, negative: bool = False) -> Surrogate:
    """CISPO of the sequences whose ratio, s of the tokens' log-ratios, is .6 to `high`."""

    def surrogate(logp: Tensor, old: Tensor, gen: Tensor, a: Tensor) -> Tensor:
        ratio = s((logp - old).detach()).exp()
        leaves = ((ratio < 0.6) | (ratio > high)) & ((a[0] < 0) | (not negative))
        return truncated(1.3)(logp, old, gen, a) * ~leaves

    return surrogate


def near_generator(penalty: Callable[[Tensor], Tensor]) -> Surrogate:
    return lambda logp, old, gen, a: truncated(1.3)(logp, old, gen, a) + 0.3 * penalty(logp - gen)


MASKS: dict[str, Surrogate] = {
    "none": truncated(1.3),
    "product": sequences_within(torch.sum, 2.0),
    "mean": sequences_within(torch.mean, 2.0),
    "negative": sequences_within(torch.mean, math.inf, negative=True),
}
TO_GENERATOR: dict[Any, Surrogate] = {
    "k2": near_generator(lambda x: x**2 / 2),
    "k3": near_generator(lambda x: torch.exp(-x) - 1 + x),
    "unbiased": near_generator(lambda x: torch.exp(x) * (torch.exp(-x) - 1 + x)),
}
FORMULAS: dict[str, tuple[dict[str, Any], Surrogate]] = {
    "icepop, generator": ({"loss": "icepop"}, icepop),
    "icepop, recomputed": ({"loss": "icepop", "anchor": "recomputed"}, weighted(masked, clip(0.2, 0.2))),
    **{
        f"{loss}, {anchor}": ({**named, "anchor": anchor}, surrogate)
        for loss, (named, surrogate) in LOSSES.items()
        for anchor in ("generator", "recomputed")
    },
    **{
        f"{loss}, {kind}": (
            {"loss": loss, "anchor": "recomputed", "mismatch": kind},
            weighted(k, LOSSES[loss][1]),
        )
        for loss in ("cispo", "dapo")
        for kind, k in MISMATCH.items()
    },
    **{f"mask {kind}": ({"sequence_mask": kind}, surrogate) for kind, surrogate in MASKS.items()},
    **{
        f"KL to the generator, {k}": (
            {"kl": KLConfig(coefficient=0.3, estimator=k, to="generator")},
            surrogate,
        )
        for k, surrogate in TO_GENERATOR.items()
    },
}


@pytest.mark.axis("objective.loss", "icepop")
@pytest.mark.axis("objective.anchor", "generator", "recomputed")
@pytest.mark.axis("objective.mismatch", "none", "truncate", "mask")
@pytest.mark.axis("objective.sequence_mask", "none", "product", "mean", "negative")
@pytest.mark.axis("objective.kl.to", "initial", "generator")
@pytest.mark.axis("objective.kl.estimator", "unbiased")
@pytest.mark.parametrize("case", FORMULAS)
def test_the_gradient_of_a_loss_is_its_formula_s(model_dir: str, case: str) -> None:
    named, surrogate = FORMULAS[case]
    check(model_dir, settings(**BOUNDS, **named), surrogate)


def check(model_dir: str, c: Config, surrogate: Surrogate, penalty: Any = nothing) -> dict[str, Any]:
    """Train one step on the groups; compares with the formula and returns the metrics."""
    given = scores() if c.objective.needs_scores else ()
    metrics, got = gradient(model_dir, c, build_batch(groups(), 1, c.objective, 0, given))
    loss, exact = expected(model_dir, surrogate, penalty, c.objective.anchor == "recomputed")
    assert metrics["learner/loss"] == pytest.approx(loss, rel=1e-5)
    assert error(got, exact) < 1e-5
    return metrics


def kl_estimate(estimator: str, logp: Tensor, ref: Tensor) -> Tensor:
    x = logp - ref
    return {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}[estimator]


@pytest.mark.axis("objective.kl.estimator", "k1", "k2", "k3")
@pytest.mark.axis("objective.kl.place", "loss", "reward")
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_to_the_reference_is_a_term_of_the_loss_or_of_the_reward(model_dir: str, estimator: str) -> None:
    c = settings(kl=KLConfig(coefficient=0.3, estimator=estimator))  # type: ignore[arg-type]
    penalty = lambda logp, ref, entropy: 0.3 * kl_estimate(estimator, logp, ref)  # noqa: E731
    metrics = check(model_dir, c, truncated(1.3), penalty)
    lm = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    estimates = []
    for s, x in zip(to_score(groups()), scores(), strict=True):
        logp = plain_logprobs(lm, s.prompt_ids, s.token_ids)
        estimates.append(kl_estimate(estimator, logp, torch.from_numpy(x.logprobs_ref))[s.token_weights > 0])
    assert metrics["kl/ref"] == pytest.approx(float(torch.cat(estimates).mean()), rel=1e-5)

    c = settings(kl=KLConfig(coefficient=0.3, estimator=estimator, place="reward"))  # type: ignore[arg-type]
    batch, at = build_batch(groups(), 1, c.objective, 0, scores()), 0
    sampled: list[float] = []
    for g in groups():
        rewards = []
        for r, x in zip(g.rollouts, scores()[at:], strict=False):
            k = kl_estimate(estimator, torch.from_numpy(x.logprobs), torch.from_numpy(x.logprobs_ref))
            sampled += k[torch.from_numpy(r.sampled)].tolist()
            rewards.append(r.reward - 0.3 * float(k[torch.from_numpy(r.sampled)].sum()))
        for reward in rewards:
            assert batch.sequences[at].logprobs_ref is None
            assert batch.sequences[at].advantages == pytest.approx(reward - np.mean(rewards), rel=1e-5)
            at += 1
    assert batch.stats["kl/ref"] == pytest.approx(np.mean(sampled), rel=1e-5)


@pytest.mark.axis("objective.entropy_bonus", 0.2)
def test_entropy_bonus_is_subtracted_from_each_token_s_term(model_dir: str) -> None:
    penalty = lambda logp, ref, entropy: -0.2 * entropy  # noqa: E731
    check(model_dir, settings(entropy_bonus=0.2), truncated(1.3), penalty)


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


def test_the_reference_is_the_initial_model_after_steps_and_after_a_resume(
    model_dir: str, tmp_path: Path
) -> None:
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
    for other in (
        {"anchor": "recomputed"},
        {"kl": replace(kl, place="reward")},
        {"critic": CriticConfig(body="own")},
    ):
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


RANKS: dict[str, tuple[Config, Surrogate, Any]] = {
    "gspo": (settings(loss="gspo", clip_low=0.2, clip_high=0.3), gspo(0.2, 0.3), nothing),
    "dapo to old, KL, entropy": (
        settings(loss="dapo", anchor="recomputed", kl=KLConfig(coefficient=0.3), entropy_bonus=0.2),
        clip(0.2, 0.28),
        lambda logp, ref, entropy: 0.3 * kl_estimate("k3", logp, ref) - 0.2 * entropy,
    ),
}


def rank_cases() -> dict[str, tuple[str, Config, TrainBatch]]:
    """Model, config and batch of each; `one` leaves a rank with the DUMMY alone."""
    out: dict[str, tuple[str, Config, TrainBatch]] = {}
    for name, (c, _, _) in RANKS.items():
        batch = build_batch(groups(), 1, c.objective, 0, scores() if c.objective.needs_scores else ())
        for kind, split in (("tied", False), ("untied", True)):
            c = replace(c, learner=replace(c.learner, vocab_parallel=split))
            out[f"{name}, {kind}, {split}"] = kind, c, batch
            out[f"{name}, one {kind}, {split}"] = kind, c, replace(batch, sequences=batch.sequences[1:2])
    return out


def on_a_rank(models: dict[str, str], ranks: Ranks) -> dict[str, Any]:
    out: dict[str, Any] = {
        name: gradient(models[kind], c, batch, ranks) for name, (kind, c, batch) in rank_cases().items()
    }
    c = settings(kl=KLConfig(coefficient=0.3))
    one = learner(models["untied"], c, None, ranks)
    half = learner(models["tied"], replace(c, model=ModelConfig(dtype="float16")), None, ranks)
    first = half.score(to_score(groups()))
    half.policy.scale.state[0] = 2.0**40
    overflows = half.train(build_batch(groups(), 1, settings().objective, 0, scores()))["learner/overflows"]
    weights = [full_tensor(w, torch.float32) for w in half.weights.values()]
    return out | {"scores": (*one.score(to_score(groups())), *first), "half": (overflows, weights)}


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_sequences_penalties_and_a_sharded_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {kind: make_model(kind, tmp_path / kind) for kind in ("tied", "untied")}
    got, other = on_ranks(2, tmp_path, partial(on_a_rank, models), monkeypatch)
    overflows, weights = got["half"]  # float16: both ranks compute the step again, as often
    assert overflows == other["half"][0] > 5
    assert all(torch.equal(a, b) for a, b in zip(weights, other["half"][1], strict=True))
    for x in got.pop("scores"):
        np.testing.assert_array_equal(x.logprobs, x.logprobs_ref)
    for key, (kind, c, batch) in rank_cases().items():
        metrics, ours = got[key]
        alone, exact = gradient(models[kind], c, batch)
        if len(batch.sequences) > 1:
            _, surrogate, penalty = RANKS[key.rsplit(", ", 2)[0]]
            _, exact = expected(models[kind], surrogate, penalty, c.objective.anchor == "recomputed")
        assert error(ours, exact) < 1e-5, key
        for metric in ("learner/loss", "ratio/truncated", "ratio/mean", "kl/ref"):
            assert metrics.get(metric, 0) == pytest.approx(alone.get(metric, 0), rel=1e-5), (key, metric)


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
