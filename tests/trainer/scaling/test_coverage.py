"""Promises of the intervals: they cover the truth as often as they say; what is not identified is flagged."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import toeplitz

from bench.validation.runs import ours, truths
from bench.validation.scenarios import PAPER_RUNS, SCENARIOS, SHORT, TOO_SHORT, WEAK, WELL, simulate
from trainer.scaling import Fit, Sigmoid, fit
from trainer.scaling.curve.families import B_RANGE, MAX_REACH
from trainer.scaling.curve.marginal import CORRELATED_SHARE, CORRELATIONS, NOISE_PRIOR_POINTS, Data
from trainer.scaling.curve.posterior import posterior

Array = NDArray[np.float64]

BY_NAME = {case.name: case for case in SCENARIOS}
SEED = 31  # not that of the published tables


def inside(result: Fit, truth: dict[str, float]) -> list[bool]:
    estimates = {"A": result.A, "B": result.B, "C_mid": result.C_mid, "2x": result.at_2x}
    return [estimates[key].low <= value <= estimates[key].high for key, value in truth.items()]


@pytest.mark.parametrize(("case", "each"), [(WELL, 3), ("AR(1) 0.7", 2), ("no standard errors reported", 3)])
def test_intervals_of_the_published_curves_cover_the_truth(case: str, each: int) -> None:
    hits = []
    for row in PAPER_RUNS.values():
        for i in range(each):
            points = simulate(BY_NAME[case], row, i, SEED)
            hits.append(inside(ours(points), truths(points)))
    assert np.mean(hits, 0).min() >= 0.75  # 90 % nominal, 10 to 30 runs


@pytest.mark.parametrize("start", ["given", "measured", "unknown"])
def test_intervals_from_six_points_cover_the_truth_and_no_ceiling_is_identified(start: str) -> None:
    rng, n, sd, hits, identified = np.random.default_rng(SEED), 6, 0.02, [], 0
    for _ in range(20):
        law = Sigmoid(
            rng.uniform(0.05, 0.4),
            rng.uniform(0.55, 0.95),
            rng.uniform(1, 4),
            np.exp(rng.uniform(-2.3, -0.5)),
        )
        c = np.linspace(1 / n, 1, n)
        r = np.clip(law.reward(c) + rng.normal(0, sd, n), 0, 1)
        R0 = {"given": law.R0, "measured": law.R0 + rng.normal(0, sd), "unknown": None}[start]
        result = fit(c, r, np.full(n, sd), R0=R0, R0_se=sd if start == "measured" else 0.0)
        truth = {"A": law.A, "B": law.B, "C_mid": law.C_mid, "2x": float(law.reward(2.0))}
        hits.append(inside(result, truth))
        identified += result.identified
    assert np.mean(hits, 0).min() >= 0.75 and identified <= 1


def test_a_fit_that_ends_before_the_bend_is_flagged_and_one_that_goes_beyond_is_not() -> None:
    for name in SHORT:
        assert not ours(simulate(BY_NAME[TOO_SHORT], PAPER_RUNS[name], 0, SEED)).identified, name
        if name != WEAK:
            assert ours(simulate(BY_NAME[WELL], PAPER_RUNS[name], 0, SEED)).identified, name


def quantiles(value: Array, weight: Array, levels: tuple[float, ...]) -> Array:
    value = np.broadcast_to(value, weight.shape).ravel()
    order = np.argsort(value)
    total = np.cumsum(weight.ravel()[order])
    result: Array = value[order][np.searchsorted(total / total[-1], levels)]
    return result


def brute_force(data: Data, b: Array, c_mid: Array, R0: Array, A: Array) -> Array:
    """Posterior on the whole grid (B, C_mid, R0, A), R0 unknown: a flat prior on 0 ≤ R0 ≤ A."""
    n = len(data.compute)
    s = 1 / (1 + (c_mid[:, None] / data.compute) ** b[:, None, None])
    weight = np.zeros((len(b), len(c_mid), len(R0), len(A)))
    share = CORRELATED_SHARE
    for rho in (0.0, *CORRELATIONS):
        shape = share * toeplitz(rho ** np.arange(n)) + (1 - share) * np.eye(n) if rho else np.eye(n)
        whiten = np.linalg.inv(np.linalg.cholesky(data.sd[0] ** 2 * shape))
        low, high, y = (1 - s) @ whiten.T, s @ whiten.T, whiten @ data.reward
        pairs = ((low, low), (low, high), (high, high), (low, y), (high, y))
        u, v, q, g, h = ((x * z).sum(-1)[..., None, None] for x, z in pairs)
        r, a = R0[:, None], A[None, :]
        sse = y @ y - 2 * r * g - 2 * a * h + r**2 * u + 2 * r * a * v + a**2 * q
        prior = (0.5 if rho == 0 else 0.5 / len(CORRELATIONS)) * np.linalg.det(whiten * data.sd[0])
        weight += prior * ((NOISE_PRIOR_POINTS + sse) / n) ** (-(n + NOISE_PRIOR_POINTS) / 2)
    return np.where(R0[:, None] <= A[None, :], weight, 0)


def test_where_the_start_is_unknown_draws_are_the_brute_force_integral_over_starts_from_0_to_A() -> None:
    law, rng, n, sd = Sigmoid(R0=0.11, A=0.90, B=2.4, C_mid=0.05), np.random.default_rng(4), 10, 0.03
    c = np.linspace(0.02, 0.16, n)
    y = law.reward(c) + sd * rng.uniform(-1.5, 1.5, n)  # no outliers
    data = Data(c, y, np.full(n, sd), True, None, 0.0)
    b, c_mid = np.geomspace(0.8, 8, 45), np.geomspace(0.03, 0.1, 51)
    R0, A = np.linspace(0, 0.5, 41), np.linspace(0.6, 1, 41)
    weight = brute_force(data, b, c_mid, R0, A)
    # all there is: hardly any of it beyond that grid
    everywhere = (np.geomspace(*B_RANGE, 31), np.geomspace(c[0] / 3, c[-1] * MAX_REACH, 51),
                  np.linspace(0, 1, 21), np.linspace(0, 1, 21))  # fmt: skip
    coarse = brute_force(data, *everywhere)
    inside = np.ix_(*((x >= g[0]) & (x <= g[-1]) for x, g in zip(everywhere, (b, c_mid, R0, A), strict=True)))
    assert coarse[inside].sum() > 0.98 * coarse.sum()

    draws = posterior(data, draws=20_000).draws
    levels = (0.05, 0.5, 0.95)
    for name, value, drawn in (
        ("R0", R0[:, None], draws.R0), ("A", A, draws.A),
        ("B", b[:, None, None, None], draws.B), ("C_mid", c_mid[:, None, None], draws.C_mid),
    ):  # fmt: skip
        expected = quantiles(value, weight, levels)
        width = expected[2] - expected[0]
        np.testing.assert_allclose(np.quantile(drawn, levels), expected, atol=0.1 * width, err_msg=name)
    assert (draws.R0 >= 0).all() and (draws.R0 <= draws.A).all()
