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

from kernels import token_weights
from trainer.config import ObjectiveConfig
from trainer.types import Group, Rollout, TrainBatch, TrainSequence

EPS = 1e-6  # least divisor of an advantage


def build_batch(
    groups: Sequence[Group], step: int, objective: ObjectiveConfig, learner_version: int
) -> TrainBatch:
    """The batch of optimizer step `step`, trained on weights of `learner_version`."""
    rollouts = [r for g in groups for r in g.rollouts]
    group = np.repeat(np.arange(len(groups)), [len(g.rollouts) for g in groups])  # (C,) whose rollout it is
    lengths = np.array([len(r.token_ids) for r in rollouts])  # (C,)
    sampled = np.concatenate([r.sampled for r in rollouts])  # (T,) of all tokens, end to end
    owner = np.repeat(np.arange(len(rollouts)), lengths)
    loss_tokens = np.bincount(owner[sampled], minlength=len(rollouts))  # (C,)
    surviving = loss_tokens > 0
    if objective.drop_zero_variance:
        surviving &= ~np.array([zero_variance(g) for g in groups])[group]
    if objective.drop_truncated:
        surviving &= ~np.array([r.truncated for r in rollouts])
    advantages = _advantages(np.array([r.reward for r in rollouts]), group, surviving, objective)
    weights = np.zeros(len(sampled), np.float32)
    weights[sampled & surviving[owner]] = token_weights(
        loss_tokens[surviving].tolist(), group[surviving].tolist(), objective.aggregation
    )
    prompts = [np.asarray(g.prompt.token_ids, np.int32) for g in groups]
    ends = np.cumsum(lengths)
    sequences = []
    for i in np.flatnonzero(surviving).tolist():
        r, own = rollouts[i], weights[ends[i] - lengths[i] : ends[i]]
        prompt_ids, advantage = prompts[group[i]], float(advantages[i])
        sequences.append(TrainSequence(prompt_ids, r.token_ids, r.logprobs_gen, r.versions, own, advantage))
    lags = learner_version - np.concatenate([r.versions for r in rollouts])[sampled]
    stats = _stats(groups, rollouts, lags) | {
        "train/effective_prompts": float(len(set(group[surviving].tolist()))),
        "train/effective_completions": float(len(sequences)),
    }
    return TrainBatch(step, tuple(sequences), stats)


def zero_variance(group: Group) -> bool:
    """Whether all rewards of the group are equal."""
    rewards = [r.reward for r in group.rollouts]
    return min(rewards) == max(rewards)


def _advantages(
    rewards: NDArray[np.float64],  # (C,)
    group: NDArray[np.int64],  # (C,)
    surviving: NDArray[np.bool_],  # (C,)
    objective: ObjectiveConfig,
) -> NDArray[np.float64]:
    """Of each completion, surviving or not."""
    count = np.bincount(group)
    centred = rewards - (np.bincount(group, rewards) / count)[group]
    match objective.advantage_norm:
        case "none":
            return centred
        case "group":
            std = np.sqrt(np.bincount(group, centred**2) / count)[group]
        case "batch":
            std = centred[surviving].std() if surviving.any() else np.ones(1)
    return centred / np.maximum(std, EPS)


def _stats(groups: Sequence[Group], rollouts: Sequence[Rollout], lags: NDArray[np.int32]) -> dict[str, float]:
    lengths = [len(r.token_ids) for r in rollouts]
    equal = [g.pass_rate for g in groups if zero_variance(g)]
    outcomes = [r.outcome for r in rollouts]
    stats = {
        "train/reward": np.mean([r.reward for r in rollouts]),
        "train/pass_rate": outcomes.count("correct") / len(rollouts),
        "train/prompts": len(groups),
        "train/all_right": equal.count(1) / len(groups),
        "train/all_wrong": equal.count(0) / len(groups),
        "train/truncated": np.mean([r.truncated for r in rollouts]),
        "train/interrupted": np.mean([r.interrupted for r in rollouts]),
        "train/length_mean": np.mean(lengths),
        "train/length_max": max(lengths),
        "lag/max": lags.max(initial=0),
        "lag/mean": lags.mean() if len(lags) else 0.0,
    }
    stats |= {f"verify/{o}": outcomes.count(o) / len(rollouts) for o in ("crash", "timeout", "unparsable")}
    return {name: float(value) for name, value in stats.items()}
