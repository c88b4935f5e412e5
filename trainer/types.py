"""The data that travels between the processes: prompts, requests, completions, groups, batches.

Token in, token out: the ids, the generator's log-probabilities and the weight versions of tokens travel
together. Text is only decoded from ids and never tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
# The log-prob of a prompt's token, and the likeliest in its place with its own; nats, at temperature 1.
PROMPT_SCORE = np.dtype([("logprob", np.float32), ("best_id", np.int32), ("best_logprob", np.float32)])
FinishReason = Literal["stop", "length", "abort"]
Answer = str | tuple[str, ...]  # one accepted answer, or several, each of which is right
# The last two are of episodes whose environment failed, or gave no reward.
Outcome = Literal["correct", "wrong", "unparsable", "timeout", "crash", "error", "unscored"]


class Verdict(NamedTuple):
    """The judgement of one completion."""

    score: float  # 0 to 1
    outcome: Outcome


CORRECT, WRONG, UNPARSABLE = Verdict(1.0, "correct"), Verdict(0.0, "wrong"), Verdict(0.0, "unparsable")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task item. `prompt_id` is the hash of the prompt text, so equal texts are one prompt."""

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    answer: Answer
    metadata: dict[str, Any]  # the row's columns: what a scorer needs besides the answer; JSON-able
    task: str = ""  # its name in the mixture, or the held-out set's
    place: str = field(default="", compare=False)  # of its row, for errors, such as `data.jsonl:3`
    completions: tuple[tuple[int, ...], ...] = ()  # of its row, where the run learns them: token ids


@dataclass(frozen=True, slots=True)
class Request:
    """A request for `n` completions of one prompt. The engine may share the prompt's prefill."""

    request_id: str
    prompt_ids: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    seed: int  # the i-th completion's random numbers depend on (seed, i, position) only
    evaluation: bool = False  # counts as `evaluate` in the engine's time and goes before training requests
    keep_kv: tuple[FinishReason, ...] = ()  # ends after which a request that continues this one may follow
    # The request whose prompt and completion, with keys and values, this prompt begins with.
    continues: str = ""
    # Where each of the model's turns in it begins and ends: so an engine that lacks these keys and values can
    # compute them as they were.
    turns: tuple[int, ...] = ()
    # Return the experts of the tokens from this position on: earlier ones are known. −1: of none.
    experts_from: int = -1
    score_prompt: bool = False  # log-probs of the prompt's tokens, too; with n = 1, not with `continues`


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample of a request. A stop token, if any, is the last of token_ids."""

    request_id: str
    index: int  # 0 to n − 1
    token_ids: NDArray[np.int32]  # (T,)
    logprobs_gen: NDArray[np.float32]  # (T,) nats, of the sampled distribution (at the temperature)
    versions: NDArray[np.int32]  # (T,) weight version that produced each token
    finish_reason: FinishReason
    # (P − 1,) PROMPT_SCORE of the prompt's tokens from the second on, if the request asks for them.
    prompt_scores: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, PROMPT_SCORE))
    # Ids (models/experts.py) of the tokens of prompt and completion from `experts_from` to the one before the
    # last, which the model has not read.
    experts: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its reward; after an interruption: thinking + phrase + answer; of an environment: all
    turns of an episode."""

    token_ids: NDArray[np.int32]  # (T,)
    logprobs_gen: NDArray[np.float32]  # (T,) nats; 0 where not sampled
    versions: NDArray[np.int32]  # (T,)
    sampled: NDArray[np.bool_]  # (T,) False on injected tokens, which carry no loss
    text: str
    reward: float
    outcome: Outcome
    truncated: bool  # ended at the token limit
    interrupted: bool
    # The reward's parts before their weights, if several.
    scores: dict[str, float] = field(default_factory=dict)
    # Of an episode, for people: the `turns` as messages, their `count`, `tool_calls`, `seconds` and `error`.
    episode: dict[str, Any] = field(default_factory=dict)
    # (P + T − 1, layers · k) ids of the experts of prompt and completion, but for the last token.
    experts: NDArray[Any] | None = None

    @property
    def scored(self) -> bool:
        """False for an episode without a reward: it is neither trained on nor part of a mean."""
        return self.outcome not in ("error", "unscored")


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt. `group_id` counts the issued prompts from 0, without gaps."""

    group_id: int
    epoch: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    # (T,) nats, of each rollout, by a teacher behind a URL; empty without one.
    logprobs_ref: tuple[NDArray[np.float32], ...] = ()

    @property
    def pass_rate(self) -> float:
        """Share of the scored rollouts that are correct; 0 of none."""
        return float(np.mean([r.outcome == "correct" for r in self.rollouts if r.scored] or [False]))


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One completion, for the learner. All numbers are final: they are normalised over the batch."""

    prompt_ids: NDArray[np.int32]  # (P,)
    token_ids: NDArray[np.int32]  # (T,)
    logprobs_gen: NDArray[np.float32]  # (T,) nats
    versions: NDArray[np.int32]  # (T,)
    token_weights: NDArray[np.float32]  # (T,) of each token's loss term; 0 on injected tokens
    advantages: NDArray[np.float32]  # (T,)
    logprobs_old: NDArray[np.float32] | None = None  # (T,) nats: the ratio's anchor, if not logprobs_gen
    logprobs_ref: NDArray[np.float32] | None = None  # (T,) nats, of the reference model, for a KL penalty
    values: NDArray[np.float32] | None = None  # (T,) the critic's, before the first step on these tokens
    returns: NDArray[np.float32] | None = None  # (T,) what the critic learns
    # (P + T − 1, layers · k) ids of the experts to replay, of prompt and completion
    experts: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The learner's scores of one completion's tokens, under their present weights."""

    logprobs: NDArray[np.float32] | None = None  # (T,) nats, of the policy
    logprobs_ref: NDArray[np.float32] | None = None  # (T,) nats, of the reference model
    values: NDArray[np.float32] | None = None  # (T,) of the critic, each before its token


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One optimizer batch. Sequences of one prompt are neighbours, so that packing can share the prompt."""

    step: int  # from 1; it turns weights of version step − 1 into version step
    sequences: tuple[TrainSequence, ...]
    stats: dict[str, float]  # the controller's metrics of the batch: rewards, lag, lengths ...
    publish: bool = True  # the engines will need the new weights
    steps: float = 0.0  # of the whole run, as expected now; 0: pipeline.steps

    def __reduce__(self) -> tuple[Any, ...]:
        sequences = Columns.from_records(self.sequences)
        return _train_batch, (self.step, sequences, self.stats, self.publish, self.steps)


