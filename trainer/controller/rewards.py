"""The reward of a completion, from all scorers of its task.

    reward = Σ_s w_s(step) · score_s + length penalty

The main scorer (`verifier.kind`) counts as wrong_reward + (correct_reward − wrong_reward) · score and alone
decides what is a pass. An extra scorer counts by its score itself. The weights are those of the optimizer
step that the prompt was issued for, so all completions of a group have the same ones, also after a resume.
Evaluations take the weights at the end of their schedule, so that the curve of the mean reward is about one
reward, and ask every scorer.
"""

import asyncio
import math
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainer.config import LengthPenaltyConfig, VerifierConfig
from trainer.types import Outcome, Prompt
from trainer.verifiers.pool import open_scorer
from trainer.verifiers.verifier import Note, Scorer


@dataclass(frozen=True, slots=True)
class Scored:
    """A completion's reward and outcome; `scores` are the reward's parts before their weights, if several.
    In an evaluation a judge's is missing where it gave none, which counts as 0."""

    reward: float
    outcome: Outcome
    scores: dict[str, float]


class Rewards:
    """The scorers of one task, to be closed. ConfigError if one cannot start.

    `shared`: the scorers that several tasks use, such as a judge; empty for the first task."""

    def __init__(self, config: VerifierConfig, note: Note, shared: dict[Any, Scorer]) -> None:
        self._config, self._weights = config, [config.weight, *(scorer.weight for scorer in config.extra)]
        with ExitStack() as stack:
            scorers = (open_scorer(replace(config, kind=kind), note, shared) for kind in config.kinds)
            self._scorers = [stack.enter_context(closing(scorer)) for scorer in scorers]
            self.close = stack.pop_all().close

    async def score(self, prompt: Prompt, text: str, tokens: int, step: int | None) -> Scored:
        """The reward of a completion of so many tokens, at an optimizer step; None: in an evaluation."""
        config = self._config
        weights = [weight_at(weight, math.inf if step is None else step) for weight in self._weights]
        asked = [i for i, weight in enumerate(weights) if weight or i == 0 or step is None]
        verdicts = await asyncio.gather(*(self._scorers[i].score(prompt, text) for i in asked))
        scores = {config.kinds[i]: verdict.score for i, verdict in zip(asked, verdicts, strict=True)}
        wrong, correct, verdict = config.wrong_reward, config.correct_reward, verdicts[0]
        scores[config.kind] = wrong + (correct - wrong) * verdict.score
        reward = sum(weights[i] * scores[config.kinds[i]] for i in asked)
        penalty = penalised(tokens, verdict.outcome, config.length_penalty)
        scores |= penalty
        reward += sum(penalty.values())
        if step is None:
            for i, one in zip(asked, verdicts, strict=True):
                if config.kinds[i] == "judge" and one.outcome == "unparsable":
                    del scores["judge"]
        return Scored(reward, verdict.outcome, scores if len(scores) > 1 or step is None else {})


def penalised(tokens: int, outcome: Outcome, penalty: LengthPenaltyConfig) -> dict[str, float]:
    """The score `length_penalty` of a completion of so many tokens; empty where there is no such penalty."""
    if not penalty.cache_tokens:
        return {}
    counts = penalty.applies_to == "all" or outcome == "correct"
    return {"length_penalty": length_penalty(tokens, penalty) if counts else 0.0}


def weight_at(weight: float | dict[int, float], step: float) -> float:
    """The weight at an optimizer step (from 0): linear between the points of a mapping, constant outside."""
    if not isinstance(weight, dict):
        return weight
    return float(np.interp(step, sorted(weight), [weight[s] for s in sorted(weight)]))


def length_penalty(tokens: int, penalty: LengthPenaltyConfig) -> float:
    """clip((L_max − |y|) / L_cache − 1, −1, 0) (arXiv 2510.13786, after DAPO's, 2503.14476)."""
    return float(np.clip((penalty.max_tokens - tokens) / penalty.cache_tokens - 1, -1.0, 0.0))
