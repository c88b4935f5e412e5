"""Promises of the run's record: what each event adds to ledger, metrics, curve and view; no processes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from trainer.accounting.flops import step_flops
from trainer.config import (
    Config,
    ConfigError,
    ForecastConfig,
    GuardConfig,
    KLConfig,
    LoggingConfig,
    ObjectiveConfig,
    PipelineConfig,
)
from trainer.jsonl import append, read_lines
from trainer.launcher.placement import assign
from trainer.launcher.recorder import Recorder
from trainer.launcher.terminal import make_view
from trainer.messages import Event, Keep, Spans
from trainer.run_folder import EVENTS, claim, complete
from trainer.scaling import Sigmoid

CONFIG = Config(pipeline=PipelineConfig(steps=10), logging=LoggingConfig(tensorboard=False))


def step_event(step: int, at: float, rollouts: int = 100, trained: int = 50) -> Event:
    tokens = {"train/rollout_tokens": rollouts, "learner/input_tokens": trained}
    return Event("step", at, {"step": step, **tokens})


def make(
    run_dir: Path, resume_version: int | None = None, config: Config = CONFIG, devices: int = 0, **resume: Any
) -> Recorder:
    config = replace(config, run_dir=str(run_dir))
    held = assign(config, (), devices or len(os.sched_getaffinity(0)))
    state = None if resume_version is None else {"version": resume_version} | resume
    return Recorder(config, held, make_view(config, "core-hours", stream=StringIO()), state, 1.5)


def test_the_rate_of_an_engine_that_was_started_again_counts_from_0(tmp_path: Path) -> None:
    one = make(tmp_path)
    one.handle("learner", step_event(1, one.start))
    for tokens, busy_s in ((1000, 2.0), (1600, 3.0), (300, 1.0)):
        one.handle("engine", Event("engine", one.start, {"tokens": tokens, "busy_s": busy_s}))
        one.handle("learner", step_event(1, one.start))
    rates = [row["engine/tokens_per_s"] for row in read_lines(tmp_path / "metrics.jsonl")]
    assert rates == [0, 500, 600, 300]


def test_the_measured_memory_stands_beside_the_estimate(tmp_path: Path) -> None:
    one = make(tmp_path)
    for step, peak in enumerate((1.0, 3.0, 2.0), 1):
        event = step_event(step, one.start)
        event.data["learner/peak_memory_gb"] = peak
        one.handle("controller", event)
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert [row["learner/estimated_memory_gb"] for row in rows] == [1.5] * 3
    assert (one.peak_gb, one.estimated_gb) == (3.0, 1.5)


def test_a_line_has_the_most_kv_in_use_since_the_line_before_and_all_preemptions(tmp_path: Path) -> None:
    one = make(tmp_path)
    one.handle("learner", step_event(1, one.start))
    for role, use, preempted in (("engine", 0.9, 3), ("engine-1", 0.4, 0), ("engine", 0.5, 4)):
        counts = {"tokens": 1, "busy_s": 1.0, "kv_use": use, "preemptions": preempted}
        one.handle(role, Event("engine", one.start, counts))
    for step in (2, 3):
        one.handle("learner", step_event(step, one.start))
    rows = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [row.get("engine/kv_use") for row in rows] == [None, 0.9, None]
    assert rows[1]["engine/preemptions"] == 4


def test_the_compute_is_spent_with_the_step_that_reaches_it_and_the_end_is_recorded(tmp_path: Path) -> None:
    config = replace(CONFIG, run_dir=str(tmp_path), pipeline=replace(CONFIG.pipeline, max_compute=20 / 3600))
    devices = assign(config, (), 2)
    one = Recorder(config, devices, make_view(config, "core-hours", stream=StringIO()), None, 1.5)
    start = one.start
    one.handle("controller", Event("training_begins", start, {}))
    spent = []
    for step, at in enumerate((start + 4, start + 9, start + 11), 1):
        for role in ("engine", "learner"):
            assert not one.handle(role, Spans(role, (("generate", start, at),)))
        spent.append(one.handle("controller", step_event(step, at)))
    assert spent == ["", "", "compute"]  # after 8, 18 and 22 core-seconds
    result = {"step": 3, "pass_rate": 0.5, "pass_rate_se": 0.1}
    one.handle("controller", Event("eval", start + 12, result))
    one.handle("controller", Event("done", start + 12, {"step": 3, "ended_by": ""}))  # by Ctrl-C
    assert not complete(tmp_path, 20 / 3600)
    one.handle("controller", Event("done", start + 12, {"step": 3, "ended_by": "compute"}))
    assert complete(tmp_path, 20 / 3600) and not complete(tmp_path, 21 / 3600) and not complete(tmp_path)
    with pytest.raises(ConfigError, match="a complete run whose checkpoints are gone"):
        claim(str(tmp_path), resume=True)
    (tmp_path / "checkpoints" / "step-000003").mkdir(parents=True)
    claim(str(tmp_path), resume=True).close()
    assert not complete(tmp_path, 20 / 3600)  # it goes on


def test_a_checkpoint_is_asked_for_once_after_each_chosen_compute_also_after_a_resume(tmp_path: Path) -> None:
    logging = replace(CONFIG.logging, keep_at=(5 / 3600, 7 / 3600, 20 / 3600))
    config = replace(CONFIG, logging=logging)

    def asked(one: Recorder, ends: tuple[int, ...]) -> list[object]:
        """What the record asks for with each step, whose two roles have held a core until that second."""
        messages: list[object] = []
        one.ask = lambda message: messages.append((step, message))
        one.handle("controller", Event("training_begins", one.start, {}))
        for step, end in enumerate(ends, 1):
            for role in ("engine", "learner"):
                one.handle(role, Spans(role, (("generate", one.start, one.start + end),)))
            one.handle("controller", step_event(step, one.start + end))
        one.close()
        return messages

    first = make(tmp_path, config=config, devices=2)
    assert asked(first, (2, 4, 5, 6)) == [(2, Keep(8 / 3600))]  # after 4, 8, 10 and 12 core-seconds
    folder = tmp_path / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    (folder / "controller.json").write_text(json.dumps({"version": 3, "kept": 8 / 3600}))
    again = make(tmp_path, 3, config=config, devices=2)
    ((step, message),) = asked(again, (1, 3, 6, 9))  # 12 seconds were spent before
    assert step == 3 and message == Keep(pytest.approx(24 / 3600))


def test_the_compute_of_an_evaluation_is_that_when_its_weights_were_made(tmp_path: Path) -> None:
    one = make(tmp_path)
    start, (cores, *_) = one.start, one.ledger.devices.values()
    result = {"pass_rate": 0.5, "pass_rate_se": 0.1}
    one.handle("controller", Event("eval", start, {"step": 0} | result))
    one.handle("controller", Event("training_begins", start, {}))
    for role, state in (("engine", "generate"), ("learner", "forward_backward")):
        one.handle(role, Spans(role, ((state, start, start + 7),)))
    one.handle("controller", step_event(1, start + 7))
    for i in range(1000):  # a long evaluation of version 1, and a step beside it
        at = start + 7 + i / 100
        one.handle(
            "engine", Spans("engine", (("generate", at, at + 0.005), ("evaluate", at + 0.005, at + 0.01)))
        )
    one.handle("learner", Spans("learner", (("forward_backward", start + 7, start + 17),)))
    one.handle("controller", step_event(2, start + 17))
    one.handle("controller", Event("eval", start + 18, {"step": 1} | result | {"pass_rate": 0.6}))
    first, one_made, _, last = list(read_lines(tmp_path / "metrics.jsonl"))
    assert first["compute/flops"] == 0 and last["compute/flops"] == one_made["compute/flops"]
    assert [p.compute * 3600 for p in one.points] == pytest.approx([0, 14 * cores])
    assert (first["compute/total"], last["compute/total"] * 3600) == pytest.approx((0, 14 * cores))
    assert last["time"] == pytest.approx(7)
    assert "eval/gain_per_hour" not in first
    assert last["eval/gain_per_hour"] == pytest.approx(0.1 / (14 * cores / 3600))


def test_the_flops_of_the_steps_add_up_and_a_resumed_run_goes_on_from_them(tmp_path: Path) -> None:
    tokens = {"train/rollout_tokens": 1000, "learner/input_tokens": 500}
    plain = ObjectiveConfig()
    assert step_flops(10, plain, tokens) == 10 * (2 * 1000 + 6 * 500)
    with_reference = replace(plain, kl=KLConfig(coefficient=0.1))
    assert step_flops(10, with_reference, tokens) == 10 * (2 * (1000 + 1000) + 6 * 500)
    second_epoch = {"train/rollout_tokens": 0, "learner/input_tokens": 500}
    assert step_flops(10, with_reference, second_epoch) == 10 * 6 * 500

    def steps(one: Recorder, *numbers: int) -> None:
        one.handle("controller", Event("ready", one.start, {"learner": {"parameters": 10}}))
        for step in numbers:
            one.handle("controller", step_event(step, one.start))
        one.close()

    steps(make(tmp_path), 1, 2, 3)
    steps(make(tmp_path, resume_version=2), 3)
    each = 10 * (2 * 100 + 6 * 50)
    found = [row["compute/flops"] for row in read_lines(tmp_path / "metrics.jsonl")]
    assert found == [each, 2 * each, 3 * each]


@pytest.mark.parametrize(("version", "steps"), [(2, [0, 1, 2, 2]), (0, [])])
def test_a_resume_forgets_what_lies_beyond_its_checkpoint(
    version: int, steps: list[int], tmp_path: Path
) -> None:
    before = make(tmp_path)
    before.close()
    line = {"compute/total": 0.1, "eval/pass_rate": 0.5, "eval/pass_rate_se": 0.1}
    rows = [{"step": 0} | line, {"step": 1}, {"step": 2}, {"step": 3}, {"step": 2} | line, {"step": 3} | line]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = make(tmp_path, resume_version=version)
    assert [row["step"] for row in list(read_lines(tmp_path / "metrics.jsonl"))] == steps
    assert [p.step for p in one.points] == [s for s in steps if s != 1][:-1]
    assert one.view.state.step == version
    assert one.view.state.left(time.monotonic()) is None  # not known before this process has made steps


def train(one: Recorder, step: int, law: Sigmoid) -> tuple[str, float]:
    """A step of 30 s and its evaluation, which has no noise: why the run is complete now, and the reward."""
    at, rate = one.start + 30 * step, law.R0
    if step:
        for role in one.ledger.devices:
            one.handle(role, Spans(role, (("idle", at - 30, at),)))
        one.handle("controller", step_event(step, at))
        rate = float(law.reward(one.ledger.compute(at).total))
    result = {"step": step, "pass_rate": rate, "pass_rate_se": 0.01}
    ended_by = one.handle("controller", Event("eval", at, result))
    if not step:
        one.handle("controller", Event("training_begins", at, {}))
    return ended_by, rate


def test_a_run_whose_forecast_says_so_ends_and_records_why_also_after_a_resume(tmp_path: Path) -> None:
    law, pipeline = Sigmoid(0.1, 0.7, 2.5, 0.02), replace(CONFIG.pipeline, steps=60)
    config = replace(CONFIG, pipeline=pipeline, forecast=ForecastConfig(stop="gain<0.01 per doubling"))
    one = make(tmp_path, config=config)
    ended_by = [train(one, step, law)[0] for step in range(12)]
    last = ended_by.index("forecast")
    assert ended_by.count("forecast") == 1 and 7 <= last < 11  # five points make a fit, and three forecasts
    one.handle("controller", Event("done", one.start + 400, {"step": 11, "ended_by": "forecast"}))
    logged = [x for x in one.view.stream.getvalue().splitlines() if "] stopping: " in x]  # type: ignore[attr-defined]
    end = json.loads((tmp_path / "ended.json").read_text())
    assert end["by"] == "forecast" and len(logged) == 1 and logged[0].endswith(f"stopping: {end['why']}")
    assert "[gain<0.01 per doubling for 3 evaluations in a row]" in end["why"]
    assert complete(tmp_path) and complete(tmp_path, 99.0)  # a sweep does not go on with it, at any budget
    one.close()

    before = (tmp_path / "metrics.jsonl").read_text()
    again = make(tmp_path, last - 1, config)  # from a checkpoint before the last evaluation
    assert [train(again, step, law)[0] for step in (last,)] == ["forecast"]  # its count goes on
    again.close()
    (tmp_path / "metrics.jsonl").write_text(before)
    without = make(tmp_path, last, replace(config, forecast=ForecastConfig()))
    assert [train(without, step, law)[0] for step in (last + 1, last + 2)] == ["", ""]
    without.close()


def test_an_evaluation_says_how_well_half_of_its_compute_predicted_it(tmp_path: Path) -> None:
    one = make(tmp_path, config=replace(CONFIG, pipeline=replace(CONFIG.pipeline, steps=12)))
    for step in range(12):
        train(one, step, Sigmoid(0.1, 0.9, 2.0, 0.03))
    found = [
        row.get("forecast/error_at_2x")
        for row in read_lines(tmp_path / "metrics.jsonl")
        if "eval/pass_rate" in row
    ]
    assert found[:6] == [None] * 6  # three points make a forecast
    assert all(error is not None and abs(error) < 0.05 for error in found[10:]) and len(found) == 12


def test_each_evaluation_comes_with_its_prediction_and_a_forecast_of_the_runs_end(
    tmp_path: Path,
) -> None:
    law = Sigmoid(0.1, 0.9, 2.0, 0.02)
    one = make(tmp_path)
    for step in range(9):
        rate = train(one, step, law)[1]
    row = list(read_lines(tmp_path / "metrics.jsonl"))[-1]
    end = float(law.reward(row["compute/total"] / 8 * 10))  # of ten steps
    assert row["forecast/end_low"] <= end <= row["forecast/end_high"]
    assert row["forecast/end"] == pytest.approx(end, abs=0.02)
    assert row["forecast/predicted"] == pytest.approx(rate, abs=0.02) and row["forecast/alarm"] == 0
    assert one.fit is not None and one.fit.points == 8


def test_a_launcher_that_is_behind_writes_evaluations_down_and_fits_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(tmp_path)
    law = Sigmoid(0.1, 0.9, 2.0, 0.02)
    for step in range(7):
        train(one, step, law)
    before = one.fit
    monkeypatch.setattr("trainer.launcher.recorder.BEHIND_S", -1e6)  # every event counts as old
    for step in (7, 8):
        _, row = train(one, step, law), list(read_lines(tmp_path / "metrics.jsonl"))[-1]
        assert row["step"] == step and "eval/pass_rate" in row and "compute/total" in row
        assert not any(name.startswith("forecast/") for name in row)
    assert before is not None and one.fit is not None
    assert (before.points, one.fit.points) == (6, 8)
    monkeypatch.undo()
    train(one, 9, law)
    assert "forecast/end" in list(read_lines(tmp_path / "metrics.jsonl"))[-1]


def test_a_warning_is_shown_and_kept_and_ends_the_run_if_asked(tmp_path: Path) -> None:
    for stop in (False, True):
        folder = tmp_path / str(stop)
        folder.mkdir()
        one = make(folder, config=replace(CONFIG, guard=GuardConfig(stop=stop)))
        ended = []
        for step in range(1, 5):
            event = step_event(step, one.start)
            event.data["ratio/ess"] = 0.3
            event.data["learner/skipped_steps"] = float(step == 2)  # which ends no run
            ended.append(one.handle("controller", event))
        assert ended == ["", "", "guard" if stop else "", ""]
        rows = read_lines(folder / "metrics.jsonl")
        assert [any(k.startswith("warning/") for k in row) for row in rows] == [False, True, True, False]
        one.handle("controller", Event("done", one.start, {"step": 4, "ended_by": "guard" if stop else ""}))
        assert complete(folder) == stop
        if stop:
            assert "leave only 30% of the batch" in (folder / "ended.json").read_text()


def test_a_warning_after_the_end_was_decided_does_not_change_why(tmp_path: Path) -> None:
    one = make(tmp_path, config=replace(CONFIG, guard=GuardConfig(stop=True)))
    one._why_stopped = "the forecast says so"
    for step in range(1, 4):
        event = step_event(step, one.start)
        event.data["ratio/ess"] = 0.1
        assert one.handle("controller", event) == ""
    one.handle("controller", Event("done", one.start, {"step": 3, "ended_by": "forecast"}))
    assert "the forecast says so" in (tmp_path / "ended.json").read_text()


def test_a_resumed_run_does_not_repeat_a_warning(tmp_path: Path) -> None:
    one = make(tmp_path)
    one.handle("controller", Event("training_begins", one.start, {}))
    result = {"pass_rate": 0.5, "pass_rate_se": 0.1}
    for step in range(1, 5):
        event = step_event(step, one.start + step)
        event.data.update({"ratio/ess": 0.1, "train/pass_rate": 0.5})
        one.handle("controller", event)
        one.handle("controller", Event("eval", one.start + step, {"step": step} | result))
    one.close()
    resumed = make(tmp_path, resume_version=4)
    for step in range(5, 9):
        event = step_event(step, resumed.start + step)
        event.data["ratio/ess"] = 0.1
        resumed.handle("controller", event)
    rows = [row for row in read_lines(tmp_path / "metrics.jsonl") if "warning/ess" in row]
    assert [row["step"] for row in rows] == [3]


@pytest.mark.parametrize("written", [0, 1, 2, 3, 4])
def test_a_resume_writes_the_lines_that_a_killed_launcher_did_not(written: int, tmp_path: Path) -> None:
    """Five messages of an unbroken run's controller, of which the launcher wrote the first few."""
    result = {"pass_rate": 0.5, "pass_rate_se": 0.1}

    def events(start: float) -> list[Event]:
        return [
            Event("training_begins", start, {"step": 0}),
            step_event(1, start + 2),
            step_event(2, start + 5),
            Event("eval", start + 6, {"step": 2} | result),
            step_event(3, start + 9),
        ]

    def played(folder: Path, until: int) -> Recorder:
        folder.mkdir()
        one = make(folder)
        one.handle("controller", Event("ready", one.start, {"learner": {"parameters": 10}}))
        one.handle("controller", Event("eval", one.start, {"step": 0} | result))
        for event in events(one.start)[: until + 1]:
            for role in one.ledger.devices:
                one.handle(role, Spans(role, (("generate", one.start, event.time),)))
            one.handle("controller", event)
        return one

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    played(whole, 4).close()
    killed = played(broken, written)
    killed.ledger.write(broken)
    log(broken, Event("ready", killed.start, {"learner": {"parameters": 10}}), *events(killed.start))
    again = make(broken, 3)
    assert not (broken / EVENTS).exists()

    def rows(folder: Path) -> list[dict[str, Any]]:
        wanted = ("step", "eval/pass_rate", "compute/total", "compute/flops", "learner/input_tokens")
        return [{k: row[k] for k in wanted if k in row} for row in read_lines(folder / "metrics.jsonl")]

    assert len(rows(broken)) == 5
    for got, expected in zip(rows(broken), rows(whole), strict=True):
        assert got == pytest.approx(expected)
    assert [p.step for p in again.points] == [0, 2]
    cores = sum(again.ledger.devices.values())
    assert again.ledger.compute(again.start).total == pytest.approx(9 * cores / 3600)
    again.handle("controller", Event("training_begins", again.start, {"step": 3}))
    again.handle("controller", step_event(4, again.start + 1))
    assert rows(broken)[-1]["compute/total"] == pytest.approx(10 * cores / 3600)
    assert rows(broken)[-1]["compute/flops"] == 4 * rows(broken)[1]["compute/flops"]


