"""Promises of the run's record: what each event adds to ledger, metrics, curve and view; no processes."""

import json
import os
import time
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import having

from trainer.accounting.flops import step_flops
from trainer.config import Config, ConfigError, KLConfig, ObjectiveConfig
from trainer.jsonl import append, read_lines
from trainer.launcher.placement import assign
from trainer.launcher.recorder import Recorder
from trainer.launcher.terminal import make_view
from trainer.messages import Event, Keep, Pace, Spans
from trainer.run_folder import EVENTS, claim, complete
from trainer.scaling import Sigmoid

CONFIG = having(Config(), pipeline={"steps": 10}, logging={"tensorboard": False})
READY = {"learner": {"parameters": 10}}
HOUR = 3600.0


def make(run_dir: Path, version: int | None = None, config: Config = CONFIG, devices: int = 0) -> Recorder:
    run_dir.mkdir(exist_ok=True)
    config = replace(config, run_dir=str(run_dir))
    held = assign(config, (), devices or len(os.sched_getaffinity(0)))
    state = None if version is None else {"version": version}
    return Recorder(config, held, make_view(config, "core-hours", stream=StringIO()), state, 1.5)


def stepped(step: int, at: float, **more: Any) -> Event:
    return Event("step", at, {"step": step, "train/rollout_tokens": 100, "learner/input_tokens": 50} | more)


def evaluated(step: int, at: float, **more: Any) -> Event:
    return Event("eval", at, {"step": step, "pass_rate": 0.5, "pass_rate_se": 0.1} | more)


def hold(one: Recorder, until: float, state: str = "generate") -> None:
    """Every role has been in this state until so many seconds after the start."""
    for role in one.ledger.devices:
        assert not one.handle(role, Spans(role, ((state, one.start, one.start + until),)))


def play(one: Recorder, *events: Event) -> list[str]:
    """The controller's events, and why the run is complete after each."""
    return [one.handle("controller", event) for event in events]


def begin(one: Recorder) -> None:
    play(one, Event("training_begins", one.start, {"step": 0}))


def rows(folder: Path, key: str = "step") -> list[dict[str, Any]]:
    return [row for row in read_lines(folder / "metrics.jsonl") if key in row]


def log(folder: Path, *events: Event) -> None:
    """The controller's log of these events."""
    (folder / EVENTS).parent.mkdir(exist_ok=True)
    with (folder / EVENTS).open("w") as file:
        for event in events:
            append(file, asdict(event))


def test_a_line_has_the_engines_counters_since_the_line_before(tmp_path: Path) -> None:
    """Their rate, where one that was started again counts from 0; the most KV in use, and all preemptions."""
    one = make(tmp_path)
    names = ("tokens", "busy_s", "kv_use", "preemptions")
    restarted, other = ("engine", (300, 1.0, 0.9, 3)), ("engine-1", (50, 0.5, 0.4, 1))
    reports = [(), (("engine", (1000, 2.0)),), (("engine", (1600, 3.0)),), (restarted, other), ()]
    for step, counts in enumerate(reports):
        for role, values in counts:
            one.handle(role, Event("engine", one.start, dict(zip(names, values, strict=False))))
        play(one, stepped(step, one.start, **{"learner/peak_memory_gb": (1.0, 3.0, 2.0, 0.0, 1.0)[step]}))
    assert [row["engine/tokens_per_s"] for row in rows(tmp_path)] == [0, 500, 600, 400, 400]
    assert [row.get("engine/kv_use") for row in rows(tmp_path)] == [None, None, None, 0.9, None]
    assert rows(tmp_path)[3]["engine/preemptions"] == 4
    assert {row["learner/estimated_memory_gb"] for row in rows(tmp_path)} == {1.5}
    assert (one.peak_gb, one.estimated_gb) == (3.0, 1.5)


def test_compute_never_falls_where_an_engine_reports_late_that_it_evaluated(tmp_path: Path) -> None:
    one = make(tmp_path)
    begin(one)
    hold(one, 10)
    play(one, stepped(1, one.start + 20))  # no role has reported beyond 10
    for role in one.ledger.devices:
        one.handle(role, Spans(role, (("evaluate", one.start + 10, one.start + 21),)))
    play(one, stepped(2, one.start + 21))
    assert one.ledger.compute().total == pytest.approx(20 / HOUR)
    hold(one, 40)
    play(one, stepped(3, one.start + 40))
    first, second, third = (row["compute/total"] for row in rows(tmp_path))
    assert first == second == pytest.approx(40 / HOUR) and third == pytest.approx(58 / HOUR)


