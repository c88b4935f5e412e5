"""The data that travels between the roles: prompts, requests, completions, groups, batches.

Token in, token out: ids, the generator's log-probability and the weight version of every token
travel together; text is only ever derived from ids, never tokenised again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]
Outcome = Literal["correct", "wrong", "unparsable", "timeout", "crash"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task item. `prompt_id` is the hash of the prompt text, so equal prompts are one prompt."""

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    metadata: dict[str, Any]  # what a scorer needs beside the answer; JSON-able


@dataclass(frozen=True, slots=True)
class Request:
    """`n` completions of one prompt. The engine may share the prompt's prefill among them."""

    request_id: str
    prompt_ids: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    seed: int  # the i-th completion's random numbers depend on (seed, i, position) and nothing else
    evaluation: bool = False  # books the engine's time as `evaluate` and goes before training requests


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample of a request. A stop token, where there is one, is the last of token_ids."""

    request_id: str
    index: int  # which of the request's n
    token_ids: NDArray[np.int32]  # (T,)
    logprobs: NDArray[np.float32]  # (T,) nats, of the distribution sampled from (at the temperature)
    versions: NDArray[np.int32]  # (T,) weight version that produced each token
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its reward; after an interruption it holds thinking + phrase + answer."""

    token_ids: NDArray[np.int32]  # (T,)
    logprobs: NDArray[np.float32]  # (T,) nats; 0 where not sampled
    versions: NDArray[np.int32]  # (T,)
    sampled: NDArray[np.bool_]  # (T,) False on injected tokens, which carry no loss
    text: str
    reward: float
    outcome: Outcome
    truncated: bool  # ended at the token limit
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt. `ordinal` counts prompts handed out, without gaps, from 0."""

    ordinal: int
    epoch: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def pass_rate(self) -> float:
        """Share of rollouts verified correct."""
        return float(np.mean([r.outcome == "correct" for r in self.rollouts]))

    @property
    def oldest_version(self) -> int:
        """The oldest weight version among the sampled tokens."""
        return min(int(r.versions[r.sampled].min()) for r in self.rollouts if r.sampled.any())


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One completion as the learner sees it. Every number is final: it is normalised over the batch."""

    prompt_ids: NDArray[np.int32]  # (P,)
    token_ids: NDArray[np.int32]  # (T,)
    logprobs: NDArray[np.float32]  # (T,) nats, the generator's
    versions: NDArray[np.int32]  # (T,)
    weights: NDArray[np.float32]  # (T,) weight of each token's loss term; 0 on injected tokens
    advantage: float


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One optimizer batch; sequences of one prompt stand together, so that packing can share it."""

    step: int  # the optimizer step this batch makes, from 1; trained on weights of version step − 1
    sequences: tuple[TrainSequence, ...]
    stats: dict[str, float]  # what the controller knows of the batch: rewards, lag, lengths ...
