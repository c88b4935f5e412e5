"""The runs of a recipe differ by their seed: how much, and what they say together about the recipe.

A random-effects (hierarchical) model of A, log B and log C_mid. A run with parameters θ has those of its
recipe, μ, and a deviation of its own:

    θ ~ N(μ, diag(τ_A², τ_B², τ_C²)),    data of the run ~ its fit,    μ has a flat prior

For one run, p(μ | data) is the posterior of its fit, widened by the prior of τ. For several runs it is
proportional to the product of these densities, so that each run counts by its precision, along the ridge of
its correlated parameters, and one that determines little takes nothing away. R0 is that of the model before
training, which all seeds share.

The prior of every τ is known to a factor of two. That of A is the paper's: three independent runs moved A by
up to .015, so that two ceilings differ only beyond ±.02 (arXiv 2510.13786). For B and C_mid nothing is
published; that they vary by about 7 % from run to run is our assumption. The given runs update all three.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp, ndtr, softmax

from trainer.scaling.curve.marginal import MIN_SD
from trainer.scaling.curve.sigmoid import DRAWS, Array, Draws, Estimate, estimate
from trainer.scaling.random_effects import LEVELS, effects

MARGIN = 0.02  # between the ceilings of two single runs of one recipe, 90 % (arXiv 2510.13786)
SEED_SD = 0.07  # median of τ of log B and log C_mid before the seeds update it: an assumption
PARAMETERS = ("A", "B", "C_mid")


@dataclass(frozen=True, slots=True, eq=False)
class SeedVariance:
    """The posterior of one τ: levels and their probabilities."""

    tau: Array  # (levels,)
    weight: Array  # (levels,) sums to 1

    def estimate(self, confidence: float) -> Estimate:
        """The geometric mean, and the interval."""
        levels = self.draw(np.random.default_rng(0))
        return estimate(float(np.exp(self.weight @ np.log(self.tau))), self.tau[levels], confidence)

    def draw(self, rng: np.random.Generator) -> NDArray[np.intp]:
        """(DRAWS,) indices of levels."""
        return rng.choice(len(self.tau), DRAWS, p=self.weight)

    def margin(self, confidence: float) -> float:
        """The largest likely difference between two runs of one recipe."""

        def excess(x: float) -> float:
            return float(self.weight @ (2 * ndtr(x / (2**0.5 * self.tau)) - 1)) - confidence

        return float(brentq(excess, 0.0, 20 * float(self.tau[-1])))


def seed_variance(recipes: Sequence[Sequence[tuple[float, float]]], median: float) -> SeedVariance:
    """τ of one parameter from (value, variance of its fit) of each run; `median`: that of its prior.

    log2 of τ has a standard deviation of 1 before.
    """
    tau = median * 2**LEVELS
    evidence = sum(effects(runs, tau).log_evidence for runs in recipes)
    return SeedVariance(tau, softmax(-(LEVELS**2) / 2 + evidence))


MARGIN_IN_MEDIANS = seed_variance([], 1.0).margin(0.9)


def seed_variances(recipes: Sequence[Sequence[Draws]]) -> dict[str, SeedVariance]:
    """τ of A, log B and log C_mid, from the runs of some recipes."""
    medians = {"A": MARGIN / MARGIN_IN_MEDIANS, "B": SEED_SD, "C_mid": SEED_SD}
    return {
        name: seed_variance([_moments(runs, name) for runs in recipes], median)
        for name, median in medians.items()
    }


def pool(
    runs: Sequence[Draws],
    variances: Mapping[str, SeedVariance],
    levels: NDArray[np.intp],  # (parameters, draws): of τ, the same for all recipes
    rng: np.random.Generator,
) -> tuple[Draws, Draws]:
    """Draws of a recipe from those of its runs; and of the weighted mean of these runs alone."""
    tau = np.stack([variances[name].tau[i] for name, i in zip(PARAMETERS, levels, strict=True)], axis=1)
    each = [effects(_moments(runs, name), variances[name].tau) for name in PARAMETERS]
    counted = np.sum([e.log_evidence[i] for e, i in zip(each, levels, strict=True)], axis=0)
    recipe, alone = (x.T for x in pool_draws([_coordinates(run) for run in runs], tau, counted, rng))
    bounded = []
    for R0, A, log_B, log_C_mid in (recipe, alone):
        A = np.clip(A, 0, 1)
        bounded.append(Draws(np.clip(R0, 0, A), A, np.exp(log_B), np.exp(log_C_mid)))
    return bounded[0], bounded[1]


def _moments(runs: Sequence[Draws], name: str) -> list[tuple[float, float]]:
    """Mean and variance of a parameter of each run, of B and C_mid in their logarithms."""
    columns = (_coordinates(run)[:, 1 + PARAMETERS.index(name)] for run in runs)
    return [(float(x.mean()), float(x.var())) for x in columns]


def _coordinates(run: Draws) -> Array:
    """(draws, 4): R0, A, log B, log C_mid."""
    return np.stack([run.R0, run.A, np.log(run.B), np.log(run.C_mid)], axis=1)


def pool_draws(
    runs: Sequence[Array],  # (draws, 4) of each run
    tau: Array,  # (draws, 3) of A, log B and log C_mid
    log_counted: Array,  # (draws,) what these runs have already added to the log density of `tau`
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """(draws, 4) each: μ given the runs, by importance sampling; and the weighted mean of the runs.

    Half of the proposals of μ are from the closed form for normally distributed runs, with a wider
    covariance, and half from single runs. A single run needs no weights: its draws move to other seeds.
    """
    runs = [rng.permutation(x) for x in runs]  # all fits use the same seed, which would correlate them
    R0_sd = max(MIN_SD, float(np.std([x[:, 0].mean() for x in runs])))
    variances = np.concatenate([np.full((len(tau), 1), R0_sd), tau], axis=1) ** 2
    if len(runs) == 1:
        return runs[0] + np.sqrt(variances) * rng.standard_normal(variances.shape), runs[0]
    between = variances[:, :, None] * np.eye(4)
    precisions = [np.linalg.inv(np.cov(x.T) + between) for x in runs]
    covariance = np.linalg.inv(np.sum(precisions, axis=0))
    weights = covariance @ np.array(precisions)  # (runs, draws, 4, 4): they add up to 1
    mean = np.sum([w @ x.mean(0) for w, x in zip(weights, runs, strict=True)], axis=0)
    joint = _Kernels(np.zeros((1, 4)), 1.5 * covariance)  # wider than the closed form
    single = [_kernels(x, between, rng) for x in runs]
    proposed, source = mean + joint.draw(rng), rng.integers(0, 2 * len(runs), len(tau))
    for i, kernels in enumerate(single):
        proposed = np.where((source == i)[:, None], kernels.draw(rng), proposed)
    log_p = np.stack([kernels.log_density(proposed) for kernels in single])
    any_run = np.logaddexp.reduce(log_p) - np.log(len(runs))
    share = softmax(log_p.sum(0) - np.logaddexp(joint.log_density(proposed - mean), any_run) - log_counted)
    chosen = np.searchsorted(share.cumsum(), (np.arange(len(tau)) + 0.5) / len(tau))
    recipe = rng.permutation(proposed[np.minimum(chosen, len(tau) - 1)])
    if (share**2).sum() > 1 / 200:  # so few proposals count that the runs hardly overlap
        recipe = mean + _Kernels(np.zeros((1, 4)), covariance).draw(rng)
    return recipe, np.sum([np.einsum("nij,nj->ni", w, x) for w, x in zip(weights, runs, strict=True)], axis=0)


@dataclass(frozen=True, slots=True, eq=False)
class _Kernels:
    """A mixture of normal distributions around the same points, with another covariance for each draw."""

    points: Array  # (kernels, 4)
    covariance: Array  # (draws, 4, 4)

    def draw(self, rng: np.random.Generator) -> Array:
        """(draws, 4): one from each mixture."""
        z = rng.standard_normal(self.covariance.shape[:2])
        near = self.points[rng.integers(0, len(self.points), len(z))]
        return near + np.einsum("nij,nj->ni", np.linalg.cholesky(self.covariance), z)

    def log_density(self, x: Array) -> Array:
        """(draws,): that of each mixture at its row of x, (draws, 4), but for a constant."""
        P, middle = np.linalg.inv(self.covariance), self.points.mean(0)
        y, k = x - middle, self.points - middle
        Py = np.einsum("nij,nj->ni", P, y)
        kPk = P.reshape(len(P), 16) @ (k[:, :, None] * k[:, None, :]).reshape(len(k), 16).T
        density = logsumexp(Py @ k.T - 0.5 * kPk, axis=1) - np.log(len(k))
        return np.asarray(density - 0.5 * ((Py * y).sum(1) + np.linalg.slogdet(self.covariance)[1]))


def _kernels(draws: Array, between: Array, rng: np.random.Generator) -> _Kernels:
    """The density of a run's draws, each moved to another seed.

    The kernels are on 400 of the draws, shrunk to their mean by as much as a kernel's own width adds to the
    covariance (Liu and West 2001). Their width is half of Silverman's: the variance over seeds smooths, too.
    """
    points = draws[rng.choice(len(draws), min(400, len(draws)), replace=False)]
    width = 0.5 * (4 / (6 * len(points))) ** 0.125  # in standard deviations, in four dimensions
    mean = draws.mean(0)
    return _Kernels(mean + (1 - width**2) ** 0.5 * (points - mean), between + width**2 * np.cov(draws.T))