def test_the_compute_is_spent_with_the_step_that_reaches_it_and_the_end_is_recorded(tmp_path: Path) -> None:
    one = make(tmp_path, config=having(CONFIG, pipeline={"max_compute": 20 / HOUR}), devices=2)
    begin(one)
    spent, paces = [], list[object]()
    one.ask = paces.append
    for step, at in enumerate((4, 9, 11), 1):
        hold(one, at)
        spent += play(one, stepped(step, one.start + at))
    assert spent == ["", "", "compute"]  # after 8, 18 and 22 core-seconds
    assert paces == [Pace(pytest.approx(seconds / HOUR)) for seconds in (8, 9, 22 / 3)]
    end = one.start + 12
    play(one, evaluated(3, end), Event("done", end, {"step": 3, "ended_by": ""}))  # Ctrl-C
    assert not complete(tmp_path, 20 / HOUR)
    play(one, Event("done", end, {"step": 3, "ended_by": "compute"}))
    assert complete(tmp_path, 20 / HOUR) and not complete(tmp_path, 21 / HOUR) and not complete(tmp_path)
    with pytest.raises(ConfigError, match="a complete run whose checkpoints are gone"):
        claim(str(tmp_path), resume=True)
    (tmp_path / "checkpoints" / "step-000003").mkdir(parents=True)
    claim(str(tmp_path), resume=True).close()
    assert not complete(tmp_path, 20 / HOUR)  # it goes on


def test_a_checkpoint_is_asked_for_once_after_each_chosen_compute_also_after_a_resume(tmp_path: Path) -> None:
    config = having(CONFIG, logging={"keep_at": (5 / HOUR, 7 / HOUR, 20 / HOUR)})

    def asked(one: Recorder, ends: tuple[int, ...]) -> list[object]:
        """The record's messages at each step, until which two roles have held a core for so many seconds."""
        messages: list[object] = []
        one.ask = lambda message: messages.append((step, message))
        begin(one)
        for step, end in enumerate(ends, 1):
            hold(one, end)
            play(one, stepped(step, one.start + end))
        one.close()
        return messages

    first = make(tmp_path, config=config, devices=2)
    assert asked(first, (2, 4, 5, 6)) == [(2, Keep(8 / HOUR))]  # after 4, 8, 10 and 12 core-seconds
    folder = tmp_path / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    (folder / "controller.json").write_text(json.dumps({"version": 3, "kept": 8 / HOUR}))
    again = make(tmp_path, 3, config=config, devices=2)
    ((step, message),) = asked(again, (1, 3, 6, 9))  # 12 seconds were spent before
    assert step == 3 and message == Keep(pytest.approx(24 / HOUR))


def test_the_compute_of_an_evaluation_is_that_when_its_weights_were_made(tmp_path: Path) -> None:
    one = make(tmp_path)
    start, (cores, *_) = one.start, one.ledger.devices.values()
    play(one, evaluated(0, start))
    begin(one)
    hold(one, 7)
    play(one, stepped(1, start + 7))
    for i in range(1000):  # a long evaluation of version 1, and a step beside it
        at = start + 7 + i / 100
        spans = ("generate", at, at + 0.005), ("evaluate", at + 0.005, at + 0.01)
        one.handle("engine", Spans("engine", spans))
    one.handle("learner", Spans("learner", (("forward_backward", start + 7, start + 17),)))
    play(one, stepped(2, start + 17), evaluated(1, start + 18, pass_rate=0.6))
    first, one_made, _, last = rows(tmp_path)
    assert first["compute/flops"] == 0 and last["compute/flops"] == one_made["compute/flops"]
    assert [p.compute * HOUR for p in one.points] == pytest.approx([0, 14 * cores])
    assert (first["compute/total"], last["compute/total"] * HOUR) == pytest.approx((0, 14 * cores))
    assert last["time"] == pytest.approx(7)
    assert "eval/gain_per_hour" not in first
    assert last["eval/gain_per_hour"] == pytest.approx(0.1 / (14 * cores / HOUR))


def test_the_rest_of_a_run_is_made_at_the_rate_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is forecast at twice the mean hours of a step where an hour does half of the mean's work."""
    one, ends = make(tmp_path), list[float]()
    fit = SimpleNamespace(axis=SimpleNamespace(ahead=np.array([0.5])))
    state = SimpleNamespace(fit=fit, recommendation="none", gain=None, metrics=dict)
    monkeypatch.setattr("trainer.launcher.recorder.forecast", lambda _, end, *__: ends.append(end) or state)
    play(one, evaluated(0, one.start))
    begin(one)
    for step in (1, 2):
        hold(one, 10 * step)
        play(one, stepped(step, one.start + 10 * step), evaluated(step, one.start + 10 * step))
        fit.axis = None  # from now on
    hours = one.points[-1].compute / 2  # of a step, of 10
    assert ends == pytest.approx([0, (1 + 9 / 0.5) * hours, 10 * hours])


