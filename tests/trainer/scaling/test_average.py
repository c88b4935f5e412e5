"""Promises of the forecasts: averaged over laws, they hold what comes also where the run is no sigmoid."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.scaling import Sigmoid, fit
from trainer.scaling.average import LogisticDraws, _draw
from trainer.scaling.laws import Axis, Law, integrate, logistic_compute_for, logistic_of_power
from trainer.scaling.marginal import Data, noise_models

Array = np.ndarray
R0, A, NOISE = 0.15, 0.9, 0.005
SHARE = np.arange(1, 41) / 40


def odds_law(c: Array) -> Array:
    """The odds of R / A grow by the factor e^u, u = 4 C^.7."""
    odds = R0 / (A - R0) * np.exp(4.0 * c**0.7)
    return np.asarray(A * odds / (1 + odds))


def exponential(c: Array) -> Array:
    return np.asarray(A - (A - R0) * np.exp(-3 * c))


def sigmoid(c: Array) -> Array:
    return Sigmoid(R0, A, 1.9, 0.3).reward(c)


def measured(law: Array, seed: int) -> Array:
    return np.clip(law + np.random.default_rng(seed).normal(0, NOISE, len(law)), 0, 1)


def test_the_logistic_of_a_power_is_the_odds_law_and_without_q_the_stretched_approach() -> None:
    c = np.array([0.0, 0.01, 0.2, 1.0, 3.0])
    tau = 0.25 ** (1 / 0.7)  # (c / τ)^.7 = 4 c^.7
    gained = logistic_of_power(A / R0 - 1)(c, np.array(0.7), np.array(tau))
    assert R0 + (A - R0) * gained == pytest.approx(odds_law(c))
    stretched = logistic_of_power(0.0)(c, np.array(1.0), np.array(1 / 3))
    assert R0 + (A - R0) * stretched == pytest.approx(exponential(c))


@pytest.mark.parametrize("q", [0.0, 5.0])
def test_the_compute_for_a_reward_inverts_the_curve(q: float) -> None:
    p, tau = np.array([0.5, 1.0, 2.0]), np.array([0.1, 1.0, 10.0])
    found = logistic_compute_for(np.full(3, 0.6), q, p, tau)
    assert logistic_of_power(q)(found, p, tau) == pytest.approx([0.6] * 3)
    draws = LogisticDraws(q, np.full(3, R0), np.array([0.5, 0.7, 0.9]), p, tau)
    at = draws.compute_for(0.55)
    assert at[0] == np.inf  # beyond its ceiling
    assert draws.reward(float(at[1]))[1] == pytest.approx(0.55) == draws.reward(float(at[2]))[2]
    assert list(draws.compute_for(0.1)) == [0, 0, 0]


@pytest.mark.parametrize("law", [odds_law, exponential], ids=["odds", "exponential"])
def test_the_end_of_a_run_that_is_no_sigmoid_is_forecast_from_its_half(law: object) -> None:
    assert callable(law)
    held, below_the_upper_end_of_sigmoids = [], []
    for seed in range(6):
        half = SHARE[:20]
        found = fit(half, measured(law(half), seed), np.full(20, NOISE), R0=R0)
        end = float(law(np.array(1.0)))
        held.append(found.at(1.0).low <= end <= found.at(1.0).high)
        assert found.draws is not None and found.sigmoid_prob < 0.5
        below_the_upper_end_of_sigmoids.append(float(np.quantile(found.draws.reward(1.0), 0.95)) >= end)
    assert sum(held) >= 5 and sum(below_the_upper_end_of_sigmoids) <= 2


def test_a_sigmoid_gets_most_of_the_probability_and_its_forecast_holds() -> None:
    probabilities, held = [], []
    for seed in range(6):
        found = fit(SHARE, measured(sigmoid(SHARE), seed), np.full(40, NOISE), R0=R0)
        probabilities.append(found.sigmoid_prob)
        held.append(found.at_2x.low <= float(sigmoid(np.array(2.0))) <= found.at_2x.high)
        assert found.at_2x.value == pytest.approx(float(sigmoid(np.array(2.0))), abs=0.02)
    assert np.mean(probabilities) > 0.9 and sum(held) >= 5


def test_forecasts_are_the_same_for_the_same_data() -> None:
    one, two = (fit(SHARE, measured(odds_law(SHARE), 0), np.full(40, NOISE), R0=R0) for _ in range(2))
    assert one.at(3.0) == two.at(3.0) and one.band == two.band and one.sigmoid_prob == two.sigmoid_prob


def test_the_parameters_of_a_grid_are_those_of_its_cells_and_draws_follow_the_brute_force_posterior() -> None:
    """p and τ on a fixed fine grid, R0 exact, white noise: weights (ν₀ + SSE)^-((n + ν₀ − 1) / 2) / √Σs²."""
    c = np.linspace(0.05, 1, 20)
    curve = R0 + (0.8 - R0) * logistic_of_power(4.0)(c, np.array(1.2), np.array(0.4))
    reward, sd = measured(curve, 1), np.full(20, NOISE)
    data = Data(c, reward, sd, True, R0, 0.0)
    law = Law("", logistic_of_power(4.0), (Axis(0.3, 3, 13), Axis(0.02, 30, 31)))
    white = noise_models(data, np.ones(20), ())
    found = integrate(data, white, law)
    for x, fit_of_cell in ((0, 0), (len(found.theta[0]) - 1, -1)):
        s = law.fraction(c, found.theta[0][x], found.theta[1][x])
        z, y = s / NOISE, (reward - R0 * (1 - s)) / NOISE
        assert found.cells[0].fit.A[fit_of_cell] == pytest.approx(float(z @ y / (z @ z)))
    p, tau = (x.ravel() for x in np.meshgrid(np.geomspace(0.3, 3, 400), np.geomspace(0.02, 30, 800)))
    s = law.fraction(c, p[:, None], tau[:, None])
    z, y = s / NOISE, (reward - R0 * (1 - s)) / NOISE
    best = (z * y).sum(1) / (z * z).sum(1)
    sse = ((y - best[:, None] * z) ** 2).sum(1)
    log_weight = -0.5 * (20 + 3 - 1) * np.log(3 + sse) - 0.5 * np.log((z * z).sum(1))
    weight = np.exp(log_weight - log_weight.max())
    draws = _draw(data, 4.0, found, 4000, np.random.default_rng(0))
    mean = (weight @ (R0 + (best - R0) * law.fraction(2.0, p, tau))) / weight.sum()
    assert float(draws.reward(2.0).mean()) == pytest.approx(mean, abs=0.003)
    assert float(np.log(draws.p).mean()) == pytest.approx(weight @ np.log(p) / weight.sum(), abs=0.02)
    log_mean = np.log(weight.mean()) + log_weight.max()  # over the prior of p and τ
    assert found.log_evidence - white[0].log_prior == pytest.approx(log_mean, abs=0.2)
