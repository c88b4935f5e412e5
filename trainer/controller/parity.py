"""The parity gate: before training, learner and engine score the same tokens, and must nearly agree.

ρ is the ratio of the two probabilities, so any mismatch of dtype, head, temperature or weights is noise in
every step.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainer.config import ConfigError
from trainer.controller.context import RolloutContext
from trainer.controller.learner_client import LearnerClient
from trainer.controller.rollout import rollout_prompt
from trainer.controller.scores import scorable
from trainer.controller.weight_sync import WeightSync
from trainer.mismatch import means_by_position, sums_by_position
from trainer.types import Prompt, TrainSequence

# Bounds on mean |learner − engine| in nats, which separate right settings from wrong ones. Measured with
# SmolLM2-135M on a CPU, both engines: float32 below 1e-5, bfloat16 with an FP32 head .03, float16
# .004 to .005 with or without it.
PARITY_NATS = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
PROMPTS, SAMPLES = 8, 2


async def parity_gate(
    ctx: RolloutContext, learner: LearnerClient, weights: WeightSync, prompts: Sequence[Prompt],
    lacking: Callable[[str], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Mean and maximum of |log π_learner − log π_engine| in nats, over the tokens of a few completions, and
    the mean by position.

    `lacking`: for a learner that replays experts, hears it if engines have returned none. ConfigError above
    the threshold, or without experts where they were demanded."""
    prompts = prompts[:PROMPTS]
    groups = await asyncio.gather(  # all at once, so that every engine takes part
        *(rollout_prompt(ctx, p, SAMPLES, f"parity{i}", i, None, experts=True) for i, p in enumerate(prompts))
    )
    pairs = zip(prompts, groups, strict=True)
    sequences = [s for prompt, rollouts in pairs for s in scorable(prompt, rollouts)]
    if lacking:
        _check_experts(sequences, ctx.config.model.replay_experts, lacking)
    async with weights.learner_turn():
        scores = await learner.score(sequences, logprobs=True)
    sampled = np.concatenate([s.token_weights for s in sequences]) > 0
    logprobs = np.concatenate([x.logprobs for x in scores if x.logprobs is not None])
    gap = np.abs(logprobs - np.concatenate([s.logprobs_gen for s in sequences]))[sampled]
    positions = np.concatenate([len(s.prompt_ids) + np.flatnonzero(s.token_weights) for s in sequences])
    if not len(gap):
        errors = (r.episode.get("error") for rollouts in groups for r in rollouts)
        why = next(filter(None, errors), "there is no room for one")
        raise ConfigError(f"no completion of {len(prompts)} prompts has a token: {why}")
    mean, largest = float(gap.mean()), float(gap.max())
    bound = PARITY_NATS[ctx.config.model.dtype]
    if not mean <= bound:
        raise ConfigError(
            f"learner and engine disagree on the same {len(gap)} tokens by {mean:.3g} nats on "
            f"average (max {largest:.3g}); expected at most {bound:g} in {ctx.config.model.dtype}. Both "
            "must have the same weights, dtype and FP32 head, and log-probs of the sampled distribution: at "
            "engine.temperature, without top-p or top-k"
        )
    by_position = means_by_position(sums_by_position(gap, positions))
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
