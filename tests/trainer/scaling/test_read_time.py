"""Promises of compute by time: any unit, dates and clocks, without pauses, from any W&B chart."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.logs import pairs, reading_of, readings_of, says, start_of, write_csv, write_jsonl

from trainer.config import ConfigError

HOURS = [0.0, 0.5, 1.0, 2.0, 4.0]
REWARDS = [0.1, 0.2, 0.3, 0.4, 0.5]
GPU_HOURS = [(4.0, 0.2), (8.0, 0.3), (16.0, 0.4), (32.0, 0.5)]  # with 8 devices
DATE = 1_760_000_000


UNITS = {
    1.0: ("hours", "time_hours", "Time (h)", "elapsed_h", "wall-clock hours", "train/time_hours"),
    60.0: ("elapsed_min", "minutes", "training time (min)"), 1 / 24: ("days", "time_days"),
    3.6e6: ("time_ms",),
    3600.0: ("elapsed_s", "seconds", "wall_time", "time", "elapsed_seconds", "time/time_elapsed"),
}  # fmt: skip


@pytest.mark.parametrize(("in_hours", "column"), [(unit, name) for unit in UNITS for name in UNITS[unit]])
def test_the_unit_of_time_is_that_of_the_name(column: str, in_hours: float, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "s.csv", {column: [t * in_hours for t in HOURS], "accuracy": REWARDS})
    reading = reading_of(path, "--devices", 8)
    assert [p.compute for p in reading.curve.points] == pytest.approx([c for c, _ in GPU_HOURS])
    assert start_of(reading.curve) == 0.1 and reading.curve.unit == "GPU-hours"


def test_time_alone_is_no_compute_until_the_number_of_devices_is_known(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "sheet.csv", {"hours": HOURS, "accuracy": REWARDS})
    with pytest.raises(ConfigError, match=r"only as time, 'hours': give --devices N, the number of GPUs"):
        reading_of(path)


def test_a_unit_that_no_name_gives_is_taken_to_be_seconds_and_said(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "sheet.csv", {"t": HOURS, "accuracy": REWARDS})
    guessed = reading_of(path, "--devices", 8, "--time-column", "t")
    assert says(guessed, "'t' is taken to be in seconds (--time-unit)")


ZONES = ("2026-01-31T{:02}:{:02}:00Z", "2026-01-31 {:02}:{:02}:00", "2026-01-31T{:02}:{:02}:00+02:00")
DATES = [[form.format(9 + int(t), int(t * 60) % 60) for t in HOURS] for form in ZONES]
STAMPS = [[int((DATE + 3600 * t) * 10**digits) for t in HOURS] for digits in (0, 3, 6, 9)]


@pytest.mark.parametrize("clock", [*DATES, *STAMPS], ids=lambda clock: str(clock[0]))
def test_dates_are_clocks_in_seconds_or_smaller_units_or_written(clock: list[object], tmp_path: Path) -> None:
    name = "date" if isinstance(clock[0], str) else "timestamp"
    path = write_csv(tmp_path / "a.csv", {"step": [0, 5, 10, 20, 40], name: clock, "acc": REWARDS})
    assert pairs(reading_of(path, "--devices", 8).curve) == GPU_HOURS


def test_mlflows_long_table_is_read_by_metric_and_run(tmp_path: Path) -> None:
    lines = ["Run ID,Name,metric,step,timestamp,value"]
    for run, name in (("a3f9", "grpo"), ("b7c1", "cispo")):
        for step, t, reward in zip((0, 5, 10, 20, 40), HOURS, REWARDS, strict=True):
            stamp = int((DATE + 3600 * t) * 1000)
            lines += [f"{run},{name},{m},{step},{stamp},{v}" for m, v in (("loss", 9), ("eval/acc", reward))]
    path = tmp_path / "mlflow.csv"
    path.write_text("\n".join(lines) + "\n")
    first, second = readings_of(path, "--devices", 8)
    assert [first.curve.name, second.curve.name] == [f"{path}: grpo a3f9", f"{path}: cispo b7c1"]
    assert pairs(first.curve) == pairs(second.curve) == GPU_HOURS and first.reward_column == "eval/acc"


@pytest.mark.parametrize("clock", ["_runtime", "_timestamp"])
def test_a_pause_is_no_compute_and_evaluations_are_no_pause(clock: str, tmp_path: Path) -> None:
    rows, t = [], 50.0 if clock == "_runtime" else float(DATE)
    for step in range(61):
        t += (60 if step else 0) + (20_000 if step == 33 else 0)
        rows.append({"_step": step, clock: t, "loss": 1.0})
        if step % 10 == 0:
            t += 900 if step else 0  # an evaluation takes 15 steps' time
            rows.append({"_step": step, clock: t, "eval/acc": step / 64})
    reading = reading_of(write_jsonl(tmp_path / "a.jsonl", rows), "--devices", 60)
    assert [p.compute for p in reading.curve.points] == pytest.approx([25 * i for i in range(1, 7)])
    assert says(reading, "Pauses", "5.6 h, before step 33")


def test_a_pause_between_rare_rows_is_found(tmp_path: Path) -> None:
    steps = list(range(0, 400, 20))
    clock = [DATE + 30 * s * (1 + s / 400) + (7200 if s > 200 else 0) for s in steps]  # steps become slower
    rows = [{"step": s, "timestamp": t, "eval/acc": s / 500} for s, t in zip(steps, clock, strict=True)]
    reading = reading_of(write_jsonl(tmp_path / "a.jsonl", rows), "--devices", 1)
    assert reading.curve.points[-1].compute == pytest.approx(30 * 380 * 1.95 / 3600, rel=0.02)
    assert says(reading, "Pauses", "2.0 h, before step 220")


def test_times_of_steps_are_recognized_as_they_fall_so_often(tmp_path: Path) -> None:
    table = {"step": [1, 2, 3, 4, 5], "time_s": [1800, 3600, 1800, 5400, 1800], "acc": REWARDS}
    reading = reading_of(write_csv(tmp_path / "a.csv", table), "--devices", 2)
    assert [p.compute for p in reading.curve.points] == [1, 3, 4, 7, 8]
    assert "the sum of 'time_s'" in reading.compute


@pytest.mark.parametrize("clock", ["_runtime", "time"])
def test_a_clock_that_begins_again_is_added_up(clock: str, tmp_path: Path) -> None:
    rows = [{"step": s, clock: 60.0 * s, "eval/acc": s / 64} for s in range(31)]
    rows += [{"step": s, clock: 60.0 * (s - 30), "eval/acc": s / 64} for s in range(31, 61)]
    reading = reading_of(write_jsonl(tmp_path / "a.jsonl", rows), "--devices", 60)
    assert [p.compute for p in reading.curve.points] == pytest.approx(range(1, 61))


CHART = {"Step": [0, 10, 20, 40], "_step": [0, 10, 20, 40], "r": [0.1, 0.2, 0.3, 0.4]}


def chart(path: Path, x: str, values: Sequence[object], steps: bool = True, run: str = "grpo") -> Path:
    """A chart as W&B exports it: the x axis, then each run's steps and metric, with minima and maxima."""
    table: dict[str, Sequence[object]] = {x: values}
    metric = "val-core/aime/acc/mean@16"
    for name, column in ([("_step", CHART["_step"])] if steps else []) + [(metric, CHART["r"])]:
        table |= {f"{run} - {name}{ending}": column for ending in ("", "__MIN", "__MAX")}
    return write_csv(path, table)