def test_the_flops_of_the_steps_add_up_and_a_resumed_run_goes_on_from_them(tmp_path: Path) -> None:
    tokens = {"train/rollout_tokens": 1000, "learner/input_tokens": 500}
    with_reference = ObjectiveConfig(kl=KLConfig(coefficient=0.1))
    assert step_flops(10, ObjectiveConfig(), tokens) == 10 * (2 * 1000 + 6 * 500)
    assert step_flops(10, with_reference, tokens, 10) == 10 * (2 * (1000 + 1000) + 6 * 500)
    assert (
        step_flops(10, with_reference, tokens, 70) == 10 * (2 * 1000 + 6 * 500) + 2 * 70 * 1000
    )  # a teacher
    assert (
        step_flops(10, with_reference, tokens | {"train/rollout_tokens": 0}, 10) == 10 * 6 * 500
    )  # 2nd epoch
    assert step_flops(10, ObjectiveConfig(), tokens, adapters=3) == 10 * 2 * 1000 + (4 * 10 + 6 * 3) * 500
    each = 10 * (2 * 100 + 6 * 50)
    for resume, steps in ((None, (1, 2, 3)), (2, (3,))):
        one = make(tmp_path, resume)
        made = [event for step in steps for event in (stepped(step, one.start), evaluated(step, one.start))]
        play(one, Event("ready", one.start, READY), *made)
        one.close()
        assert [p.flops for p in one.points] == [each, 2 * each, 3 * each]
    assert [row["compute/flops"] for row in rows(tmp_path)] == [
        each,
        each,
        2 * each,
        2 * each,
        3 * each,
        3 * each,
    ]


@pytest.mark.parametrize(("version", "steps"), [(2, [0, 1, 2, 2]), (0, [])])
def test_a_resume_forgets_all_beyond_its_checkpoint(version: int, steps: list[int], tmp_path: Path) -> None:
    make(tmp_path).close()
    line = {"compute/total": 0.1, "eval/pass_rate": 0.5, "eval/pass_rate_se": 0.1}
    lines = [{"step": 0} | line, *({"step": s} for s in (1, 2, 3)), {"step": 2} | line, {"step": 3} | line]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    one = make(tmp_path, version)
    assert [row["step"] for row in rows(tmp_path)] == steps
    assert [p.step for p in one.points] == [s for s in steps if s != 1][:-1]
    assert one.view.state.step == version
    assert one.view.state.remaining(time.monotonic()) is None  # not known before this process has made steps


def train(one: Recorder, step: int, law: Sigmoid) -> tuple[str, float]:
    """A step of 30 s and its evaluation, which has no noise: why the run is complete now, and the reward."""
    at, rate = one.start + 30 * step, law.R0
    if step:
        hold(one, 30 * step, "idle")
        play(one, stepped(step, at))
        rate = float(law.reward(one.ledger.compute(at).total))
    (ended_by,) = play(one, evaluated(step, at, pass_rate=rate, pass_rate_se=0.01))
    if not step:
        begin(one)
    return ended_by, rate


@pytest.mark.slow
def test_a_run_whose_forecast_says_so_ends_and_records_why_also_after_a_resume(tmp_path: Path) -> None:
    law = Sigmoid(0.1, 0.7, 2.5, 0.02)
    config = having(CONFIG, pipeline={"steps": 60}, forecast={"stop": "gain<0.01 per doubling"})
    one = make(tmp_path, config=config)
    ended_by = [train(one, step, law)[0] for step in range(12)]
    last = ended_by.index("forecast")
    assert ended_by.count("forecast") == 1 and 7 <= last < 11  # five points make a fit, and three forecasts
    play(one, Event("done", one.start + 400, {"step": 11, "ended_by": "forecast"}))
    logged = [x for x in one.view.stream.getvalue().splitlines() if "] stopping: " in x]  # type: ignore[attr-defined]
    end = json.loads((tmp_path / "ended.json").read_text())
    assert end["by"] == "forecast" and len(logged) == 1 and logged[0].endswith(f"stopping: {end['why']}")
    assert "[gain<0.01 per doubling for 3 evaluations in a row]" in end["why"]
    assert complete(tmp_path) and complete(tmp_path, 99.0)  # a sweep does not go on with it, at any budget
    one.close()

    before = (tmp_path / "metrics.jsonl").read_text()
    for settings, version, steps, reasons in (
        (config, last - 1, (last,), ["forecast"]),  # before the last evaluation: its count goes on
        (having(config, forecast={"stop": ""}), last, (last + 1, last + 2), ["", ""]),
    ):
        (tmp_path / "metrics.jsonl").write_text(before)
        again = make(tmp_path, version, settings)
        assert [train(again, step, law)[0] for step in steps] == reasons
        again.close()


