"""The best value of a numeric axis, such as the group size or the learning rate, at each budget.

Runs with several values of the axis give a reward for each value at a budget, whatever else is varied at its
best (frontier.py). Over the logarithm of the value the reward has a maximum, or rises to an end of the range
that was tried. In each draw of the curves the maximum is that of the parabola through the best value and its
two neighbours, so that it may lie between values; at an end it is that end. The interval over draws allows
for fits and seeds.

How the best value moves with compute, v ∝ C^p as in the allocation of sampling compute (arXiv 2603.12151), is
the slope of its logarithm over the budgets' in each draw, over the budgets where it is inside the range.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainer.scaling.budgets import Curves
from trainer.scaling.curve.sigmoid import Array, Estimate, median


@dataclass(frozen=True, slots=True)
class Best:
    """The best value at one budget."""

    compute: float
    value: Estimate  # from the lowest to the highest tried
    reward: Estimate  # of the tried value that is most often the best
    tried: str  # that value
    at_lowest: float  # probability that the lowest value tried is the best: what is below is not known
    at_highest: float  # the same of the highest
    ahead: float  # the budget as a multiple of the shortest run of any value

    @property
    def inside(self) -> bool:
        """True if it is more likely inside the range tried than at an end or beyond it."""
        return self.at_lowest + self.at_highest < 1 / 2


@dataclass(frozen=True, slots=True)
class Allocation:
    """The best values at all budgets, and p of v ∝ C^p; None: fewer than two are inside the range tried."""

    budgets: tuple[Best, ...]
    exponent: Estimate | None
    confidence: float


def allocate(curves: Curves, draws: Mapping[float, Mapping[str, Array]]) -> Allocation:
    """The best value at each budget, from the draws of each value's reward there (`draws_by_value`).

    The values are numbers above 0.
    """
    rows, logs = list[Best](), list[Array]()
    for budget, by_value in draws.items():
        ordered = sorted(by_value, key=float)
        rewards = np.stack([by_value[name] for name in ordered], axis=1)
        x = np.log([float(name) for name in ordered])
        best, first = peak(x, rewards), rewards.argmax(1)
        likeliest = int(np.bincount(first, minlength=len(ordered)).argmax())
        reward = median(np.clip(rewards[:, likeliest], 0, 1), curves.confidence)
        ends = float((first == 0).mean()), float((first == len(ordered) - 1).mean())
        value, ahead = median(np.exp(best), curves.confidence), budget / min(curves.last.values())
        rows.append(Best(budget, value, reward, f"{float(ordered[likeliest]):g}", *ends, ahead))
        if rows[-1].inside:
            logs.append(best)
    exponent = None
    if len(logs) > 1:
        c = np.log([row.compute for row in rows if row.inside])
        c -= c.mean()
        exponent = median(np.stack(logs, axis=1) @ c / (c @ c), curves.confidence)
    return Allocation(tuple(rows), exponent, curves.confidence)


def peak(x: Array, rewards: Array) -> Array:
    """(n,) where the rewards, (n, k) at ascending x, (k,), are highest: of the parabola around the best."""
    first, row = rewards.argmax(1), np.arange(len(rewards))
    at = np.clip(first, 1, max(len(x) - 2, 1))
    if len(x) < 3:
        return np.asarray(x[first])
    low, up = x[at] - x[at - 1], x[at + 1] - x[at]
    rise, fall = rewards[row, at] - rewards[row, at - 1], rewards[row, at] - rewards[row, at + 1]
    curvature = rise / low + fall / up  # of a maximum: above 0
    shift = (rise / low * up - fall / up * low) / (2 * np.where(curvature > 0, curvature, np.inf))
    return np.where(at == first, x[at] + shift, x[first])
