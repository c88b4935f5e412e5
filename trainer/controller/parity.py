"""The parity gate: before training, learner and engine score the same tokens, and must nearly agree.

ρ is the ratio of the two probabilities, so any mismatch of dtype, head, temperature or weights is noise in
every step.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError
from trainer.controller.context import RolloutContext
from trainer.controller.learner_client import LearnerClient
from trainer.controller.rollout import rollout_prompt
from trainer.controller.scores import Floats, scorable
from trainer.controller.weight_sync import WeightSync
from trainer.mismatch import PARITY_NATS, means_by_position, sums_by_position
from trainer.types import Prompt, TrainSequence

PROMPTS, SAMPLES = 8, 2


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Learner and engine on the same N sampled tokens."""

    gap: Floats  # (N,) log π_learner − log π_engine, in nats
    logprobs: Floats  # (N,) log π_engine
    positions: NDArray[np.int64]  # (N,) in the sequence, the prompt included


async def measure(
    ctx: RolloutContext, learner: LearnerClient, weights: WeightSync, prompts: Sequence[Prompt], samples: int,
    lacking: Callable[[str], None] | None = None,
) -> Gaps:  # fmt: skip
    """Sample so many completions of each prompt, all at once so that every engine takes part, and score them.

    ConfigError if no completion has a token, or experts that were demanded have not come."""
    groups = await asyncio.gather(
        *(rollout_prompt(ctx, p, samples, f"parity{i}", i, None, experts=True) for i, p in enumerate(prompts))
    )
    pairs = zip(prompts, groups, strict=True)
    sequences = [s for prompt, rollouts in pairs for s in scorable(prompt, rollouts)]
    if lacking:
        _check_experts(sequences, ctx.config.model.replay_experts, lacking)
    async with weights.learner_turn():
        scores = await learner.score(sequences, logprobs=True)
    sampled = np.concatenate([s.token_weights for s in sequences]) > 0
    learners = np.concatenate([x.logprobs for x in scores if x.logprobs is not None])
    engines = np.concatenate([s.logprobs_gen for s in sequences])
    if not sampled.any():
        errors = (r.episode.get("error") for rollouts in groups for r in rollouts)
        why = next(filter(None, errors), "there is no room for one")
        raise ConfigError(f"no completion of {len(prompts)} prompts has a token: {why}")
    positions = np.concatenate([len(s.prompt_ids) + np.flatnonzero(s.token_weights) for s in sequences])
    return Gaps((learners - engines)[sampled], engines[sampled], positions)


async def parity_gate(
    ctx: RolloutContext, learner: LearnerClient, weights: WeightSync, prompts: Sequence[Prompt],
    lacking: Callable[[str], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Mean and maximum of |log π_learner − log π_engine| in nats, over the tokens of a few completions, and
    the mean by position.

    `lacking`: for a learner that replays experts, hears it if engines have returned none. ConfigError above
    the threshold, or without experts where they were demanded."""
    gaps = await measure(ctx, learner, weights, prompts[:PROMPTS], SAMPLES, lacking)
    gap, bound = np.abs(gaps.gap), PARITY_NATS[ctx.config.model.dtype]
    mean, largest = float(gap.mean()), float(gap.max())
    if not mean <= bound:
        raise ConfigError(
            f"learner and engine disagree on the same {len(gap)} tokens by {mean:.3g} nats on "
            f"average (max {largest:.3g}); expected at most {bound:g} in {ctx.config.model.dtype}. Both "
            "must have the same weights, dtype and FP32 head, and log-probs of the sampled distribution: at "
            "engine.temperature, without top-p or top-k"
        )
    by_position = means_by_position(sums_by_position(gap, gaps.positions))
    return {"mean": mean, "max": largest, "tokens": len(gap), "by_position": by_position}


def _check_experts(
    sequences: Sequence[TrainSequence], demanded: bool | None, lacking: Callable[[str], None]
) -> None:
    without = [s.experts is None for s in sequences if len(s.token_ids)]
    if not any(without):
        return
    came = f"{sum(without)} of {len(without)} completions came without them"
    if demanded:
        raise ConfigError(
            f"model.replay_experts is true, and of the experts {came}; expected an engine that returns them: "
            "vLLM on a GPU, a server by URL that was started with this setting, or engine.kind torch"
        )
    lacking(
        f"experts are not replayed: {came}. vLLM on a CPU returns none, nor does a server by URL that runs "
        "on one, or with model.replay_experts false"
    )
