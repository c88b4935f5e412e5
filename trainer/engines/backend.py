"""Shared by the processes of torch/ and vllm/: waiting requests, the controller's messages, reports.

Request ──add──> RequestQueue ──take──> samples to generate, continued ones first
                      └─────────abort──> empty completions of samples that never started
"""

import time
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from trainer.config import ConfigError
from trainer.messages import Event, Shutdown
from trainer.roles import run_role
from trainer.telemetry import Clock, send
from trainer.types import Completion, Request

REPORT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples first .. first + count − 1 of a request."""

    request: Request
    first: int
    count: int


class RequestQueue:
    """Samples that wait for a free slot: those that continue others, then evaluations, then training; each
    in order of arrival. A completion that waited for its second part behind new ones would hold up its batch
    for as long as all of them take."""

    def __init__(self, max_positions: int) -> None:
        self._max_positions = max_positions  # of a prompt and its completion together
        self._waiting: list[Samples] = []  # the next first

    @property
    def next_request(self) -> Request | None:
        """The request whose samples `take` returns next."""
        return self._waiting[0].request if self._waiting else None

    def add(self, request: Request) -> None:
        """Queue all samples of a request; ConfigError if the engine cannot serve it."""
        prompt, new = len(request.prompt_ids), request.max_tokens
        if not 0 < prompt < prompt + new <= self._max_positions:
            raise ConfigError(
                f"request {request.request_id} has {prompt} prompt tokens and asks for {new} new ones; "
                f"expected 1 of each at least, {self._max_positions} together at most. Lower "
                "engine.max_new_tokens or data.max_prompt_tokens"
            )
        insort(self._waiting, Samples(request, first=0, count=request.n), key=_class)

    def take(self, limit: int) -> Samples:
        """Remove and return at most `limit` samples of `next_request`."""
        head = self._waiting.pop(0)
        count = min(head.count, limit)
        if count < head.count:
            self._waiting.insert(0, replace(head, first=head.first + count, count=head.count - count))
        return replace(head, count=count)

    def abort(self, request_ids: frozenset[str]) -> list[Completion]:
        """Remove these requests; an empty completion for each of their samples."""
        ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        aborted = [x for x in self._waiting if x.request.request_id in request_ids]
        self._waiting = [x for x in self._waiting if x.request.request_id not in request_ids]
        samples = [(x.request.request_id, i) for x in aborted for i in range(x.first, x.first + x.count)]
        return [Completion(name, i, ids, logprobs, ids, "abort") for name, i in samples]


def _class(samples: Samples) -> int:
    request = samples.request
    return 0 if request.continues else 1 if request.evaluation else 2


class Activity:
    """Counts an engine's tokens and busy seconds, and reports them to the launcher."""

    def __init__(self, clock: Clock, telemetry: Connection) -> None:
        self._clock, self._telemetry = clock, telemetry
        self.tokens, self.busy_s = 0, 0.0
        self._observed: dict[str, float] = {}  # since the last report
        self._reported, self._reported_at = 0, time.monotonic()

    def book(self, seconds: float, evaluation_share: float) -> None:
        """Count seconds of generation; the share of evaluations goes to the state `evaluate`."""
        self.busy_s += seconds
        if evaluation_share:
            self._clock.split({"generate": 1 - evaluation_share, "evaluate": evaluation_share})

    def observe(self, statistics: dict[str, float]) -> None:
        """Keep the highest of each of these numbers for the next report."""
        self._observed = {k: max(x, self._observed.get(k, x)) for k, x in statistics.items()}

    def report(self, idle: bool) -> None:
        """Send the counts if there are new tokens: every second, and at once when the engine becomes idle."""
        now = time.monotonic()
        if self.tokens > self._reported and (idle or now - self._reported_at >= REPORT_EVERY_S):
            counts = {"tokens": self.tokens, "busy_s": self.busy_s}
            send(self._telemetry, Event("engine", now, counts | self._observed))
            self._observed = {}
            self._reported, self._reported_at = self.tokens, now


def run_engine(role: str, telemetry: Connection, work: Callable[[Clock], None]) -> None:
    """Do the work of an engine's process; its error, if it fails, and its time go to the launcher."""
    clock = Clock(role, partial(send, telemetry))
    try:
        run_role(role, telemetry, partial(work, clock))
    finally:
        clock.flush()


def weight_files(path: str) -> list[str]:
    """The safetensors files of a weight push: one, those of a model's folder, or none (an empty path)."""
    if not path or not Path(path).is_dir():
        return [path] * bool(path)
    return sorted(map(str, Path(path).glob("*.safetensors")))


def random_key(seed: int, index: int) -> int:
    """The start of a sample's random sequence, 64 bits that depend on (seed, index) alone."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0])


def kv_shape(model: Any) -> tuple[int, int, int]:
    """Layers, KV heads and dimensions of a head, by a model's config of transformers."""
    heads = model.num_attention_heads
    size = getattr(model, "head_dim", None) or model.hidden_size // heads
    return model.num_hidden_layers, getattr(model, "num_key_value_heads", None) or heads, size


def divergence_error(version: int) -> ConfigError:
    """The error for log-probs that are not finite."""
    return ConfigError(
        f"the engine's log-probs by weights version {version} are not finite: training has diverged. "
        "Lower learner.lr, then --resume from an earlier checkpoint"
    )


def read_messages(conn: Connection, deliver: Callable[[object], None]) -> None:
    """Start a thread that delivers the controller's messages as they come, and a Shutdown when it dies.

    Read at once, whatever the engine is doing: two processes that both send into full pipes and do not read
    would wait forever.
    """

    def read() -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    deliver(conn.recv())
        finally:
            deliver(Shutdown())

    Thread(target=read, daemon=True).start()
