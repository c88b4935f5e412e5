"""The data that travels between the roles: prompts, requests, completions, groups, batches.

Token in, token out: ids, the generator's log-probability and the weight version of every token
travel together; text is only ever derived from ids, never tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
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
    logprobs_gen: NDArray[np.float32]  # (T,) nats, of the distribution sampled from (at the temperature)
    versions: NDArray[np.int32]  # (T,) weight version that produced each token
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its reward; after an interruption it holds thinking + phrase + answer."""

    token_ids: NDArray[np.int32]  # (T,)
    logprobs_gen: NDArray[np.float32]  # (T,) nats; 0 where not sampled
    versions: NDArray[np.int32]  # (T,)
    sampled: NDArray[np.bool_]  # (T,) False on injected tokens, which carry no loss
    text: str
    reward: float
    outcome: Outcome
    truncated: bool  # ended at the token limit
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt. `group_id` counts prompts handed out, without gaps, from 0."""

    group_id: int
    epoch: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def pass_rate(self) -> float:
        """Share of rollouts verified correct."""
        return float(np.mean([r.outcome == "correct" for r in self.rollouts]))


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One completion as the learner sees it. Every number is final: it is normalised over the batch."""

    prompt_ids: NDArray[np.int32]  # (P,)
    token_ids: NDArray[np.int32]  # (T,)
    logprobs_gen: NDArray[np.float32]  # (T,) nats, the generator's
    versions: NDArray[np.int32]  # (T,)
    token_weights: NDArray[np.float32]  # (T,) weight of each token's loss term; 0 on injected tokens
    advantage: float


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One optimizer batch; sequences of one prompt stand together, so that packing can share it."""

    step: int  # the optimizer step this batch makes, from 1; trained on weights of version step − 1
    sequences: tuple[TrainSequence, ...]
    stats: dict[str, float]  # what the controller knows of the batch: rewards, lag, lengths ...

    def __reduce__(self) -> tuple[Any, ...]:
        return _batch, (self.step, Columns.of(self.sequences), self.stats)


@dataclass(frozen=True, slots=True)
class Columns(Generic[T]):
    """Records of one dataclass as columns: to pickle a thousand small arrays takes ten times as long.

    A column is a list, or where the values are (T,) arrays, their lengths and all of them end to end.
    """

    kind: type[T]
    columns: dict[str, Any]  # field -> column

    @classmethod
    def of(cls, records: Sequence[T]) -> Columns[T]:
        """At least one record, or a table without columns."""
        columns: dict[str, Any] = {}
        for name in [f.name for f in fields(records[0])] if records else ():  # type: ignore[arg-type]
            values = [getattr(record, name) for record in records]
            arrays = isinstance(values[0], np.ndarray)
            columns[name] = ([len(v) for v in values], np.concatenate(values)) if arrays else values
        return cls(type(records[0]) if records else object, columns)  # type: ignore[arg-type]

    def rows(self) -> list[T]:
        """The records; their arrays are views of the columns."""
        columns = [_split(*c) if isinstance(c, tuple) else c for c in self.columns.values()]
        return [self.kind(*row) for row in zip(*columns, strict=True)]


def _split(lengths: Sequence[int], flat: NDArray[Any]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _batch(step: int, sequences: Columns[TrainSequence], stats: dict[str, float]) -> TrainBatch:
    return TrainBatch(step, tuple(sequences.rows()), stats)
