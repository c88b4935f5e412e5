"""Promises of the loop: the lag bound, in-flight versions, order, evaluation of one version, stop, resume."""

import asyncio
import json
import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, FakeLearner, context, prompts, saved_when_stopped

from trainer.config import Config, ConfigError, EngineConfig, InterruptionConfig
from trainer.controller.controller import Controller
from trainer.controller.data import Dataset
from trainer.controller.deadline import Deadline
from trainer.controller.journal import Journal
from trainer.controller.process import _run, check_lengths, send_event
from trainer.controller.sampler import Sampler
from trainer.messages import Ready, StepDone
from trainer.models.resolve import resolve_model
from trainer.types import TrainBatch


def configured(tmp_path: Path, k: int, steps: int = 12, prompts_per_step: int = 4, **pipeline: Any) -> Config:
    config = Config(run_dir=str(tmp_path))
    pipeline = {
        "max_lag": k,
        "steps": steps,
        "prompts_per_step": prompts_per_step,
        "deadline_s": 20.0,
    } | pipeline
    return replace(
        config,
        pipeline=replace(config.pipeline, completions_per_prompt=2, **pipeline),
        evaluation=replace(config.evaluation, every=4, samples=1),
        engine=replace(config.engine, max_new_tokens=40),
        objective=replace(config.objective, zero_variance="keep"),
    )


def controller(
    config: Config, engine: Any, learner: Any, events: list[tuple[str, dict[str, Any]]]
) -> Controller:
    dataset = Dataset(prompts(20), prompts(3, start=100))
    sampler = Sampler(dataset.train, config.pipeline, config.seed)
    journal = Journal(Path(config.run_dir) / "journal")
    emit = lambda kind, data: events.append((kind, data))  # noqa: E731  # a one-line spy
    return Controller(context(config, engine), dataset, sampler, learner, journal, emit)


def lags(learner: FakeLearner) -> list[np.ndarray]:
    """Per batch, the lag of every token."""
    return [b.step - 1 - np.concatenate([s.versions for s in b.sequences]) for b in learner.batches]


@pytest.mark.axis("pipeline.scheme", "pipeline_rl")
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("slow", ["engine", "learner", "pushes"])
def test_lag_never_exceeds_k_and_k_0_is_on_policy(tmp_path: Path, k: int, slow: str) -> None:
    rng = np.random.default_rng(0)
    engine = FakeEngine(
        lambda r, i: int(rng.integers(1, 40)),
        tick=0.002 if slow == "engine" else 0.0002,
        load_s=0.05 if slow == "pushes" else 0.0,
    )
    learner = FakeLearner(0.05 if slow == "learner" else 0.001)
    config = configured(tmp_path, k)
    asyncio.run(controller(config, engine, learner, []).run())
    assert [b.step for b in learner.batches] == list(range(1, 13))
    for batch_lags in lags(learner):
        assert batch_lags.min() >= 0 and batch_lags.max() <= k
    assert engine.most_running <= (k + 1) * 4 + 3  # the slots, and three evaluation prompts


def test_weights_swap_inside_completions_and_lag_is_used(tmp_path: Path) -> None:
    engine, learner = FakeEngine(lambda r, i: 30, tick=0.002), FakeLearner(0.001)
    asyncio.run(controller(configured(tmp_path, 4), engine, learner, []).run())
    sequences = [s for b in learner.batches for s in b.sequences]
    assert any(len(set(s.versions.tolist())) > 1 for s in sequences)
    assert {0, 1} < set(np.concatenate(lags(learner)).tolist())


def test_colocated_engines_are_paused_while_the_learner_steps(tmp_path: Path) -> None:
    states: list[tuple[str, bool]] = []

    class TakingTurns(FakeEngine):
        async def update_weights(self, version: int, path: str) -> None:
            states.append(("push", self.paused))

    engine = TakingTurns()

    class Watching(FakeLearner):
        async def train(self, batch: Any) -> Any:
            states.append(("step", engine.paused))
            return await super().train(batch)

    config = configured(tmp_path, 1, steps=3)
    config = replace(config, engine=replace(config.engine, colocate=True))
    asyncio.run(controller(config, engine, Watching(), []).run())
    assert [s for s in states if s[0] == "step"] == [("step", True)] * 3 and not engine.paused


