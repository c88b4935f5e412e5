"""Promises of the fit: it finds a known sigmoid, its intervals cover, it says what is not identified."""

import json
import math

import numpy as np
import pytest
from simulated import PAPER, measured

from trainer.config import ConfigError
from trainer.scaling import Fit, Sigmoid, curve, explain, fit
from trainer.scaling.curve.fit import fit_curve
from trainer.scaling.curve.sigmoid import EvalPoint
from trainer.scaling.layout import amount
from trainer.scaling.simulate import autocorrelated
from trainer.scaling.text import why_not

TINY = Sigmoid(R0=0.11, A=0.90, B=2.4, C_mid=0.05)


def test_the_sigmoid_by_hand() -> None:
    law = Sigmoid(R0=0.2, A=0.8, B=2.0, C_mid=10.0)
    assert law.reward([0, 10, 20, 1e9]).tolist() == pytest.approx([0.2, 0.5, 0.2 + 0.6 / 1.25, 0.8])
    assert [law.compute_for(r) for r in (0.1, 0.5, 0.68, 0.99)] == pytest.approx([0, 10, 20, np.inf])


def test_amounts_of_compute_are_easy_to_read() -> None:
    compute = np.arange(500, 16001, 500.0)
    text = explain(fit(compute, PAPER.reward(compute), np.full(32, 0.003), R0=PAPER.R0), "GPU-hours")
    assert "midpoint    C_mid 2,540 (2," in text and "(32,000 GPU-hours)" in text and "e+0" not in text
    assert [amount(x) for x in (0.05126, 7, 812.4, 2541.7, 3.2e5, 2.541e21, math.inf, math.nan)] == [
        "0.0513", "7", "812", "2,540", "320,000", "2.54e+21", "∞", "–",
    ]  # fmt: skip


@pytest.mark.slow
def test_up_to_8k_gpu_hours_the_ceiling_is_found_and_its_interval_covers() -> None:
    rng, compute = np.random.default_rng(0), np.arange(1500, 8001, 250.0)
    noisy = [PAPER.reward(compute) + rng.normal(0, 0.005, len(compute)) for _ in range(100)]
    fits = [fit(compute, r, np.full(len(compute), 0.005), R0=PAPER.R0) for r in noisy]
    errors = np.abs([f.A.value - PAPER.A for f in fits])
    assert np.median(errors) < 0.01 and np.quantile(errors, 0.95) < 0.02
    covered = np.mean([f.A.low <= PAPER.A <= f.A.high for f in fits])
    assert 0.82 <= covered <= 0.99  # 90 % nominal, 100 runs
    ahead = float(PAPER.reward(16_000))
    assert np.mean([f.at_2x.low <= ahead <= f.at_2x.high for f in fits]) >= 0.82
    assert np.mean([f.identified for f in fits]) >= 0.9


SMALL_RISE = Sigmoid(R0=0.30, A=0.40, B=1.92, C_mid=2542)


def small_rise(within: float | None = None, confidence: float = 0.9) -> Fit:
    compute = np.arange(500, 9001, 250.0)
    noisy = SMALL_RISE.reward(compute) + np.random.default_rng(2).normal(0, 0.006, 35)
    return fit(compute, noisy, np.full(35, 0.006), R0=0.3, confidence=confidence, within=within)


def test_a_ceiling_is_identified_in_relation_to_the_rise() -> None:
    result = small_rise()
    assert 0.2 * (result.A.value - 0.3) < result.A.high - result.A.low < 0.06
    assert result.flags == ("wide",) and "which is more than 0.020, a fifth of the rise" in result.reasons
    assert f"A is {result.A.high - result.A.low:.3f} wide" in result.reasons and "0.10" not in result.reasons
    text = explain(result, "GPU-hours")
    assert text.count("If the run goes on as it did (a sigmoid: ") == 1
    assert f"compute (18,000 GPU-hours): {result.at_2x.low:.3f} to {result.at_2x.high:.3f}\n" in text
    reach = max(result.A.high - result.A.value, result.A.value - result.A.low)
    assert small_rise(within=1.01 * reach).identified
    narrow = small_rise(within=0.99 * reach)
    assert narrow.flags == ("wide",) and "reaches further than 0.0" in narrow.reasons


