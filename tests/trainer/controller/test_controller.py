"""Promises of the loop: the lag bound, in-flight versions, order, evaluation of one version, stop, resume."""

import asyncio
import json
import multiprocessing
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import (
    Events,
    FakeEngine,
    FakeLearner,
    configured,
    controller,
    evaluated,
    having,
    journal,
    prompts,
    train,
    train_and_stop,
)

from trainer.config import ConfigError, EngineConfig, InterruptionConfig
from trainer.controller.process import check_lengths, controller_main, send_event
from trainer.jsonl import open_to_append, read_lines
from trainer.messages import Event, Failed, Ready, StepDone
from trainer.models.resolve import resolve_model
from trainer.run_folder import EVENTS
from trainer.types import TrainBatch


def test_an_evaluation_sees_exactly_one_version(tmp_path: Path) -> None:
    events, engine = Events(), FakeEngine(lambda r, i: 20)
    train(configured(tmp_path, 4), engine, FakeLearner(), events)
    seen = {name: versions for name, versions in engine.versions.items() if name[0] == "e"}
    assert seen == {"e0": {0}, "e4": {4}, "e8": {8}, "e12": {12}}
    assert evaluated(events) == [0, 4, 8, 12]
    worth = [data["by_prompt"][""]["pass"] for kind, data in events if kind == "eval"]
    held_out = [data["prompts"] for kind, data in events if kind == "eval"]
    assert [len(by_k[1]) for by_k in worth] == held_out  # a number for each prompt


@pytest.mark.parametrize(
    ("request_id", "stage"),
    [("g", "generate: step 1"), ("e0", "evaluate: version 0"), ("e4", "evaluate: version 4")],
)
def test_a_silent_engine_is_named_within_the_deadline(tmp_path: Path, request_id: str, stage: str) -> None:
    config = configured(tmp_path, 0, deadline_s=2, steps=4)
    with pytest.raises(TimeoutError, match=rf"^{stage}: no progress for pipeline.deadline_s = 2 s"):
        train(config, FakeEngine(stuck=request_id))


def test_an_evaluation_may_last_longer_than_the_deadline_while_completions_come(tmp_path: Path) -> None:
    config = having(configured(tmp_path, 0, deadline_s=1.0, steps=4), evaluation={"samples": 10})
    train(config, FakeEngine(lambda r, i: 5 if r.evaluation else 1, tick=0.04))  # 2 s, one every 0.2 s


def test_a_verifier_that_makes_no_progress_is_named(tmp_path: Path) -> None:
    run = controller(configured(tmp_path, 0, deadline_s=1))
    run.ctx.rewards[""].score = lambda *item: asyncio.sleep(100)  # type: ignore[assignment, method-assign]
    with pytest.raises(TimeoutError, match="verify: evaluate: version 0"):
        asyncio.run(asyncio.wait_for(run.run(), 10))


