"""Promises of the forecasts: averaged over laws, they hold what comes also where the run is no sigmoid."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import logit

from trainer.scaling import Sigmoid, fit
from trainer.scaling.curve import average
from trainer.scaling.curve.average import DEFAULT, TRANSIENT_SD, Average, LawDraws, LawPrior, Mixture
from trainer.scaling.curve.families import Axis, Family, integrate, logistic_of_power
from trainer.scaling.curve.marginal import Data, marginal, noise_models

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


def curves(q: float, A: list[float], p: list[float], tau: list[float]) -> LawDraws:
    family = Family("", logistic_of_power(q), ())
    n = len(A)
    return LawDraws(
        family, np.full(n, R0), np.array(A), (np.array(p), np.array(tau)), np.zeros(n), np.ones(n)
    )


@pytest.mark.parametrize("q", [0.0, 5.0])
@pytest.mark.parametrize("drift", [0.0, 0.2])
def test_the_compute_for_a_reward_inverts_the_curve(q: float, drift: float) -> None:
    draws = curves(q, [0.5, 0.7, 0.9], [0.5, 1.0, 2.0], [0.1, 1.0, 10.0])
    forecast = Average((draws,), 0.0, last=1.0, drift=np.full(3, drift))
    budget = forecast.compute_for(0.55)
    for i in (1, 2):
        assert forecast.reward(float(budget[i]))[i] == pytest.approx(0.55, abs=5e-4)
    assert (budget[0] == np.inf) == (drift == 0)  # its ceiling is .5
    assert list(forecast.compute_for(0.1)) == [0, 0, 0]


def test_a_drift_adds_to_the_log_odds_for_each_e_fold_of_compute_beyond_the_data() -> None:
    draws = curves(5.0, [0.9, 0.9], [1.0, 1.0], [1.0, 1.0])
    plain = Average((draws,), 0.0, last=2.0, drift=np.zeros(2))
    drifting = Average((draws,), 0.0, last=2.0, drift=np.array([0.3, -0.1]))
    assert drifting.reward(2.0) == pytest.approx(plain.reward(2.0))
    before, after = (x.reward(2 * np.e**2) for x in (plain, drifting))
    assert np.log(after / (1 - after)) - np.log(before / (1 - before)) == pytest.approx([0.6, -0.2])


def test_what_is_still_to_be_gained_is_off_by_a_share_of_it_that_grows_with_the_pace() -> None:
    """So a run on its plateau is as certain as before, whatever the error, and a fast one is less so."""
    for C in (4.0, 2.0):  # beyond the data, and at their end
        draws = curves(5.0, [0.9, 0.9], [1.0, 1.0], [1.0, 1.0])
        plain = Average((draws,), 0.0, last=2.0, drift=np.zeros(2))
        off = replace(plain, gain_error=np.array([0.5, -0.5]))
        before, after, now, half = (
            logit(x) for x in (plain.reward(C), off.reward(C), *plain.reward([2.0, 1.0]).T)
        )
        gained, pace = before - now, now - half
        assert after - before == pytest.approx([0.5 * pace[0] * gained[0], -0.5 * pace[1] * gained[1]])
        assert (gained[0] > 0) == (C > 2) and pace[0] > 0
    assert np.std(average.gain_errors(0.2, 0.5)) == pytest.approx(0.1, rel=0.05)
    assert not average.gain_errors(0.2, 1.0).any()  # the sigmoid's posterior alone


@pytest.mark.parametrize("law", [odds_law, exponential], ids=["odds", "exponential"])
def test_the_end_of_a_run_that_is_no_sigmoid_is_forecast_from_its_half(law: object) -> None:
    assert callable(law)
    inside, below_the_upper_end_of_sigmoids = [], []
    for seed in range(6):
        half = SHARE[:20]
        result = fit(half, measured(law(half), seed), np.full(20, NOISE), R0=R0)
        end = float(law(np.array(1.0)))
        inside.append(result.at(1.0).low <= end <= result.at(1.0).high)
        assert result.draws is not None and result.sigmoid_prob < 0.5
        below_the_upper_end_of_sigmoids.append(float(np.quantile(result.draws.reward(1.0), 0.95)) >= end)
    assert sum(inside) >= 5 and sum(below_the_upper_end_of_sigmoids) <= 2


def test_a_sigmoid_gets_most_of_the_probability_and_its_forecast_holds() -> None:
    probabilities, inside = [], []
    for seed in range(6):
        result = fit(SHARE, measured(sigmoid(SHARE), seed), np.full(40, NOISE), R0=R0)
        probabilities.append(result.sigmoid_prob)
        inside.append(result.at_2x.low <= float(sigmoid(np.array(2.0))) <= result.at_2x.high)
        assert result.at_2x.value == pytest.approx(float(sigmoid(np.array(2.0))), abs=0.02)
    assert np.mean(probabilities) > 0.9 and sum(inside) >= 5


def test_the_parameters_of_a_grid_are_those_of_its_cells_and_draws_follow_the_brute_force_posterior() -> None:
    """p and τ on a fixed fine grid, R0 exact, white noise: weights (ν₀ + SSE)^-((n + ν₀ − 1) / 2) / √Σs²."""
    c = np.linspace(0.05, 1, 20)
    curve = R0 + (0.8 - R0) * logistic_of_power(4.0)(c, np.array(1.2), np.array(0.4))
    reward, sd = measured(curve, 1), np.full(20, NOISE)
    data = Data(c, reward, sd, True, R0, 0.0)
    law = Family("", logistic_of_power(4.0), (Axis(0.3, 3, 13), Axis(0.02, 30, 31)))
    white = noise_models(data, np.ones(20), ())
    result = integrate(data, white, law)
    for x, fit_of_cell in ((0, 0), (len(result.theta[0]) - 1, -1)):
        s = law.fraction(c, result.theta[0][x], result.theta[1][x])
        z, y = s / NOISE, (reward - R0 * (1 - s)) / NOISE
        assert result.cells[0].fit.A[fit_of_cell] == pytest.approx(float(z @ y / (z @ z)))
    p, tau = (x.ravel() for x in np.meshgrid(np.geomspace(0.3, 3, 400), np.geomspace(0.02, 30, 800)))
    s = law.fraction(c, p[:, None], tau[:, None])
    z, y = s / NOISE, (reward - R0 * (1 - s)) / NOISE
    best = (z * y).sum(1) / (z * z).sum(1)
    sse = ((y - best[:, None] * z) ** 2).sum(1)
    log_weight = -0.5 * (20 + 3 - 1) * np.log(3 + sse) - 0.5 * np.log((z * z).sum(1))
    weight = np.exp(log_weight - log_weight.max())
    mixed = Mixture(data, (), tuple(white), ((np.inf, np.zeros(20)),), TRANSIENT_SD)
    draws = average.draw(mixed, result, 4000, np.random.default_rng(0))
    mean = (weight @ (R0 + (best - R0) * law.fraction(2.0, p, tau))) / weight.sum()
    assert float(draws.reward(2.0).mean()) == pytest.approx(mean, abs=0.003)
    assert float(np.log(draws.theta[0]).mean()) == pytest.approx(weight @ np.log(p) / weight.sum(), abs=0.02)
    log_mean = np.log(weight.mean()) + log_weight.max()  # over the prior of p and τ
    log_mean -= math.log(1 - R0)  # the density of A's prior
    log_mean += 0.5 * np.log(np.pi) + math.lgamma((20 + 3 - 1) / 2)  # one parameter, A, is integrated
    assert result.log_evidence - white[0].log_prior == pytest.approx(log_mean, abs=0.05)


@pytest.mark.parametrize("exact", [True, False])
def test_a_given_ceiling_and_a_free_one_have_the_evidence_of_brute_force_integrals(exact: bool) -> None:
    """∫ (ν₀ + |W (R − R0 (1 − s) − A s)|²)^(−(n + ν₀)/2) over what is free, within 0 ≤ R0 ≤ A ≤ 1."""
    c = np.linspace(0.1, 1, 8)
    s = logistic_of_power(0.0)(c, np.array(1.0), np.array(0.6))
    reward = 0.3 * (1 - s) + 0.9 * s + 0.02 * np.random.default_rng(2).standard_normal(8)
    data = Data(c, reward, np.full(8, 0.03), True, 0.31, 0.0 if exact else 0.05)
    (white,) = noise_models(data, np.ones(8), ())
    start, gained = data.prepend_R0(data.reward, 0.31), data.prepend_R0(s, 0.0)
    n = len(start) + 3
    grid = (np.arange(1200) + 0.5) / 1200

    def log_integral(R0: np.ndarray, A: np.ndarray, cell: float) -> float:
        rest = start - R0[..., None] * (1 - gained) - A[..., None] * gained
        z = rest @ white.whiten.T
        values = np.where(R0 <= A, (3 + (z * z).sum(-1)) ** (-n / 2), 0.0)
        return float(np.log(values.sum() * cell)) + white.log_prior + math.lgamma(n / 2)

    R0 = np.array([0.31]) if exact else grid
    cell = 1.0 if exact else 1 / 1200
    for ceiling, A, size in ((None, grid, cell / 1200), (1.0, np.ones(1), cell)):
        brute = log_integral(R0[:, None], A[None, :], size)
        density = 0.0 if ceiling else -math.log(1 - 0.31)  # of A's prior, which is uniform from R0
        result = marginal(data, white, gained[None, :], ceiling).log_weight[0] - density
        assert result == pytest.approx(brute, abs=0.01), ceiling


@pytest.mark.parametrize("start", [0.1, 0.5, 0.9, None])
def test_points_that_say_nothing_leave_each_law_its_prior_probability(start: float | None) -> None:
    c = np.linspace(0.2, 1, 5)
    data = Data(c, np.full(5, 0.5), np.full(5, 50.0), True, start, 0.0)
    result = average.mixture(data)
    by_law = [sum(c.probability for c in result.components if c.family.law == k) for k in range(4)]
    assert by_law == pytest.approx([law.probability for law in DEFAULT.laws], abs=0.03)


def test_the_evidence_of_points_that_say_nothing_does_not_depend_on_the_grid() -> None:
    data = Data(np.linspace(0.2, 1, 5), np.full(5, 0.5), np.full(5, 50.0), True, 0.3, 0.0)
    white = noise_models(data, np.ones(5), ())
    coarse, fine = (
        integrate(data, white, Family("", logistic_of_power(1.0), (Axis(0.3, 3, n), Axis(0.1, 9, n))))
        for n in (5, 41)
    )
    assert coarse.log_evidence == pytest.approx(fine.log_evidence, abs=0.01)


def test_a_normal_prior_of_a_parameter_is_in_the_evidence_and_the_draws() -> None:
    data = Data(SHARE, measured(odds_law(SHARE), 0), np.full(40, NOISE), True, R0, NOISE)
    noises = noise_models(data, np.ones(40), ())
    tau = Axis(0.02, 30, 21)
    flat, near, far = (
        integrate(data, noises, Family("", logistic_of_power(5.0), (Axis(0.3, 3, 21, normal=normal), tau)))
        for normal in (None, (math.log(0.7), 0.1), (math.log(2.5), 0.1))
    )
    assert near.log_evidence > flat.log_evidence > far.log_evidence
    density = Axis(0.3, 3, 4001, normal=(0.1, 0.2))
    step = density.length / 4000
    assert float(np.exp(density.log_prior(density.values)).sum() * step) == pytest.approx(1, abs=1e-3)


def test_a_transient_at_the_start_does_not_move_the_forecast_of_the_end() -> None:
    c = np.arange(1, 25) / 40
    late = 1 / (1 + 3 * np.exp(-4 * SHARE[-1]))

    def solved(c: Array) -> Array:
        return np.asarray(1 / (1 + 3 * np.exp(-4 * c)) - 0.1 * np.exp(-c / 0.05))

    errors, without, inside = [], [], []
    for seed in range(4):
        rewards = measured(solved(np.append(0.0, c)), seed)
        data = Data(c, rewards[1:], np.full(24, NOISE), True, float(rewards[0]), NOISE)
        for prior, result in ((DEFAULT, errors), (replace(DEFAULT, transients=()), without)):
            forecast = average.average(data, prior)
            low, value, high = np.quantile(forecast.reward(1.0), [0.05, 0.5, 0.95])
            result.append(abs(float(value) - late) / (high - low))
            if prior is DEFAULT:
                inside.append(low <= late <= high)
                assert np.median(forecast.reward(0.025)) == pytest.approx(float(solved(c[:1])[0]), abs=0.02)
    assert sum(inside) >= 3 and np.mean(without) > 2 * np.mean(errors)


def test_where_r0_is_exact_or_no_point_could_show_it_there_is_no_transient() -> None:
    c = np.linspace(0.5, 1, 12)
    rewards = measured(odds_law(c), 0)
    exact = average.mixture(Data(c, rewards, np.full(12, NOISE), True, R0, 0.0))
    assert [T for T, _ in exact.directions] == [np.inf]  # none
    seen = average.mixture(Data(c, rewards, np.full(12, NOISE), True, R0, NOISE))
    assert [round(T, 2) for T, _ in seen.directions[1:]] == [0.2]  # .06 would be over long before .5


def test_a_law_that_the_prior_rules_out_has_no_part_in_the_forecast() -> None:
    data = Data(SHARE, measured(odds_law(SHARE), 0), np.full(40, NOISE), True, R0, NOISE)
    result = average.mixture(data, replace(DEFAULT, laws=(DEFAULT.laws[0], *[LawPrior(1e-12, None)] * 3)))
    by_law = [sum(c.probability for c in result.components if c.family.law == k) for k in range(4)]
    assert by_law[0] > 0.99 and sum(by_law) == pytest.approx(1)


def test_gains_that_runs_in_general_make_count_only_where_the_data_leave_them_open() -> None:
    def gains(rewards: Array, sd: float) -> list[Array]:
        data = Data(SHARE, rewards, np.full(len(SHARE), sd), True, R0, 0.0)
        each = (average.average(data, replace(DEFAULT, gain=gain)) for gain in (0.0, 1.5))
        return [np.diff(x.reward([1.0, 3.0]))[:, 0] for x in each]

    noise = np.random.default_rng(0).normal(0, 0.03, len(SHARE))
    alike, more = gains(np.clip(R0 + noise, 0, 1), 0.03)  # it has not risen
    assert np.median(more) > np.median(alike) + 0.02 and np.quantile(more, 0.95) > np.quantile(alike, 0.95)
    alike, more = gains(measured(sigmoid(SHARE), 0), NOISE)
    assert np.median(more) == pytest.approx(np.median(alike), abs=0.004)


def test_resampled_draws_are_those_of_their_law_in_proportion_to_their_weights() -> None:
    parts = [curves(q, list(np.linspace(0.5, 0.9, 100)), [1.0] * 100, [1.0] * 100) for q in (0.0, 5.0)]
    weight = np.repeat([0.0, 1.0, 3.0, 0.0], 50)
    first, second = average.resampled(parts, weight)
    assert (len(first.A), len(second.A)) == (average.DRAWS // 4, 3 * average.DRAWS // 4)
    assert first.A.min() > 0.7 > second.A.max() and (first.family, second.family) == (
        parts[0].family, parts[1].family
    )  # fmt: skip