@dataclass(frozen=True, slots=True)
class Columns(Generic[T]):
    """Records of one dataclass as columns, which pickle ten times as fast as a thousand small arrays.

    A column of (T, ...) arrays is a list of their lengths and one array of all values; any other is a list.
    """

    kind: type[T]
    columns: dict[str, Any]  # by field name

    @classmethod
    def from_records(cls, records: Sequence[T]) -> Columns[T]:
        """The records' columns; none if there is no record."""
        columns: dict[str, Any] = {}
        for name in [f.name for f in fields(records[0])] if records else ():  # type: ignore[arg-type]  # a dataclass
            values = [getattr(record, name) for record in records]
            arrays = all(isinstance(v, np.ndarray) for v in values)
            columns[name] = ([len(v) for v in values], np.concatenate(values)) if arrays else values
        return cls(type(records[0]) if records else object, columns)  # type: ignore[arg-type]  # none: no T

    def to_records(self) -> list[T]:
        """The records; their arrays are views of the columns."""
        columns = [split(*c) if isinstance(c, tuple) else c for c in self.columns.values()]
        return [self.kind(*row) for row in zip(*columns, strict=True)]


def split(lengths: Sequence[int], flat: NDArray[Any]) -> list[NDArray[Any]]:
    """Views of consecutive parts; for few parts ten times as fast as np.split."""
    return [flat[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _train_batch(
    step: int, sequences: Columns[TrainSequence], stats: dict[str, float], publish: bool, steps: float
) -> TrainBatch:
    return TrainBatch(step, tuple(sequences.to_records()), stats, publish, steps)