def test_the_level_of_the_intervals_is_as_asked() -> None:
    nine, half = small_rise(), small_rise(confidence=0.5)
    assert nine.draws is not None and half.draws is not None
    inside = np.abs(half.draws.A - (half.A.low + half.A.high) / 2) < (half.A.high - half.A.low) / 2
    assert np.mean(inside) == pytest.approx(0.5, abs=0.01)
    assert half.A.high - half.A.low < 0.6 * (nine.A.high - nine.A.low)
    for options, says in ({"within": 0.0}, "--within 0: exp"), ({"confidence": 90}, "--confidence 90: exp"):
        with pytest.raises(ConfigError, match=says):
            small_rise(**options)


def test_too_few_flat_and_falling_runs_are_flagged() -> None:
    sd = 0.01
    few = fit(measured(np.arange(1.0, 4), 0.1 + 0.1 * np.arange(1, 4), sd, 0.1))
    assert few.flags == ("too-few-points",) and "fewer than 5" in explain(few, "core-hours")
    rng = np.random.default_rng(0)
    c = np.linspace(1, 10, 12)
    flat = fit(c, 0.2 + rng.normal(0, sd, 12), np.full(12, sd), R0=0.2)
    assert "flat" in flat.flags and "Its level is 0.2" in why_not(flat)
    falling = fit(c, np.r_[np.linspace(0.3, 0.8, 6), np.linspace(0.75, 0.4, 6)], np.full(12, sd), R0=0.2)
    assert "falling" in falling.flags and not falling.identified


def test_one_high_outlier_before_the_end_is_no_fall() -> None:
    rng, c = np.random.default_rng(0), np.linspace(1000, 16_000, 10)
    r = PAPER.reward(c) + rng.normal(0, 0.005, 10) + 0.1 * (np.arange(10) == 6)
    assert "falling" not in fit(c, r, np.full(10, 0.005), R0=PAPER.R0).flags
    fell = r - np.r_[[0] * 7, 0.03, 0.06, 0.1]
    assert "falling" in fit(c, fell, np.full(10, 0.005), R0=PAPER.R0).flags


@pytest.mark.parametrize(("points", "last"), [(50, 4), (100, 9)])
def test_a_collapse_in_the_last_few_of_many_points_is_a_fall(points: int, last: int) -> None:
    rng, c = np.random.default_rng(0), np.linspace(16_000 / points, 16_000, points)
    r = PAPER.reward(c) + rng.normal(0, 0.005, points)
    r[-last:] = 0.58 - 0.45 * np.arange(1, last + 1) / last
    result = fit(c, r, np.full(points, 0.005), R0=PAPER.R0)
    assert "falling" in result.flags and "flat" not in result.flags


def test_noise_as_large_as_reported_is_no_poor_fit() -> None:
    rng, c = np.random.default_rng(24), np.linspace(80, 12_000, 150)  # luck that hides the rise
    r = Sigmoid(R0=0.3, A=0.6, B=2.0, C_mid=80).reward(c) + rng.normal(0, 0.05, 150)
    result = fit(c, np.clip(r, 0, 1), np.full(150, 0.05), R0=0.3, R0_se=0.02)
    assert result.identified and result.A.low < 0.6 < result.A.high


JUMPS = {
    "one jump at the end": [0.0, 0, 0, 0, 1],
    "one jump from a tenth": [0.1, 0.1, 0.1, 0.1, 0.1, 0.9],
    "one jump to just below 1": [0.1, 0.1, 0.1, 0.1, 0.1, 0.95],
    "two of ten after a step": [0.1] * 8 + [0.8] * 2,
}


