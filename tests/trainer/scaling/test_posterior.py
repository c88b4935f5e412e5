"""Promises of the posterior: it is the brute-force integral, and outliers and order do not matter."""

import numpy as np
import pytest
from simulated import measured

from trainer.scaling import Sigmoid, curve, fit
from trainer.scaling.curve.average import posterior
from trainer.scaling.curve.families import B_RANGE, MAX_REACH, robust
from trainer.scaling.curve.marginal import CORRELATED_SHARE, CORRELATIONS, NOISE_PRIOR_POINTS, Data

Array = np.ndarray
LAW = Sigmoid(R0=0.11, A=0.90, B=2.4, C_mid=0.05)


def brute_force(data: Data, b: Array, c_mid: Array, R0: Array, A: Array) -> tuple[Array, float]:
    """The posterior on the grid (B, C_mid, R0, A), and the probability that errors are correlated.

    p(R0, A, log B, log C_mid) ∝ Σ_ρ p(ρ) |Σ_ρ|^-½ (ν₀ + eᵀ Σ_ρ⁻¹ e)^-((n + ν₀) / 2) where 0 ≤ R0 ≤ A.
    Errors are correlated in compute: by ρ at the median distance of two evaluations.
    """
    c, n, share = data.compute, len(data.compute), CORRELATED_SHARE
    gaps = np.abs(c[:, None] - c) / np.median(np.diff(c))
    s = 1 / (1 + (c_mid[:, None] / c) ** b[:, None, None])
    r, a = R0[:, None], A[None, :]
    weights = []
    for rho in (0.0, *CORRELATIONS):
        shape = share * rho**gaps + (1 - share) * np.eye(n) if rho else np.eye(n)
        whiten = np.linalg.inv(np.linalg.cholesky(data.sd[0] ** 2 * shape))
        low, high, y = (1 - s) @ whiten.T, s @ whiten.T, whiten @ data.reward
        pairs = ((low, low), (low, high), (high, high), (low, y), (high, y))
        u, v, q, g, h = ((x * z).sum(-1)[..., None, None] for x, z in pairs)
        sse = y @ y - 2 * r * g - 2 * a * h + r**2 * u + 2 * r * a * v + a**2 * q
        prior = (0.5 if rho == 0 else 0.5 / len(CORRELATIONS)) * np.linalg.det(whiten * data.sd[0])
        weight = prior * ((NOISE_PRIOR_POINTS + sse) / n) ** (-(n + NOISE_PRIOR_POINTS) / 2)
        weights.append(np.where(r <= a, weight, 0))
    total = np.sum(weights, 0)
    return total, 1 - float(weights[0].sum() / total.sum())


def assert_distributed(drawn: Array, value: Array, weight: Array, tolerance: float) -> None:
    """Quantiles of the draws are those of the weighted values, to a share of the interval's width."""
    value, levels = np.broadcast_to(value, weight.shape).ravel(), (0.05, 0.5, 0.95)
    order = np.argsort(value)
    total = np.cumsum(weight.ravel()[order])
    expected = value[order][np.searchsorted(total / total[-1], levels)]
    width = expected[2] - expected[0]
    np.testing.assert_allclose(np.quantile(drawn, levels), expected, atol=tolerance * width)


EVEN = np.linspace(0.02, 0.16, 14)
UNEVEN = np.r_[np.linspace(0.02, 0.05, 7), 0.0501, 0.08, np.linspace(0.1, 0.18, 5)]


@pytest.mark.parametrize(("rho", "c"), [(0.0, EVEN), (0.85, EVEN), (0.85, UNEVEN)])
def test_with_a_known_start_draws_are_the_brute_force_integral(rho: float, c: Array) -> None:
    rng, n, sd = np.random.default_rng(4), 14, 0.012
    gaps = np.abs(c[:, None] - c) / np.median(np.diff(c))
    noise = np.linalg.cholesky(rho**gaps) @ rng.uniform(-1.5, 1.5, n)  # no outliers
    data = Data(c, LAW.reward(c) + sd * noise, np.full(n, sd), True, LAW.R0, 0.0)
    result = posterior(data, draws=20_000)
    wide = 2.0 if rho and c is EVEN else 1.0  # the box: what is beyond it has next to no weight
    b = np.geomspace(LAW.B / 1.6**wide, LAW.B * 1.6**wide, 121)
    c_mid = np.geomspace(LAW.C_mid / 1.5**wide, LAW.C_mid * 1.5**wide, 121)
    A = np.linspace(LAW.A - 0.2 * wide, 1, 141)
    weight, correlated = brute_force(data, b, c_mid, np.array([LAW.R0]), A)
    faces = (weight[0], weight[-1], weight[:, 0], weight[:, -1], weight[..., 0])
    assert max(f.max() for f in faces) < weight.max() * np.exp(-6)
    B, M = b[:, None, None, None], c_mid[:, None, None]
    ahead = LAW.R0 + (A - LAW.R0) / (1 + (M / 0.32) ** B)
    draws = result.draws
    for drawn, value in ((draws.A, A), (draws.B, B), (draws.C_mid, M), (draws.reward(0.32), ahead)):
        assert_distributed(drawn, value, weight, 0.05)
    assert (result.autocorrelated_prob > 0.5) == (rho > 0) == (correlated > 0.5)


