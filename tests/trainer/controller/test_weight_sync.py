"""Promises of weight sync: who pauses when, in which order, and what a failure does."""

import asyncio
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from fakes import CALLS, FakeEngine, FakeLearner, configured, controller, having, train

from trainer.config import ConfigError, EngineConfig
from trainer.controller.deadline import Deadline
from trainer.controller.learner_client import LearnerClient
from trainer.controller.parity import parity_gate
from trainer.controller.weight_sync import WeightSync
from trainer.messages import Ack, Push, Save, StepDone, Transfer, Written


def log_of(tmp_path: Path, weight_push: str, colocate: bool, load_s: float = 0.0) -> list[str]:
    """What engine and learner were asked for, in a run that evaluates and saves now and then."""
    log: list[str] = []
    engine = {"weight_push": weight_push, "colocate": colocate}
    config = having(configured(tmp_path, 2, steps=8), engine=engine, logging={"checkpoint_every": 3})
    train(config, FakeEngine(lambda r, i: 9, load_s=load_s, log=log), FakeLearner(0.002, log=log))
    return log


def steps_of(log: list[str]) -> list[str]:
    return [entry for entry in log if entry.startswith("step")]


def test_between_distinct_gpus_engines_pause_for_the_push_only(tmp_path: Path) -> None:
    log = [entry for entry in log_of(tmp_path, "nccl", False) if entry != "save"]
    assert steps_of(log) == [f"step {i}" for i in range(1, 9)]
    pushes = [entry for entry in log if not entry.startswith("step")]
    versions = [int(entry.split()[1]) for entry in pushes if entry.startswith("label")]
    assert pushes == [entry for v in versions for entry in ("pause", *CALLS, f"label {v}", "resume")]
    assert {0, 4, 8} <= set(versions) and versions == sorted(set(versions))  # those that are evaluated
    for v in versions[1:]:  # the engines hold what the learner has, and no step comes in between
        assert steps_of(log[: log.index(f"label {v}")])[-1] == f"step {v}"
    for v in (1, 2, 3):  # before the first evaluation, each version before the next step
        assert log.index(f"label {v}") < log.index(f"step {v + 1}")


def test_colocated_engines_load_a_file_before_a_checkpoint_lets_them_sleep_again(tmp_path: Path) -> None:
    log = log_of(tmp_path, "file", True, load_s=0.05)
    assert log.count("save") == 3
    for v in range(1, 9):
        after = log.index(f"step {v}") + 1
        assert log[after : after + 2] == ["resume", f"label {v}"]


@pytest.mark.parametrize("weight_push", ["nccl", "file"])
def test_an_evaluation_stops_the_learner_only_at_the_lag_bound(weight_push: Any, tmp_path: Path) -> None:
    log: list[str] = []

    class Slow(FakeEngine):
        async def stream(self, request: Any) -> Any:
            if evaluates := request.request_id.startswith("e4."):
                log.append("evaluates")
                await asyncio.sleep(0.5)
            async for ended in super().stream(request):
                yield ended
            if evaluates:
                log.append("evaluated")

    config = having(configured(tmp_path, 2, steps=12), engine={"weight_push": weight_push})
    train(config, Slow(lambda r, i: 9, log=log), FakeLearner(0.002, log=log))
    during = log[log.index("evaluates") : log.index("evaluated")]
    # Version 4 is held: with k = 2 batches 5, 6 and 7 may be full.
    assert [x for x in during if x.startswith(("step", "label"))] == ["step 5", "step 6", "step 7"]
    assert "label 7" in log and "label 5" not in log
    assert steps_of(log) == [f"step {i}" for i in range(1, 13)]


def test_the_learner_waits_at_a_version_that_is_to_be_evaluated(tmp_path: Path) -> None:
    config = configured(tmp_path, 3, steps=6)
    config = having(config, engine={"weight_push": "nccl"}, evaluation={"every": 2})
    log: list[str] = []
    # The evaluation is long enough for three steps.
    engine = FakeEngine(lambda r, i: 60 if r.evaluation else 3, log=log)
    train(config, engine, FakeLearner(0.002, log=log))
    for v in (2, 4, 6):  # the learner had no later weights when it sent these
        assert steps_of(log[: log.index(f"label {v}")])[-1] == f"step {v}"