@pytest.mark.parametrize("start", ["given", "measured", "unknown"])
@pytest.mark.parametrize("reward", JUMPS.values(), ids=JUMPS)
def test_a_jump_identifies_no_ceiling(reward: list[float], start: str) -> None:
    c = np.arange(1.0, len(reward) + 1)
    R0, R0_se = {"given": (reward[0], 0.0), "measured": (reward[0], None), "unknown": (None, 0.0)}[start]
    for sd in (None, np.full(len(c), 0.005)):
        result = fit(c, reward, sd, R0=R0, R0_se=R0_se)
        assert not result.identified
        assert not {"C_mid-beyond-data", "poor-fit"}.isdisjoint(result.flags)


def test_mere_noise_identifies_no_ceiling() -> None:
    flags = set()
    for seed in range(8):
        r = 0.5 + np.random.default_rng(seed).normal(0, 0.02, 50)
        result = fit(np.arange(1.0, 51), r, np.full(50, 0.005), R0=r[0])
        assert not result.identified
        flags |= set(result.flags)
    assert "flat" in flags  # by the scatter, which is four times the reported errors


def test_that_a_curve_explains_too_little_is_said_and_written() -> None:
    result = fit(np.arange(1.0, 6), JUMPS["one jump at the end"], R0=0.0)
    text = " ".join(explain(result, "h").split())
    assert "is not identified: " in text
    assert "a fifth of the points are outliers, or the curve explains less than" in text
    assert "poor-fit" in result.to_json()["flags"] and result.to_json()["identified"] is False


@pytest.mark.parametrize("R0", [1.0, 1 - 1e-12])
def test_a_start_at_the_highest_reward_leaves_nothing_to_rise_to(R0: float) -> None:
    result = fit(np.arange(1.0, 9.0), np.ones(8), R0=R0)
    assert (result.R0.value, result.A.value) == pytest.approx((R0, 1.0), rel=0, abs=1e-12)
    assert "flat" in result.flags and not result.identified


def test_r0_is_the_point_of_least_compute_and_its_error_widens_intervals() -> None:
    c = np.linspace(0.01, 0.3, 20)
    result = fit(np.r_[c[::-1], 0], np.r_[TINY.reward(c)[::-1], 0.11], np.full(21, 0.01))
    assert result.A.low <= 0.9 <= result.A.high and result.points == 20
    sharp = fit(c, TINY.reward(c), np.full(20, 0.01), R0=0.11)
    assert result.B.high - result.B.low > sharp.B.high - sharp.B.low


def test_a_perfect_score_is_no_more_certain_than_the_surest_point() -> None:
    c = np.linspace(0.01, 0.3, 20)
    r = np.r_[TINY.reward(c)[:19], 1.0]
    sd = np.full(20, 0.01)
    perfect = np.r_[sd[:19], 0.0]  # mean@k of 1 has a binomial error of 0
    assert fit(c, r, perfect, R0=0.11).A == fit(c, r, sd, R0=0.11).A


@pytest.mark.slow
def test_unreported_noise_is_no_fall() -> None:
    c, fell = np.linspace(0.01, 0.3, 20), 0
    broken = np.r_[np.linspace(0.2, 0.8, 10), np.linspace(0.75, 0.3, 10)]
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 0.05, 20)
        fell += "falling" in fit(c, np.clip(TINY.reward(c) - 0.2 + noise, 0, 1), R0=0.05).flags
        if seed < 5:
            assert "falling" in fit(c, np.clip(broken + noise, 0, 1), R0=0.2).flags
    assert fell <= 2


def test_no_line_is_wider_than_a_terminal() -> None:
    c = np.linspace(1, 10, 12)
    for f in (fit(c, 0.2 + 0.05 * np.sin(c), np.full(12, 0.01), R0=0.2), fit(c[:2], [0.2, 0.3], R0=0.2)):
        assert max(map(len, explain(f, "GPU-hours").split("\n"))) <= 79


def test_overdispersion_is_reported_only_for_reported_errors() -> None:
    c = np.linspace(0.01, 0.3, 24)
    r = np.clip(TINY.reward(c) + np.random.default_rng(1).normal(0, 0.04, 24), 0, 1)
    text = explain(fit(c, r, np.full(24, 0.01), R0=0.11), "core-hours")
    assert "times as much as their standard errors say" in text
    assert "standard errors" not in explain(fit(c, r, R0=0.11), "core-hours")


