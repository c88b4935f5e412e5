"""Fakes for tests of the loop, which obey the protocols and record what happens, and runs of a controller."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import Config, ConfigError, VerifierConfig
from trainer.controller.context import RolloutContext
from trainer.controller.controller import Controller
from trainer.controller.data import Dataset
from trainer.controller.deadline import Deadline
from trainer.controller.journal import Journal, records
from trainer.controller.mixture import sampler_of
from trainer.controller.rewards import Scored
from trainer.messages import StepDone
from trainer.types import Completion, FinishReason, Group, Prompt, Request, Rollout, TrainBatch

CALLS = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
Events = list[tuple[str, dict[str, Any]]]


def prompts(n: int, start: int = 0) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"id{i:04d}", f"text {i}", (1, 2, i % 50), "7", {}) for i in range(start, start + n))


def rollout(reward: float, sampled: Sequence[bool] = (True,), **more: Any) -> Rollout:
    """A completion of the tokens 0, 1, 2 …, of which some are injected; one with a reward is correct."""
    n, outcome = len(sampled), "correct" if reward > 0 else "wrong"
    fields: dict[str, Any] = {
        "token_ids": np.arange(n, dtype=np.int32), "logprobs_gen": np.full(n, -0.5, np.float32),
        "versions": np.zeros(n, np.int32), "sampled": np.array(sampled, bool), "text": "", "reward": reward,
        "outcome": outcome, "truncated": False, "interrupted": not all(sampled),
    }  # fmt: skip
    return Rollout(**fields | more)


def group(prompt: Prompt, correct: int, total: int) -> Group:
    """A group of which so many rollouts are correct."""
    return Group(0, 0, prompt, tuple(rollout(1.0 if i < correct else -1.0) for i in range(total)))


def experts_of(ids: Sequence[int]) -> NDArray[np.uint8]:
    """(T − 1, 2) the experts of all these tokens but the last: here a token's position, and itself."""
    return np.array([(i % 250, token % 250) for i, token in enumerate(ids[:-1])], np.uint8).reshape(-1, 2)


@dataclass(eq=False)
class FakeEngine:
    """Makes a token every `tick` seconds; each token has the version held at that moment. It does not answer
    requests whose names begin with `stuck`."""

    lengths: Any = lambda request, index: 5
    tick: float = 0.001
    load_s: float = 0.0
    stuck: str = "none"
    log: list[str] = field(default_factory=list)
    version: int = 0
    running: int = 0
    most_running: int = 0
    paused: bool = False
    requests: list[Request] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    # of tokens, by a request's name up to its dot
    versions: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    async def stream(self, request: Request) -> AsyncIterator[list[Completion]]:
        self.requests.append(request)
        if request.request_id.startswith(self.stuck):
            await asyncio.sleep(100)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for index in range(request.n):
            versions = []
            wanted = self.lengths(request, index)
            for _ in range(min(wanted, request.max_tokens)):
                await asyncio.sleep(self.tick)
                versions.append(self.version)
            n = len(versions)
            self.versions[request.request_id.partition(".")[0]].update(versions)
            reason: FinishReason = "length" if wanted > request.max_tokens else "stop"
            ids = np.arange(n, dtype=np.int32) + 10
            logprobs = np.full(n, -0.5, np.float32)
            done = Completion(request.request_id, index, ids, logprobs, np.array(versions, np.int32), reason)
            if request.experts_from >= 0:
                experts = experts_of([*request.prompt_ids, *ids.tolist()])[request.experts_from :]
                done = replace(done, experts=experts)
            yield [done]
        self.running -= 1

    async def update_weights(self, version: int, path: str) -> None:
        await asyncio.sleep(self.load_s)
        self.version = version
        self.held.append(version)
        self.log.append(f"label {version}")

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        assert self.paused
        self.log.append(call)

    async def pause(self) -> None:
        await asyncio.sleep(0.002)
        assert not self.paused, "paused twice"
        self.paused = True
        self.log.append("pause")

    def resume(self) -> None:
        self.paused = False
        self.log.append("resume")

    def waiting(self, request_id: str, state: str) -> AbstractContextManager[None]:
        return nullcontext()

    def release(self, request_id: str) -> None:
        self.log.append(f"release {request_id}")


@dataclass(eq=False)
class FakeLearner:
    """Takes `step_s` a step, keeps the batches, refuses the step `refused`, pushes as vLLM's sender does."""

    step_s: float = 0.0
    refused: int = 0
    log: list[str] = field(default_factory=list)
    batches: list[TrainBatch] = field(default_factory=list)
    saved: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def train(self, batch: TrainBatch) -> StepDone:
        if batch.step == self.refused:
            raise ConfigError(f"step {self.refused}: loss is nan")
        self.log.append(f"step {batch.step}")
        await asyncio.sleep(self.step_s)
        self.batches.append(batch)
        return StepDone(batch.step, "", {})

    async def push(self, transfer: Any, deadline: Any) -> None:
        steps = len(self.batches)
        for call in CALLS:
            await transfer(call, {})
        assert len(self.batches) == steps, "a step came in between"

    async def save(self, path: str, state: dict[str, Any]) -> None:
        self.log.append("save")
        self.saved.append((path, state))


