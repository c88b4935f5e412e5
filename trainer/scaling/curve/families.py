"""Laws of which the sigmoid is one: curves R = R0 (1 − s) + A s, with a fraction s(C) of the gain.

    sigmoid              s = 1 / (1 + (C_mid / C)^B)                       arXiv 2510.13786
    stretched approach   s = 1 − e^−u,                       u = (C / τ)^p     an exponential where p = 1
    logistic of C^p      s = (1 − e^−u) / (1 + q e^−u)
    logistic             s = 1 / (1 + e^(−k (C − c)))                          R0 is its limit at the left
    power law            s = 1 − (C₁ / C)^k                                    R0 is R at the first point, C₁

If q = A / R0 − 1, the third is R = A / (1 + q e^−u): the odds of R / A grow by the factor e^u. With p = 1 it
is a logistic in compute, and q = 0 gives the stretched approach. A power law whose ceiling is 1 is the
log-power law of arXiv 2509.25300.

A family is integrated over its parameters (`integrate`), or fitted by least squares (`least_squares_curve`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import minimum_filter
from scipy.optimize import least_squares
from scipy.special import expit, softmax

from trainer.scaling.curve.marginal import Data, GridCells, Noise, draw_ends, linear_fit, marginal
from trainer.scaling.curve.sigmoid import Array, fraction_gained

B_RANGE = (0.3, 20.0)  # of the sigmoid
MAX_REACH = 30.0  # C_mid and τ are sought up to this multiple of the largest compute
KEEP = 8.0  # nats below the peak up to which the grid is refined: what lies beyond is under e^-8 of it
OUTLIER = 3.0  # standard deviations from which a point loses weight


@dataclass(frozen=True, slots=True)
class Axis:
    """A parameter between two ends, in its logarithm or not, and its prior there."""

    low: float
    high: float
    cells: int
    log: bool = True
    normal: tuple[float, float] | None = None  # mean and sd of a normal prior; None: a flat one

    @property
    def values(self) -> Array:
        """(cells,)"""
        return (np.geomspace if self.log else np.linspace)(self.low, self.high, self.cells)

    @property
    def length(self) -> float:
        """Length of the axis in the measure of the prior."""
        return float(np.log(self.high / self.low)) if self.log else self.high - self.low

    @property
    def step(self) -> float:
        """Between two cells, in the measure of the prior."""
        return self.length / (self.cells - 1)

    def log_prior(self, x: Array) -> Array:
        """The log density of the prior at x, in its measure."""
        if self.normal is None:
            return np.full(x.shape, -math.log(self.length))
        mean, sd = self.normal
        z = ((np.log(x) if self.log else x) - mean) / sd
        return -0.5 * z * z - math.log(sd * math.sqrt(2 * math.pi))

    def around(self, inside: NDArray[np.bool_]) -> Axis:
        """The same number of cells for the range of those inside, (cells,), and one step more."""
        k, x = np.flatnonzero(inside), self.values
        low, high = x[max(k[0] - 1, 0)], x[min(k[-1] + 1, self.cells - 1)]
        return replace(self, low=float(low), high=float(high))


@dataclass(frozen=True, slots=True)
class Family:
    """Curves R0 (1 − s) + A s of one law, with the priors of the parameters of s."""

    name: str
    fraction: Callable[..., Array]  # s of (compute, *parameters); broadcasts; 0 at compute 0
    axes: tuple[Axis, ...]
    has_end: bool = True  # whether A is its ceiling
    ceiling: float | None = None  # A, if it is given
    lowest_R0: float = 0.0  # a bound of least squares
    law: int = 0  # its number in average.LAWS
    probability: float = 1.0  # among other families, before the data

    def reward(self, compute: ArrayLike, R0: Array | float, A: Array | float, *theta: Array | float) -> Array:
        """R(C); broadcasts."""
        s = self.fraction(np.asarray(compute, np.float64), *theta)
        return R0 + (A - R0) * s


@dataclass(frozen=True, slots=True, eq=False)
class Integrated:
    """The marginal likelihoods of a family on a grid of its parameters, which lies around the peak."""

    family: Family
    axes: tuple[Axis, ...]  # of the grid
    theta: list[Array]  # (cells, 1) each
    cells: list[GridCells]  # by noise
    log_weight: Array  # (noises, cells), the prior included
    log_evidence: float  # the probability of the data, averaged over all parameters
    probability: float = 1.0  # of the family among others, given the data

    def draw(self, data: Data, count: int, rng: np.random.Generator) -> tuple[NDArray[np.intp], list[Array]]:
        """The number of a noise, and R0, A and the parameters, in proportion to their probability."""
        total = softmax(self.log_weight, axis=None).ravel().cumsum()
        k = np.searchsorted(total / total[-1], (np.arange(count) + 0.5) / count)
        k = rng.permutation(np.minimum(k, total.size - 1))
        model, cell = np.divmod(k, self.log_weight.shape[1])
        ends = np.stack([cells.ends for cells in self.cells])[model, :, cell].T
        return model, [*draw_ends(data, ends, self.cells[0].dof, rng), *(x[cell, 0] for x in self.theta)]


def on_grid(data: Data, family: Family, axes: Sequence[Axis]) -> tuple[list[Array], Array]:
    """The parameters of every cell, (cells, 1) each, and the fractions s at R0 and the points, (cells, n)."""
    theta = [x.reshape(-1, 1) for x in np.meshgrid(*(axis.values for axis in axes), indexing="ij")]
    return theta, family.fraction(data.prepend_R0(data.compute, 0.0)[None, :], *theta)


def integrate(data: Data, noises: Sequence[Noise], family: Family, keep: float = KEEP) -> Integrated:
    """The evidence of a family: marginal likelihoods on a grid that is refined around the peak.

    The grid is fine enough where a fifth of its cells are within `keep` of the peak. The integral is the
    trapezoidal rule's: cells at an end of a range count half.
    """
    axes = list(family.axes)
    for remaining in reversed(range(5)):  # rounds of refinement
        theta, s = on_grid(data, family, axes)
        cells = [marginal(data, noise, s, family.ceiling) for noise in noises]
        prior = sum((a.log_prior(x[:, 0]) for a, x in zip(family.axes, theta, strict=True)), np.zeros(len(s)))
        log_weight = np.stack([c.log_weight for c in cells]) + prior
        inside = (log_weight > log_weight.max() - keep).any(0)
        if not axes or not remaining or inside.mean() > 0.2:
            break
        inside = inside.reshape([axis.cells for axis in axes])
        others = [tuple(j for j in range(len(axes)) if j != i) for i in range(len(axes))]
        refined = [axis.around(inside.any(other)) for axis, other in zip(axes, others, strict=True)]
        if refined == axes:
            break
        axes = refined
    for axis, x in zip(axes, theta, strict=True):
        log_weight[:, np.isin(x[:, 0], axis.values[[0, -1]])] -= math.log(2)
    cell = sum(math.log(axis.step) for axis in axes)
    evidence = float(np.logaddexp.reduce(log_weight, axis=None)) + cell
    return Integrated(family, tuple(axes), theta, cells, log_weight, evidence)


def robust(data: Data) -> tuple[Array, float, NDArray[np.bool_]]:
    """Weights (n,) in (0, 1], at first Huber's, then redescending ones; the residuals' size in sd; and which
    points are outliers, (n,).

    The residuals are those of the sigmoid of least squares. Where a fifth of the points would be outliers, or
    the last two above the curve, the curve is wrong, not they: all weights are 1.
    """
    weight, family = np.ones(len(data.compute)), sigmoids(data, (25, 61))
    theta, s = on_grid(data, family, family.axes)
    for exponent in (1, 1, 1, 4, 4, 4):
        whiten = np.diag(data.prepend_R0(np.sqrt(weight) / data.sd, 1 / max(data.R0_se, 1e-9)))
        fit = linear_fit(data, whiten, s)
        allowed = (fit.A <= 1) & (fit.R0 >= 0)
        k = int((np.where(allowed, fit.sse, np.inf) if allowed.any() else fit.sse).argmin())
        curve = family.reward(data.compute, fit.R0[k], min(fit.A[k], 1.0), *(x[k, 0] for x in theta))
        z = np.abs(data.reward - curve) / data.sd
        scale = max(float(np.median(z)) * 1.4826, 1.0 if data.sd_known else 1e-6)
        before, weight = weight, np.minimum(1, (OUTLIER * scale / np.maximum(z, 1e-9)) ** exponent)
        if (before == 1).all() and (weight == 1).all():  # no outliers: the other rounds would repeat this one
            break
    outliers = weight < 0.25
    above = outliers & (data.reward > curve)
    if 5 * outliers.sum() >= len(outliers) or above[-2:].all():
        weight, scale = np.ones(len(weight)), float(np.sqrt((z**2).mean()))
    return weight, scale, outliers


def least_squares_curve(data: Data, family: Family, whiten: Array) -> list[float]:
    """R0 ≤ A and the parameters of least squares, sought from the lowest minima of the grid."""
    theta, s = on_grid(data, family, family.axes)
    linear, (low, high) = linear_fit(data, whiten, s, family.ceiling), _bounds(data, family)
    A = np.clip(linear.A, low[1], high[1])
    R0 = np.clip(linear.R0 + linear.R0_slope * (A - linear.A), low[0], np.minimum(A, high[0]))
    rewards = R0[:, None] * (1 - s) + A[:, None] * s
    error = (rewards - data.prepend_R0(data.reward, data.R0 or 0.0)) @ whiten.T
    chi2 = (error**2).sum(1).reshape([axis.cells for axis in family.axes])
    minima = np.flatnonzero(chi2 == minimum_filter(chi2, 3, mode="nearest"))
    lowest = minima[np.argsort(chi2.ravel()[minima], kind="stable")][:4]
    columns = np.stack([R0, A, *(x[:, 0] for x in theta)])
    solutions = [polished(data, family, whiten, columns[:, k]) for k in lowest]
    return min(solutions, key=lambda solution: solution[0])[1]


def polished(data: Data, family: Family, whiten: Array, start: Array) -> tuple[float, list[float]]:
    """The sum of squares, and R0 ≤ A and the parameters of the local least squares next to a start."""
    (low, high), logs = _bounds(data, family), [False, False, *(axis.log for axis in family.axes)]
    c, y = data.prepend_R0(data.compute, 0.0), whiten @ data.prepend_R0(data.reward, data.R0 or 0.0)

    def curve(x: Array) -> list[float]:
        R0, A, *theta = (float(np.exp(value) if log else value) for value, log in zip(x, logs, strict=True))
        A = min(A, high[1])
        return [low[0] + R0 * (min(A, high[0]) - low[0]), A, *theta]  # R0 is sought as a share of its range

    def scaled(values: Iterable[float]) -> Array:
        return np.array([np.log(x) if log else x for x, log in zip(values, logs, strict=True)])

    A = min(max(start[1], low[1]), high[1])
    share = (start[0] - low[0]) / max(min(A, high[0]) - low[0], 1e-300)
    bounds = np.stack([scaled([0.0, *low[1:]]), scaled([1.0, *high[1:]])])
    bounds[1] = np.maximum(bounds[1], bounds[0] + 1e-12)  # a value that is given
    margin = 1e-9 * (bounds[1] - bounds[0])
    solution = least_squares(
        lambda x: whiten @ family.reward(c, *curve(x)) - y,
        np.clip(scaled([share, *start[1:]]), bounds[0] + margin, bounds[1] - margin),
        bounds=bounds, x_scale="jac", jac="3-point", ftol=1e-13, xtol=1e-12, gtol=1e-13,
    )  # fmt: skip
    return float(solution.cost), curve(solution.x)


def _bounds(data: Data, family: Family) -> tuple[list[float], list[float]]:
    """The lowest and the highest R0, A and parameters."""
    R0 = (data.lowest_A,) * 2 if data.exact else (family.lowest_R0, 1.0)
    A = (max(R0[0], 0.0), 1.0) if family.ceiling is None else (family.ceiling,) * 2
    low, high = zip(R0, A, *((axis.low, axis.high) for axis in family.axes), strict=True)
    return list(low), list(high)


def sigmoids(
    data: Data, cells: tuple[int, int] = (13, 21), prior: tuple[float, float] | None = None
) -> Family:
    """The sigmoid on a grid of so many values of B and C_mid; `prior`: a normal one of log B."""
    axes = (Axis(*B_RANGE, cells[0], normal=prior), Axis(*reach(data), cells[1]))
    return Family("a sigmoid", fraction_gained, axes)


def reach(data: Data) -> tuple[float, float]:
    """The ends of the range in which C_mid and τ are sought.

    It starts at a third of the first compute: what is over before that leaves no trace.
    """
    return 1 / 3 * float(data.compute[0]), MAX_REACH * float(data.compute[-1])


def exponential(c: ArrayLike, tau: Array | float) -> Array:
    """s of an exponential approach."""
    return np.asarray(-np.expm1(-np.asarray(c, np.float64) / tau))


def logistic_of_power(q: float) -> Callable[..., Array]:
    """s of (C, p, τ) for a given q."""

    def fraction(c: ArrayLike, p: Array, tau: Array) -> Array:
        e = np.exp(-np.minimum((np.asarray(c, np.float64) / tau) ** p, 700.0))
        return (1 - e) / (1 + q * e)

    return fraction


LOGISTIC = "a logistic"


def other_families(data: Data) -> tuple[Family, ...]:
    """Curves to compare the sigmoid with; their parameters reach from the gaps of the data to beyond it."""
    last, gap = float(data.compute[-1]), data.gap

    def logistic(c: Array, middle: Array, steepness: Array) -> Array:
        low = expit(-steepness * middle)
        return (expit(steepness * (c - middle)) - low) / (1 - low)

    return (
        Family("an exponential approach", exponential, (Axis(gap / 2, 10 * last, 60),)),
        Family("a straight rise to a hard cap", lambda c, t: np.minimum(c / t, 1),
               (Axis(min(2 * gap, last / 2), last, 60),)),
        Family("a straight line", lambda c: c / last, (), has_end=False),
        Family("a logarithm of compute", lambda c, t: np.log1p(c / t) / np.log1p(last / t),
               (Axis(gap / 30, 10 * last, 40),), has_end=False),
        Family(LOGISTIC, logistic,
               (Axis(last / 20, 1.4 * last, 20, log=False), Axis(2 / last, 80 / last, 14))),
    )  # fmt: skip


def families_to_fit(data: Data) -> dict[str, Family]:
    """The sigmoid and the laws of others, over ranges in which to search for the least squares."""
    first, last = float(data.compute[0]), float(data.compute[-1])
    span, gap = last - first, max(float(np.diff(data.compute).min()), 1e-6 * (last - first))
    steepness, middle = Axis(0.05 / span, 10 / gap, 41), Axis(first - span, last + 2 * span, 121, log=False)
    power = Family("power law", lambda c, k: 1 - (first / c) ** k, (Axis(0.005, 10.0, 200),), lowest_R0=-10.0)
    return {
        "sigmoid": sigmoids(data, (31, 61)),
        "logistic": Family("logistic", lambda c, k, m: expit(k * (c - m)), (steepness, middle)),
        "power law": power,
        "log-power": replace(power, ceiling=1.0),
        "exponential": Family("exponential", exponential, (Axis(first / 10, 10 * last, 200),)),
    }
