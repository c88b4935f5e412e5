"""Turns groups into one optimizer batch, with advantages and token weights normalised over the batch.

Dropped from the loss (the other completions are `surviving`):
  - completions cut at the token limit (`drop_truncated`), and those without a sampled token;
  - episodes without a reward, since their environment failed or gave none;
  - groups whose other completions have equal rewards r, unless `zero_variance` is `keep`. With `resample`
    they are replaced before a batch is built, up to a limit;
  - tokens that were not sampled (the interruption phrase): weight 0.
A prompt survives if one of its completions does. Dropped completions still count in their group's mean, but
episodes without a reward do not.

Advantage: r − group mean, divided by the std of these differences over the surviving completions ("batch"),
by the std of the group's rewards ("group"), by a given number ("global") or by nothing ("none"). A KL penalty
in the reward (`kl.place`) is part of r. Every std is the population's; the batch's is taken after dropping
zero-variance groups, whose zeros would only shrink it, unless `std_over` is `all`. "running" subtracts the
mean of these differences over all batches up to this one, and divides by their std.

Weights: each prompt ("prompt"), completion ("sample") or token ("token") weighs the same, and the weights of
a batch add up to 1. Or every token has 1 / (surviving completions · longest completion) ("sum", Dr. GRPO,
arXiv 2503.20783). The loss is Σ weight · term, however the batch is split into micro-batches and ranks.

With a critic each token has an advantage of its own (`gae.py`), and the norms are over tokens: "batch" and
"running" subtract the mean as well. A group whose rewards are equal is not dropped, since its advantages, to
the critic's values, are not zero.

With `kl.place: in_advantage` a token's advantage is its completion's less c · (log π_gen − log π_ref), the
policy gradient of the reverse KL to a teacher (on-policy distillation); with `as_advantage` it is the latter
alone. No group is dropped then, either.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kernels import token_weights
from trainer.config import KLConfig, ObjectiveConfig
from trainer.controller.gae import critic_advantages
from trainer.controller.scores import distance, kl_reference, mismatch_weight, to_score
from trainer.types import Group, Rollout, TokenScores, TrainBatch, split

EPS = 1e-6  # smallest divisor of an advantage
REPEATED_TOKENS = 4  # tokens of the sequences that are compared: two pairs
HASH = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, odd: multiples are spread evenly
MIN_TOKENS = 64  # tokens of a completion that is judged
MIN_DISTINCT = 0.3  # share of its sequences below which it is repetitive; running text has above .8


@dataclass(slots=True)
class Moments:
    """Mean and variance of the numbers that were added so far (Chan, Golub and LeVeque 1983)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # Σ (x − mean)²
    closed: bool = False  # to further numbers: later epochs bring none that are new

    def add(self, values: NDArray[np.float64]) -> None:
        """Add (N,) numbers."""
        if self.closed or not len(values):
            return
        count, delta = self.count + len(values), float(values.mean()) - self.mean
        self.squares += float(values.var()) * len(values) + delta**2 * self.count * len(values) / count
        self.count, self.mean = count, self.mean + delta * len(values) / count

    @property
    def std(self) -> float:
        """The population's; 1 of nothing."""
        return float((self.squares / self.count) ** 0.5) if self.count else 1.0


