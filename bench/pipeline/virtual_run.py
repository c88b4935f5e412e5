"""The trainer's own controller at the paper's sizes, with engines and a learner that only take their time.

  python -m bench.pipeline.virtual_run     Qwen3-8B on eight H100 or H200, 48 prompts × 16, PipelineRL-8

Controller, engine pool and the engines' queue are the trainer's; the clock is virtual, so that hours pass in
seconds. Held beside it is the closed form: the slower side alone sets the pace. The speeds come from a model
of the hardware (docs/gpu.md), and none has been measured.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from bench.pipeline.lengths import lognormal_lengths
from bench.table import table
from trainer.config import Config, InterruptionConfig
from trainer.controller.controller import Controller
from trainer.controller.data import Dataset
from trainer.controller.deadline import Deadline
from trainer.controller.rewards import Scored
from trainer.controller.rollout import RolloutContext
from trainer.controller.sampler import Sampler
from trainer.engines.backend import RequestQueue
from trainer.engines.pool import EnginePool
from trainer.messages import StepDone
from trainer.types import Completion, Prompt, Request, TrainBatch

UNIT = 100  # tokens that count as one here: arrays of every token would fill the memory
PROMPTS, COMPLETIONS, MAX_LAG = 48, 16, 8  # the paper's
THINKING = 10_000, 12_000  # tokens until the interruption, the paper's
ANSWER = 500  # tokens at most after it
MEAN, P95, LONGEST = 8_500, 20_000, 40_000  # of completions that nobody interrupts


@dataclass(frozen=True, slots=True)
class Speeds:
    """What engines and learner do in a second."""

    name: str
    engines: int
    slots: int  # sequences at once on each engine
    engine_tokens_per_s: float  # of all engines together, their slots full
    learner_tokens_per_s: float
    push_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run; times in seconds."""

    first_step: float
    step: float  # mean between the first step's end and the last's
    lag: float  # mean over the trained tokens, in steps
    lag_max: int
    learner_idle: float  # share of the time after the first step
    engine_idle: float
    tokens: float  # of a batch, mean


# Modelled for Qwen3-8B at 16K; the learner at MFU .25 and .40 on two H200, at .40 on four and three H100.
SPEEDS = (
    Speeds("H200, 2 + 6, MFU .25", 6, 64, 17_000, 6_100_000 / 607),
    Speeds("H200, 2 + 6, MFU .40", 6, 64, 17_000, 6_100_000 / 380),
    Speeds("H100, 4 + 4, MFU .40", 4, 64, 8_200, 6_100_000 / 303),
    Speeds("H100, 3 + 5, MFU .40", 5, 64, 10_250, 6_100_000 / 404),
)


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


class TimedEngine:
    """Samples take their length times the time of a token; the queue is that of the real engines."""

    def __init__(self, name: str, speeds: Speeds, lengths: NDArray[np.int64]) -> None:
        self.name, self._lengths = name, lengths
        self._token_s = speeds.slots * speeds.engines * UNIT / speeds.engine_tokens_per_s
        self._slots, self._push_s = speeds.slots, speeds.push_s
        self._queue, self._free = RequestQueue(max_positions=10**9), speeds.slots
        self._held: list[tuple[float, int]] = [(0.0, 0)]  # since when which version
        self._streams: dict[str, asyncio.Queue[Completion]] = {}
        self.busy_s = 0.0  # over all slots

    async def stream(self, request: Request) -> AsyncIterator[list[Completion]]:
        """As EngineClient.stream."""
        queue = self._streams[request.request_id] = asyncio.Queue[Completion]()
        self._queue.add(request)
        self._admit()
        for _ in range(request.n):
            yield [await queue.get()]
        del self._streams[request.request_id]

    async def update_weights(self, version: int, path: str) -> None:
        """As EngineClient.update_weights; decoding goes on meanwhile."""
        await asyncio.sleep(self._push_s)
        self._held.append((asyncio.get_running_loop().time(), version))

    def _admit(self) -> None:
        loop = asyncio.get_running_loop()
        while self._free and self._queue.next_request:
            samples = self._queue.take(1)
            self._free -= 1
            wanted = self._wanted(samples.request)
            length = min(wanted, samples.request.max_tokens)
            args = (samples.request, length, wanted > length, loop.time())
            loop.call_later(length * self._token_s, self._ended, *args)

    def _wanted(self, request: Request) -> int:
        """Tokens after which the model itself would end."""
        if request.continues:
            return 1 + request.seed % request.max_tokens
        return int(self._lengths[request.seed % len(self._lengths)])

    def _ended(self, request: Request, length: int, cut: bool, began: float) -> None:
        self._free += 1
        self.busy_s += length * self._token_s
        times = began + self._token_s * np.arange(1, length + 1)
        since, versions = zip(*self._held, strict=True)
        held = np.asarray(versions, np.int32)[np.searchsorted(since, times, "right") - 1]
        ids, logprobs = np.ones(length, np.int32), np.full(length, -1.0, np.float32)
        done = Completion(request.request_id, 0, ids, logprobs, held, "length" if cut else "stop")
        self._streams[request.request_id].put_nowait(done)
        self._admit()


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step, as it ended."""

    end: float
    seconds: float
    lag: NDArray[np.int64]  # of every token
    engines_busy_s: float  # of all slots, since the start


class TimedLearner:
    """A step takes its tokens' time."""

    def __init__(self, tokens_per_s: float, engines: Sequence[TimedEngine]) -> None:
        self._token_s, self._engines = UNIT / tokens_per_s, engines
        self.steps: list[Step] = []

    async def train(self, batch: TrainBatch) -> StepDone:
        """As LearnerClient.train."""
        lag = batch.step - 1 - np.concatenate([s.versions for s in batch.sequences]).astype(np.int64)
        seconds = len(lag) * self._token_s
        await asyncio.sleep(seconds)
        busy = sum(engine.busy_s for engine in self._engines)
        self.steps.append(Step(asyncio.get_running_loop().time(), seconds, lag, busy))
        return StepDone(batch.step, "", {})


