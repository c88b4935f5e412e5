"""Promises of slow tools, in virtual time: no token is too old for its batch, and nobody else waits."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, FakeLearner, configured, controller, having, lags

from bench.pipeline.timed import VirtualLoop
from trainer.environments.pool import Step
from trainer.types import Group

TICK, TOKENS, TURNS = 0.001, 5, 3
TURN = TICK * TOKENS  # seconds of a turn of the model
Seconds = Callable[[int, int], float]  # of a tool, by the episode (in the order in which they begin) and turn


class Tools:
    """A pool of environments of TURNS turns that take so long."""

    def __init__(self, seconds: Seconds) -> None:
        self.duration, self.opened = seconds, 0

    @asynccontextmanager
    async def episode(self, evaluation: bool = False) -> AsyncIterator["Tool"]:
        self.opened += not evaluation
        yield Tool((lambda number, turn: 0.0) if evaluation else self.duration, self.opened - 1)


class Tool:
    seconds = 0.0

    def __init__(self, duration: Seconds, number: int) -> None:
        self._duration, self._number, self._turn = duration, number, 0

    async def start(self, row: dict[str, Any]) -> Step:
        await asyncio.sleep(self._duration(self._number, 0))
        return Step(())

    async def step(self, message: dict[str, Any]) -> Step:
        self._turn += 1
        await asyncio.sleep(self._duration(self._number, self._turn))
        return Step((), float(self._number % 2), self._turn == TURNS)


def train(folder: Path, k: int, seconds: Seconds) -> tuple[FakeLearner, dict[int, float]]:
    """Twelve steps of four groups of two episodes; the learner, and when each group was finished."""
    environment = {"kind": "fakes:Fake", "max_turns": TURNS}
    config = configured(folder, k)
    config = having(
        config, environment=environment, engine={"max_new_tokens": 100}, evaluation={"every": 100}
    )
    learner, finished = FakeLearner(step_s=TURN), dict[int, float]()
    run = controller(config, FakeEngine(lambda request, index: TOKENS, TICK), learner)
    run.ctx.environments[""] = Tools(seconds)  # type: ignore[assignment]  # it obeys the protocol
    record = run.journal.finished

    def note(group: Group) -> None:
        finished[group.group_id] = asyncio.get_running_loop().time()
        record(group)

    run.journal.finished = note  # type: ignore[method-assign]

    async def work() -> None:
        await run.weights.push(run.version)
        await run.run()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())
    return learner, finished


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_no_token_is_older_than_the_bound_whatever_the_tools_take(tmp_path: Path, k: int) -> None:
    """Between nothing and fifty times a turn of the model, and some of them always fifty times."""

    def seconds(episode: int, turn: int) -> float:
        share = float(np.random.default_rng([episode, turn]).random())
        return 50 * TURN * (1.0 if episode % 7 == 3 else share)

    learner, finished = train(tmp_path, k, seconds)
    assert len(learner.batches) == 12 and finished.keys() >= {*range(48)}
    assert (
        max(int(lag.max()) for lag in lags(learner)) == k
        and min(int(lag.min()) for lag in lags(learner)) >= 0
    )


def test_neither_the_engine_nor_another_group_waits_for_a_slow_tool(tmp_path: Path) -> None:
    """Up to the lag bound: the slow group is of the first batch, and three batches may be open."""

    def slow(episode: int, turn: int) -> float:
        return 50 * TURN if episode < 2 else 0.0

    _, with_it = train(tmp_path / "slow", 2, slow)
    _, without = train(tmp_path / "fast", 2, lambda episode, turn: 0.0)
    others = range(1, 12)
    assert {i: with_it[i] for i in others} == {i: without[i] for i in others}
    assert max(with_it[i] for i in others) < 3 * TURNS * TURN < with_it[0]  # after the first evaluation
    assert min(with_it[i] for i in range(12, 48)) > with_it[0]  # the bound: they wait for the first batch
