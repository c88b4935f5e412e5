"""The held-out score: mean@k over the held-out prompts, with its standard error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.controller.rollout import RolloutContext, rollout_prompt
from trainer.types import Prompt

EVALUATION_SEED = 7_919  # evaluations share their random numbers, so that differences are the weights'


@dataclass(frozen=True, slots=True)
class Evaluation:
    """mean@k on the held-out prompts.

    `pass_rate_se` is the error of sampling k completions on these fixed prompts: what scatters along a
    run's own curve, so what a fit must weigh by. `prompts_se` also holds the choice of prompts: what
    matters when two data sets are compared.
    """

    pass_rate: float
    pass_rate_se: float
    prompts_se: float
    prompts: int
    samples: int
    truncated: float  # share of completions cut at the token limit
    mean_tokens: float


async def evaluate(ctx: RolloutContext, prompts: Sequence[Prompt], samples: int, version: int) -> Evaluation:
    """Generate `samples` completions of every held-out prompt with the engine's present weights."""
    groups = await asyncio.gather(
        *(
            rollout_prompt(ctx, p, samples, f"e{version}.{i}", EVALUATION_SEED + i, evaluation=True)
            for i, p in enumerate(prompts)
        )
    )
    correct = np.array([[r.outcome == "correct" for r in g] for g in groups], np.float64)  # (prompts, k)
    rollouts = [r for g in groups for r in g]
    return Evaluation(
        float(correct.mean()),
        sampling_error(correct),
        float(correct.mean(1).std(ddof=1) / len(prompts) ** 0.5) if len(prompts) > 1 else float("nan"),
        len(prompts),
        samples,
        float(np.mean([r.truncated for r in rollouts])),
        float(np.mean([len(r.token_ids) for r in rollouts])),
    )


def sampling_error(correct: NDArray[np.float64]) -> float:
    """Standard error of the mean of 0/1 outcomes (prompts, k), the prompts being fixed.

    Var = Σ_i p_i (1 − p_i) / k / n²; p_i (1 − p_i) is estimated without bias from k ≥ 2 samples. With
    k = 1 it cannot be told apart from the spread between prompts: the binomial bound is taken. The
    floor of one half outcome keeps a perfect score from claiming certainty.
    """
    n, k = correct.shape
    p = correct.mean(1)
    within = p * (1 - p) * k / (k - 1) if k > 1 else np.full(n, correct.mean() * (1 - correct.mean()))
    return float(max((within.sum() / k) ** 0.5 / n, 0.5 / (n * k)))
