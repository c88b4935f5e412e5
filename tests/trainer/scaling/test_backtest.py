"""Promises of the backtest: it uses the first half only, and predicts a run that follows a sigmoid."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainer.scaling import EvalPoint, Sigmoid, curve_of
from trainer.scaling.__main__ import main
from trainer.scaling.forecast import backtest
from trainer.scaling.text import describe_backtest

LAW = Sigmoid(R0=0.11, A=0.90, B=2.4, C_mid=0.05)
AT = np.linspace(0.01, 0.3, 30)


def points(rewards: np.ndarray) -> list[EvalPoint]:
    start = EvalPoint(0, 0.0, LAW.R0, 0.01)
    return [
        start,
        *(
            EvalPoint(i, float(c), float(r), 0.01)
            for i, (c, r) in enumerate(zip(AT, rewards, strict=True), 1)
        ),
    ]


def test_a_run_that_follows_the_curve_ends_as_its_first_half_predicts() -> None:
    hits = []
    for seed in range(8):
        noise = np.random.default_rng(seed).normal(0, 0.01, 30)
        found = backtest(curve_of("", "h", points(LAW.reward(AT) + noise)))
        assert found is not None and found.seen == pytest.approx(0.15)
        hits.append(found.predicted.low <= float(LAW.reward(0.3)) <= found.predicted.high)
        assert abs(found.measured - found.predicted.value) < 0.06
    assert sum(hits) >= 6


def test_the_second_half_does_not_change_the_prediction() -> None:
    curve = points(LAW.reward(AT))
    other = [*curve[:-10], *(EvalPoint(p.step, p.compute, 0.2, 0.01) for p in curve[-10:])]
    one, two = backtest(curve_of("", "h", curve)), backtest(curve_of("", "h", other))
    assert one is not None and two is not None and one.predicted == two.predicted
    assert two.measured == 0.2 and two.measured - two.predicted.value < -0.6


def test_too_few_points_in_the_first_half_give_no_backtest() -> None:
    assert backtest(curve_of("", "h", points(LAW.reward(AT))[:8])) is None
    assert backtest(curve_of("", "h", [])) is None and describe_backtest(None, "h") == ""


def test_the_text_says_whether_the_first_half_identified_the_ceiling() -> None:
    found = backtest(curve_of("", "h", points(LAW.reward(AT / 8))))
    assert found is not None and not found.identified
    assert "(ceiling not identified) predicts" in " ".join(describe_backtest(found, "h").split())


def test_a_second_rise_after_the_first_half_is_named_and_concluded_from() -> None:
    rewards = LAW.reward(AT) + np.where(np.asarray(AT) > 0.6 * max(AT), 0.2, 0.0)
    missed = " ".join(describe_backtest(backtest(curve_of("", "h", points(rewards))), "h").split())
    assert "outside the interval. The first half did not predict the end, so do not rely" in missed
    inside = " ".join(describe_backtest(backtest(curve_of("", "h", points(LAW.reward(AT)))), "h").split())
    assert "inside the interval: the first half predicted the end." in inside


def test_fit_prints_and_writes_the_backtest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{c},{r:.4f},.01" for c, r in zip((0.0, *AT), (LAW.R0, *LAW.reward(AT)), strict=True)]
    (tmp_path / "run.csv").write_text("\n".join(["core_hours,pass_rate,pass_rate_se", *rows]))
    assert main(["fit", str(tmp_path / "run.csv"), "--json", str(tmp_path / "fit.json")]) == 0
    (found,) = json.loads((tmp_path / "fit.json").read_text()).values()
    assert found["backtest"]["identified"]
    assert "Backtest: a fit of the first 0.15 core-hours alone (ceiling identified) predicts" in " ".join(
        capsys.readouterr().out.split()
    )
    assert found["backtest"]["measured"] == pytest.approx(float(LAW.reward(0.3)), abs=1e-4)
    assert found["backtest"]["predicted"]["value"] == pytest.approx(found["backtest"]["measured"], abs=0.01)