RELATIVE = [95, 3695, 7295, 14495]
WALL = [DATE + t for t in RELATIVE]
CLOCKS = [("Relative Time (Process)", RELATIVE), ("Relative Time (Wall)", RELATIVE), ("Wall Time", WALL)]


@pytest.mark.parametrize("run", ["grpo", "Group: grpo - lr 1e-6"])
@pytest.mark.parametrize(("x", "values"), CLOCKS)
def test_a_chart_over_time_is_read_with_the_devices(
    x: str, values: list[int], run: str, tmp_path: Path
) -> None:
    for steps, start in ((True, []), (False, ["--start", "first"])):
        path = chart(tmp_path / "w.csv", x, values, steps, run)
        reading = reading_of(path, "--devices", 8, *start)
        assert pairs(reading.curve) == [(8, 0.2), (16, 0.3), (32, 0.4)] and start_of(reading.curve) == 0.1
        assert reading.curve.name == f"{path}: {run}"
    with pytest.raises(ConfigError, match=re.escape(f"only as time, {x!r}: give --devices N")):
        reading_of(path)


def test_without_steps_the_start_of_a_chart_over_time_is_asked_for_or_said(tmp_path: Path) -> None:
    path = chart(tmp_path / "w.csv", "Wall Time", WALL, steps=False)
    with pytest.raises(ConfigError, match="--start first if the first row is from before step 1"):
        reading_of(path, "--devices", 8)
    other = reading_of(path, "--devices", 8, "--start", "2025-10-09T08:53:20Z")  # DATE
    assert pairs(other.curve)[0] == (pytest.approx(95 * 8 / 3600), 0.1)
    path = chart(tmp_path / "w.csv", "Relative Time (Process)", RELATIVE, steps=False)
    reading = reading_of(path, "--devices", 8)
    assert says(reading, "counted from the zero of 'Relative Time (Process)'", "--start first")


def test_a_chart_over_steps_or_another_metric_is_read_in_it(tmp_path: Path) -> None:
    for x in ("Step", "training/global_step", "trainer/global_step"):
        reading = reading_of(chart(tmp_path / "w.csv", x, CHART["Step"]))
        assert pairs(reading.curve) == [(10, 0.2), (20, 0.3), (40, 0.4)] and reading.curve.unit == "steps"
    reading = reading_of(chart(tmp_path / "w.csv", "perf/gpu_hours", [0, 2, 4, 8]))
    assert pairs(reading.curve) == [(2, 0.2), (4, 0.3), (8, 0.4)] and reading.curve.unit == "GPU-hours"


def test_the_runs_of_a_chart_over_time_do_not_share_their_rows(tmp_path: Path) -> None:
    table: dict[str, Sequence[object]] = {"Relative Time (Process)": [0, 5, 3600, 3605, 7200, 90000]}
    for run, values in (("a", [0.1, "", 0.2, "", 0.3, ""]), ("b", ["", 0.1, "", 0.2, "", 0.3])):
        table |= {f"{run} - eval/acc{ending}": values for ending in ("", "__MIN", "__MAX")}
    a, b = readings_of(write_csv(tmp_path / "w.csv", table), "--devices", 1, "--start", "first")
    assert pairs(a.curve) == [(1, 0.2), (2, 0.3)]
    assert pairs(b.curve) == [(1, 0.2), (pytest.approx(24.9986, rel=1e-4), 0.3)]
