"""Laws of which the sigmoid is one: curves R = R0 (1 − s) + A s, with a fraction s(C) of the gain.

    sigmoid              s = 1 / (1 + (C_mid / C)^B)                       arXiv 2510.13786
    stretched approach   s = 1 − e^−u,                       u = (C / τ)^p     an exponential where p = 1
    logistic of C^p      s = (1 − e^−u) / (1 + q e^−u)

If q = A / R0 − 1, the last is R = A / (1 + q e^−u): the odds of R / A grow by the factor e^u. With p = 1 it
is a logistic in compute, and q = 0 gives the stretched approach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from trainer.scaling.curve.marginal import Data, GridCells, Noise, marginal, typical_gap
from trainer.scaling.curve.sigmoid import fraction_gained

Array = NDArray[np.float64]

B_RANGE = (0.3, 20.0)  # of the sigmoid
MAX_REACH = 30.0  # C_mid and τ are sought up to this multiple of the largest compute
SEEN = 1 / 3  # and from this share of the first point's: what is over before it leaves no trace
KEEP = 8.0  # nats below the peak up to which the grid is refined: what lies beyond is under e^-8 of it
RESOLVED = 0.2  # share of the cells in that range at which the grid is fine enough
MAX_ROUNDS = 5  # of refinement


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
        """In the measure of the prior."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Integrated:
    """The marginal likelihoods of a family on a grid of its parameters, which lies around the peak."""

    family: Family
    axes: tuple[Axis, ...]  # of the grid
    theta: list[Array]  # (cells, 1) each
    cells: list[GridCells]  # by noise
    log_weight: Array  # (noises, cells), the prior included
    log_evidence: float  # the probability of the data, averaged over all parameters


def on_grid(data: Data, family: Family, axes: Sequence[Axis]) -> tuple[list[Array], Array]:
    """The parameters of every cell, (cells, 1) each, and the fractions s at R0 and the points, (cells, n)."""
    theta = [x.reshape(-1, 1) for x in np.meshgrid(*(axis.values for axis in axes), indexing="ij")]
    return theta, family.fraction(data.prepend_R0(data.compute, 0.0)[None, :], *theta)


def integrate(data: Data, noises: Sequence[Noise], family: Family, keep: float = KEEP) -> Integrated:
    """The evidence of a family: marginal likelihoods on a grid that is refined around the peak.

    The integral is the trapezoidal rule's: cells at an end of a range count half.
    """
    axes = list(family.axes)
    for last_round in (*[False] * (MAX_ROUNDS - 1), True):
        theta, s = on_grid(data, family, axes)
        cells = [marginal(data, noise, s, family.ceiling) for noise in noises]
        prior = sum((a.log_prior(x[:, 0]) for a, x in zip(family.axes, theta, strict=True)), np.zeros(len(s)))
        log_weight = np.stack([c.log_weight for c in cells]) + prior
        inside = (log_weight > log_weight.max() - keep).any(0)
        if not axes or last_round or inside.mean() > RESOLVED:
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


def sigmoids(
    data: Data, cells: tuple[int, int] = (13, 21), prior: tuple[float, float] | None = None
) -> Family:
    """The sigmoid on a grid of so many values of B and C_mid; `prior`: a normal one of log B."""
    axes = (Axis(*B_RANGE, cells[0], normal=prior), Axis(*reach(data), cells[1]))
    return Family("a sigmoid", fraction_gained, axes)


def reach(data: Data) -> tuple[float, float]:
    """The ends of the range in which C_mid and τ are sought."""
    return SEEN * float(data.compute[0]), MAX_REACH * float(data.compute[-1])


def full_box(data: Data) -> tuple[float, float, float, float]:
    """The ends of the ranges in which B and C_mid are sought."""
    return (*B_RANGE, *reach(data))


def logistic_of_power(q: float) -> Callable[..., Array]:
    """s of (C, p, τ) for a given q."""

    def fraction(c: ArrayLike, p: Array, tau: Array) -> Array:
        e = np.exp(-np.minimum((np.asarray(c, np.float64) / tau) ** p, 700.0))
        return (1 - e) / (1 + q * e)

    return fraction


LOGISTIC = "a logistic"


def other_families(data: Data) -> tuple[Family, ...]:
    """Curves to compare the sigmoid with; their parameters reach from the gaps of the data to beyond it."""
    last, gap = float(data.compute[-1]), typical_gap(data.compute)

    def logistic(c: Array, middle: Array, steepness: Array) -> Array:
        low = expit(-steepness * middle)
        return (expit(steepness * (c - middle)) - low) / (1 - low)

    return (
        Family("an exponential approach", lambda c, t: -np.expm1(-c / t), (Axis(gap / 2, 10 * last, 60),)),
        Family("a straight rise to a hard cap", lambda c, t: np.minimum(c / t, 1),
               (Axis(min(2 * gap, last / 2), last, 60),)),
        Family("a straight line", lambda c: c / last, (), has_end=False),
        Family("a logarithm of compute", lambda c, t: np.log1p(c / t) / np.log1p(last / t),
               (Axis(gap / 30, 10 * last, 40),), has_end=False),
        Family(LOGISTIC, logistic,
               (Axis(last / 20, 1.4 * last, 20, log=False), Axis(2 / last, 80 / last, 14))),
    )  # fmt: skip
