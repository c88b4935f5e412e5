"""The parity gate: before training, learner and engine score the same tokens; the difference is printed.

ρ is the ratio of the two, so a mismatch of dtype, head, temperature or weights is noise in every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.config import ConfigError
from trainer.controller.learner_client import LearnerClient
from trainer.controller.rollout import RolloutContext, rollout_prompt
from trainer.types import Prompt, TrainSequence

# Mean |learner − engine| in nats, which right settings keep and wrong ones do not. SmolLM2-135M on a CPU:
# float32 below 1e-5 (each engine is 6e-6 from float64), bfloat16 under an FP32 head .03, on both engines.
PARITY_NATS = {"float32": 1e-3, "bfloat16": 0.05}
PROMPTS, SAMPLES = 8, 2


@dataclass(frozen=True, slots=True)
class Parity:
    """|log π_learner − log π_engine| over the gate's tokens, in nats."""

    mean: float
    max: float
    tokens: int


async def parity_gate(ctx: RolloutContext, learner: LearnerClient, prompts: Sequence[Prompt]) -> Parity:
    """Generate a few completions, let the learner score them; ConfigError above the threshold."""
    asked = prompts[:PROMPTS]
    answers = await asyncio.gather(  # at once, so that they reach every engine
        *(rollout_prompt(ctx, p, SAMPLES, f"parity{i}", i, evaluation=True) for i, p in enumerate(asked))
    )
    sequences = [
        TrainSequence(
            np.asarray(p.token_ids, np.int32),
            r.token_ids,
            r.logprobs_gen,
            r.versions,
            r.sampled.astype(np.float32),
            0.0,
        )
        for p, rollouts in zip(asked, answers, strict=True)
        for r in rollouts
    ]
    if ctx.config.engine.colocate:  # the learner needs the GPUs
        await ctx.engine.pause()
    scores = await learner.score(sequences)
    if ctx.config.engine.colocate:
        ctx.engine.resume()
    gap = np.concatenate(
        [
            np.abs(ours - s.logprobs_gen)[s.token_weights > 0]
            for ours, s in zip(scores, sequences, strict=True)
        ]
    )
    parity = Parity(float(gap.mean()), float(gap.max()), len(gap))
    bound = PARITY_NATS[ctx.config.model.dtype]
    if not parity.mean <= bound:
        raise ConfigError(
            f"learner and engine disagree on the same {parity.tokens} tokens by {parity.mean:.3g} nats on "
            f"average (max {parity.max:.3g}); expected at most {bound:g} in "
            f"{ctx.config.model.dtype}. Both must have the same weights, dtype and FP32 head, and log-"
            "probs of the distribution sampled from: at engine.temperature, without top-p or top-k"
        )
    return parity