def test_an_evaluation_has_its_prediction_a_forecast_and_how_well_half_predicted_it(tmp_path: Path) -> None:
    law = Sigmoid(0.1, 0.9, 2.0, 0.02)
    one = make(tmp_path)
    for step in range(9):
        rate = train(one, step, law)[1]
    row = rows(tmp_path)[-1]
    end = float(law.reward(row["compute/total"] / 8 * 10))  # of ten steps
    assert row["forecast/end_low"] <= end <= row["forecast/end_high"]
    assert row["forecast/end"] == pytest.approx(end, abs=0.02)
    assert row["forecast/predicted"] == pytest.approx(rate, abs=0.02) and row["forecast/alarm"] == 0
    assert one.fit is not None and one.fit.points == 8
    for step in range(9, 12):
        train(one, step, law)
    errors = [row.get("forecast/error_at_2x") for row in rows(tmp_path, "eval/pass_rate")]
    assert errors[:4] == [None] * 4  # two points and R0 make a forecast
    assert all(error is not None and abs(error) < 0.05 for error in errors[10:]) and len(errors) == 12


def test_a_launcher_behind_fits_the_last_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, law = make(tmp_path), Sigmoid(0.1, 0.9, 2.0, 0.02)
    for step in range(7):
        train(one, step, law)
    before = one.fit
    monkeypatch.setattr("trainer.launcher.recorder.BEHIND_S", -1e6)  # every event counts as old
    for step in (7, 8):
        _, row = train(one, step, law), rows(tmp_path)[-1]
        assert row["step"] == step and "eval/pass_rate" in row and "compute/total" in row
        assert not any(name.startswith("forecast/") for name in row)
    assert before is not None and one.fit is not None
    assert (before.points, one.fit.points) == (6, 8)
    monkeypatch.undo()
    train(one, 9, law)
    assert "forecast/end" in rows(tmp_path)[-1]


@pytest.mark.parametrize("stop", [False, True])
def test_a_warning_is_kept_once_and_ends_the_run_if_asked(stop: bool, tmp_path: Path) -> None:
    config = having(CONFIG, guard={"stop": stop})

    def wrong(one: Recorder, steps: range) -> list[str]:
        # A skipped step ends no run.
        bad = [{"ratio/ess": 0.3, "learner/skipped_steps": float(step == 2)} for step in steps]
        return play(one, *(stepped(step, one.start, **x) for step, x in zip(steps, bad, strict=True)))

    one = make(tmp_path, config=config)
    assert wrong(one, range(1, 5)) == ["", "", "guard" if stop else "", ""]
    signs = [[k for k in row if k.startswith("warning/")] for row in rows(tmp_path)]
    assert signs == [[], ["warning/skipped"], ["warning/ess"], []]
    play(one, Event("done", one.start, {"step": 4, "ended_by": "guard" if stop else ""}))
    assert complete(tmp_path) == stop
    assert not stop or "leave only 30% of the batch" in (tmp_path / "ended.json").read_text()
    one.close()
    resumed = make(tmp_path, 4, config)
    assert not any(wrong(resumed, range(5, 9))) and len(rows(tmp_path, "warning/ess")) == 1


def test_what_follows_the_end_of_training_is_not_compute(tmp_path: Path) -> None:
    one = make(tmp_path)
    begin(one)
    hold(one, 10.0)
    play(one, Event("done", one.start + 10, {"step": 1, "ended_by": ""}))
    hold(one, 15.0, "idle")
    devices = sum(one.ledger.devices.values())
    assert one.ledger.compute().total == pytest.approx(10 * devices / HOUR)
    assert all(role["states"]["shut-down"] > 0 for role in one.ledger.to_json()["roles"].values())


def test_a_warning_after_the_end_was_decided_does_not_change_why(tmp_path: Path) -> None:
    one = make(tmp_path, config=having(CONFIG, guard={"stop": True}))
    one._why_stopped = "the forecast says so"
    assert not any(play(one, *(stepped(step, one.start, **{"ratio/ess": 0.1}) for step in range(1, 4))))
    play(one, Event("done", one.start, {"step": 3, "ended_by": "forecast"}))
    assert "the forecast says so" in (tmp_path / "ended.json").read_text()


