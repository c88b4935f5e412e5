"""Promises of the classical intervals: a profile's ends lie on its limit, a refit is the least squares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import least_squares
from scipy.stats import f as f_distribution

from bench.validation.classical_intervals import Intervals, _problem, bootstrap, profile, refit
from bench.validation.least_squares import best_ends, moments, triangle
from trainer.config import ConfigError
from trainer.scaling import Curve, EvalPoint, Sigmoid, fit_curve

PAPER = Sigmoid(R0=0.30, A=0.61, B=1.92, C_mid=2542)  # Table 1 of 2510.13786; its R0 is not published
UP_TO_8K = np.arange(1500, 8001, 250.0)
SD = 0.005
R0S = {"given": 0.3, "measured": EvalPoint(0, 0.0, 0.303, 0.008), "unknown": None}


def curve(
    compute: np.ndarray = UP_TO_8K,
    R0: EvalPoint | float | None = 0.3,
    seed: int = 0,
    noise: np.ndarray | None = None,
) -> Curve:
    errors = np.random.default_rng(seed).normal(0, SD, len(compute)) if noise is None else noise
    rewards = PAPER.reward(compute) + errors
    points = (
        EvalPoint(i, float(c), float(r), SD) for i, (c, r) in enumerate(zip(compute, rewards, strict=True))
    )
    return Curve("made", "GPU-hours", tuple(points), R0)


def brute_chi2(made: Curve, held: dict[str, float]) -> float:
    """The least χ² with some of A, B, C_mid held: scipy over the rest, R0 as a share of A."""
    c, y = (np.array([getattr(p, k) for p in made.points]) for k in ("compute", "pass_rate"))

    def law(x: np.ndarray) -> Sigmoid:
        at = iter(x)
        A = held["A"] if "A" in held else next(at)
        B = held["B"] if "B" in held else np.exp(next(at))
        C_mid = held["C_mid"] if "C_mid" in held else np.exp(next(at))
        return Sigmoid(made.R0 if isinstance(made.R0, float) else A * next(at), A, B, C_mid)

    def errors(x: np.ndarray) -> np.ndarray:
        z = (law(x).reward(c) - y) / SD
        if isinstance(made.R0, EvalPoint):
            return np.append(z, (law(x).R0 - made.R0.pass_rate) / made.R0.pass_rate_se)
        return z

    bounds = [("A", 0.3, 1.0), ("B", np.log(0.3), np.log(20)), ("C_mid", np.log(500), np.log(240_000))]
    free = [(low, high) for name, low, high in bounds if name not in held]
    if not isinstance(made.R0, float):
        free.append((0.0, 1.0))
    low, high = np.array(free).T
    starts = low + (high - low) * np.random.default_rng(0).random((3, len(low)))
    found = [
        least_squares(errors, x, bounds=(low, high), x_scale="jac", xtol=1e-12, ftol=1e-12) for x in starts
    ]
    return 2 * min(float(f.cost) for f in found)


@pytest.mark.parametrize("start", list(R0S))
def test_with_a_number_held_at_an_end_of_its_profile_the_best_chi2_lies_on_the_limit(start: str) -> None:
    made = curve(R0=R0S[start])
    found = profile(made, 0.9)
    n, p = len(made.points) + (start == "measured"), 3 if start == "given" else 4
    least = brute_chi2(made, {})
    limit = least * (1 + f_distribution.ppf(0.9, 1, n - p) / (n - p))
    for name in ("A", "B", "C_mid"):
        e = getattr(found, name)
        assert e.low < getattr(found.law, name) == e.value < e.high
        for end in (e.low, e.high):
            assert brute_chi2(made, {name: end}) == pytest.approx(limit, rel=1e-3), (name, end)


def test_an_end_that_the_data_leave_open_is_the_bound() -> None:
    early = profile(curve(np.arange(1500, 2501, 100.0), seed=1))
    assert early.A.high == 1.0 and early.A.low < 0.61
    assert early.C_mid.low < 2542 < early.C_mid.high


@pytest.mark.parametrize("start", list(R0S))
def test_each_refit_is_the_least_squares_of_its_series(start: str) -> None:
    for compute in (UP_TO_8K, np.arange(1500, 4001, 125.0)):  # the second: the ceiling is often at 1
        problem = _problem(curve(compute, R0S[start]))
        rng = np.random.default_rng(1)
        series = problem.y + problem.sd * rng.normal(0, 1, (4, len(problem.y)))
        draws = refit(problem, series)
        for i, y in enumerate(series):
            law = Sigmoid(*(float(x[i]) for x in (draws.R0, draws.A, draws.B, draws.C_mid)))
            chi2 = float((((law.reward(problem.c) - y) / problem.sd) ** 2).sum())
            best = replace(problem, y=y).best()[1]
            assert chi2 <= best * (1 + 1e-6), i
            assert 0 <= law.R0 <= law.A <= 1 and (start != "given" or law.R0 == 0.3)


def widths(found: Intervals) -> np.ndarray:
    return np.array([e.high - e.low for e in (found.A, found.B, found.C_mid)])


def test_where_the_errors_are_white_all_intervals_agree() -> None:
    made = curve(np.arange(500, 16001, 250.0), seed=2)
    by_profile = profile(made)
    for resampling in ("residual", "parametric"):
        resampled = bootstrap(made, 1000, resampling)  # type: ignore[arg-type]  # both are of its Literal
        assert resampled.law == by_profile.law
        assert widths(resampled) == pytest.approx(widths(by_profile), rel=0.15)
    default = fit_curve(made)
    assert default.A.value == pytest.approx(by_profile.A.value, abs=0.002)
    assert 0.9 < (default.A.high - default.A.low) / (by_profile.A.high - by_profile.A.low) < 2.5


def test_blocks_widen_the_interval_of_a_run_that_wanders() -> None:
    compute = np.arange(500, 16001, 250.0)
    wander = 0.01 * np.sin(np.arange(len(compute)) * 2 * np.pi / 18)
    jitter = np.random.default_rng(0).permutation(wander)
    ratio = {}
    for name, noise in (("wander", wander), ("jitter", jitter)):
        made = curve(compute, noise=noise)
        blocks, single = (bootstrap(made, 1000, kind) for kind in ("block", "residual"))  # type: ignore[arg-type]
        ratio[name] = widths(blocks)[0] / widths(single)[0]
    assert ratio["wander"] > 1.3 and 0.7 < ratio["jitter"] < 1.3


@pytest.mark.slow
def test_the_bootstraps_intervals_cover_as_often_as_they_say() -> None:
    inside = []
    for seed in range(200):
        made = curve(seed=seed)
        found = bootstrap(made, 200, "parametric")
        inside.append([e.low <= t <= e.high for e, t in zip((found.A, found.B), (0.61, 1.92), strict=True)])
    assert np.mean(inside, 0) == pytest.approx(0.9, abs=0.06)  # nearly 3 standard errors


def test_an_outlier_loses_its_weight_first() -> None:
    noise = np.random.default_rng(0).normal(0, SD, len(UP_TO_8K))
    clean = profile(curve(noise=noise))
    noise[12] += 0.1
    dirty = profile(curve(noise=noise))
    assert dirty.A.value == pytest.approx(clean.A.value, abs=0.003)
    assert widths(dirty)[0] < 2 * widths(clean)[0]


def test_the_same_seed_gives_the_same_interval() -> None:
    made = curve()
    one, other, third = (bootstrap(made, 200, seed=s) for s in (0, 0, 1))
    assert one.A == other.A != third.A and one.draws is not None and one.draws.A.shape == (200,)


def test_too_few_points_or_resamples_are_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="made: 4 points beyond R0; for an interval, 5 or more"):
        profile(curve(UP_TO_8K[:4]))
    with pytest.raises(
        ConfigError, match="bootstrap: 3 refits are too few for quantiles; expected 100 or more"
    ):
        bootstrap(curve(), 3)
    with pytest.raises(ConfigError, match="expected one of residual, parametric, block"):
        bootstrap(curve(), 1000, "jackknife")  # type: ignore[arg-type]  # that is the point


def test_the_ends_of_a_curve_are_the_best_within_their_bounds() -> None:
    rng = np.random.default_rng(0)
    a, b = (x.ravel() for x in np.meshgrid(*2 * [np.linspace(0.1, 0.9, 81)]))
    a, b = a[a <= b], b[a <= b]
    for i in range(200):
        s, sd = np.sort(rng.random(7)), 0.01 + rng.random(7)
        y = rng.normal(*rng.random(2), 7)
        low, high, gain = best_ends(moments(s, y, sd), triangle(0.1, 0.9))
        assert 0.1 <= low <= high <= 0.9
        found = float((((low * (1 - s) + high * s - y) / sd) ** 2).sum())
        assert found == pytest.approx(float(((y / sd) ** 2).sum() - gain), rel=1e-9), i
        errors = (a[:, None] * (1 - s) + b[:, None] * s - y) / sd
        assert found <= (errors**2).sum(1).min() + 1e-9, i
