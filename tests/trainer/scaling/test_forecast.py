"""Promises of the live forecast: its intervals hold; a run that leaves its curve raises an alarm."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from simulated import measured

from trainer.scaling import EvalPoint, Sigmoid
from trainer.scaling.curve.fit import fit_curve
from trainer.scaling.curve.sigmoid import curve_of
from trainer.scaling.forecast import Forecast, describe_recommendation, forecast
from trainer.scaling.text import gain

pytestmark = pytest.mark.slow

LAW = Sigmoid(R0=0.11, A=0.90, B=2.4, C_mid=0.05)
SD = 0.01


def run(rewards: np.ndarray, compute: np.ndarray) -> list[Forecast]:
    """The forecast after each evaluation; R0 is measured before."""
    points = points_of(compute, rewards)
    return [after(points[:n], float(compute[-1])) for n in range(2, len(points) + 1)]


@cache  # runs of these tests share their beginnings
def after(points: tuple[EvalPoint, ...], end: float) -> Forecast:
    """The forecast after the last of the points."""
    return forecast(points, end, after(points[:-1], end) if len(points) > 2 else None)


def points_of(compute: np.ndarray, rewards: np.ndarray) -> tuple[EvalPoint, ...]:
    """R0 and the evaluations after it."""
    return measured(compute, rewards, SD, LAW.R0).evaluations


def noisy(seed: int, compute: np.ndarray) -> np.ndarray:
    return LAW.reward(compute) + np.random.default_rng(seed).normal(0, SD, len(compute))


def test_nine_in_ten_evaluations_are_within_their_interval_and_raise_no_alarm() -> None:
    compute = np.linspace(0.012, 0.3, 16)
    seen = []
    for seed in range(6):
        looks = run(noisy(seed, compute), compute)
        assert all(x.predicted is None for x in looks[:2])  # two points and R0 make the first forecast
        for look, reward in zip(looks[5:], noisy(seed, compute)[5:], strict=True):
            assert look.predicted is not None and not look.alarm
            seen.append(look.predicted.low <= reward <= look.predicted.high)
    assert 0.82 <= np.mean(seen) <= 0.98


def test_a_collapse_is_an_alarm_at_once_and_a_slow_decline_within_a_few_evaluations() -> None:
    compute = np.linspace(0.012, 0.3, 16)
    fallen = noisy(0, compute)
    fallen[10:] -= 0.3
    looks = run(fallen, compute)
    assert not looks[9].alarm and looks[10].alarm and looks[10].missed == -1 and looks[10].far_off
    assert "are below the predicted interval" in describe_recommendation(looks[10], "core-hours", 0.1)
    sinking = noisy(0, compute)
    sinking[10:] -= 0.03 * np.arange(1, 7)
    assert any(x.alarm for x in run(sinking, compute)[10:13])


def test_it_recommends_to_continue_while_the_reward_rises_and_to_stop_at_the_ceiling() -> None:
    compute = np.linspace(0.012, 0.3, 16)
    rising = forecast(points_of(compute[:6], noisy(1, compute[:6])), 0.3, None)
    assert rising.gain is not None and rising.gain.low > 0.02 and (rising.gain_probability or 0) > 0.99
    text = describe_recommendation(rising, "core-hours", 0.2)
    assert text.startswith("continue: the remaining 0.2 core-hours")
    late = np.linspace(0.02, 1.0, 30)
    done = forecast(points_of(late, noisy(1, late)), 1.3, None)
    assert done.gain_probability is not None and done.gain_probability < 0.1
    text = describe_recommendation(done, "core-hours", 0.3)
    assert text.startswith("consider stopping: the remaining 0.3 core-hours")


@pytest.mark.parametrize("samples", [64, 0])
def test_perfect_scores_and_unreported_errors_raise_no_alarm(samples: int) -> None:
    law, compute = Sigmoid(0.11, 0.985 if samples else 0.8, 3.0, 0.05), np.linspace(0.012, 0.6, 14)
    looks: list[Forecast] = []
    for seed in range(2):
        rng, points, before = np.random.default_rng(seed), [EvalPoint(0, 0.0, 0.11, 0.03)], None
        for i, c in enumerate(compute.tolist(), 1):
            p = float(law.reward(c))
            r = rng.binomial(samples, p) / samples if samples else min(1.0, p + rng.normal(0, 0.03))
            points.append(EvalPoint(i, c, r, (r * (1 - r) / samples) ** 0.5 if samples else 0.0))
            before = forecast(points, 1.0, before)
            looks.append(before)
    assert np.mean([x.alarm for x in looks if x.predicted]) <= 0.04


def test_a_run_that_has_fallen_or_is_no_sigmoid_is_not_recommended_to_go_on() -> None:
    compute = np.linspace(0.012, 0.3, 24)
    fallen = noisy(0, compute)
    fallen[18:] -= 0.3
    after = forecast(points_of(compute, fallen), 0.6, None)
    assert "falling" in after.fit.flags and after.recommendation == "none"
    assert after.gain is None and after.end is None and "forecast/end" not in after.metrics()
    line = 0.11 + 2 * compute + np.random.default_rng(0).normal(0, 0.003, 24)
    rising = forecast(points_of(compute, line), 0.6, None)
    assert "not-sigmoid" in rising.fit.flags and rising.gain is not None and rising.gain.low > 0.05
    assert rising.recommendation == "none" and describe_recommendation(rising, "core-hours", 0.3) == ""


def test_at_the_end_there_is_no_recommendation_however_the_end_was_rounded() -> None:
    compute = np.linspace(0.012, 0.3, 16)
    end = float(np.nextafter(0.3, 1))  # 0.3 / steps · steps
    done = forecast(points_of(compute, noisy(1, compute)), end, None)
    assert done.recommendation == "none" and done.gain is None


def test_what_is_unknown_is_not_among_the_metrics() -> None:
    compute = np.linspace(0.012, 0.3, 16)
    points = points_of(compute, noisy(2, compute))
    one, two, before = (forecast(points[: n + 1], 0.3, None) for n in (1, 2, 14))
    assert one.metrics() == {}
    assert "forecast/end" in two.metrics() and "forecast/predicted" not in two.metrics()
    known, over = (forecast(points[: n + 1], 0.3, before).metrics() for n in (15, 16))
    names = ("ceiling_low", "end_high", "gain", "gain_probability", "predicted")
    assert known.keys() >= {f"forecast/{name}" for name in names} and known["forecast/alarm"] == 0
    assert "forecast/end" not in over


def test_a_few_points_that_fall_have_no_forecast_and_flat_ones_a_wide_one() -> None:
    fallen, flat = (
        forecast([EvalPoint(i, float(i), r, 0.01) for i, r in enumerate(rewards)], 60.0, None)
        for rewards in ((0.5, 0.45, 0.4, 0.3), (0.5, 0.51, 0.5, 0.5))
    )
    assert "falling" in fallen.fit.flags and not fallen.fit.has_forecast and fallen.end is None
    assert "flat" in flat.fit.flags and flat.recommendation == "none"
    assert flat.end is not None and flat.end.low < 0.52 and flat.end.high > 0.6
    risen = forecast([EvalPoint(i, float(i), 0.3 + 0.6 * (i > 0), 0.01) for i in range(4)], 60.0, None)
    assert risen.fit.has_forecast and risen.recommendation == "none"  # three points are too few to act on


def test_rewards_of_0_alone_leave_it_open_when_the_run_takes_off() -> None:
    """Their scatter of 0 was taken for the noise: 0.000 to 0.000 at twice the compute."""
    points = [EvalPoint(i, float(i), 0.0, 0.0) for i in range(9)]
    stays = forecast(points, 16.0, None)
    assert "flat" in stays.fit.flags and stays.recommendation == "none"
    assert stays.end is not None and stays.end.high > 0.1 and stays.fit.at_2x.high > 0.1
    assert stays.gain_probability is not None and stays.gain_probability > 0.2
    assert "It stays" not in gain(stays.fit) and "usual errors" in stays.fit.noise
    few = forecast(points[:4], 16.0, None)
    assert few.end is not None and few.end.high > 0.1
    once = forecast([*points[:5], EvalPoint(5, 5.0, 1 / 64, 0.0), *points[6:]], 16.0, None)
    assert once.fit.at_2x.high > 0.1 and "It stays" not in gain(once.fit)
    solved = fit_curve(curve_of("", "", [replace(p, pass_rate=1.0) for p in points]))
    assert solved.at_2x.low < 0.9999 and "It stays" in gain(solved)
    evaluation = solved.level([EvalPoint(0, 16.0, 1.0, 0.0)])
    assert evaluation.high - evaluation.low > 0.002
