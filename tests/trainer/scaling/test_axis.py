"""Promises of the axis: forecasts in device-hours where a device-hour is not always the same work."""

import gzip
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t

from trainer.scaling import Curve, EvalPoint, Sigmoid, curve_of, explain, fit_curve
from trainer.scaling.__main__ import main
from trainer.scaling.curve.axis import RATE, Axis, axis_of
from trainer.scaling.curve.points import checked
from trainer.scaling.forecast import backtest, forecast
from trainer.scaling.reading.read import read_inputs

LAW = Sigmoid(R0=0.15, A=0.95, B=1.8, C_mid=0.3)  # over work, of which the whole run does 1
SD = 0.01


def drifting(seed: int, slow: float = 0.4, law: Sigmoid = LAW) -> Curve:
    """A run that other work slows down to a share for stretches, at random; the work is known."""
    rng = np.random.default_rng(seed)
    speeds = np.where(np.arange(12) % 2 == seed % 2, slow, 1.0)
    work = np.r_[0, np.cumsum(speeds * rng.exponential(0.15, 12))]
    hours = np.r_[0, np.cumsum(np.diff(work) / speeds)]
    done = np.linspace(0, 1, 41)
    rewards = np.clip(law.reward(done) + SD * rng.standard_normal(41), 0, 1).tolist()
    spent = np.interp(done, work / work[-1], hours).tolist()
    points = zip(range(41), spent, rewards, done.tolist(), strict=True)
    return curve_of("run", "core-hours", [EvalPoint(i, c, r, SD, 1e12 * w) for i, c, r, w in points])


def without_flops(run: Curve) -> Curve:
    return replace(run, points=tuple(replace(p, flops=0.0) for p in run.points))


def test_where_the_rate_does_not_drift_nothing_changes() -> None:
    run = drifting(1, slow=1.0)
    fit, plain = fit_curve(run), fit_curve(without_flops(run))
    assert fit.axis is None and fit == plain and backtest(run) == backtest(without_flops(run))
    assert "FLOPs" not in explain(fit, run.unit)
    unknown = replace(run.points[5], flops=0.0)  # of one point: then of none
    run = drifting(1)
    assert fit_curve(replace(run, points=(*run.points[:5], unknown, *run.points[6:]))).axis is None


def test_a_run_beside_other_work_is_forecast_on_its_flops() -> None:
    """From half of the device-hours to a known end: nearer than without the FLOPs, inside the interval."""
    errors, plain_errors, inside = [], [], []
    for seed in range(6):
        run = drifting(seed)
        test, plain = backtest(run), backtest(without_flops(run))
        assert test and plain
        truth = float(LAW.reward(1.0))
        errors.append(abs(test.end.predicted.value - truth))
        plain_errors.append(abs(plain.end.predicted.value - truth))
        inside.append(test.end.predicted.low <= truth <= test.end.predicted.high)
    assert sum(inside) >= 5 and np.mean(errors) < 0.75 * np.mean(plain_errors)


def test_each_draw_goes_on_at_its_own_rate() -> None:
    """Two curves over work, at device-hours: measured work in between, then 2 and ½ work an hour."""
    axis = Axis(np.array([0.0, 1, 3, 4]), np.array([0.0, 2, 3, 4]), np.ones(5), np.array([2.0, 0.5]))

    def on_work(work: np.ndarray) -> np.ndarray:
        return np.stack([0.01 * work, 0.1 + 0.02 * work])

    expected = [[0, 0.01, 0.025, 0.04, 0.08], [0.1, 0.12, 0.15, 0.18, 0.20]]
    assert axis.reward(on_work, [0, 0.5, 2, 4, 6]) == pytest.approx(np.array(expected), abs=1e-4)
    assert axis.reward(on_work, 6.0) == pytest.approx([0.08, 0.20], abs=1e-4)
    ahead = axis.rate_ahead(0.9)
    assert (ahead.low, ahead.high) == (0.5, 2.0)


def test_the_rate_ahead_is_that_of_the_last_third_as_uncertain_as_the_rates_were() -> None:
    """3 FLOPs an hour for 8 hours, then 1.5 for 4: 30 in 12 hours, 2.5 an hour."""
    points = [EvalPoint(i, float(i), 0.1, 0.01, 3.0 * min(i, 8) + 1.5 * max(i - 8, 0)) for i in range(1, 13)]
    axis = axis_of(checked(curve_of("run", "core-hours", points)))
    assert axis and axis.rates == pytest.approx([1.2, 1.2, 1.2, 0.6, 0.6])
    assert axis.spread == pytest.approx(math.log(2) * math.sqrt(3 * 2 / 5 / 4))
    a, b, dof = RATE
    reach = math.sqrt(a**2 + b * axis.spread**2) * t.ppf(0.005 + 0.99 * 0.95, dof)
    ahead = axis.rate_ahead(0.9)
    assert (ahead.value, ahead.low, ahead.high) == pytest.approx(
        (0.6, 0.6 * math.exp(-reach), 0.6 * math.exp(reach)), rel=0.01
    )


def test_the_output_the_live_forecast_and_the_page_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = drifting(0), tmp_path / "curves.csv.gz"
    rows = [f"{p.step},{p.pass_rate},{p.pass_rate_se},{p.compute},{p.flops}" for p in run.evaluations]
    names = "step,eval/pass_rate,eval/pass_rate_se,compute/total,compute/flops"
    file.write_bytes(gzip.compress("\n".join([names, *rows]).encode()))
    reading, other = (read_inputs([f"{file}{of}"])[0] for of in ("", "@compute=compute/flops"))
    assert reading.curve.points == run.points
    assert {p.flops for p in other.curve.points} == {0.0}
    fit = fit_curve(run)
    assert fit.axis and fit.to_json()["rate_ahead"]["value"] == fit.axis.rate_ahead(0.9).value
    for command in (["fit"], ["predict", "--at", "1.5"]):
        main([command[0], f"{file}@unit=core-hours", *command[1:]])
        assert "so the curve is fitted to FLOPs, written as core-hours" in " ".join(
            capsys.readouterr().out.split()
        )
    main(["report", f"{file}@unit=core-hours", "--out", str(tmp_path / "page.html")])
    assert "so the curve is fitted to FLOPs" in (tmp_path / "page.html").read_text()
    live = forecast(run.evaluations, 2 * run.points[-1].compute, None).metrics()
    assert live["forecast/rate_low"] < live["forecast/rate"] < live["forecast/rate_high"]
    assert "forecast/rate" not in forecast(without_flops(run).evaluations, 3.0, None).metrics()
