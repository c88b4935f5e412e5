"""Promises of the posterior: it is the brute-force integral, and outliers and order do not matter."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import logsumexp
from simulated import measured

from trainer.scaling import Sigmoid, curve, fit
from trainer.scaling.curve.families import robust
from trainer.scaling.curve.marginal import CORRELATED_SHARE, CORRELATIONS, NOISE_PRIOR_POINTS, Data
from trainer.scaling.curve.posterior import posterior

LAW = Sigmoid(R0=0.11, A=0.90, B=2.4, C_mid=0.05)


def quantiles(value: np.ndarray, log_weight: np.ndarray, levels: tuple[float, ...]) -> np.ndarray:
    order = np.argsort(value.ravel())
    weight = np.exp(log_weight.ravel()[order] - log_weight.max())
    total = np.cumsum(weight)
    return value.ravel()[order][np.searchsorted(total / total[-1], levels)]


EVEN = np.linspace(0.02, 0.16, 14)
UNEVEN = np.r_[np.linspace(0.02, 0.05, 7), 0.0501, 0.08, np.linspace(0.1, 0.18, 5)]


@pytest.mark.parametrize(("rho", "c"), [(0.0, EVEN), (0.85, EVEN), (0.85, UNEVEN)])
def test_the_draws_are_the_brute_force_integral_over_noise_and_parameters(rho: float, c: np.ndarray) -> None:
    """R0 and errors given: p(A, log B, log C_mid) ∝ Σ_ρ p(ρ) |Σ_ρ|^-½ (ν₀ + eᵀ Σ_ρ⁻¹ e)^-((n + ν₀) / 2).

    Errors are correlated in compute: by ρ at the median distance of two evaluations.
    """
    rng, n, sd = np.random.default_rng(4), 14, 0.012
    gaps = np.array([[abs(x - y) for y in c] for x in c]) / np.median([c[i + 1] - c[i] for i in range(n - 1)])
    noise = np.linalg.cholesky(rho**gaps) @ rng.uniform(-1.5, 1.5, n)  # no outliers
    y = LAW.reward(c) + sd * noise
    result = posterior(Data(c, y, np.full(n, sd), True, LAW.R0, 0.0), draws=20_000)

    wide = 2.0 if rho and c is EVEN else 1.0  # the box: what is beyond it has next to no weight
    A = np.linspace(LAW.A - 0.2 * wide, 1, 141)[:, None, None]
    b = np.geomspace(LAW.B / 1.6**wide, LAW.B * 1.6**wide, 121)[None, :, None]
    c_mid = np.geomspace(LAW.C_mid / 1.5**wide, LAW.C_mid * 1.5**wide, 121)[None, None, :]
    s = 1 / (1 + (c_mid[..., None] / c) ** b[..., None])
    terms, prior_points = [], NOISE_PRIOR_POINTS
    share = CORRELATED_SHARE
    for r in (0.0, *CORRELATIONS):
        shape = share * r**gaps + (1 - share) * np.eye(n) if r else np.eye(n)
        whiten = np.linalg.inv(np.linalg.cholesky(sd**2 * shape))
        gained, by = whiten @ (y - LAW.R0), s @ whiten.T  # the error is linear in A: gained - (A - R0) by
        Q = gained @ gained - 2 * (A - LAW.R0) * (by @ gained) + (A - LAW.R0) ** 2 * (by**2).sum(-1)
        prior = 0.5 if r == 0 else 0.5 / len(CORRELATIONS)
        log_det = np.linalg.slogdet(sd**2 * shape)[1]
        terms.append(np.log(prior) - 0.5 * log_det - (n + prior_points) / 2 * np.log(prior_points + Q))
    log_p = logsumexp(terms, axis=0)
    faces = (log_p[0], log_p[:, 0], log_p[:, -1], log_p[..., 0], log_p[..., -1])
    assert max(f.max() for f in faces) < log_p.max() - 6
    levels = (0.05, 0.5, 0.95)
    ahead = LAW.R0 + (A - LAW.R0) / (1 + (c_mid / 0.32) ** b)
    for name, value, drawn in (
        ("A", np.broadcast_to(A, log_p.shape), result.draws.A),
        ("B", np.broadcast_to(b, log_p.shape), result.draws.B),
        ("C_mid", np.broadcast_to(c_mid, log_p.shape), result.draws.C_mid),
        ("reward at 2x", ahead, result.draws.reward(0.32)),
    ):
        expected = quantiles(value, log_p, levels)
        width = expected[2] - expected[0]
        np.testing.assert_allclose(np.quantile(drawn, levels), expected, atol=0.05 * width, err_msg=name)
    assert (result.autocorrelated_prob > 0.5) == (rho > 0)


def test_outliers_lose_their_weight_and_others_keep_theirs() -> None:
    c = np.linspace(0.01, 0.3, 40)
    y = LAW.reward(c) + np.random.default_rng(0).normal(0, 0.01, 40)
    y[[12, 30]] += (0.1, -0.1)
    weight = robust(Data(c, y, np.full(40, 0.01), True, LAW.R0, 0.0))[0]
    assert weight[[12, 30]].max() < 0.2 and np.delete(weight, [12, 30]).min() > 0.5


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


def test_compute_for_a_reward_is_the_inverse_of_the_reward_draw_by_draw() -> None:
    c = np.linspace(0.01, 0.3, 20)
    result = fit(c, LAW.reward(c), np.full(20, 0.01), R0=0.11)
    budgets = result.forecast.compute_for(0.6)
    np.testing.assert_allclose(np.diag(result.forecast.reward(budgets)), 0.6, atol=1e-3)
    assert np.isinf(result.compute_for(0.99).high) and result.forecast.compute_for(0.1).max() == 0
    law = result.sigmoid
    assert law.reward(law.compute_for(0.6)) == pytest.approx(0.6)
    assert (law.compute_for(0.1), law.compute_for(0.99)) == (0, np.inf)


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
