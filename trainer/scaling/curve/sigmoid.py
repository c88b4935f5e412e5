"""The sigmoid of reward over compute (arXiv 2510.13786, eq. 1), evaluations, and estimates from draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.config import ConfigError

Array = NDArray[np.float64]

DRAWS = 4000  # of every posterior


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """R(C) = R0 + (A − R0) / (1 + (C_mid / C)^B)."""

    R0: float  # reward at zero compute
    A: float  # ceiling
    B: float  # efficiency
    C_mid: float  # compute at which half of A − R0 is gained

    def reward(self, compute: ArrayLike) -> Array:
        """R(C); R(0) = R0."""
        return self.R0 + (self.A - self.R0) * fraction_gained(compute, self.B, self.C_mid)

    def compute_for(self, reward: float) -> float:
        """C at which R(C) is `reward`: 0 if that is at most R0, infinite from the ceiling on."""
        if reward <= self.R0 or reward >= self.A:
            return 0.0 if reward <= self.R0 else math.inf
        return self.C_mid * ((reward - self.R0) / (self.A - reward)) ** (1 / self.B)


def fraction_gained(compute: ArrayLike, B: ArrayLike, C_mid: ArrayLike) -> Array:
    """The fraction of A − R0 that is gained: 1 / (1 + (C_mid / C)^B), 0 at C = 0. Broadcasts."""
    c, b, c_mid = (np.asarray(x, np.float64) for x in (compute, B, C_mid))
    with np.errstate(divide="ignore", over="ignore"):
        return 1 / (1 + (c_mid / c) ** b)


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Equally likely sigmoids; (n,) each."""

    R0: Array
    A: Array
    B: Array
    C_mid: Array

    def reward(self, compute: ArrayLike) -> Array:
        """R(C) of each draw: (n,) for a number, (n, m) for m of them."""
        s = fraction_gained(np.asarray(compute, np.float64)[..., None], self.B, self.C_mid)
        return np.moveaxis(self.R0 + (self.A - self.R0) * s, -1, 0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Estimate:
        """The same in another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def estimate(value: float, draws: Array, confidence: float) -> Estimate:
    """A value and the interval of its draws, widened where that leaves out the value."""
    tail = (1 - confidence) / 2
    low, high = (float(x) for x in np.quantile(draws, [tail, 1 - tail], method="inverted_cdf"))
    return Estimate(value, min(low, value), max(high, value))


def median(draws: Array, confidence: float) -> Estimate:
    """The median and the interval of draws, of which some can be infinite."""
    tail = (1 - confidence) / 2
    return Estimate(*np.quantile(draws, [0.5, tail, 1 - tail], method="inverted_cdf").tolist())


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """One evaluation."""

    step: int
    compute: float  # C, in the unit of the ledger
    pass_rate: float  # mean@k
    pass_rate_se: float  # its standard error; 0: unknown
    flops: float = field(default=0.0, compare=False)  # of the run until then; 0: unknown


@dataclass(frozen=True, slots=True)
class Curve:
    """The evaluations of one run, and its reward at zero compute."""

    name: str
    unit: str  # of compute: "GPU-hours", "core-hours", "FLOPs", "steps", or the column's name
    points: tuple[EvalPoint, ...]  # compute is > 0 and never decreases
    R0: EvalPoint | float | None  # measured (at compute 0), given, or unknown

    @property
    def evaluations(self) -> tuple[EvalPoint, ...]:
        """All that was measured: the points, after the one at compute 0 if there is one."""
        return (self.R0, *self.points) if isinstance(self.R0, EvalPoint) else self.points


def curve_of(name: str, unit: str, points: Iterable[EvalPoint]) -> Curve:
    """The curve of a run's evaluations, given in any order; R0 is their mean at compute 0, if there are any.

    Equal evaluations count once. Two evaluations may have the same compute, because training steps can be
    shorter than the ledger's updates. ConfigError: a compute that is negative or not finite.
    """
    unique = {(p.compute, p.pass_rate): p for p in points}
    for p in unique.values():
        if not 0 <= p.compute < math.inf:
            raise ConfigError(f"step {p.step}: compute is {p.compute:g}; expected a number of at least 0")
    ordered = sorted(unique.values(), key=lambda p: p.compute)
    starts = [p for p in ordered if p.compute == 0]
    return Curve(name, unit, tuple(ordered[len(starts) :]), mean_point(starts) if starts else None)


def without_flops(curve: Curve) -> Curve:
    """The curve without its FLOPs, which is then fitted to its compute, whatever a device-hour did."""
    return replace(curve, points=tuple(replace(p, flops=0.0) for p in curve.points))


def mean_point(points: Sequence[EvalPoint]) -> EvalPoint:
    """The mean of evaluations of the same weights."""
    n = len(points)
    reward = math.fsum(p.pass_rate for p in points) / n
    se = math.hypot(*(p.pass_rate_se for p in points)) / n
    return replace(points[0], pass_rate=reward, pass_rate_se=se)