def test_batches_take_groups_in_the_order_they_were_issued_and_none_is_lost(tmp_path: Path) -> None:
    engine = FakeEngine(lambda r, i: 40 if r.request_id.endswith("3") else 1)
    asyncio.run(controller(configured(tmp_path, 2), engine, FakeLearner(), []).run())
    text = (tmp_path / "journal" / "000000.jsonl").read_text()
    trained = [line for line in text.splitlines() if '"trained"' in line]
    assert trained[0] == '{"trained": 1, "first": 0, "last": 3}' and '"first": 44, "last": 47' in trained[-1]
    assert text.count('"finished"') == 48


def test_an_evaluation_sees_exactly_one_version(tmp_path: Path) -> None:
    seen: dict[str, set[int]] = {}

    class Watching(FakeEngine):
        async def stream(self, request: Any) -> Any:
            async for ended in super().stream(request):
                if request.evaluation:
                    name = request.request_id.split(".")[0]
                    seen.setdefault(name, set()).update(*(c.versions.tolist() for c in ended))
                yield ended

    events: list[tuple[str, dict[str, Any]]] = []
    engine = Watching(lambda r, i: 20)
    asyncio.run(controller(configured(tmp_path, 4), engine, FakeLearner(), events).run())
    assert seen == {"e0": {0}, "e4": {4}, "e8": {8}, "e12": {12}}
    assert [d["step"] for kind, d in events if kind == "eval"] == [0, 4, 8, 12]


def test_an_engine_that_does_not_answer_is_named_within_the_deadline(tmp_path: Path) -> None:
    config = configured(tmp_path, 1, deadline_s=0.2)
    engine = FakeEngine(lambda r, i: 1 if r.evaluation else 10_000, tick=0.01)
    config = replace(config, engine=replace(config.engine, max_new_tokens=10_000))
    with pytest.raises(TimeoutError, match=r"generate: step 1: no progress for pipeline.deadline_s = 0.2 s"):
        asyncio.run(asyncio.wait_for(controller(config, engine, FakeLearner(), []).run(), 10))


def test_a_start_has_a_deadline_of_its_own() -> None:
    run, start = Deadline(0.1), Deadline(2.0, "pipeline.start_deadline_s")

    async def slow(deadline: Deadline, seconds: float) -> None:
        await deadline.wait_for(asyncio.sleep(seconds), "engine: start")

    asyncio.run(slow(start, 0.5))
    with pytest.raises(TimeoutError, match=r"engine: start: no progress for pipeline\.deadline_s = 0.1 s"):
        asyncio.run(slow(run, 0.5))
    with pytest.raises(TimeoutError, match=r"no progress for pipeline\.start_deadline_s = 0.1 s"):
        asyncio.run(slow(Deadline(0.1, "pipeline.start_deadline_s"), 0.5))


def test_the_run_waits_for_an_engine_that_starts_again_as_long_as_for_its_first_start() -> None:
    deadline = Deadline(0.1)

    async def waits() -> None:
        with deadline.starting(5.0):
            await deadline.wait_for(asyncio.sleep(0.4), "generate: step 5")
        await deadline.wait_for(asyncio.sleep(0.3), "generate: step 5")

    with pytest.raises(TimeoutError, match=r"generate: step 5: no progress for pipeline\.deadline_s = 0.1 s"):
        asyncio.run(waits())


def test_an_evaluation_may_last_longer_than_the_deadline_while_completions_come(tmp_path: Path) -> None:
    config = configured(tmp_path, 0, deadline_s=0.4, steps=4)
    config = replace(config, evaluation=replace(config.evaluation, samples=10))
    engine = FakeEngine(lambda r, i: 5 if r.evaluation else 1, tick=0.02)  # 1 s, a completion every 0.1 s
    asyncio.run(asyncio.wait_for(controller(config, engine, FakeLearner(), []).run(), 30))


@pytest.mark.parametrize("version", [0, 4])
def test_an_evaluation_that_makes_no_progress_is_named(tmp_path: Path, version: int) -> None:
    class Stuck(FakeEngine):
        async def stream(self, request: Any) -> Any:
            if request.request_id.startswith(f"e{version}"):
                await asyncio.sleep(100)
            async for ended in super().stream(request):
                yield ended

    config = configured(tmp_path, 0, deadline_s=0.3, steps=4)
    with pytest.raises(TimeoutError, match=f"evaluate: version {version}: no progress"):
        asyncio.run(asyncio.wait_for(controller(config, Stuck(), FakeLearner(), []).run(), 10))


