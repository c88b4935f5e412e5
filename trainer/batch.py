"""From groups to one optimizer batch: advantages and token weights, final and normalised over the batch.

What is left out of the loss (`surviving` completions are the rest):
  - every group whose rewards are all equal (`drop_zero_variance`): it teaches nothing, and is not replaced;
  - completions cut at the token limit (`drop_truncated`), and those without a sampled token;
  - tokens that were not sampled (an interruption phrase): weight 0.
A prompt counts as surviving if one of its completions does. Every reward counts in its group's mean.

Advantage: r − group mean, divided by the std of these differences over the surviving completions
("batch"), by the group's own reward std ("group"), or by nothing ("none"). The std is the population's
and is taken after the zero-variance drop, whose zeros would only shrink it.

Weights: each prompt ("prompt"), completion ("sample") or token ("token") weighs the same, and the weights
of a batch add up to 1, so the loss is Σ weight · term, whatever the micro-batches or the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.config import ObjectiveConfig
from trainer.types import Group, Rollout, TrainBatch, TrainSequence

EPS = 1e-6  # least divisor of an advantage


def build_batch(
    groups: Sequence[Group], step: int, objective: ObjectiveConfig, learner_version: int
) -> TrainBatch:
    """The batch of optimizer step `step`, trained on weights of `learner_version`."""
    surviving = [[i for i, r in enumerate(g.rollouts) if _survives(g, r, objective)] for g in groups]
    advantages = _advantages(groups, surviving, objective)
    lengths = [
        [int(g.rollouts[i].sampled.sum()) for i in kept] for g, kept in zip(groups, surviving, strict=True)
    ]
    scales = _token_weights(lengths, objective)
    sequences = []
    for group, kept, advantage, scale in zip(groups, surviving, advantages, scales, strict=True):
        prompt_ids = np.asarray(group.prompt.token_ids, np.int32)
        for i, weight in zip(kept, scale, strict=True):
            r = group.rollouts[i]
            weights = np.where(r.sampled, weight, 0.0).astype(np.float32)
            sequences.append(
                TrainSequence(prompt_ids, r.token_ids, r.logprobs, r.versions, weights, float(advantage[i]))
            )
    return TrainBatch(step, tuple(sequences), _stats(groups, surviving, learner_version))


def _survives(group: Group, rollout: Rollout, objective: ObjectiveConfig) -> bool:
    if objective.drop_zero_variance and zero_variance(group):
        return False
    return bool(rollout.sampled.any()) and not (objective.drop_truncated and rollout.truncated)


def zero_variance(group: Group) -> bool:
    """Whether all rewards of the group are equal."""
    rewards = [r.reward for r in group.rollouts]
    return min(rewards) == max(rewards)


def _advantages(
    groups: Sequence[Group], surviving: Sequence[Sequence[int]], objective: ObjectiveConfig
) -> list[NDArray[np.float64]]:
    """Per group, the advantage of each of its completions, surviving or not."""
    rewards = [np.array([r.reward for r in g.rollouts]) for g in groups]
    centred = [r - r.mean() for r in rewards]
    if objective.advantage_norm == "group":
        return [c / max(float(r.std()), EPS) for c, r in zip(centred, rewards, strict=True)]
    kept = np.concatenate([c[list(k)] for c, k in zip(centred, surviving, strict=True)])
    if objective.advantage_norm == "none" or not len(kept):
        return centred
    return [c / max(float(kept.std()), EPS) for c in centred]


def _token_weights(lengths: Sequence[Sequence[int]], objective: ObjectiveConfig) -> list[list[float]]:
    """The weight of every token of each surviving completion, from their lengths in loss tokens."""
    prompts = sum(bool(group) for group in lengths)
    completions = sum(len(group) for group in lengths)
    tokens = sum(sum(group) for group in lengths)
    match objective.aggregation:
        case "prompt":
            return [[1 / (prompts * sum(group)) for _ in group] for group in lengths]
        case "sample":
            return [[1 / (completions * n) for n in group] for group in lengths]
        case "token":
            return [[1 / tokens for _ in group] for group in lengths]


def _stats(groups: Sequence[Group], surviving: Sequence[Sequence[int]], version: int) -> dict[str, float]:
    rollouts = [r for g in groups for r in g.rollouts]
    lengths = [len(r.token_ids) for r in rollouts]
    lags = version - np.concatenate([r.versions[r.sampled] for r in rollouts])
    equal = [g.pass_rate for g in groups if zero_variance(g)]
    stats = {
        "train/reward": np.mean([r.reward for r in rollouts]),
        "train/pass_rate": np.mean([r.outcome == "correct" for r in rollouts]),
        "train/prompts": len(groups),
        "train/effective_prompts": sum(bool(kept) for kept in surviving),
        "train/effective_completions": sum(len(kept) for kept in surviving),
        "train/all_right": sum(rate == 1 for rate in equal) / len(groups),
        "train/all_wrong": sum(rate == 0 for rate in equal) / len(groups),
        "train/truncated": np.mean([r.truncated for r in rollouts]),
        "train/interrupted": np.mean([r.interrupted for r in rollouts]),
        "train/length_mean": np.mean(lengths),
        "train/length_max": max(lengths),
        "lag/max": lags.max(initial=0),
        "lag/mean": lags.mean() if len(lags) else 0.0,
    }
    return {name: float(value) for name, value in stats.items()}
