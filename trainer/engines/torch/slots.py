"""The torch engine's sequences as arrays, one row per slot; the active slots are always 0 .. active − 1.

A step touches thousands of sequences, so only freeing slots loops over them in Python.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.engines.backend import Samples, random_key
from trainer.types import Completion, FinishReason, Request

_ROW = np.dtype(
    [
        ("key", np.uint64),  # where its random numbers start
        ("count", np.int64),  # tokens generated
        ("prompt", np.int64),  # tokens of the prompt
        ("max_tokens", np.int64),
        ("temperature", np.float32),
        ("evaluation", np.bool_),
        ("stops", np.int64),  # row of `_is_stop` with its stop ids
    ]
)
_TOKEN = np.dtype([("id", np.int32), ("logprob", np.float32), ("version", np.int32)])


class Slots:
    """The samples being generated."""

    def __init__(self, capacity: int, vocab: int) -> None:
        self.capacity, self.active = capacity, 0
        # (capacity, positions, layers · k) of prompts and completions, once any are recorded.
        self.experts: NDArray[Any] | None = None
        self.requests: list[tuple[Request, int]] = []  # of each slot: the request and the sample's index
        self._rows = np.zeros(capacity, _ROW)
        self._tokens = np.zeros((capacity, 64), _TOKEN)
        self._vocab = vocab
        self._stop_rows: dict[frozenset[int], int] = {}
        self._is_stop = np.zeros((0, vocab), np.bool_)  # (stop sets, V)

    def column(self, name: str) -> NDArray[Any]:
        """A field of all active slots."""
        return self._rows[name][: self.active].copy()

    def newest(self, active: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The newest token of each of the first `active` slots, unseen by the model yet, and its position."""
        rows = self._rows[:active]
        newest = rows["count"] - 1
        return self._tokens["id"][np.arange(active), newest], rows["prompt"] + newest

    def add(self, samples: Samples) -> None:
        """Put samples into the next slots."""
        request, count = samples.request, samples.count
        if request.max_tokens > self._tokens.shape[1]:
            wider = np.zeros((self.capacity, max(request.max_tokens, 2 * self._tokens.shape[1])), _TOKEN)
            wider[:, : self._tokens.shape[1]] = self._tokens
            self._tokens = wider
        rows = self._rows[self.active : self.active + count]
        indices = range(samples.first, samples.first + count)
        rows["key"] = [random_key(request.seed, i) for i in indices]
        rows["count"], rows["prompt"] = 0, len(request.prompt_ids)
        rows["max_tokens"], rows["temperature"] = request.max_tokens, request.temperature
        rows["evaluation"], rows["stops"] = request.evaluation, self._stop_row(request.stop_ids)
        self.requests += [(request, i) for i in indices]
        self.active += count

    def append(
        self, ids: NDArray[np.int64], logprobs: NDArray[np.floating], version: int
    ) -> list[tuple[int, FinishReason]]:
        """Append a token to each active slot; returns the slots that end with it, and why."""
        rows = self._rows[: self.active]
        new = np.arange(self.active), rows["count"]
        for name, value in (("id", ids), ("logprob", logprobs), ("version", version)):
            self._tokens[name][new] = value
        rows["count"] += 1
        stopped = self._is_stop[rows["stops"], ids]
        ended = np.flatnonzero(stopped | (rows["count"] == rows["max_tokens"]))
        return [(int(slot), "stop" if stopped[slot] else "length") for slot in ended]

    def completion(self, slot: int, reason: FinishReason) -> Completion:
        """The tokens generated in a slot, as a Completion."""
        request, index = self.requests[slot]
        tokens = self._tokens[slot, : self._rows["count"][slot]]
        ids, logprobs, versions = (tokens[name].copy() for name in ("id", "logprob", "version"))
        experts = None
        if self.experts is not None and request.experts_from >= 0:
            fed = len(request.prompt_ids) + len(ids) - 1
            experts = self.experts[slot, request.experts_from : fed].copy()
        return Completion(request.request_id, index, ids, logprobs, versions, reason, experts=experts)

    def record(self, slots: Any, positions: Any, experts: NDArray[Any]) -> None:
        """Note the experts (..., layers · k) of tokens at these positions of these slots (...)."""
        length = 1 + int(np.max(positions, initial=0))
        if self.experts is None or self.experts.shape[1] < length:
            wider = np.zeros((self.capacity, 2 * length, experts.shape[-1]), experts.dtype)
            if self.experts is not None:
                wider[:, : self.experts.shape[1]] = self.experts
            self.experts = wider
        self.experts[slots, positions] = experts

    def free(self, ended: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Free these slots by moving the last ones into them: slot `sources[i]` becomes `targets[i]`."""
        remaining = self.active - len(ended)
        freed = np.asarray(ended, np.int64)
        targets = freed[freed < remaining]
        sources = np.setdiff1d(np.arange(remaining, self.active), freed, assume_unique=True)
        self._rows[targets], self._tokens[targets] = self._rows[sources], self._tokens[sources]
        if self.experts is not None:
            self.experts[targets] = self.experts[sources]
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            self.requests[target] = self.requests[source]
        del self.requests[remaining:]
        self.active = remaining
        return sources, targets

    def _stop_row(self, stop_ids: frozenset[int]) -> int:
        if stop_ids not in self._stop_rows:
            self._stop_rows[stop_ids] = len(self._stop_rows)
            row = np.isin(np.arange(self._vocab), list(stop_ids))
            self._is_stop = np.concatenate([self._is_stop, row[None]])
        return self._stop_rows[stop_ids]
