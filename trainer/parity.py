"""The parity gate: before training, learner and engine score the same tokens; the difference is printed.

ρ is the ratio of the two, so a mismatch of dtype, head, temperature or weights is noise in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.config import ConfigError
from trainer.learner_client import LearnerClient
from trainer.rollout import RolloutContext, rollout_prompt
from trainer.types import Prompt, TrainSequence

PARITY_NATS = (
    0.05  # mean |learner − engine|: bf16 bodies under an FP32 head stay below, wrong settings do not
)
PROMPTS, SAMPLES = 8, 2


@dataclass(frozen=True, slots=True)
class Parity:
    """|log π_learner − log π_engine| over the gate's tokens, in nats."""

    mean: float
    max: float
    tokens: int


async def parity_gate(ctx: RolloutContext, learner: LearnerClient, prompts: Sequence[Prompt]) -> Parity:
    """Generate a few completions, let the learner score them; ConfigError above the threshold."""
    sequences = []
    for i, prompt in enumerate(prompts[:PROMPTS]):
        for r in await rollout_prompt(ctx, prompt, SAMPLES, f"parity{i}", i, evaluation=True):
            weights = r.sampled.astype(np.float32)
            sequences.append(
                TrainSequence(
                    np.asarray(prompt.token_ids, np.int32), r.token_ids, r.logprobs, r.versions, weights, 0.0
                )
            )
    scores = await learner.score(sequences)
    gap = np.concatenate(
        [np.abs(ours - s.logprobs)[s.weights > 0] for ours, s in zip(scores, sequences, strict=True)]
    )
    parity = Parity(float(gap.mean()), float(gap.max()), len(gap))
    if not parity.mean <= PARITY_NATS:
        raise ConfigError(
            f"learner and engine disagree on the same {parity.tokens} tokens by {parity.mean:.3g} nats on "
            f"average (max {parity.max:.3g}); expected at most {PARITY_NATS}. Give both the same "
            "model.dtype, model.fp32_head and engine.temperature"
        )
    return parity
