"""How far the ceilings of runs of one recipe differ: τ, their standard deviation over seeds.

The paper: three independent runs moved A by up to .015, so two ceilings differ only beyond ±.02 (arXiv
2510.13786). That is the prior of τ, known to a factor of two; the seeds there are, if any, correct it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

Array = NDArray[np.float64]

MARGIN = 0.02  # A of two single runs of one recipe, 90 %
IN_MEDIANS = 3.3117  # that margin in medians of τ, where log2 τ has the standard deviation 1
LADDER = np.linspace(-4, 6, 121)  # log2 of τ over the prior's median


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """The posterior of τ: levels and their probabilities."""

    tau: Array  # (levels,)
    weight: Array  # (levels,) sums to 1

    @property
    def middle(self) -> float:
        """The geometric mean."""
        return float(np.exp(self.weight @ np.log(self.tau)))

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """(n,)"""
        return rng.choice(self.tau, n, p=self.weight)

    def margin(self, runs_a: int, runs_b: int, confidence: float) -> float:
        """What the mean ceilings of so many and so many runs of one recipe differ by at most."""
        sd = self.tau * (1 / runs_a + 1 / runs_b) ** 0.5

        def excess(x: float) -> float:
            return float(self.weight @ (2 * ndtr(x / sd) - 1)) - confidence

        return float(brentq(excess, 0.0, 10 * float(sd[-1])))


def run_spread(recipes: Sequence[Sequence[tuple[float, float]]], margin: float = MARGIN) -> Spread:
    """τ by the runs of some recipes: (A, variance of its fit) of each run.

    A_run ~ N(A_recipe, τ² + variance). A_recipe is flat, and integrated out: single runs tell nothing.
    """
    tau = margin / IN_MEDIANS * 2**LADDER
    log_weight = -(LADDER**2) / 2
    for runs in recipes:
        A, variance = np.asarray(runs, np.float64).T
        w = 1 / (tau[:, None] ** 2 + variance)  # (levels, runs)
        mean = (w @ A) / w.sum(1)
        log_weight += 0.5 * np.log(w).sum(1) - 0.5 * np.log(w.sum(1))
        log_weight -= 0.5 * (w * (A - mean[:, None]) ** 2).sum(1)
    weight = np.exp(log_weight - log_weight.max())
    return Spread(tau, weight / weight.sum())