def test_a_verifier_that_makes_no_progress_is_named(tmp_path: Path) -> None:
    run = controller(configured(tmp_path, 0, deadline_s=0.3), FakeEngine(), FakeLearner(), [])
    run.ctx.rewards[""].score = lambda *item: asyncio.sleep(100)  # type: ignore[assignment, method-assign]
    with pytest.raises(TimeoutError, match="verify: evaluate: version 0"):
        asyncio.run(asyncio.wait_for(run.run(), 10))


def test_a_failing_push_ends_the_run(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        async def update_weights(self, version: int, path: str) -> None:
            raise ConnectionError("engine 0 has died")

    with pytest.raises(ConnectionError, match="engine 0 has died"):
        asyncio.run(
            asyncio.wait_for(controller(configured(tmp_path, 1), Broken(), FakeLearner(), []).run(), 10)
        )


def test_a_run_whose_prompts_are_all_solved_ends_with_its_last_weights_evaluated(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    config = configured(tmp_path, 0, no_positive_resampling=True, npr_threshold=0.01, steps=99)
    config = replace(config, evaluation=replace(config.evaluation, every=98))
    learner = FakeLearner()
    asyncio.run(asyncio.wait_for(controller(config, FakeEngine(), learner, events).run(), 20))
    assert 5 <= len(learner.batches) < 99 and all(len(b.sequences) == 8 for b in learner.batches)
    assert [d["step"] for kind, d in events if kind == "eval"] == [0, len(learner.batches)]
    (note,) = [d["text"] for kind, d in events if kind == "note"]
    assert f"after step {len(learner.batches)}: all 20 training prompts have been solved" in note


@pytest.mark.parametrize("scheme", [{}, {"scheme": "ppo_off_policy", "minibatches": 3}])
def test_a_run_whose_compute_is_spent_ends_with_its_last_weights_evaluated(
    scheme: dict[str, Any], tmp_path: Path
) -> None:
    config = configured(tmp_path, 1, steps=99, **scheme)
    config = replace(config, evaluation=replace(config.evaluation, every=98))
    engine, learner, events = FakeEngine(), FakeLearner(0.01), list[tuple[str, dict[str, Any]]]()
    run = controller(config, engine, learner, events)

    def emit(kind: str, data: dict[str, Any]) -> None:
        events.append((kind, data))
        if kind == "step" and data["step"] == 4:
            run.complete_by = "compute"
            run.stop.set()

    run.emit = emit
    asyncio.run(asyncio.wait_for(run.run(), 20))
    made = len(learner.batches)
    assert made == 6 if scheme else made in (4, 5)  # the round ends; a step may have begun
    assert [d["step"] for kind, d in events if kind == "eval"] == [0, made]
    assert engine.held[-1] == made and run.ended_by == "compute"


def test_a_fatal_error_saves_what_was_learned_before_it(tmp_path: Path) -> None:
    class Refusing(FakeLearner):
        async def train(self, batch: Any) -> Any:
            if batch.step == 3:
                raise ConfigError("step 3: loss is nan")
            return await super().train(batch)

    learner = Refusing()
    with pytest.raises(ConfigError, match="step 3: loss is nan"):
        asyncio.run(
            asyncio.wait_for(controller(configured(tmp_path, 1), FakeEngine(), learner, []).run(), 10)
        )
    ((path, state),) = learner.saved
    assert path.endswith("step-000002") and (state["version"], state["group_id"]) == (2, 8)


@pytest.mark.parametrize("refused", [1, 3])
def test_after_a_refused_step_colocated_engines_are_resumed_and_the_steps_before_it_are_saved(
    tmp_path: Path, refused: int
) -> None:
    class Refusing(FakeLearner):
        async def train(self, batch: Any) -> Any:
            if batch.step == refused:
                raise ConfigError(f"step {refused}: loss is nan")
            return await super().train(batch)

    engine, learner = FakeEngine(), Refusing()
    config = configured(tmp_path, 1)
    config = replace(config, engine=replace(config.engine, colocate=True))
    with pytest.raises(ConfigError, match="loss is nan"):
        asyncio.run(asyncio.wait_for(controller(config, engine, learner, []).run(), 10))
    assert not engine.paused
    assert [state["version"] for _, state in learner.saved] == ([] if refused == 1 else [2])


def test_a_running_step_when_something_fails_is_finished_and_saved(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        async def update_weights(self, version: int, path: str) -> None:
            await asyncio.sleep(0.05)
            raise ConnectionError("engine 0 has died")

    learner = FakeLearner(0.2)
    with pytest.raises(ConnectionError, match="engine 0 has died"):
        asyncio.run(asyncio.wait_for(controller(configured(tmp_path, 4), Broken(), learner, []).run(), 10))
    assert [state["version"] for _, state in learner.saved] == [2] == [len(learner.batches)]


def test_events_to_a_dead_launcher_are_dropped() -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    send_event(theirs, "step", {"step": 1})


def test_stop_ends_after_the_current_step_and_a_resume_trains_every_group_once(tmp_path: Path) -> None:
    config = configured(tmp_path, 2)
    learner = FakeLearner(0.01)

    async def interrupted() -> dict[str, Any]:
        run = controller(config, FakeEngine(), learner, [])
        return await saved_when_stopped(run, learner, 5)

    state = asyncio.run(interrupted())
    made = len(learner.batches)
    assert state["version"] == made < 12

    async def resumed() -> None:
        run = controller(config, FakeEngine(), learner, [])
        run.restore(state)
        run.ctx.engine.version = made  # type: ignore[attr-defined]  # the launcher's full push
        await run.run()

    asyncio.run(resumed())
    assert [b.step for b in learner.batches] == list(range(1, 13))
    lines = [
        line
        for line in (tmp_path / "journal" / "000000.jsonl").read_text().splitlines()
        if '"trained"' in line
    ]
    assert [f'"first": {4 * i}' in line for i, line in enumerate(lines)] == [True] * 12


def test_a_checkpoint_holds_the_prompts_that_were_issued_beyond_it(tmp_path: Path) -> None:
    config, learner = configured(tmp_path, 2), FakeLearner(0.01)

    async def interrupted() -> dict[str, Any]:
        return await saved_when_stopped(controller(config, FakeEngine(), learner, []), learner, 3)

    state = asyncio.run(interrupted())
    shutil.rmtree(tmp_path / "journal")  # as in a branch, or where a kept checkpoint's groups are deleted
    again = controller(config, FakeEngine(), FakeLearner(), [])
    again.restore(state)
    again.ctx.engine.version = state["version"]  # type: ignore[attr-defined]
    asyncio.run(again.run())
    first, journal = state["group_id"], (tmp_path / "journal" / "000000.jsonl").read_text()
    assert state["sampler"]["group_id"] > first
    assert [f'"issued": {i},' in journal for i in range(first, 48)] == [True] * (48 - first)
    assert f'"trained": {state["version"] + 1}, "first": {first}' in journal


def test_a_restored_group_of_another_prompt_is_not_taken(tmp_path: Path) -> None:
    config = configured(tmp_path, 0, steps=2)
    asyncio.run(controller(config, FakeEngine(), FakeLearner(), []).run())
    run = controller(config, FakeEngine(), FakeLearner(), [])
    for _ in range(5):
        run.sampler.next(0)
    shifted = run.sampler.state_dict() | {"group_id": 4}  # other prompts follow than those in the journal
    run.restore({"version": 1, "group_id": 4, "sampler": shifted})
    run.ctx.engine.version = 1  # type: ignore[attr-defined]
    asyncio.run(run.run())
    assert len(run.ctx.engine.requests) == 4 + 3  # type: ignore[attr-defined]  # and three to evaluate


def test_another_batch_size_on_resume_drops_no_prompt(tmp_path: Path) -> None:
    learner, config = FakeLearner(), configured(tmp_path, 0, steps=2)
    run = controller(config, FakeEngine(), learner, [])
    asyncio.run(run.run())
    asyncio.run(run.save())
    assert learner.saved[-1][1]["group_id"] == 8
    again = controller(configured(tmp_path, 0, steps=4, prompts_per_step=6), FakeEngine(), learner, [])
    again.restore(learner.saved[-1][1])
    again.ctx.engine.version = 2  # type: ignore[attr-defined]
    asyncio.run(again.run())
    assert '"trained": 4, "first": 14, "last": 19' in (tmp_path / "journal" / "000000.jsonl").read_text()


def test_a_checkpoint_holds_the_last_steps_and_evaluations_as_they_were_reported(tmp_path: Path) -> None:
    learner, events = FakeLearner(), list[tuple[str, dict[str, Any]]]()
    run = controller(configured(tmp_path, 0, steps=4), FakeEngine(), learner, events)
    asyncio.run(run.run())
    asyncio.run(run.save())
    kept = [(event["kind"], event["data"]["step"]) for event in learner.saved[-1][1]["events"]]
    reported = [(kind, data) for kind, data in events if kind in ("training_begins", "step", "eval")]
    assert kept == [(kind, data["step"]) for kind, data in reported] and len(kept) == 1 + 4 + 2
    json.dumps(learner.saved[-1][1])


def test_a_checkpoint_that_is_asked_for_is_written_before_the_next_step_and_stays_one(tmp_path: Path) -> None:
    class Asking(FakeLearner):
        async def train(self, batch: TrainBatch) -> StepDone:
            done = await super().train(batch)
            run.keep = 0.25 if batch.step == 3 else 0.0
            return done

    learner, config = Asking(), configured(tmp_path, 0, steps=6)
    run = controller(config, FakeEngine(), learner, [])

    async def stopped() -> None:
        await run.run()
        await run.save()

    asyncio.run(stopped())
    assert [(path[-1], state["kept"]) for path, state in learner.saved] == [("3", 0.25), ("6", 0)]
    again = controller(config, FakeEngine(), FakeLearner(), [])
    again.restore(learner.saved[0][1])
    asyncio.run(again.save())  # stopped before its first step
    assert again.learner.saved[-1][1]["kept"] == 0.25  # type: ignore[attr-defined]  # it is a fake


def test_a_checkpoint_of_an_older_version_is_refused_in_one_line(tmp_path: Path) -> None:
    config = configured(tmp_path, 0)
    run = controller(config, FakeEngine(), FakeLearner(), [])
    old = {"path": "runs/a/step-000002", "version": 2, "ordinal": 8, "sampler": {"ordinal": 8}}
    with pytest.raises(ConfigError, match=r"runs/a/step-000002: no 'group_id'.* start a new run$"):
        run.restore(old)


@pytest.mark.parametrize("interrupted", [False, True])
def test_completions_that_cannot_fit_the_model_are_refused_at_the_start(interrupted: bool) -> None:
    interruption = InterruptionConfig(enabled=interrupted, lo=10, hi=60, answer_tokens=30)
    engine = EngineConfig(max_new_tokens=100, interruption=interruption)
    check_lengths(engine, prompts(5), 10, 103)  # 3 tokens of prompt and 100 of completion, either way
    with pytest.raises(ConfigError, match="the model has 102 positions: lower engine"):
        check_lengths(engine, prompts(5), 10, 102)


def test_a_checkpoint_lets_the_journal_forget_what_no_checkpoint_needs(tmp_path: Path) -> None:
    pruned: list[int] = []

    class Writing(FakeLearner):
        async def save(self, path: str, state: dict[str, Any]) -> None:
            Path(path).mkdir(parents=True)
            Path(path, "controller.json").write_text(json.dumps({"group_id": state["group_id"]}))

    config = configured(tmp_path, 1, steps=6)
    config = replace(config, logging=replace(config.logging, checkpoint_every=2))
    run = controller(config, FakeEngine(), Writing(), [])
    run.journal.prune = pruned.append  # type: ignore[method-assign]  # a spy
    asyncio.run(run.run())
    shutil.rmtree(tmp_path / "checkpoints" / "step-000002")  # as the learner deletes the oldest
    asyncio.run(run.save())
    assert pruned == [8, 8, 16]  # the first group not yet trained on, of the oldest checkpoint there is


def test_processes_that_are_ready_after_the_deadline_but_not_after_that_of_their_start_live(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path, 0, deadline_s=0.5, start_deadline_s=60.0)
    data = {"source": "reasoning_gym:basic_arithmetic", "size": 60, "held_out": 5}
    config = replace(config, data=replace(config.data, **data))  # type: ignore[arg-type]  # settings by name
    engine, learner, telemetry = (multiprocessing.Pipe() for _ in range(3))

    async def body() -> None:
        work = _run(config, resolve_model("tiny"), [engine[1]], learner[1], None, telemetry[1])
        running = asyncio.create_task(work)
        await asyncio.sleep(1.0)
        for conn in (learner[0], engine[0]):
            await asyncio.sleep(1.0)
            conn.send(Ready({"parameters": 1}))
        with pytest.raises(TimeoutError, match=r"no progress for pipeline\.deadline_s = 0.5 s"):
            await running  # both are ready, and then nobody answers

    asyncio.run(body())
    kinds = []
    while telemetry[0].poll():
        kinds.append(telemetry[0].recv().kind)
    # The signs of life come from a thread, whenever it is their turn.
    assert [kind for kind in kinds if kind != "alive"][:3] == ["phase", "data", "ready"]