def build_batch(
    groups: Sequence[Group],
    step: int,
    objective: ObjectiveConfig,
    learner_version: int,
    scores: Sequence[TokenScores] = (),  # of `to_score(groups)`, if the objective needs them
    aside: Sequence[Group] = (),  # groups that count in the statistics alone
    longest: int = 1,  # tokens of a completion at most
    moments: Moments | None = None,  # updated by the advantages
) -> TrainBatch:
    """The batch of optimizer step `step`, to train weights of `learner_version`."""
    rollouts = [r for g in groups for r in g.rollouts]
    scored: Sequence[TokenScores | None] = scores or [None] * len(rollouts)
    group = np.repeat(np.arange(len(groups)), [len(g.rollouts) for g in groups])  # (C,) group of each rollout
    lengths = [len(r.token_ids) for r in rollouts]
    sampled = np.concatenate([r.sampled for r in rollouts])  # (T,) over all tokens of the batch
    rollout = np.repeat(np.arange(len(rollouts)), lengths)  # (T,) rollout of each token
    loss_tokens = np.bincount(rollout[sampled], minlength=len(rollouts))  # (C,)
    penalties = _penalties(rollouts, scores, objective.kl)
    penalty = objective.kl.coefficient * np.array([p.sum(dtype=np.float64) for p in penalties])
    rewards = np.array([r.reward for r in rollouts]) - penalty  # (C,)
    surviving = (loss_tokens > 0) & _surviving(rollouts, rewards, group, objective)
    counted = surviving | np.array([r.scored and objective.std_over == "all" for r in rollouts])
    if objective.has_critic:
        by_token, targets = critic_advantages(rollouts, scores, penalties, objective)
        by_token = _normalised(by_token, sampled & counted[rollout], objective, moments)
        returns = split(lengths, targets.astype(np.float32))
    else:
        centred = _centred(rollouts, rewards, group, objective)
        by_token = _normalised(centred, counted, objective, moments)[rollout]
    gaps = distance(rollouts, scores) if objective.kl.has_advantage else np.zeros(0, np.float32)
    if len(gaps):
        by_token = by_token * (objective.kl.place == "in_advantage") - objective.kl.coefficient * gaps
    weights = np.zeros(len(sampled), np.float32)
    survivors = loss_tokens[surviving].tolist(), group[surviving].tolist()
    weights[sampled & surviving[rollout]] = token_weights(*survivors, objective.aggregation)
    if objective.aggregation == "sum":
        weights /= max(1, surviving.sum()) * longest
    weights_of, advantages = (split(lengths, x.astype(np.float32)) for x in (weights, by_token))
    sequences = [
        replace(
            sequence,
            token_weights=weights_of[i],
            advantages=mismatch_weight(rollouts[i], s, objective) * advantages[i],
            logprobs_old=s.logprobs if s and objective.anchor == "recomputed" else None,
            logprobs_ref=_reference(rollouts[i], s, objective.kl),
            values=s.values if s else None,
            returns=returns[i] if objective.has_critic else None,
        )
        for i, (sequence, s) in enumerate(zip(to_score(groups), scored, strict=True))
        if surviving[i]
    ]
    lags = learner_version - np.concatenate([r.versions for r in rollouts])[sampled]
    stats = _stats(groups, aside, lags)
    has_gradient = (weights > 0) & ((abs(by_token) > EPS) | (objective.loss in ("sft", "none")))  # (T,)
    stats["train/effective_prompts"] = float(len(set(group[rollout[has_gradient]].tolist())))
    stats["train/effective_completions"] = float(len(sequences))
    if len(estimates := np.concatenate([*penalties, gaps])):
        stats["kl/ref"] = float(estimates.sum() / max(1, sampled.sum()))
    return TrainBatch(step, tuple(sequences), stats)


def _penalties(
    rollouts: Sequence[Rollout], scores: Sequence[TokenScores], kl: KLConfig
) -> list[NDArray[np.float32]]:
    """(T,) each token's estimated KL, by rollout, where that is a part of the reward; else (0,)."""
    if not kl.coefficient or kl.place != "reward":
        return [np.zeros(0, np.float32)] * len(rollouts)
    return [kl_reference(r, s, kl) for r, s in zip(rollouts, scores, strict=True)]


def _reference(rollout: Rollout, scores: TokenScores | None, kl: KLConfig) -> NDArray[np.float32] | None:
    """(T,) log-probs that a penalty in the loss is taken to, if there is one."""
    if kl.coefficient and kl.to == "generator":
        return rollout.logprobs_gen
    return scores.logprobs_ref if scores and kl.place == "loss" else None


def _surviving(
    rollouts: Sequence[Rollout],
    rewards: NDArray[np.float64],  # (C,)
    group: NDArray[np.int64],  # (C,)
    objective: ObjectiveConfig,
) -> NDArray[np.bool_]:
    """(C,) the rollouts that no filter drops."""
    mask = np.array([r.scored and not (r.truncated and objective.drop_truncated) for r in rollouts])
    if objective.zero_variance != "keep" and not (objective.has_critic or objective.kl.has_advantage):
        mask &= np.array([len(set(rewards[mask & (group == g)])) > 1 for g in range(group.max() + 1)])[group]
    return mask


def zero_variance(group: Group, drop_truncated: bool = False) -> bool:
    """True if all rewards of the group are equal; where truncated completions are dropped, of the others."""
    counted = (r for r in group.rollouts if r.scored and not (drop_truncated and r.truncated))
    return len({r.reward for r in counted}) < 2