def test_the_start_is_reported_as_measured_and_as_fitted() -> None:
    c = np.linspace(0.01, 0.3, 20)
    text = explain(fit(measured(c, TINY.reward(c), 0.01, 0.13)), "core-hours")
    assert "measured before step 1: 0.130" in text


def test_what_is_unknown_is_null_in_json() -> None:
    few = fit(measured(np.arange(1.0, 3), np.full(2, 0.1), 0.01, 0.1)).to_json()
    assert few["A"] == {"value": None, "low": None, "high": None} and few["identified"] is False
    json.dumps(few, allow_nan=False)


@pytest.mark.parametrize("climb", [4, 10, 28])
@pytest.mark.parametrize("noise", [0.0, 0.001])
def test_a_late_climb_is_no_block_of_outliers(climb: int, noise: float) -> None:
    """From 60 evaluations of nothing, 0 → .78: the climb was taken for outliers, and 0.000 forecast."""
    rewards = np.append(np.zeros(60), np.linspace(0.78 / climb, 0.78, climb))
    rewards = np.abs(rewards + noise * np.random.default_rng(0).standard_normal(len(rewards)))
    result = fit(np.arange(len(rewards)) * 10.0, rewards)
    assert result.outliers == 0 and result.r2 > 0.7 and result.at_2x.low > 0.7


def test_another_shape_is_not_said_beside_a_probable_sigmoid() -> None:
    x = np.linspace(0.02, 1, 50)
    rewards = 0.1 + 0.6 * (0.5 / (1 + (0.03 / x) ** 2) + 0.5 / (1 + (0.8 / x) ** 4))
    noisy = rewards + np.random.default_rng(0).normal(0, 0.005, 50)
    text = explain(fit(x, noisy, np.full(50, 0.005), R0=0.1), "GPU-hours")
    assert "rises in two stages" in text and "a sigmoid:" not in text


def test_without_standard_errors_rewards_near_0_are_taken_for_more_certain_than_those_at_a_half() -> None:
    c = np.arange(1.0, 31.0)
    truth = Sigmoid(0.02, 0.6, 3.0, 15.0)
    result = fit(c, np.clip(truth.reward(c), 0, 1), R0=0.02)
    low, high = (result.level([EvalPoint(0, x, 0.0, 0.0)]) for x in (1.0, 60.0))
    assert low.high - low.low < 0.5 * (high.high - high.low)


def test_the_mean_of_several_evaluations_is_more_certain_than_one_unless_errors_are_correlated() -> None:
    c, rng = np.arange(1.0, 41.0), np.random.default_rng(0)
    white = rng.normal(0, 0.03, 40)
    widths = []
    for noise in (white, autocorrelated(white, 0.9)):
        result = fit(c, np.clip(Sigmoid(0.2, 0.6, 2.0, 5.0).reward(c) + noise, 0, 1), R0=0.2)
        last = [EvalPoint(0, x, 0.5, 0.0) for x in (31.0, 34.0, 37.0, 40.0)]
        one, mean = result.level(last[-1:]), result.level(last)
        widths.append((mean.high - mean.low) / (one.high - one.low))
    assert widths[0] + 0.05 < widths[1] <= 1


def test_a_fall_is_judged_by_how_far_points_scatter_where_reported_errors_are_too_small() -> None:
    c, fell = np.arange(1.0, 31.0), []
    for seed in range(8):
        noise = np.random.default_rng(seed).normal(0, 0.03, 30)
        rewards = np.clip(Sigmoid(0.2, 0.6, 2.0, 4.0).reward(c) + noise, 0, 1)
        collapsed = rewards - np.r_[np.zeros(22), np.linspace(0.02, 0.25, 8)]
        runs = (curve(c, r, np.full(30, 0.01), R0=0.2) for r in (rewards, collapsed))
        fell.append(["falling" in fit_curve(run, prior=None).flags for run in runs])
    assert fell == [[False, True]] * 8
