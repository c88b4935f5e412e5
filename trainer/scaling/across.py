"""Runs of several sizes N (parameters of the model, or amounts of data): what a size not trained would do.

Each parameter, on a scale without bounds, is a straight line over log N with a normal scatter τ:

    log-odds of A and of R0 = a + b log N + τ z,    log C_mid = a + b log N + τ z,    log B = a + τ z

In log-odds a ceiling never leaves 0 to 1, and near 1 its error 1 − A is a power law of N. B has no slope: the
paper's two sizes (8B: 1.92, Scout 17B×16: 1.65, arXiv 2510.13786) differ by no more than their seeds may.

a and b have flat priors. τ has a half-Cauchy prior, whose median is SCATTER: an assumption, as nothing is
published. Three sizes say little about τ, so that the intervals are wide, as Student's t with few degrees of
freedom is. a, b and z are integrated in closed form for each level of τ. A size enters with the mean and the
variance of its draws, so that one whose ceiling is not identified counts for little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit, softmax

from trainer.config import ConfigError
from trainer.scaling.compare import UNFIT, Recipe, pooled_recipes
from trainer.scaling.curve.fit import Estimate, Fit, fit_curve, median
from trainer.scaling.curve.marginal import DRAWS
from trainer.scaling.curve.sigmoid import Curve, Draws
from trainer.scaling.earlier import EXTREME
from trainer.scaling.random_effects import LEVELS, effects
from trainer.scaling.seeds import PARAMETERS, SeedVariance

Array = NDArray[np.float64]

# Median of τ before the sizes update it: .2 in log-odds is .05 in a ceiling of .5; 40% in C_mid, 20% in B
SCATTER = {"R0": 0.2, "A": 0.2, "B": 0.2, "C_mid": 0.4}
MIN_SIZES = 3  # two determine a line, and say nothing about the scatter about it
MAX_LOG = 300.0  # of B and C_mid


@dataclass(frozen=True, slots=True, eq=False)
class SizeLaw:
    """The posterior of a line over log N with scatter τ, as a mixture over levels of τ."""

    tau: Array  # (levels,)
    weight: Array  # (levels,) sums to 1
    mean: Array  # (levels, p): the height at `center`, and the slope if p = 2
    root: Array  # (levels, p, p): Cholesky factor of their covariance
    center: float  # log N

    def draw(self, log_size: float, rng: np.random.Generator) -> tuple[Array, Array]:
        """(DRAWS,) each: the parameter of another size, with the scatter; and the slope, 0 if it has none."""
        level = rng.choice(len(self.tau), DRAWS, p=self.weight)
        z = rng.standard_normal((DRAWS, self.mean.shape[1]))
        line = self.mean[level] + np.einsum("nij,nj->ni", self.root[level], z)
        slope = line[:, 1] if line.shape[1] == 2 else np.zeros(DRAWS)
        height = line[:, 0] + slope * (log_size - self.center)
        return height + self.tau[level] * rng.standard_normal(DRAWS), slope


def size_law(
    log_size: ArrayLike,  # (sizes,)
    value: ArrayLike,  # (sizes,) of the parameter
    variance: ArrayLike,  # (sizes,) of these values
    scatter: float,  # median of τ's prior
    has_slope: bool = True,
) -> SizeLaw:
    """The law, given value ~ N(a + b log N, τ² + variance)."""
    x = np.asarray(log_size, np.float64)
    design, tau = np.stack([np.ones_like(x), x - x.mean()], 1)[:, : 1 + has_slope], scatter * 2**LEVELS
    each = effects(np.stack([value, variance], axis=1), tau, design)
    log_prior = np.log(2) * LEVELS - np.log1p(4**LEVELS)  # half-Cauchy, per unit of log τ
    root = np.linalg.cholesky(each.covariance).astype(np.float64)
    return SizeLaw(tau, softmax(log_prior + each.log_evidence), each.mean, root, float(x.mean()))


def predict_size(known: Mapping[float, Draws], size: float) -> tuple[Draws, dict[str, Array]]:
    """Draws of another size, given those of some sizes, and of the slopes; parameters are independent."""
    rng, new, slopes = np.random.default_rng(0), {}, {}
    for name, scatter in SCATTER.items():
        bounded = name in ("R0", "A")
        rows = [getattr(draws, name) for draws in known.values()]
        rows = [logit(np.clip(x, EXTREME, 1 - EXTREME)) if bounded else np.log(x) for x in rows]
        moments = [x.mean() for x in rows], [x.var() for x in rows]
        law = size_law(np.log(list(known)), *moments, scatter, has_slope=name != "B")
        x, slopes[name] = law.draw(float(np.log(size)), rng)
        new[name] = expit(x) if bounded else np.exp(np.clip(x, -MAX_LOG, MAX_LOG))
    return Draws(np.minimum(new["R0"], new["A"]), new["A"], new["B"], new["C_mid"]), slopes


@dataclass(frozen=True, slots=True, eq=False)
class Across:
    """The sizes trained, and what the law says of others."""

    recipes: dict[float, Recipe]  # by size, rising
    predicted: dict[float, Draws]  # of one run of each size asked for, its seed included
    slopes: dict[str, Estimate]  # of A's log-odds and of log C_mid over log N
    check: Estimate | None  # A of the largest size, predicted from the smaller ones; None: too few sizes
    left_out: tuple[str, ...]  # runs, and why
    confidence: float

    def estimate(self, size: float, name: str) -> Estimate:
        """A parameter of a size trained or predicted."""
        if size in self.recipes:
            return self.recipes[size].estimate(name)
        return median(getattr(self.predicted[size], name), self.confidence)

    def reward(self, size: float, compute: float) -> Estimate:
        """R(C) of a size predicted."""
        return median(self.predicted[size].reward(compute), self.confidence)


def across(
    groups: Mapping[float, Sequence[Curve]],  # runs by size, all in one unit of compute
    sizes: Sequence[float],  # at least one, to be predicted
    confidence: float = 0.9,
    within: float | None = None,
) -> Across:
    """Predict sizes not trained. Runs without a forecast, or that no sigmoid describes, are left out.

    ConfigError: fewer than three sizes are left.
    """
    fits = {n: [(c, fit_curve(c, confidence, within)) for c in groups[n]] for n in sorted(groups)}
    left_out = [f"{c.name} ({_why(fit)})" for runs in fits.values() for c, fit in runs if _why(fit)]
    used = {repr(n): kept for n, runs in fits.items() if (kept := [run for run in runs if not _why(run[1])])}
    if len(used) < MIN_SIZES:
        without = f", without {'; '.join(left_out)}" if left_out else ""
        raise ConfigError(
            f"sizes of runs that can be used: {len(used)}{without}; expected at least {MIN_SIZES}, because "
            "two determine a line, but not how far sizes lie from it"
        )
    pooled, variances = pooled_recipes(used)
    known = {float(recipe.name): recipe.draws for recipe in pooled}
    found = {size: predict_size(known, size) for size in sizes}
    *smaller, largest = known
    check = None
    if len(smaller) >= MIN_SIZES:
        alone, _ = predict_size({size: known[size] for size in smaller}, largest)
        check = median(one_run(alone, variances).A, confidence)
    return Across(
        {float(recipe.name): recipe for recipe in pooled},
        {size: one_run(draws, variances) for size, (draws, _) in found.items()},
        {name: median(found[sizes[0]][1][name], confidence) for name in ("A", "C_mid")},
        check, tuple(left_out), confidence,
    )  # fmt: skip


def one_run(draws: Draws, variances: Mapping[str, SeedVariance]) -> Draws:
    """Draws of one run of a recipe, which differs from the recipe by its seed."""
    rng = np.random.default_rng(1)
    tau = [variances[name].tau[variances[name].draw(rng)] for name in PARAMETERS]
    A, B, C_mid = rng.standard_normal((len(tau), DRAWS)) * tau
    return Draws(
        draws.R0, np.clip(draws.A + A, draws.R0, 1), draws.B * np.exp(B), draws.C_mid * np.exp(C_mid)
    )


def _why(fit: Fit) -> str:
    """Why a run is left out; empty if it is not."""
    return "" if fit.predictable and not set(fit.flags) & UNFIT else fit.reasons
