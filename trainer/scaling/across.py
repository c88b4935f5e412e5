"""Runs of several sizes N (parameters of the model, or amounts of data): what a size not trained would do.

Each parameter, on a scale without bounds, is a straight line over log N with a normal scatter τ:

    log-odds of A and of R0 = a + b log N + τ z,    log C_mid = a + b log N + τ z,    log B = a + τ z

In log-odds a ceiling never leaves 0 to 1, and near 1 its error 1 − A is a power law of N. B has no slope: the
paper's two sizes (8B: 1.92, Scout 17B×16: 1.65, arXiv 2510.13786) differ by no more than their seeds may.

a and b have flat priors. τ has a half-Cauchy prior, whose median is SCATTER: an assumption, as nothing is
published. Three sizes say little about τ, so that the intervals are wide, as Student's t with few degrees of
freedom is. a, b and z are integrated in closed form for each level of τ. A size enters with the mean and the
variance of its draws, so that one whose ceiling is not identified counts for little.

Two published laws over sizes are cross-checks (`other_laws`), each fitted to the same runs: each gives one
number for a size not trained, with the jackknife's interval.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, logit, softmax, stdtrit

from trainer.config import ConfigError
from trainer.scaling.compare import UNFIT, Recipe, pooled_recipes
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.curve.points import checked
from trainer.scaling.curve.sigmoid import DRAWS, Array, Curve, Draws, Estimate, median, without_flops
from trainer.scaling.earlier import EXTREME
from trainer.scaling.random_effects import LEVELS, effects
from trainer.scaling.seeds import PARAMETERS, SeedVariance

Runs = Mapping[float, Sequence[Curve]]  # by size

# Median of τ before the sizes update it: .2 in log-odds is .05 in a ceiling of .5; 40% in C_mid, 20% in B
SCATTER = {"R0": 0.2, "A": 0.2, "B": 0.2, "C_mid": 0.4}
MIN_SIZES = 3  # two determine a line, and say nothing about the scatter about it
DELTAS, STARTS = np.geomspace(1, 60, 15), np.linspace(-0.5, 1, 16)  # δ and t0 of LOGISTIC
POWER = "arXiv 2509.25300, log(1 − R) = −k(N) log C + E(N), k(N) = K_max/(1 + N0/N), E(N) free: k(N)"
LOGISTIC = "arXiv 2507.18014, R = α R0 + β N + γ/(1 + exp(−δ(t − t0))): R at t = 1, an equally long training,"


def draw_size(
    log_size: ArrayLike,  # (sizes,)
    units: ArrayLike,  # (sizes, 2): value of the parameter, and the variance of that value
    scatter: float,  # median of τ's prior
    new: float,  # log N of another size
    rng: np.random.Generator,
    has_slope: bool = True,
) -> tuple[Array, Array]:
    """(DRAWS,) each: the parameter of another size, with the scatter; and the slope, 0 if it has none.

    Values of sizes trained are normal about the line, with the variance τ² + that of the value.
    """
    x = np.asarray(log_size, np.float64)
    design, tau = np.stack([np.ones_like(x), x - x.mean()], 1)[:, : 1 + has_slope], scatter * 2**LEVELS
    each = effects(units, tau, design)
    log_prior = np.log(2) * LEVELS - np.log1p(4**LEVELS)  # half-Cauchy, per unit of log τ
    level = rng.choice(len(tau), DRAWS, p=softmax(log_prior + each.log_evidence))
    z = rng.standard_normal((DRAWS, design.shape[1]))
    line = each.mean[level] + np.einsum("nij,nj->ni", np.linalg.cholesky(each.covariance)[level], z)
    slope = line[:, 1] if has_slope else np.zeros(DRAWS)
    return line[:, 0] + slope * (new - x.mean()) + tau[level] * rng.standard_normal(DRAWS), slope


def predict_size(known: Mapping[float, Draws], size: float) -> tuple[Draws, dict[str, Array]]:
    """Draws of another size, given those of some sizes, and of the slopes; parameters are independent."""
    rng, new, slopes = np.random.default_rng(0), {}, {}
    for name, scatter in SCATTER.items():
        bounded = name in ("R0", "A")
        rows = (getattr(draws, name) for draws in known.values())
        rows = (logit(np.clip(x, EXTREME, 1 - EXTREME)) if bounded else np.log(x) for x in rows)
        units = [(x.mean(), x.var()) for x in rows]
        log_size = float(np.log(size))
        x, slopes[name] = draw_size(np.log(list(known)), units, scatter, log_size, rng, has_slope=name != "B")
        new[name] = expit(x) if bounded else np.exp(np.clip(x, -300, 300))
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
    curves = {n: list(map(without_flops, groups[n])) for n in sorted(groups)}
    fits = {n: [(c, fit_curve(c, confidence, within)) for c in runs] for n, runs in curves.items()}
    left_out = [f"{c.name} ({_why(fit)})" for runs in fits.values() for c, fit in runs if _why(fit)]
    used = {repr(n): good for n, runs in fits.items() if (good := [run for run in runs if not _why(run[1])])}
    if len(used) < MIN_SIZES:
        without = f", without {'; '.join(left_out)}" if left_out else ""
        raise ConfigError(
            f"sizes of runs that can be used: {len(used)}{without}; expected at least {MIN_SIZES}, because "
            "two determine a line, but not how far sizes lie from it"
        )
    pooled, variances = pooled_recipes(used)
    known = {float(recipe.name): recipe.draws for recipe in pooled}
    predicted = {size: predict_size(known, size) for size in sizes}
    *smaller, largest = known
    check = None
    if len(smaller) >= MIN_SIZES:
        alone, _ = predict_size({size: known[size] for size in smaller}, largest)
        check = median(one_run(alone, variances).A, confidence)
    return Across(
        {float(recipe.name): recipe for recipe in pooled},
        {size: one_run(draws, variances) for size, (draws, _) in predicted.items()},
        {name: median(predicted[sizes[0]][1][name], confidence) for name in ("A", "C_mid")},
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
    """The reason why a run is left out; empty if it is not."""
    return "" if fit.predictable and not set(fit.flags) & UNFIT else fit.reasons


def other_laws(runs: Runs, size: float, R0: float, confidence: float) -> dict[str, Estimate | None]:
    """The number that each law gives for a size that starts from `R0`; None: the runs do not identify it.

    An exponent is determined to a factor of three, a reward to .2.
    """
    k = jackknife(exponent, runs, size, confidence)
    reward = jackknife(lambda some, n: end_reward(some, n, R0), runs, size, confidence)
    narrow = reward and reward.low >= 0 and reward.high <= min(1, reward.low + 0.2)
    return {POWER: k if k and 0 < k.high < 3 * k.low else None, LOGISTIC: reward if narrow else None}


def jackknife(
    rule: Callable[[Runs, float], float], runs: Runs, size: float, confidence: float
) -> Estimate | None:
    """A rule's number for `size`, with Student's interval; None: it fails, also without one of the sizes."""
    without = [rule({n: some for n, some in runs.items() if n != omitted}, size) for omitted in runs]
    value, dof = rule(runs, size), len(runs) - 1
    half = math.sqrt(dof * float(np.var(without))) * float(stdtrit(dof, (1 + confidence) / 2))
    return Estimate(value, value - half, value + half) if math.isfinite(value + half) else None


def exponent(runs: Runs, size: float) -> float:
    """k(N) of POWER, from 1/k = 1/K_max + (N0/K_max)/N over the sizes. NaN: these are no positive numbers."""
    k = [float(np.mean([_slope(curve) for curve in curves])) for curves in runs.values()]
    if min(k) <= 0:
        return math.nan
    per_size, least = np.polyfit(1 / np.array(list(runs)), 1 / np.array(k), 1).tolist()
    return 1 / (least + per_size / size) if least > 0 and per_size >= 0 else math.nan


def _slope(curve: Curve) -> float:
    """−d log(1 − R) / d log C, by least squares."""
    points = [p for p in curve.points if p.pass_rate < 1]
    c, error = np.log([p.compute for p in points]), np.log([1 - p.pass_rate for p in points])
    return -float(np.polyfit(c, error, 1)[0])


def end_reward(runs: Runs, size: float, R0: float) -> float:
    """R at t = 1 of LOGISTIC; t is the share of a run's compute. NaN: the R0 of a run is unknown."""
    rows = [
        (data.R0, n / size, c / data.compute[-1], r)
        for n, curves in runs.items()
        for data in map(checked, curves)
        for c, r in zip(data.compute, data.reward, strict=True)
    ]
    start, relative, t, reward = np.array(rows, np.float64).T  # an unknown R0 is NaN
    if np.isnan(start).any():
        return math.nan
    best, predicted = math.inf, math.nan
    for delta, t0 in ((delta, t0) for delta in DELTAS for t0 in STARTS):
        design = np.stack([start, relative, expit(delta * (t - t0))], 1)
        solution, _, rank, _ = np.linalg.lstsq(design, reward, rcond=1e-6)
        sse = float(((reward - design @ solution) ** 2).sum())
        if rank == 3 and sse < best:
            best = sse
            predicted = float(solution @ [R0, 1.0, expit(delta * (1 - t0))])
    return predicted