def test_on_shared_gpus_engines_sleep_once_for_a_step_and_its_push(tmp_path: Path) -> None:
    expected = ["pause", *CALLS, "label 0", "resume"]
    for v in range(1, 9):
        expected += ["pause", f"step {v}", *CALLS, f"label {v}", "resume"]
        expected += ["pause", "save", "resume"] if v in (3, 6, 8) else []
    assert log_of(tmp_path, "ipc", True) == expected


class Pipe:
    """A learner at the other end of a pipe."""

    def __init__(self) -> None:
        self.ours, theirs = multiprocessing.Pipe()
        self.client = LearnerClient(theirs)

    async def heard(self) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, self.ours.recv)


def test_the_learners_calls_reach_the_engines_one_by_one_and_nothing_else_comes_between() -> None:
    async def body() -> list[Any]:
        pipe, made = Pipe(), []

        async def transfer(call: str, info: dict[str, Any]) -> None:
            made.append((call, info))
            assert not pipe.ours.poll(0.05)  # no message to the learner before the call has ended

        push = asyncio.create_task(pipe.client.push(transfer, Deadline(5)))
        saving = asyncio.create_task(pipe.client.save("folder", {}))
        assert await pipe.heard() == Push()
        for i in range(3):
            pipe.ours.send(Transfer("update_weights", {"i": i}))
            assert await pipe.heard() == Ack()
        pipe.ours.send(Ack())
        await push
        assert await pipe.heard() == Save("folder", {})
        pipe.ours.send(Ack())
        await saving
        return made

    assert asyncio.run(body()) == [("update_weights", {"i": i}) for i in range(3)]


def test_the_engines_hear_of_weights_once_their_file_is_complete_and_not_before(tmp_path: Path) -> None:
    async def body() -> None:
        pipe, log = Pipe(), list[str]()

        class Reader:
            async def update_weights(self, version: int, path: str) -> None:
                log.append(f"load {version} {path}")

        engine: Any = Reader()
        sync = WeightSync(EngineConfig(), engine, pipe.client, Deadline(5), lambda version: False)
        for version in (1, 2):
            await sync.publish(StepDone(version, f"{tmp_path}/{version}", {}, written=False))
        pushed = asyncio.create_task(sync.push_newest())
        for version in (1, 2):
            await asyncio.sleep(0.05)
            assert not log
            pipe.ours.send(Written(f"{tmp_path}/{version}"))
        assert await pushed == (2, 2) and log == [f"load 2 {tmp_path}/2"]
        pipe.ours.send(Written(f"{tmp_path}/3", "cannot publish the weights"))
        await sync.publish(StepDone(3, f"{tmp_path}/3", {}, written=False))
        with pytest.raises(ConfigError, match="cannot publish the weights"):
            await sync.push_newest()
        await sync.publish(StepDone(4, f"{tmp_path}/4", {}, written=False))
        dying = asyncio.create_task(sync.push_newest())
        await asyncio.sleep(0.05)
        pipe.ours.close()
        with pytest.raises(ConnectionError, match="the learner's process has died"):
            await dying

    asyncio.run(body())


def test_after_a_push_that_failed_the_learner_gets_no_further_request() -> None:
    async def body() -> None:
        pipe = Pipe()

        async def transfer(call: str, info: dict[str, Any]) -> None:
            raise ConnectionError("engine's process has died")

        pipe.ours.send(Transfer("start_weight_update", {}))
        with pytest.raises(ConnectionError, match="engine's process has died"):
            await pipe.client.push(transfer, Deadline(5))
        with pytest.raises(ConnectionError, match="has not answered the request before"):
            await pipe.client.save("folder", {})

    asyncio.run(body())


def test_colocated_engines_are_resumed_when_the_parity_gate_cannot_score(tmp_path: Path) -> None:
    class Failing(FakeLearner):
        async def score(self, sequences: Any, logprobs: bool) -> Any:
            assert engine.paused and logprobs
            raise ConfigError("the learner refuses")

    engine, learner = FakeEngine(), Failing()
    config = having(configured(tmp_path, 1), engine={"colocate": True})

    async def gate() -> None:
        one = controller(config, engine, learner)
        await parity_gate(one.ctx, one.learner, one.weights, one.dataset.held_out)

    with pytest.raises(ConfigError, match="the learner refuses"):
        asyncio.run(gate())
    assert not engine.paused
