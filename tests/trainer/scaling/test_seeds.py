"""Promises of the random effects: the closed form where runs are normal, and no harm from vague runs."""

import numpy as np
import pytest

from trainer.scaling.seeds import MARGIN, MARGIN_IN_MEDIANS, pool_draws, seed_variance

N = 4000
MEDIAN = MARGIN / MARGIN_IN_MEDIANS


def normal(mean: list[float], covariance: np.ndarray, seed: int) -> np.ndarray:
    """Draws whose sample mean and covariance are exactly these."""
    z = np.random.default_rng(seed).standard_normal((N, len(mean)))
    z = (z - z.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(z.T))).T
    return mean + z @ np.linalg.cholesky(covariance).T


def pooled(runs: list[np.ndarray], tau: tuple[float, float, float]) -> tuple[np.ndarray, np.ndarray]:
    return pool_draws(runs, np.full((N, 3), tau), np.zeros(N), np.random.default_rng(0))


def test_two_runs_are_weighted_by_their_precision_as_in_a_meta_analysis() -> None:
    ridge = np.diag(np.square([0.004, 0.02, 0.1, 0.1]))
    ridge[1, 2] = ridge[2, 1] = -0.9 * 0.02 * 0.1
    narrow = np.diag(np.square([0.004, 0.003, 0.3, 0.03]))
    means = [0.3, 0.62, 0.5, 7.6], [0.3, 0.60, 0.6, 7.6]
    recipe, runs = pooled([normal(means[0], ridge, 0), normal(means[1], narrow, 1)], (0.006, 0.07, 0.07))
    between = np.diag(np.square([1e-3, 0.006, 0.07, 0.07]))
    W = [np.linalg.inv(S + between) for S in (ridge, narrow)]
    covariance = np.linalg.inv(W[0] + W[1])
    expected = covariance @ (W[0] @ means[0] + W[1] @ means[1])
    assert expected[2] > 0.57  # a lower A along the ridge is a higher B: more than the .503 of B's variances
    assert recipe.mean(0) == pytest.approx(expected, abs=6e-3)
    assert np.cov(recipe.T) == pytest.approx(covariance, rel=0.15, abs=2e-4)
    # of the two runs alone: the same weights of their own errors
    shares = [covariance @ w for w in W]
    alone = sum(k @ S @ k.T for k, S in zip(shares, (ridge, narrow), strict=True))
    assert runs.mean(0) == pytest.approx(expected, abs=6e-3)
    assert runs.std(0)[1:] == pytest.approx(np.sqrt(np.diag(alone))[1:], rel=0.05)


def test_one_run_is_its_own_draws_moved_to_another_seed() -> None:
    run = normal([0.3, 0.6, 0.6, 7.8], np.diag(np.square([0.004, 0.008, 0.05, 0.04])), 0)
    recipe, runs = pooled([run], (0.006, 0.07, 0.07))
    assert recipe.std(0)[1:] == pytest.approx([0.010, np.hypot(0.05, 0.07), np.hypot(0.04, 0.07)], rel=0.04)
    assert sorted(runs[:, 1]) == sorted(run[:, 1])


def test_a_run_that_says_little_of_its_ceiling_takes_nothing_from_the_others() -> None:
    precise = normal([0.3, 0.58, 0.6, 7.6], np.diag(np.square([0.004, 0.005, 0.05, 0.03])), 0)
    vague = normal([0.3, 0.77, 0.4, 8.3], np.diag(np.square([0.004, 0.13, 0.3, 0.5])), 1)
    alone, _ = pooled([precise], (0.006, 0.07, 0.07))
    together, _ = pooled([precise, vague, vague], (0.006, 0.07, 0.07))
    assert np.all(np.ptp(np.quantile(together, [0.05, 0.95], axis=0), axis=0)[1:] <= 1.05 * _width(alone)[1:])
    assert np.median(together[:, 1]) == pytest.approx(0.58, abs=0.002)


def test_runs_that_allow_any_ceiling_allow_any_together() -> None:
    # The product of flat densities is flat; normal distributions of these variances would narrow by √3.
    rng = np.random.default_rng(0)
    runs = []
    for i in range(3):
        run = normal([0.3, 0.7, 0.6, 8.0], np.diag(np.square([0.004, 0.1, 0.1, 0.1])), i)
        run[:, 1] = rng.uniform(0.55, 1, N)
        runs.append(run)
    recipe, _ = pooled(runs, (0.006, 0.07, 0.07))
    assert 0.1 < recipe[:, 1].std() < 0.14 and abs(recipe[:, 1].mean() - 0.775) < 0.03


