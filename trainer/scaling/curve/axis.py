"""The axis of a run's curve: its device-hours, or its FLOPs where a device-hour was not always the same work.

On a machine that does other work, or a GPU that throttles or is shared, the curve over device-hours has bends
that the training does not have. Where a run's ledger knows both, the spread of its rates, FLOPs per
device-hour, decides: it is the standard deviation of the logarithms of the rates in the last five sixths of
the device-hours (the first holds the start of the engines). Up to DRIFT forecasts on device-hours are as good
(`python -m bench validation.axis`), and nothing changes.

Forecasts are of device-hours all the same, since these are the cost. On the axis of work, FLOPs are given in
device-hours at the run's mean rate, so that both axes end at the same compute. Ahead of the data a
device-hour does the work of the geometric mean of two rates, the last third's and the last five sixths', as
other work comes and goes. In neither counts one interval between evaluations that did less than half of an
hour's work of any other: a gap, such as that of a resume. The rate ahead is that mean times a factor that
differs from draw to draw. Its logarithm has Student's t distribution, without the outer 1 %, with the scale
√(a² + b spread²). a, b and the degrees of freedom, RATE, are the likeliest for the runs of docs/study*
(--rates).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from trainer.scaling.curve.marginal import Data
from trainer.scaling.curve.sigmoid import DRAWS, Array, Estimate, median

DRIFT = 0.15  # spread of log rates
RATE = (0.12, 0.5, 3)  # a, b and degrees of freedom
GRID = 64  # steps between which curves are interpolated


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """Device-hours as work: FLOPs, in device-hours at the run's mean rate until the last point."""

    compute: Array  # (1 + n,) device-hours: 0, and those of the points
    work: Array  # (1 + n,); the last is that of `compute`
    rates: Array  # (5,) work per device-hour in the last five sixths
    ahead: Array  # (DRAWS,) work per device-hour beyond the points

    @property
    def last(self) -> float:
        """The compute of the last point, on both axes."""
        return float(self.compute[-1])

    @property
    def spread(self) -> float:
        """The standard deviation of the logarithms of the rates."""
        return float(np.log(self.rates).std(ddof=1))

    def rate_ahead(self, confidence: float) -> Estimate:
        """The rate beyond the points, in multiples of the mean rate until there."""
        return median(self.ahead, confidence)

    def hours(self, work: Array, ahead: ArrayLike) -> Array:
        """Device-hours until so much work, (n,); beyond the points it is done at a rate for each, (n,)."""
        beyond = np.maximum(work - self.last, 0) / ahead
        return np.asarray(np.interp(work, self.work, self.compute) + beyond, np.float64)

    def reward(self, on_work: Callable[[Array], Array], compute: ArrayLike) -> Array:
        """Rewards of curves over work at device-hours, (n,) or (n, m): each draw goes on at its own rate."""
        hours = np.atleast_1d(np.asarray(compute, np.float64))
        rewards, beyond = on_work(np.interp(hours, self.compute, self.work)), hours > self.last
        if beyond.any():
            log_work = np.log1p(np.multiply.outer(self.ahead, hours[beyond] / self.last - 1))
            step = max(float(log_work.max()), 1e-9) / GRID
            on_grid = on_work(self.last * np.exp(step * np.arange(GRID + 1)))
            k = np.minimum((log_work / step).astype(int), GRID - 1)
            share, row = log_work / step - k, np.arange(len(on_grid))[:, None]
            rewards[:, beyond] = (1 - share) * on_grid[row, k] + share * on_grid[row, k + 1]
        return rewards if np.ndim(compute) else rewards[:, 0]


def axis_of(data: Data) -> Axis | None:
    """The axis of work of a run's points; None: the work is not known of all of them, or of too few."""
    flops = data.flops
    if flops is None or len(flops) < 5 or not (np.diff(flops, prepend=0.0) > 0).all():
        return None
    hours, work = np.append(0.0, data.compute), np.append(0.0, flops * (data.compute[-1] / flops[-1]))
    sixths = np.interp(np.linspace(0.0, hours[-1], 7), hours, work)
    rates = np.maximum(np.diff(sixths)[1:] * 6 / hours[-1], 1e-9)
    axis, (a, b, dof) = Axis(hours, work, rates, np.ones(1)), RATE
    scale, at = math.hypot(a, math.sqrt(b) * axis.spread), np.linspace(0.005, 0.995, DRAWS)
    factors = np.random.default_rng(1).permutation(np.exp(scale * stdtrit(dof, at)))
    return replace(axis, ahead=factors * math.sqrt(_rate(hours, work, 2 / 3) * _rate(hours, work, 1 / 6)))


def _rate(hours: Array, work: Array, start: float) -> float:
    """Work per device-hour from a share of the hours on, (1 + n,) each, without an interval that is a gap."""
    late = hours[1:] > start * hours[-1]
    spent, done = np.maximum(np.diff(hours)[late], 1e-9), np.diff(work)[late]
    slowest, *others = np.argsort(done / spent)
    if others and done[slowest] / spent[slowest] < (done / spent)[others].min() / 2:
        spent, done = spent[others], done[others]
    return float(done.sum() / spent.sum())


def on_axis(data: Data) -> tuple[Data, Axis | None]:
    """The points at their work, and that axis, where the rate has drifted; else as they are, and None."""
    axis = axis_of(data)
    if axis is None or axis.spread <= DRIFT:
        return data, None
    return replace(data, compute=axis.work[1:]), axis