def test_compute_that_the_ledger_had_not_written_is_booked_by_a_resume(tmp_path: Path) -> None:
    make(tmp_path).close()
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "time": 9.0, "compute/total": 0.25}) + "\n"
    )
    books = make(tmp_path, 1).ledger.to_json()
    assert books["compute"]["total"] == 0.25
    spent = sum(role["states"].get("unrecorded", 0.0) for role in books["roles"].values())
    assert spent == pytest.approx(0.25 * 3600)


def test_compute_that_nobody_recorded_is_without_evaluations(tmp_path: Path) -> None:
    one, result = make(tmp_path), {"pass_rate": 0.5, "pass_rate_se": 0.1, "seconds": 3600.0}
    one.handle("controller", Event("training_begins", one.start, {}))
    for role in one.ledger.devices:
        one.handle(role, Spans(role, (("generate", one.start, one.start + 100),)))
    one.handle("controller", step_event(1, one.start + 100))
    one.ledger.write(tmp_path)
    steps = {step: step_event(step, one.start + s) for step, s in ((1, 100), (2, 5500), (3, 9000))}
    evaluation = Event("eval", one.start + 3700, {"step": 1} | result)
    log(tmp_path, Event("training_begins", one.start, {}), steps[1], evaluation, steps[2], steps[3])
    again = make(tmp_path, 2)  # step 3 is made again, and its compute was spent
    cores, books = sum(again.ledger.devices.values()), again.ledger.to_json()
    rows = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 1, 2] and rows[1]["eval/pass_rate"] == 0.5
    assert [row["compute/total"] * 3600 / cores for row in rows] == pytest.approx([100, 100, 1900])
    assert [row["time"] for row in rows] == pytest.approx([100, 100, 5500])
    assert books["compute"]["total"] * 3600 / cores == pytest.approx(100 + 1800 + 3500)
    states = {"generate": 100, "evaluate": 3600, "unrecorded": 1800 + 3500}
    assert books["roles"]["engine"]["seconds"] == pytest.approx(states)


def log(folder: Path, *events: Event) -> None:
    """The controller's log of these events."""
    (folder / EVENTS).parent.mkdir(exist_ok=True)
    with (folder / EVENTS).open("w") as file:
        for event in events:
            append(file, asdict(event))
