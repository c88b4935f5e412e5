"""Uses of the learner's scores of a batch's completions: the ratio's anchor, mismatch, KL.

The learner scores the data before its first step on them, so π_old are its own log-probs at that moment. Here
they become constants of the batch: nothing of this module has a gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import KL
from trainer.config import ConfigError, KLConfig, ObjectiveConfig
from trainer.types import Group, Prompt, Rollout, TokenScores, TrainSequence

Floats = NDArray[np.float32]


def scorable(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[TrainSequence]:
    """The rollouts of one prompt as the learner scores them."""
    return [
        TrainSequence(
            prompt_ids=np.asarray(prompt.token_ids, np.int32),
            token_ids=r.token_ids,
            logprobs_gen=r.logprobs_gen,
            versions=r.versions,
            token_weights=r.sampled.astype(np.float32),
            advantages=np.zeros(len(r.token_ids), np.float32),
            experts=r.experts,
        )
        for r in rollouts
    ]


def to_score(groups: Sequence[Group]) -> list[TrainSequence]:
    """All rollouts of the groups, in order."""
    return [s for g in groups for s in scorable(g.prompt, g.rollouts)]


def with_teacher(
    groups: Sequence[Group], scores: Mapping[int, Sequence[TokenScores]]
) -> dict[int, list[TokenScores]]:
    """The scores by group id, with those of a teacher behind a URL, which stand in the groups."""
    if missing := [g.group_id for g in groups if len(g.logprobs_ref) != len(g.rollouts)]:
        raise ConfigError(
            f"group {missing[0]} has no scores of a teacher behind a URL, and a replay asks for none; "
            "expected a journal that holds them, or as objective.kl.to the teacher's folder"
        )
    scored = {}
    for g in groups:
        pairs = zip(scores[g.group_id] or [TokenScores()] * len(g.rollouts), g.logprobs_ref, strict=True)
        scored[g.group_id] = [replace(s, logprobs_ref=x) for s, x in pairs]
    return scored


def mismatch_weight(rollout: Rollout, scores: TokenScores | None, objective: ObjectiveConfig) -> Floats:
    """(T,) the factor of each token's advantage: k = π_old / π_gen, bounded as `objective.mismatch` says.

    A factor of the advantage is one of the objective's term, but not of a penalty's or the critic's. With the
    PPO clip and `mask` it is IcePop (arXiv 2510.18855, eq. 3).
    """
    if objective.token_mismatch == "none" or scores is None or scores.logprobs is None:
        return np.ones(len(rollout.token_ids), np.float32)
    ratio, bounds = np.exp(np.minimum(scores.logprobs - rollout.logprobs_gen, 80)), objective.loss_settings
    if objective.token_mismatch == "truncate":
        return np.minimum(ratio, np.float32(bounds["max_ratio"]))
    inside = (bounds["mask_low"] <= ratio) & (ratio <= bounds["mask_high"])
    return np.where(inside, ratio, np.float32(0))


def kl_reference(rollout: Rollout, scores: TokenScores, config: KLConfig) -> Floats:
    """(T,) the estimate of KL(π_old ‖ π_ref) of each token, without its coefficient; 0 if not sampled."""
    logp, logp_ref = torch.from_numpy(scores.logprobs), torch.from_numpy(scores.logprobs_ref)
    kl, logprobs_gen = KL(config.coefficient, config.estimator), torch.from_numpy(rollout.logprobs_gen)
    estimate = kl(logp, logp_ref, logprobs_gen)[0].numpy()
    return np.where(rollout.sampled, estimate, np.float32(0))


def distance(rollouts: Sequence[Rollout], scores: Sequence[TokenScores]) -> Floats:
    """(T,) log π_gen − log π_ref of all tokens of the rollouts, in nats; 0 if not sampled.

    π_gen is the policy that sampled them, so the mean is an unbiased estimate of its KL to the reference, and
    the policy need not score them again."""
    sampled = np.concatenate([r.sampled for r in rollouts])
    logprobs_ref = np.concatenate([s.logprobs_ref for s in scores])
    return np.where(sampled, np.concatenate([r.logprobs_gen for r in rollouts]) - logprobs_ref, np.float32(0))