def _centred(
    rollouts: Sequence[Rollout],
    rewards: NDArray[np.float64],  # (C,) less the penalties
    group: NDArray[np.int64],  # (C,)
    objective: ObjectiveConfig,
) -> NDArray[np.float64]:
    """(C,) rewards less their group's mean, for the norm by group over their group's std."""
    scored = np.array([r.scored for r in rollouts])
    count = np.maximum(np.bincount(group, scored), 1)
    advantages = np.where(scored, rewards - (np.bincount(group, rewards * scored) / count)[group], 0.0)
    if objective.advantage_norm == "group":
        advantages /= np.maximum(np.sqrt(np.bincount(group, advantages**2) / count)[group], EPS)
    return np.asarray(advantages)


def _normalised(
    advantages: NDArray[np.float64],  # (N,)
    counted: NDArray[np.bool_],  # (N,)
    objective: ObjectiveConfig,
    moments: Moments | None,
) -> NDArray[np.float64]:
    """(N,) advantages by the statistics of those that are counted, or by a number."""
    match objective.advantage_norm:
        case "none" | "group":
            return advantages
        case "global":
            return advantages / objective.global_std
        case "batch":
            moments = None
    moments = moments or Moments()
    moments.add(advantages[counted])
    mean = moments.mean if objective.has_critic or objective.advantage_norm == "running" else 0.0
    return np.asarray((advantages - mean) / max(moments.std, EPS))


def _stats(groups: Sequence[Group], aside: Sequence[Group], lags: NDArray[np.int32]) -> dict[str, float]:
    """Statistics of all groups that were generated for the batch; `lags` are those of the tokens in it."""
    groups = [*groups, *aside]
    rollouts = [r for g in groups for r in g.rollouts]
    lengths, scored = [len(r.token_ids) for r in rollouts], [r for r in rollouts if r.scored]
    equal = [g.pass_rate for g in groups if zero_variance(g)]
    outcomes = [r.outcome for r in rollouts]
    stats = {
        "train/reward": np.mean([r.reward for r in scored] or [math.nan]),
        "train/pass_rate": outcomes.count("correct") / max(1, len(scored)),
        "train/prompts": len(groups),
        "train/all_right": equal.count(1) / len(groups),
        "train/all_wrong": equal.count(0) / len(groups),
        "train/resampled": len(aside),
        "train/truncated": np.mean([r.truncated for r in rollouts]),
        "train/repetitive": np.mean([is_repetitive(r.token_ids) for r in rollouts]),
        "train/interrupted": np.mean([r.interrupted for r in rollouts]),
        "train/length_mean": np.mean(lengths),
        "train/length_max": max(lengths),
        "lag/max": lags.max(initial=0),
        "lag/mean": lags.mean() if len(lags) else 0.0,
    }
    for name in sorted({name for r in rollouts for name in r.scores}):
        stats[f"reward/{name}"] = np.mean([r.scores[name] for r in scored if name in r.scores] or [math.nan])
    stats |= {f"verify/{o}": outcomes.count(o) / len(rollouts) for o in ("crash", "timeout", "unparsable")}
    if episodes := [r.episode for r in rollouts if r.episode]:
        names = {"count": "turns", "tool_calls": "tool_calls", "seconds": "seconds"}
        stats |= {f"environment/{name}": np.mean([e[key] for e in episodes]) for key, name in names.items()}
        stats |= {f"environment/{o}": outcomes.count(o) / len(rollouts) for o in ("error", "unscored")}
    return {name: float(value) for name, value in stats.items()}


def is_repetitive(token_ids: NDArray[np.int32]) -> bool:
    """True if few of the sequences of REPEATED_TOKENS tokens in the completion (T,) are distinct."""
    if len(token_ids) < MIN_TOKENS:
        return False
    return count_distinct(token_ids) < MIN_DISTINCT * (len(token_ids) - REPEATED_TOKENS + 1)


def count_distinct(token_ids: NDArray[np.int32]) -> int:
    """The number of distinct sequences of REPEATED_TOKENS tokens, by 64-bit hashes: that is 15 times as fast.
    That two of 12,000 sequences have the same hash has a probability of 1e-11."""
    pairs = token_ids[:-1].astype(np.uint64) << np.uint64(32) | token_ids[1:].astype(np.uint64)
    return len(np.unique(pairs[:-2] * HASH + pairs[2:]))