class _Rewards:
    async def score(self, prompt: Prompt, text: str, tokens: int, step: int | None) -> Scored:
        return Scored(float(tokens % 2), "correct" if tokens % 2 else "wrong", {})


class _NoJournal:
    def record(self, *args: Any) -> None:
        """Writes nothing."""

    issued = finished = trained = record


def run(speeds: Speeds, steps: int = 24, seed: int = 0) -> Result:
    """A training of so many optimizer steps."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_train(speeds, _config(folder, steps, seed)))


def _config(folder: str, steps: int, seed: int) -> Config:
    config = Config(run_dir=folder, seed=seed)
    low, high = (n // UNIT for n in THINKING)
    thinking = InterruptionConfig(enabled=True, lo=low, hi=high, answer_tokens=ANSWER // UNIT, end_marker="")
    return replace(
        config,
        engine=replace(config.engine, interruption=thinking),
        pipeline=replace(
            config.pipeline, steps=steps, max_lag=MAX_LAG, prompts_per_step=PROMPTS,
            completions_per_prompt=COMPLETIONS, deadline_s=1e9,
        ),
        evaluation=replace(config.evaluation, every=0, samples=1),
        objective=replace(config.objective, zero_variance="keep"),
        logging=replace(config.logging, checkpoint_every=0, samples_per_step=0),
    )  # fmt: skip


async def _train(speeds: Speeds, config: Config) -> Result:
    lengths = lognormal_lengths(MEAN, P95, LONGEST, COMPLETIONS, seed=config.seed).ravel() // UNIT + 1
    engines = [TimedEngine(f"engine-{i}", speeds, lengths) for i in range(speeds.engines)]
    learner, deadline = (
        TimedLearner(speeds.learner_tokens_per_s, engines),
        Deadline(config.pipeline.deadline_s),
    )
    prompts = tuple(Prompt(f"{i:05d}", "", (1,), "", {}) for i in range(PROMPTS * 100))
    pool = EnginePool(engines, deadline.wait_for)  # type: ignore[arg-type]  # as much of a client as it needs
    rewards: Any = {name: _Rewards() for name in config.tasks}
    ctx = RolloutContext(
        config,
        pool,
        rewards,
        lambda many: [""] * len(many),
        stop_ids=frozenset(),
        phrase_ids=(1,),
        deadline=deadline,
    )
    sampler, client, journal = (
        Sampler(prompts, config.pipeline, config.seed),
        cast(Any, learner),
        cast(Any, _NoJournal()),
    )
    began: list[float] = []

    def emit(kind: str, data: dict[str, Any]) -> None:
        if kind == "training_begins":
            began.append(asyncio.get_running_loop().time())

    await Controller(ctx, Dataset(prompts, prompts[:1]), sampler, client, journal, emit).run()
    return _result(speeds, began[0], learner.steps)


def _result(speeds: Speeds, began: float, steps: Sequence[Step]) -> Result:
    first, last, counted = steps[0], steps[-1 - MAX_LAG], steps[1:-MAX_LAG]  # then no new groups start
    wall, slots = last.end - first.end, speeds.engines * speeds.slots
    lag = np.concatenate([step.lag for step in counted])
    return Result(
        first_step=first.end - first.seconds - began,
        step=wall / len(counted),
        lag=float(lag.mean()),
        lag_max=int(lag.max()),
        learner_idle=1 - sum(step.seconds for step in counted) / wall,
        engine_idle=1 - (last.engines_busy_s - first.engines_busy_s) / slots / wall,
        tokens=UNIT * len(lag) / len(counted),
    )


def closed_form(speeds: Speeds, tokens: float) -> tuple[float, float]:
    """Seconds in which the engines make a batch of so many tokens, and in which the learner trains on it."""
    return tokens / speeds.engine_tokens_per_s, tokens / speeds.learner_tokens_per_s


def main() -> None:
    """Print the table."""
    rows = []
    for speeds in SPEEDS:
        result = run(speeds)
        times = [*closed_form(speeds, result.tokens), result.step, result.first_step]
        idle = [f"{max(0.0, share):.0%}" for share in (result.learner_idle, result.engine_idle)]
        lag = f"{result.lag:.2f} (≤ {result.lag_max})"
        rows.append([speeds.name, *(f"{seconds:.0f}" for seconds in times), lag, *idle])
    head = ["GPUs, learner + engines", "engines s", "learner s", "step s", "first step s", "lag"]
    head += ["learner idle", "engines idle"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
