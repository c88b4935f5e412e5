"""The figures of bench.pipeline.schemes, from records written by hand."""

from pathlib import Path

import pytest
from logs import write_jsonl

from bench.pipeline.schemes import describe, measured, window
from bench.pipeline.virtual_run import Scheme
from trainer import cli


def test_steps_per_hour_idle_shares_and_lag_are_those_of_the_window(tmp_path: Path) -> None:
    steps = [(1, 10.0, {"0": 9}), (2, 20.0, {"0": 10}), (3, 22.0, {"1": 30}), (4, 30.0, {"1": 20})]
    rows = [{"step": s, "time": t, "train/wait_s": 0.0, "lag/histogram": lags} for s, t, lags in steps]
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 0, "time": 1.0, "eval/pass_rate": 0.0}, *rows])
    spans = [  # from 10 to 30 s: the learner works 3 + 8 s, engine 0 for 5 s and engine 1 for 15 s
        ("learner", "start-up", 0, 4), ("learner", "pack", 8, 13), ("learner", "idle", 13, 22),
        ("learner", "optimizer", 22, 35), ("engine", "generate", 5, 15), ("engine", "idle", 15, 40),
        ("engine-1", "generate", 11, 25), ("engine-1", "weight_update", 25, 26),
    ]  # fmt: skip
    names = ("role", "state", "start", "end")
    write_jsonl(tmp_path / "timeline.jsonl", [dict(zip(names, span, strict=True)) for span in spans])
    row = measured(tmp_path, 1, 4)
    assert row == pytest.approx({
        "steps_per_hour": 3 * 3600 / 20, "learner_idle": 1 - 11 / 20, "engine_idle": 1 - (5 + 15) / 2 / 20,
        "lag_mean": 50 / 60, "lag_max": 1, "tokens": 20,
    })  # fmt: skip


def test_the_steps_that_count_are_equally_many_and_the_options_exist() -> None:
    assert window(Scheme("ppo", 2), 8) == (2, 8) and window(Scheme("pipeline", 2), 12) == (3, 9)
    for scheme in (Scheme("ppo", 3), Scheme("pipeline", 3)):
        assert cli.parse(scheme.flags).config.pipeline.lag_bound in (2, 3)


def test_the_ratio_is_of_runs_that_were_neighbours_in_time() -> None:
    speeds = (("pipeline", (30.0, 100.0)), ("ppo", (20.0, 50.0)))
    others = {"learner_idle": 0.1, "engine_idle": 0.2, "lag_mean": 1.0, "lag_max": 2, "tokens": 100}
    rows = [
        {"case": f"{kind}: round {i}", "kind": kind, "k": 2, "steps_per_hour": speed} | others
        for kind, both in speeds
        for i, speed in enumerate(both)
    ]
    text = describe({}, rows)
    assert "makes 1.75 (1.50 to 2.00) times the steps per hour in 2 pairs of runs" in text
    assert text.splitlines()[2].split()[1:8] == ["PipelineRL-2", "|", "65", "(30", "to", "100)", "|"]