@pytest.mark.parametrize("written", [0, 1, 2, 3, 4])
def test_a_resume_writes_the_lines_that_a_killed_launcher_did_not(written: int, tmp_path: Path) -> None:
    """Five messages of an unbroken run's controller, of which the launcher wrote the first few."""

    def events(start: float) -> list[Event]:
        steps = [stepped(step, start + s) for step, s in ((1, 2), (2, 5), (3, 9))]
        steps.insert(2, evaluated(2, start + 6))
        return [Event("training_begins", start, {"step": 0}), *steps]

    def played(folder: Path, until: int) -> Recorder:
        one = make(folder)
        play(one, Event("ready", one.start, READY), evaluated(0, one.start))
        for event in events(one.start)[: until + 1]:
            hold(one, event.time - one.start)
            play(one, event)
        return one

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    played(whole, 4).close()
    killed = played(broken, written)
    assert (broken / "ledger.json").exists()  # from its first message on
    killed.ledger.write(broken)
    log(broken, Event("ready", killed.start, READY), *events(killed.start))
    again = make(broken, 3)
    assert not (broken / EVENTS).exists()

    def figures(folder: Path) -> list[dict[str, Any]]:
        wanted = ("step", "eval/pass_rate", "compute/total", "compute/flops", "learner/input_tokens")
        return [{k: row[k] for k in wanted if k in row} for row in rows(folder)]

    assert len(figures(broken)) == 5
    for got, expected in zip(figures(broken), figures(whole), strict=True):
        assert got == pytest.approx(expected)
    assert [p.step for p in again.points] == [0, 2]
    cores = sum(again.ledger.devices.values())
    assert again.ledger.compute(again.start).total == pytest.approx(9 * cores / HOUR)
    begin(again)
    play(again, stepped(4, again.start + 1))
    assert rows(broken)[-1]["compute/total"] == pytest.approx(10 * cores / HOUR)
    assert rows(broken)[-1]["compute/flops"] == 4 * rows(broken)[1]["compute/flops"]


def test_compute_that_the_ledger_had_not_written_is_booked_by_a_resume(tmp_path: Path) -> None:
    make(tmp_path).close()
    line = {"step": 1, "time": 9.0, "compute/total": 0.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    books = make(tmp_path, 1).ledger.to_json()
    assert books["compute"]["total"] == 0.25
    spent = sum(role["states"].get("unrecorded", 0.0) for role in books["roles"].values())
    assert spent == pytest.approx(0.25 * HOUR)


def test_compute_that_nobody_recorded_is_without_evaluations(tmp_path: Path) -> None:
    one = make(tmp_path)
    begin(one)
    hold(one, 100)
    steps = [stepped(step, one.start + s) for step, s in ((1, 100), (2, 5500), (3, 9000))]
    play(one, steps[0])
    one.ledger.write(tmp_path)
    evaluation = evaluated(1, one.start + 3700, seconds=3600.0)
    log(tmp_path, Event("training_begins", one.start, {}), steps[0], evaluation, *steps[1:])
    again = make(tmp_path, 2, devices=99)  # step 3 is made again, and its compute was spent, on the old cores
    cores, books = sum(one.ledger.devices.values()), again.ledger.to_json()
    lines = rows(tmp_path)
    assert [row["step"] for row in lines] == [1, 1, 2] and lines[1]["eval/pass_rate"] == 0.5
    assert [row["compute/total"] * HOUR / cores for row in lines] == pytest.approx([100, 100, 1900])
    assert [row["time"] for row in lines] == pytest.approx([100, 100, 5500])
    assert books["compute"]["total"] * HOUR / cores == pytest.approx(100 + 1800 + 3500)
    states = {"generate": 100, "evaluate": 3600, "unrecorded": 1800 + 3500}
    assert books["roles"]["engine"]["seconds"] == pytest.approx(states)


def test_what_completions_of_each_prompt_are_worth_has_a_file_of_its_own(tmp_path: Path) -> None:
    one = make(tmp_path / "run")
    worth = {"": {"pass": {"1": [0.5, 1.0]}}, "far": {"pass": {"1": [0.0]}, "maj": {"1": [0.0]}}}
    play(one, evaluated(0, one.start, by_prompt=worth))
    one.close()
    assert list(read_lines(tmp_path / "run" / "held_out.jsonl")) == [
        {"step": 0, "set": name, **measures} for name, measures in worth.items()
    ]
    assert not any("by_prompt" in key for row in rows(tmp_path / "run") for key in row)
