"""Promises of halving: it stops what will hardly win, never the likeliest, once, and says what that saved."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from simulated import falling, simulated

from bench.validation.halving import cut, trial
from trainer.run_folder import complete
from trainer.scaling import Sigmoid
from trainer.scaling.curve.average import Prior
from trainer.scaling.earlier import Earlier, prior_of_kind
from trainer.sweep import spec
from trainer.sweep.__main__ import main
from trainer.sweep.halving import RISK, RUNGS, chances, forecasts, least_likely, stop_recipes
from trainer.sweep.spec import Sweep, load_status

FAKE = (sys.executable, str(Path(__file__).parents[2] / "helpers" / "fake_trainer.py"))


def test_the_least_likely_recipes_that_together_have_at_most_the_risk_are_stopped() -> None:
    best = {"a": 0.9, "b": 0.004, "c": 0.003, "d": 0.05, "e": 0.043}
    assert least_likely(best, 0.01) == {"c": 0.003, "b": 0.004}
    assert least_likely(best, 0.006) == {"c": 0.003}
    assert least_likely({"a": 0.0, "b": 0.0}, 0.01) == {"a": 0.0}  # never the last
    assert least_likely({}, 0.01) == {}


@pytest.mark.slow
def test_chances_are_those_of_the_budget_and_near_equals_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = np.linspace(100, 1600, 16)
    laws = {
        "high": Sigmoid(0.2, 0.62, 1.8, 600),
        "near": Sigmoid(0.2, 0.62, 1.8, 610),
        "low": Sigmoid(0.2, 0.5, 1.8, 600),
    }
    laws["slow"] = Sigmoid(0.2, 0.75, 1.8, 2000)  # behind at the end of the data, ahead beyond it
    runs = {
        name: [simulated(law, compute, 0.004, 10 * i + s) for s in range(2)]
        for i, (name, law) in enumerate(laws.items())
    }
    asked: list[set[str]] = []

    def prior(earlier: Earlier) -> Prior:
        asked.append({past.group for past in earlier.runs})
        return prior_of_kind(earlier)

    monkeypatch.setattr("trainer.sweep.halving.prior_of_kind", prior)
    known = forecasts(runs | {"fallen": [falling()]})
    assert asked == [set(laws) - {name} for name in laws for _ in range(2)]  # what the other recipes say
    assert list(known) == list(runs)  # nothing is said of what has fallen, and it is not stopped
    now, later = chances(known, 1600), chances(known, 16_000)
    assert now["low"] < 0.01 and now["slow"] < 0.01 and now["high"] > 0.1 and now["near"] > 0.1
    assert sum(now.values()) == pytest.approx(1) and later["slow"] > 0.7  # other laws have a part in it


def test_a_rung_without_enough_evaluations_is_decided_and_stops_nobody(tmp_path: Path) -> None:
    sweep = Sweep(folder=tmp_path, recipes=("a", "b"), task="t", seeds=1, budget=1.0, rungs=(0.25, 0.5))
    stop_recipes(sweep, 0.25, load_status(tmp_path))
    status = load_status(tmp_path)
    assert status.decided == [0.25] and not status.stopped


@pytest.mark.slow
def test_a_cut_curve_ends_at_the_share_and_few_sweeps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.validation.halving.RECIPES", 3)
    monkeypatch.setattr("bench.validation.halving.SEEDS", 1)
    curve = simulated(Sigmoid(0.2, 0.6, 1.8, 0.3), np.linspace(0.125, 1, 8), 0.01, 0)
    assert [p.compute for p in cut(curve, 0.25).points] == [0.125, 0.25]
    one = trial(0)
    assert 0 <= one["saved"] < 0.75 and one["regret"] >= 0 and (not one["lost"] or one["regret"] > 0)


@pytest.mark.slow
def test_a_sweep_stops_the_weak_recipe_at_a_rung_and_never_trains_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spec, "TRAINER", FAKE)
    monkeypatch.setattr("trainer.sweep.schedule.TICK_S", 0.05)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.setattr("trainer.scaling.report.page.write", lambda *_, **__: None)
    folder = tmp_path / "sweep"
    asked = ["scalerl", "grpo", "--task", "arithmetic", "--seeds", "2", "--out", str(folder), "--halving"]
    assert main([*asked, "--budget", "2.4"]) == 0
    status = json.loads((folder / "status.json").read_text())
    (why,) = status["stopped"].values()
    assert list(status["stopped"]) == ["grpo"] and status["decided"] == list(RUNGS)
    assert why["share"] in RUNGS and why["probability"] <= RISK
    for seed in (0, 1):
        assert complete(folder / f"scalerl-{seed}", 2.4)
        assert complete(folder / f"grpo-{seed}", 2.4 * why["share"]) and not complete(
            folder / f"grpo-{seed}", 2.4
        )
    out = capsys.readouterr().out
    assert f"grpo was stopped at {why['share']:.0%} of the budget" in out
    assert f"That saved {(1 - why['share']) / 2:.0%} of the sweep's compute." in out
    steps = (folder / "steps.txt").read_text()
    assert set(Counter(steps.splitlines()).values()) == {1}  # rungs cost no step
    monkeypatch.setattr("trainer.sweep.__main__.write_results", lambda *_: "")
    assert main([*asked, "--budget", "2.4"]) == 0
    assert (folder / "steps.txt").read_text() == steps