def test_runs_that_do_not_overlap_are_pooled_by_the_closed_form() -> None:
    sd = np.diag(np.square([0.004, 0.002, 0.01, 0.01]))
    far = [normal([0.3, A, 0.6, 7.6], sd, i) for i, A in enumerate((0.4, 0.8))]
    recipe, _ = pooled(far, (0.001, 0.01, 0.01))
    assert len(np.unique(recipe[:, 1])) > 1000 and recipe[:, 1].mean() == pytest.approx(0.6, abs=1e-3)
    assert recipe[:, 1].std() == pytest.approx((5e-6 / 2) ** 0.5, rel=0.05)  # (.002² + .001²) / 2


def test_what_the_runs_say_of_their_spread_counts_once() -> None:
    fit_sd, ceilings = np.array([0.004, 0.002, 0.01, 0.01]), (0.600, 0.601, 0.602, 0.603, 0.600, 0.601, 0.602)
    runs = [normal([0.3, A, 0.6, 7.6], np.diag(fit_sd**2), i) for i, A in enumerate(ceilings)]
    measured = seed_variance([[(A, fit_sd[1] ** 2) for A in ceilings]], MEDIAN)
    assumed = seed_variance([], MEDIAN)
    evidence = np.log(measured.weight) - np.log(assumed.weight)
    widths = []
    for variance, counted in ((assumed, 0 * evidence), (measured, evidence)):  # two proposals, one posterior
        for seed in range(3):
            rng = np.random.default_rng(seed)
            levels = variance.draw(rng)
            tau = np.column_stack([variance.tau[levels], np.full((N, 2), 0.07)])
            widths.append(_width(pool_draws(runs, tau, counted[levels], rng)[0])[1])
    assert np.mean(widths[:3]) == pytest.approx(np.mean(widths[3:]), rel=0.06)


def _width(draws: np.ndarray) -> np.ndarray:
    return np.asarray(np.ptp(np.quantile(draws, [0.05, 0.95], axis=0), axis=0))


def test_single_runs_have_the_margin_that_is_given_and_seeds_correct_it() -> None:
    for margin in (0.02, 0.05):
        alone = seed_variance([[(0.6, 1e-5)], [(0.5, 1e-5)]], margin / MARGIN_IN_MEDIANS)
        assert alone.margin(0.9) == pytest.approx(margin, rel=2e-3)
    alike = seed_variance([[(0.600, 1e-6), (0.601, 1e-6), (0.602, 1e-6)]] * 3, MEDIAN)
    apart = seed_variance([[(0.55, 1e-6), (0.60, 1e-6), (0.65, 1e-6)]] * 3, MEDIAN)
    assert alike.margin(0.9) < 0.008 and 0.09 < apart.margin(0.9) < 0.15  # 1.64 √2 · .05 = .116


def test_seeds_that_differ_by_the_fits_errors_alone_make_no_spread() -> None:
    rng = np.random.default_rng(0)
    runs = [[(0.6 + rng.normal(0, 0.02), 0.02**2) for _ in range(4)] for _ in range(3)]
    assert seed_variance(runs, MEDIAN).margin(0.9) < 0.025


@pytest.mark.slow
def test_with_seeds_the_interval_of_a_recipe_covers_it_as_often_as_said() -> None:
    """Random effects of known size and fits of known error, three runs."""
    rng, hits, trials = np.random.default_rng(2), 0, 20
    fit_sd = np.array([0.003, 0.005, 0.05, 0.04])
    medians = np.array([MEDIAN, 0.07, 0.07])
    truth = np.array([0.3, 0.6, 0.6, 7.8])
    for trial in range(trials):
        tau = medians * 2 ** rng.normal(size=3)
        at = [truth + np.r_[0, rng.normal(0, tau)] + rng.normal(0, fit_sd) for _ in range(3)]
        variances = [
            seed_variance([[(x[i + 1], fit_sd[i + 1] ** 2) for x in at]], medians[i]) for i in range(3)
        ]
        levels = [v.draw(rng) for v in variances]
        drawn = np.stack([v.tau[i] for v, i in zip(variances, levels, strict=True)], axis=1)
        prior = [-0.5 * np.log2(v.tau / m) ** 2 for v, m in zip(variances, medians, strict=True)]
        counted = np.sum(
            [(np.log(v.weight) - p)[i] for v, p, i in zip(variances, prior, levels, strict=True)], axis=0
        )
        runs = [normal(list(x), np.diag(fit_sd**2), 10 * trial + i) for i, x in enumerate(at)]
        recipe, _ = pool_draws(runs, drawn, counted, rng)
        low, high = np.quantile(recipe, [0.05, 0.95], axis=0)
        hits += int(((low <= truth) & (truth <= high))[1:].sum())
    assert 49 <= hits <= 59  # of 60; 54 are expected