def test_where_the_start_is_unknown_draws_are_the_brute_force_integral_over_starts_from_0_to_A() -> None:
    law, rng, n, sd = Sigmoid(R0=0.11, A=0.90, B=2.4, C_mid=0.05), np.random.default_rng(4), 10, 0.03
    c = np.linspace(0.02, 0.16, n)
    y = law.reward(c) + sd * rng.uniform(-1.5, 1.5, n)  # no outliers
    data = Data(c, y, np.full(n, sd), True, None, 0.0)
    grid = np.geomspace(0.8, 8, 45), np.geomspace(0.03, 0.1, 51), *np.linspace([0, 0.6], [0.5, 1], 41).T
    weight, _ = brute_force(data, *grid)
    # all there is: hardly any of it beyond that grid
    unit = np.linspace(0, 1, 21)
    everywhere = np.geomspace(*B_RANGE, 31), np.geomspace(c[0] / 3, c[-1] * MAX_REACH, 51), unit, unit
    coarse, _ = brute_force(data, *everywhere)
    inside = np.ix_(*((x >= g[0]) & (x <= g[-1]) for x, g in zip(everywhere, grid, strict=True)))
    assert coarse[inside].sum() > 0.98 * coarse.sum()
    draws = posterior(data, draws=20_000).draws
    values = np.meshgrid(*grid, indexing="ij", sparse=True)
    for drawn, value in zip((draws.B, draws.C_mid, draws.R0, draws.A), values, strict=True):
        assert_distributed(drawn, value, weight, 0.1)
    assert (draws.R0 >= 0).all() and (draws.R0 <= draws.A).all()


def test_outliers_lose_their_weight_and_others_keep_theirs() -> None:
    c = np.linspace(0.01, 0.3, 40)
    y = LAW.reward(c) + np.random.default_rng(0).normal(0, 0.01, 40)
    y[[12, 30]] += (0.1, -0.1)
    weight = robust(Data(c, y, np.full(40, 0.01), True, LAW.R0, 0.0))[0]
    assert weight[[12, 30]].max() < 0.2 and np.delete(weight, [12, 30]).min() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("offset", [-0.1, 0.1])
def test_one_point_in_twenty_a_tenth_off_moves_the_ceiling_by_less_than_a_hundredth(offset: float) -> None:
    c = np.linspace(0.01, 0.3, 40)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        y = LAW.reward(c) + rng.normal(0, 0.01, 40)
        dirty = y.copy()
        dirty[rng.choice(40, 2, replace=False)] += offset
        clean, moved = (fit(c, np.clip(r, 0, 1), np.full(40, 0.01), R0=LAW.R0) for r in (y, dirty))
        assert abs(moved.A.value - clean.A.value) < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_a_flat_run_leaves_its_start_as_measured_and_no_ceiling_below_it(seed: int) -> None:
    reward = 0.5 + np.random.default_rng(seed).normal(0, 0.01, 9)
    result = fit(curve(np.arange(9), reward, np.full(9, 0.01)))
    assert result.R0.low > 0.47 and result.R0.high < 0.53
    assert result.A.low > 0.47 and result.A.high > 0.9
    assert result.at_2x.low > 0.47 and "flat" in result.flags


def test_the_same_points_give_the_same_draws_in_any_order() -> None:
    c = np.linspace(0.01, 0.3, 20)
    y = LAW.reward(c) + np.random.default_rng(1).normal(0, 0.01, 20)
    one, two = fit(c, y, R0=0.11), fit(c[::-1], y[::-1], R0=0.11)
    assert one.draws is not None and two.draws is not None
    assert one == two and (one.draws.A == two.draws.A).all()


def test_a_long_series_is_fitted_as_its_means() -> None:
    c = np.linspace(0.001, 0.3, 3000)
    y = np.clip(LAW.reward(c) + np.random.default_rng(2).normal(0, 0.03, 3000), 0, 1)
    result = fit(c, y, R0=0.11)
    assert result.A.low <= 0.9 <= result.A.high and result.A.high - result.A.low < 0.01


@pytest.mark.parametrize("sd", [0.002, 0.03])
def test_the_reported_error_of_the_start_does_not_depend_on_those_of_the_points(sd: float) -> None:
    c = np.linspace(0.1, 0.3, 40)  # too late to determine R0
    r = LAW.reward(c) + np.random.default_rng(4).normal(0, sd, 40)
    for se in (np.full(40, sd), None):
        R0 = fit(c, r, se, R0=LAW.R0, R0_se=0.01).R0
        assert R0.high - R0.low == pytest.approx(2 * 1.645 * 0.01, rel=0.35)


def test_a_run_that_scatters_widely_does_not_make_the_measured_start_uncertain() -> None:
    c = np.linspace(0.01, 0.3, 30)
    points = np.random.default_rng(3).normal(0, 0.03, 30)
    rewards = np.clip(LAW.reward(c) * 0.8 + 0.1 + points, 0, 1)  # a sigmoid with another R0
    result = fit(measured(c, rewards, 0.005, 0.11))
    assert result.overdispersion > 4
    assert result.R0.high - result.R0.low < 0.04 and abs(result.R0.value - 0.11) < 0.02