def test_a_failing_push_ends_the_run_and_a_running_step_is_finished_and_saved(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        async def update_weights(self, version: int, path: str) -> None:
            await asyncio.sleep(0.05)
            if version:
                raise ConnectionError("engine 0 has died")

    learner = FakeLearner(0.2)
    with pytest.raises(ConnectionError, match="engine 0 has died"):
        train(configured(tmp_path, 4), Broken(), learner)
    assert [state["version"] for _, state in learner.saved] == [2] == [len(learner.batches)]


def test_a_run_whose_prompts_are_all_solved_ends_with_its_last_weights_evaluated(tmp_path: Path) -> None:
    events, learner = Events(), FakeLearner()
    config = configured(tmp_path, 0, no_positive_resampling=True, npr_threshold=0.01, steps=99)
    train(having(config, evaluation={"every": 98}), FakeEngine(), learner, events)
    assert 5 <= len(learner.batches) < 99 and all(len(b.sequences) == 8 for b in learner.batches)
    assert evaluated(events) == [0, len(learner.batches)]
    (note,) = [d["text"] for kind, d in events if kind == "note"]
    assert f"after step {len(learner.batches)}: all 20 training prompts have been solved" in note


@pytest.mark.parametrize("scheme", [{}, {"scheme": "ppo_off_policy", "minibatches": 3}])
def test_a_run_of_spent_compute_ends_with_an_evaluation(scheme: dict[str, Any], tmp_path: Path) -> None:
    config = having(configured(tmp_path, 1, steps=99, **scheme), evaluation={"every": 98})
    engine, learner, events = FakeEngine(), FakeLearner(0.01), Events()
    run = controller(config, engine, learner, events)

    def emit(kind: str, data: dict[str, Any]) -> None:
        events.append((kind, data))
        if kind == "step" and data["step"] == 4:
            run.complete_by = "compute"
            run.stop.set()

    run.emit = emit
    asyncio.run(asyncio.wait_for(run.run(), 20))
    steps = len(learner.batches)
    assert steps == 6 if scheme else steps in (4, 5)  # the round ends; a step may have begun
    assert evaluated(events) == [0, steps]
    assert engine.held[-1] == steps and run.ended_by == "compute"


@pytest.mark.parametrize("pipeline", [{}, {"scheme": "ppo_off_policy", "minibatches": 4}])
@pytest.mark.parametrize("colocate", [False, True])
@pytest.mark.parametrize("refused", [1, 3])
def test_after_a_refused_step_the_steps_before_it_are_saved_and_colocated_engines_are_resumed(
    tmp_path: Path, refused: int, colocate: bool, pipeline: dict[str, Any]
) -> None:
    engine, learner = FakeEngine(), FakeLearner(refused=refused)
    with pytest.raises(ConfigError, match=f"step {refused}: loss is nan"):
        train(having(configured(tmp_path, 1, **pipeline), engine={"colocate": colocate}), engine, learner)
    assert not engine.paused
    saved = [(path[-6:], state["version"], state["group_id"]) for path, state in learner.saved]
    assert saved == ([] if refused == 1 else [("000002", 2, 8)])


def test_a_checkpoint_holds_the_prompts_that_were_issued_beyond_it(tmp_path: Path) -> None:
    config = configured(tmp_path, 2)
    state = train_and_stop(config, FakeLearner(0.01), 3)
    shutil.rmtree(tmp_path / "journal")  # as in a branch, or where a kept checkpoint's groups are deleted
    train(config, state=state)
    first = state["group_id"]
    assert state["sampler"]["group_id"] > first
    assert {r["issued"] for r in journal(config, "issued")} == set(range(first, 48))
    trained = journal(config, "trained")[0]
    assert (trained["trained"], trained["first"]) == (state["version"] + 1, first)


def test_a_restored_group_of_another_prompt_is_not_taken(tmp_path: Path) -> None:
    config = configured(tmp_path, 0, steps=2)
    state = train(config).learner.saved[-1][1]  # type: ignore[attr-defined]  # it is a fake
    shifted = controller(config).sampler
    for _ in range(5):  # other prompts follow than those in the journal
        shifted.next(0)
    sampler = shifted.state_dict() | {"group_id": 4}
    engine = FakeEngine()
    train(config, engine, state=state | {"version": 1, "group_id": 4, "sampler": sampler})
    assert len(engine.requests) == 4 + 3  # and three to evaluate


def test_another_batch_size_on_resume_drops_no_prompt(tmp_path: Path) -> None:
    learner = FakeLearner()
    train(configured(tmp_path, 0, steps=2), FakeEngine(), learner)
    state = learner.saved[-1][1]
    assert state["group_id"] == 8
    config = configured(tmp_path, 0, steps=4, prompts_per_step=6)
    train(config, state=state)
    assert journal(config, "trained")[-1] == {"trained": 4, "first": 14, "last": 19}


def test_what_the_record_is_made_of_is_logged_also_when_the_launcher_is_dead(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with open_to_append(tmp_path / EVENTS) as log:
        send_event(ours, "alive", {}, log)
        send_event(ours, "step", {"step": 1, "learner/loss": float("nan")}, log)
    (line,) = read_lines(tmp_path / EVENTS)
    assert (line["kind"], line["data"]) == ("step", {"step": 1, "learner/loss": None})


def test_a_checkpoint_that_is_asked_for_is_written_before_the_next_step_and_stays_one(tmp_path: Path) -> None:
    class Asking(FakeLearner):
        async def train(self, batch: TrainBatch) -> StepDone:
            done = await super().train(batch)
            run.keep = 0.25 if batch.step == 3 else 0.0
            return done

    learner, config = Asking(), configured(tmp_path, 0, steps=6)
    run = controller(config, FakeEngine(), learner)
    asyncio.run(run.run())
    asyncio.run(run.save())
    assert [(path[-1], state["kept"]) for path, state in learner.saved] == [("3", 0.25), ("6", 0)]
    again = controller(config, learner=FakeLearner())
    again.restore(learner.saved[0][1])
    asyncio.run(again.save())  # stopped before its first step
    assert again.learner.saved[-1][1]["kept"] == 0.25  # type: ignore[attr-defined]  # it is a fake


def test_a_batch_says_how_many_steps_the_compute_allows_also_after_a_resume(tmp_path: Path) -> None:
    class Paced(FakeLearner):
        async def train(self, batch: TrainBatch) -> StepDone:
            run.pace = 0.25 / batch.step
            return await super().train(batch)

    learner, config = Paced(), configured(tmp_path, 0, steps=6, max_compute=0.5)
    run = controller(config, FakeEngine(), learner)
    asyncio.run(run.run())
    asyncio.run(run.save())
    assert [batch.steps for batch in learner.batches] == [6, 2, 4, 6, 6, 6]  # 6 as long as nothing is known
    again = controller(having(config, pipeline={"steps": 99}), learner=FakeLearner())
    again.restore(learner.saved[-1][1])
    assert again.planned_steps(7) == 12


@pytest.mark.parametrize("interrupted", [False, True])
def test_completions_that_cannot_fit_the_model_are_refused_at_the_start(interrupted: bool) -> None:
    interruption = InterruptionConfig(enabled=interrupted, lo=10, hi=60, answer_tokens=30)
    engine = EngineConfig(max_new_tokens=100, interruption=interruption)
    check_lengths(engine, prompts(5), 10, 103)  # 3 tokens of prompt and 100 of completion, either way
    with pytest.raises(ConfigError, match="3 tokens and a completion up to 100; the model has 102 pos"):
        check_lengths(engine, prompts(5), 10, 102)


def test_a_checkpoint_lets_the_journal_forget_what_no_checkpoint_needs(tmp_path: Path) -> None:
    pruned: list[int] = []

    class Writing(FakeLearner):
        async def save(self, path: str, state: dict[str, Any]) -> None:
            Path(path).mkdir(parents=True)
            Path(path, "controller.json").write_text(json.dumps({"group_id": state["group_id"]}))

    config = having(configured(tmp_path, 1, steps=6), logging={"checkpoint_every": 2})
    run = controller(config, FakeEngine(), Writing())
    run.journal.prune = pruned.append  # type: ignore[method-assign]  # a spy
    asyncio.run(run.run())
    shutil.rmtree(tmp_path / "checkpoints" / "step-000002")  # as the learner deletes the oldest
    asyncio.run(run.save())
    assert pruned == [8, 8, 16]  # the first group not yet trained on, of the oldest checkpoint there is


def test_processes_ready_after_the_deadline_but_not_after_that_of_their_start_live(tmp_path: Path) -> None:
    data = {"source": "reasoning_gym:basic_arithmetic", "size": 60, "held_out": 5}
    config = having(configured(tmp_path, 0, deadline_s=0.5, start_deadline_s=60.0), data=data)
    engine, learner, telemetry = (multiprocessing.Pipe() for _ in range(3))

    def answer() -> None:
        for conn in (learner[0], engine[0]):
            time.sleep(1.0)
            conn.send(Ready({"parameters": 1}))

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(SystemExit):  # both are ready, and then nobody answers
        controller_main(config, resolve_model("tiny"), [engine[1]], learner[1], None, telemetry[1])
    told = []
    while telemetry[0].poll():
        told.append(telemetry[0].recv())
    # The signs of life come from a thread, whenever it is their turn.
    events = [message.kind for message in told if isinstance(message, Event) and message.kind != "alive"]
    assert events == ["phase", "data", "ready"]
    (failure,) = [message for message in told if isinstance(message, Failed)]
    assert "no progress for pipeline.deadline_s = 0.5 s" in failure.message
