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
from trainer.scaling.across import across
from trainer.scaling.compare import compare, compare_fits
from trainer.scaling.curve.axis import RATE, Axis, axis_of
from trainer.scaling.curve.points import checked
from trainer.scaling.curve.sigmoid import without_flops
from trainer.scaling.earlier import learn
from trainer.scaling.forecast import backtest, forecast
from trainer.scaling.plot import plot, straighten
from trainer.scaling.reading.read import read_inputs
from trainer.scaling.text import compute_for_most, parameters

pytestmark = pytest.mark.slow

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


def slowing(seed: int, slow: float = 0.5, scale: float = 1.0) -> Curve:
    """A run that beside other work does a share of the work in an hour, from .4 of the work on."""
    rng, done = np.random.default_rng([7, seed]), np.linspace(0, 1, 33)
    hours = (np.minimum(done, 0.4) + np.maximum(done - 0.4, 0) / slow) * scale
    rewards = np.clip(LAW.reward(done) + SD * rng.standard_normal(33), 0, 1).tolist()
    points = zip(range(33), hours.tolist(), rewards, done.tolist(), strict=True)
    return curve_of(f"{seed}", "core-hours", [EvalPoint(i, c, r, SD, 1e12 * w) for i, c, r, w in points])


def test_where_the_rate_does_not_drift_nothing_changes() -> None:
    run = drifting(1, slow=1.0)
    fit, plain = fit_curve(run), fit_curve(without_flops(run))
    assert (
        fit.axis is None
        and replace(fit, data_hash=plain.data_hash) == plain
        and backtest(run) == backtest(without_flops(run))
    )
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


def test_recipes_and_sizes_are_compared_by_their_compute() -> None:
    """Seeds of one training, which took the same compute to its midpoint, then half of them slowed down."""
    same = {"fast": [slowing(i, slow=1.0) for i in range(2)], "slowing": [slowing(i) for i in range(2, 4)]}
    plain = {name: list(map(without_flops, runs)) for name, runs in same.items()}
    assert all(fit_curve(run).axis for run in same["slowing"])
    refitted = compare_fits({name: [(c, fit_curve(c)) for c in runs] for name, runs in same.items()})
    for result in (compare(same), refitted):
        (pair,) = result.pairs
        assert not pair.C_mid_differs and result.pairs == compare(plain).pairs
    sizes = {float(2**i): [slowing(i, 1 - i / 8, scale=2.0**i)] for i in range(4)}
    law = across(sizes, [16.0])
    assert (
        law.slopes == across({n: list(map(without_flops, runs)) for n, runs in sizes.items()}, [16.0]).slopes
    )


def test_the_midpoint_and_the_cost_of_most_are_in_device_hours() -> None:
    """Of work it is .3 and .3 · 9^(1/1.8) = 1.017; of these hours .3 and .4 + .617 · 2 = 1.633."""
    fit = fit_curve(slowing(0))
    midpoint, most, known = fit.midpoint, compute_for_most(fit), parameters(fit)
    assert fit.axis and fit.identified and fit.C_mid.value > 1.3 * midpoint.value
    assert midpoint.value == pytest.approx(0.3, rel=0.1) and midpoint.low < 0.3 < midpoint.high
    assert most.value == pytest.approx(1.633, rel=0.1) and most.low < 1.633 < most.high
    assert known["C_mid"].startswith(f"{midpoint.value:.3g}")
    assert fit.to_json()["midpoint"]["value"] == midpoint.value
    plain = fit_curve(without_flops(slowing(0)))
    assert plain.midpoint == plain.C_mid and "midpoint" not in plain.to_json()


def test_the_efficiency_plot_of_work_is_straight(tmp_path: Path) -> None:
    run = slowing(0)
    fit = fit_curve(run)
    c, logit, *_ = straighten(run, fit).T
    middle = np.abs(logit) < 2
    off = logit[middle] - fit.B.value * np.log(c[middle] / fit.C_mid.value)
    assert middle.sum() > 10 and np.abs(off).max() < 0.25
    plot([("run", run, fit)], tmp_path / "e.svg", panels="efficiency")
    assert "core-hours at the mean rate" in (tmp_path / "e.svg").read_text()


def test_a_copy_without_flops_is_the_same_run_of_other_data() -> None:
    run = drifting(0)
    earlier = learn({"a": [run], "b": [drifting(1)]})
    assert [past.group for past in earlier.without(without_flops(run)).runs] == ["b"]
    assert fit_curve(run).data_hash != fit_curve(without_flops(run)).data_hash


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


def test_the_rate_ahead_is_between_the_last_thirds_and_the_runs_as_uncertain_as_the_rates_were() -> None:
    """3 FLOPs an hour for 8 hours, then 1.5 for 4: 30 in 12 hours, 2.5 an hour, and 24 in the last 10."""
    points = [EvalPoint(i, float(i), 0.1, 0.01, 3.0 * min(i, 8) + 1.5 * max(i - 8, 0)) for i in range(1, 13)]
    axis = axis_of(checked(curve_of("run", "core-hours", points)))
    assert axis and axis.rates == pytest.approx([1.2, 1.2, 1.2, 0.6, 0.6])
    assert axis.spread == pytest.approx(math.log(2) * math.sqrt(3 * 2 / 5 / 4))
    a, b, dof = RATE
    reach = math.sqrt(a**2 + b * axis.spread**2) * t.ppf(0.005 + 0.99 * 0.95, dof)
    ahead = axis.rate_ahead(0.9)
    value = math.sqrt(0.6 * 2.4 / 2.5)
    assert (ahead.value, ahead.low, ahead.high) == pytest.approx(
        (value, value * math.exp(-reach), value * math.exp(reach)), rel=0.01
    )


def test_a_gap_is_not_the_pace_ahead() -> None:
    """One FLOP an hour, but for an hour without work after 4 of 5: the pace ahead is 1, of a mean of 5/6."""
    hours = [i / 4 + (i > 16) for i in range(1, 21)]
    points = [EvalPoint(i, c, 0.1, 0.01, i / 4) for i, c in enumerate(hours, 1)]
    axis = axis_of(checked(curve_of("run", "core-hours", points)))
    assert axis and axis.rate_ahead(0.9).value == pytest.approx(6 / 5, rel=0.01)


def test_a_gap_as_short_as_the_distance_of_evaluations_counts_by_half() -> None:
    """1 an hour, but for a quarter of one: 6/7 of the last third, 16.5/17.5 of the last five sixths."""
    hours = [i / 4 + (i > 16) / 4 for i in range(1, 21)]
    points = [EvalPoint(i, c, 0.1, 0.01, i / 4) for i, c in enumerate(hours, 1)]
    axis = axis_of(checked(curve_of("run", "core-hours", points)))
    pace = math.sqrt(6 / 7 * 16.5 / 17.5)
    assert axis and axis.rate_ahead(0.9).value == pytest.approx(pace * 5.25 / 5, rel=0.01)


def test_the_output_the_live_forecast_and_the_page_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = drifting(0), tmp_path / "curves.csv.gz"
    rows = [f"{p.step},{p.pass_rate},{p.pass_rate_se},{p.compute},{p.flops}" for p in run.evaluations]
    names = "step,eval/pass_rate,eval/pass_rate_se,compute/total,compute/flops"
    file.write_bytes(gzip.compress("\n".join([names, *rows]).encode()))
    reading, other = (read_inputs([f"{file}{of}"])[0] for of in ("", "@compute=compute/flops"))
    assert reading.curve.points == run.points
    assert [p.flops for p in reading.curve.points] == [p.flops for p in run.points]
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