class FakeRewards:
    """Correct for even indices, by counting calls; as if it took a worker for each."""

    def __init__(self, config: VerifierConfig) -> None:
        self.config, self.texts = config, list[str]()

    async def score(self, prompt: Prompt, text: str, tokens: int, step: int | None) -> Scored:
        await asyncio.sleep(0)
        self.texts.append(text)
        right = len(self.texts) % 2 == 0
        reward = self.config.correct_reward if right else self.config.wrong_reward
        return Scored(reward, "correct" if right else "wrong", {})


def context(config: Config, engine: Any, **more: Any) -> RolloutContext:
    rewards: Any = {name: FakeRewards(task.verifier) for name, task in config.tasks.items()}
    decode = lambda batch: [" ".join(map(str, ids)) for ids in batch]  # noqa: E731
    deadline = Deadline(config.pipeline.deadline_s)
    return RolloutContext(config, engine, rewards, decode, frozenset({0}), (97, 98, 99), deadline, **more)


def having(config: Config, **sections: dict[str, Any]) -> Config:
    """The config with these keys of its sections changed."""
    return replace(config, **{k: replace(getattr(config, k), **v) for k, v in sections.items()})


def configured(folder: Path, k: int, steps: int = 12, prompts_per_step: int = 4, **pipeline: Any) -> Config:
    """A run of two completions a prompt that evaluates at every fourth step."""
    pipeline = {"max_lag": k, "steps": steps, "prompts_per_step": prompts_per_step} | pipeline
    return having(
        Config(run_dir=str(folder)),
        model={"dtype": "float32"},
        pipeline={"completions_per_prompt": 2, "deadline_s": 20.0} | pipeline,
        evaluation={"every": 4, "samples": 1},
        engine={"max_new_tokens": 40},
        objective={"zero_variance": "keep"},
    )


def controller(
    config: Config,
    engine: Any = None,
    learner: Any = None,
    events: Events | None = None,
    dataset: Dataset | None = None,
) -> Controller:
    """A controller, by default of 20 prompts; call it within an event loop if it shall run."""
    dataset = dataset or Dataset(prompts(20), prompts(3, start=100))
    events = [] if events is None else events
    emit = lambda kind, data: events.append((kind, data))  # noqa: E731  # a one-line spy
    sampler = sampler_of(config, dataset.train, lambda text: None)
    journal, ctx = Journal(Path(config.run_dir) / "journal"), context(config, engine or FakeEngine())
    client: Any = learner or FakeLearner()
    return Controller(ctx, dataset, sampler, client, journal, emit)


def train(
    config: Config,
    engine: Any = None,
    learner: Any = None,
    events: Events | None = None,
    state: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    stop_after: int | None = None,
) -> Controller:
    """Run a controller to its end, or stop it after a step, and save; with a `state`, from there on."""
    run = controller(config, engine, learner, events, dataset)
    if state is not None:
        run.restore(state)

    async def finish() -> None:
        await run.weights.push(run.version)  # as before every run's start
        await asyncio.wait_for(run.run(), 30)
        await run.save()

    step = run.learner.train

    async def stopping(batch: TrainBatch) -> StepDone:
        if batch.step == stop_after:
            run.stop.set()
        return await step(batch)

    run.learner.train = stopping  # type: ignore[method-assign]
    asyncio.run(finish())
    run.learner.train = step  # type: ignore[method-assign]
    return run


def train_and_stop(config: Config, learner: FakeLearner, step: int, **more: Any) -> dict[str, Any]:
    """The state that a controller saves when it is stopped during a step."""
    train(config, learner=learner, stop_after=step, **more)
    state: dict[str, Any] = json.loads(json.dumps(learner.saved[-1][1]))
    return state


def journal(config: Config, kind: str) -> list[dict[str, Any]]:
    """The records of a kind in the journal of a run."""
    return [record for record in records(Path(config.run_dir) / "journal") if kind in record]


def lags(learner: FakeLearner) -> list[Any]:
    """The lag of every token, by batch."""
    return [b.step - 1 - np.concatenate([s.versions for s in b.sequences]) for b in learner.batches]


def versions(learner: FakeLearner) -> list[set[int]]:
    """The versions of the tokens of every batch."""
    return [set(np.concatenate([s.versions for s in b.sequences]).tolist()) for b in learner.batches]


def evaluated(events: Events) -> list[int]:
    """The versions that were evaluated."""
    return [data["step"] for kind, data in events if kind == "eval"]
