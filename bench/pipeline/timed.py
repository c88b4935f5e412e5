"""Engines and a learner that only take their time, in virtual time: for the trainer's own controller.

An engine makes one token of each of its n sequences in decode_step_s + decode_token_s · n seconds; it admits
prompts, and takes new weights, between two of these steps.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.engines.backend import RequestQueue
from trainer.messages import StepDone
from trainer.types import Completion, Request, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One optimizer step's work."""

    prompts: int
    completions: int  # of a prompt
    lengths: NDArray[np.int64]  # (n,) tokens; a completion has one of them
    prompt_tokens: float = 0.0
    thinking: tuple[int, int, int] | None = None  # tokens until it is interrupted: least, most; of the answer
    unit: int = 1  # tokens that count as one: arrays of every token would fill the memory

    @property
    def context(self) -> float:
        """Tokens before the one being generated, on average over the tokens."""
        return self.prompt_tokens + float((self.lengths**2).mean() / self.lengths.mean() / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds of work: an engine's, and the learner's on one device."""

    decode_step_s: float  # of one token of every running sequence, whatever their number
    decode_token_s: float  # more for each of them
    slots: int  # sequences running at once on one engine
    train_token_s: float  # learner, per token
    prefill_token_s: float = 0.0  # the engine's other work stops meanwhile
    push_s: float = 0.0  # the engine stands still to take new weights
    step_s: float = 0.0  # learner, per step: optimizer, publishing; more devices do not shorten it


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        selector = self._selector  # type: ignore[attr-defined]  # asyncio's own, which the stubs leave out
        self._select, selector.select = selector.select, self._jump

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def _jump(self, timeout: float | None) -> Any:
        if timeout is None:
            raise RuntimeError("everything waits, and nothing will happen: a deadlock")
        self._now += timeout
        return self._select(0)


class Sample(NamedTuple):
    """A sequence that an engine decodes: readings of its clock, and its completion's request and index."""

    end: int
    number: int  # no two are equal: requests have no order
    request: Request
    completion: int
    start: int


class TimedEngine:
    """Generates completions of known lengths; the queue is that of the real engines."""

    def __init__(self, name: str, work: Workload, rates: Rates) -> None:
        self.name, self._work, self._rates = name, work, rates
        self._queue = RequestQueue(max_positions=10**9)
        self._clock = 0  # units made of a sequence that runs from the start
        self._held: list[tuple[int, int]] = [(0, 0)]  # from which reading of the clock on which version
        self._running: list[Sample] = []  # a heap
        self._admitted = 0
        self._streams: dict[str, asyncio.Queue[Completion]] = {}
        self._pushes: list[tuple[int, asyncio.Event]] = []
        self._wake = asyncio.Event()
        self.busy_s = 0.0
        self._task = asyncio.create_task(self._run())

    async def stream(self, request: Request) -> AsyncIterator[list[Completion]]:
        """Same contract as EngineClient.stream."""
        queue = self._streams[request.request_id] = asyncio.Queue[Completion]()
        self._queue.add(request)
        self._wake.set()
        for _ in range(request.n):
            yield [await queue.get()]
        del self._streams[request.request_id]

    async def update_weights(self, version: int, path: str) -> None:
        """Same contract as EngineClient.update_weights."""
        self._pushes.append((version, event := asyncio.Event()))
        self._wake.set()
        await event.wait()

    async def _run(self) -> None:
        rates, unit = self._rates, self._work.unit
        while True:
            while not (self._running or self._pushes or self._queue.next_request):
                self._wake.clear()
                await self._wake.wait()
            start = asyncio.get_running_loop().time()
            stop_s = self._admit() * rates.prefill_token_s + rates.push_s * len(self._pushes)
            step_s = (rates.decode_step_s + rates.decode_token_s * len(self._running)) * unit
            pushes, self._pushes = self._pushes, []
            await asyncio.sleep(stop_s)
            for version, event in pushes:
                self._held.append((self._clock, version))
                event.set()
            if self._running:
                await asyncio.sleep(step_s)
                self._clock += 1
            self.busy_s += asyncio.get_running_loop().time() - start
            while self._running and self._running[0].end <= self._clock:
                self._end(heapq.heappop(self._running))

    def _admit(self) -> float:
        """Let free slots take what waits; the tokens to prefill."""
        prefill = 0.0
        while len(self._running) < self._rates.slots and self._queue.next_request:
            samples = self._queue.take(1)
            request, index = samples.request, samples.first
            prefill += self._work.prompt_tokens * (index == 0 and not request.continues)
            length = min(self._wanted(request, index), request.max_tokens)
            self._admitted += 1
            sample = Sample(self._clock + length, self._admitted, request, index, self._clock)
            heapq.heappush(self._running, sample)
        return prefill

    def _wanted(self, request: Request, index: int) -> int:
        """Units after which the model itself would end."""
        if request.continues:
            return 1 + request.seed % request.max_tokens
        lengths = self._work.lengths
        draw = np.random.SeedSequence([request.seed % 2**63, index]).generate_state(1)[0]
        return max(1, round(int(lengths[draw % len(lengths)]) / self._work.unit))

    def _end(self, sample: Sample) -> None:
        end, _, request, index, start = sample
        since, versions = zip(*self._held[-64:], strict=True)
        reading = np.arange(start, end)
        token_versions = np.asarray(versions, np.int32)[np.searchsorted(since, reading, "right") - 1]
        ids, logprobs = np.ones(end - start, np.int32), np.full(end - start, -1.0, np.float32)
        cut = end - start < self._wanted(request, index)
        reason: Literal["length", "stop"] = "length" if cut else "stop"
        done = Completion(request.request_id, index, ids, logprobs, token_versions, reason)
        self._streams[request.request_id].put_nowait(done)


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step, as it ended."""

    start: float
    end: float
    lag: NDArray[np.int64]  # of every unit
    engines_busy_s: float  # of all of them, since the beginning


class TimedLearner:
    """A step takes its tokens' time."""

    def __init__(self, work: Workload, rates: Rates, devices: int, engines: Sequence[TimedEngine]) -> None:
        self._work, self._rates, self._devices, self._engines = work, rates, devices, engines
        self.steps: list[Step] = []

    async def train(self, batch: TrainBatch) -> StepDone:
        """Same contract as LearnerClient.train."""
        lag = batch.step - 1 - np.concatenate([s.versions for s in batch.sequences]).astype(np.int64)
        start, tokens = asyncio.get_running_loop().time(), len(lag) * self._work.unit
        tokens += round(self._work.prompts * self._work.prompt_tokens)
        seconds = self._rates.step_s + tokens * self._rates.train_token_s / self._devices
        await asyncio.sleep(seconds)
        busy = sum(engine.busy_s for engine in self._engines)
        self.steps.append(Step(start, asyncio.get_running_loop().time(), lag, busy))
        return StepDone(batch.step, "", {})
