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

from trainer.scaling.curve.marginal import Cells, Data, Noise, marginal
from trainer.scaling.curve.sigmoid import fraction_gained

Array = NDArray[np.float64]

FEW_CORRELATIONS = (0.7, 0.93)  # ρ of the noise; more of them do not change which law is likelier
KEEP = 8.0  # nats below the peak up to which the search for the peak is refined
RESOLVED, MAX_ROUNDS = 0.2, 5  # share of the cells in that range at which it is fine enough


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

    def log_prior(self, x: Array) -> Array:
        """The log density of the prior at x, in its measure."""
        if self.normal is None:
            return np.full(x.shape, -math.log(self.length))
        mean, sd = self.normal
        z = ((np.log(x) if self.log else x) - mean) / sd
        return -0.5 * z * z - math.log(sd * math.sqrt(2 * math.pi))

    def around(self, kept: NDArray[np.bool_]) -> Axis:
        """The same number of cells for the range of those kept, (cells,), and one step more."""
        k, x = np.flatnonzero(kept), self.values
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
    theta: list[Array]  # (cells, 1) each
    cells: list[Cells]  # by noise
    log_weight: Array  # (noises, cells), the prior included
    log_evidence: float  # the probability of the data, averaged over all parameters


def integrate(data: Data, noises: Sequence[Noise], family: Family) -> Integrated:
    """The evidence of a family: marginal likelihoods on a grid that is refined around the peak.

    The integral is the trapezoidal rule's: cells at an end of a range count half.
    """
    axes = list(family.axes)
    for left in reversed(range(MAX_ROUNDS)):
        grid = np.meshgrid(*(axis.values for axis in axes), indexing="ij")
        theta = [x.reshape(-1, 1) for x in grid]
        s = family.fraction(data.with_start(data.compute, 0.0)[None, :], *theta)
        cells = [marginal(data, noise, s, family.ceiling) for noise in noises]
        prior = sum((a.log_prior(x[:, 0]) for a, x in zip(family.axes, theta, strict=True)), np.zeros(len(s)))
        log_weight = np.stack([c.log_weight for c in cells]) + prior
        kept = (log_weight > log_weight.max() - KEEP).any(0)
        if not axes or not left or kept.mean() > RESOLVED:
            break
        kept = kept.reshape(grid[0].shape)
        others = [tuple(j for j in range(len(axes)) if j != i) for i in range(len(axes))]
        refined = [axis.around(kept.any(other)) for axis, other in zip(axes, others, strict=True)]
        if refined == axes:
            break
        axes = refined
    for axis, x in zip(axes, theta, strict=True):
        log_weight[:, np.isin(x[:, 0], axis.values[[0, -1]])] -= math.log(2)
    cell = sum(math.log(axis.length / (axis.cells - 1)) for axis in axes)
    return Integrated(
        family, theta, cells, log_weight, float(np.logaddexp.reduce(log_weight, axis=None)) + cell
    )


def sigmoids(box: tuple[float, float, float, float], normal: tuple[float, float] | None = None) -> Family:
    """Between these ends of B and of C_mid; `normal`: the prior of log B."""
    B_low, B_high, C_low, C_high = box
    axes = (Axis(B_low, B_high, 13, normal=normal), Axis(C_low, C_high, 21))
    return Family("a sigmoid", fraction_gained, axes)


def logistic_of_power(q: float) -> Callable[..., Array]:
    """s of (C, p, τ) for a given q."""

    def fraction(c: ArrayLike, p: Array, tau: Array) -> Array:
        e = np.exp(-np.minimum((np.asarray(c, np.float64) / tau) ** p, 700.0))
        result: Array = (1 - e) / (1 + q * e)
        return result

    return fraction
