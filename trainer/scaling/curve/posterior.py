"""The posterior of the sigmoid's four parameters: draws, with the size of the noise integrated out.

For given B and C_mid, marginal.py integrates over R0, A and the noise; B and C_mid, with flat priors of their
logarithms, are integrated on a grid (families.py). Outliers are down-weighted first. docs/validation.md shows
how often the intervals cover the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from trainer.scaling.curve.families import integrate, polished, robust, sigmoids
from trainer.scaling.curve.marginal import CORRELATIONS, Array, Data, noise_models
from trainer.scaling.curve.sigmoid import DRAWS, Draws, Sigmoid

CELLS, KEEP_TAILS = (25, 41), 10.0  # of B and C_mid; nats: with 8, a vague ceiling loses its upper tail


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """The most likely sigmoid, draws, and the noise."""

    sigmoid: Sigmoid
    draws: Draws
    autocorrelated_prob: float  # probability that the errors of neighbouring points are correlated
    autocorrelation: float  # their correlation, if they are: its mean over CORRELATIONS
    weight: Array  # (n,) of each point, below 1 for outliers
    scale: float  # size of the residuals, in standard errors

    @property
    def outliers(self) -> NDArray[np.bool_]:
        """(n,): the points that have lost three quarters of their weight."""
        return self.weight < 0.25


def posterior(data: Data, draws: int = DRAWS) -> Posterior:
    """The same draws for the same data."""
    weight, overdispersion = robust(data)
    data = replace(data, R0_se=data.start_error(overdispersion))
    noises, family = noise_models(data, weight), sigmoids(data, CELLS)
    integrated = integrate(data, noises, family, KEEP_TAILS)
    by_noise = softmax(integrated.log_weight, axis=None).sum(1)
    rng = np.random.default_rng(0)
    _, (R0, A, *cells) = integrated.draw(data, draws, rng)
    B, C_mid = (
        x * math.exp(axis.step) ** (rng.random(draws) - 0.5)  # anywhere in the cell
        for x, axis in zip(cells, integrated.axes, strict=True)
    )
    model, k = integrated.peak()
    linear = integrated.cells[model].fit
    start = np.array([linear.R0[k], linear.A[k], *(x[k, 0] for x in integrated.theta)])
    _, likeliest = polished(data, family, noises[model].whiten, start)
    return Posterior(
        Sigmoid(*likeliest), Draws(R0, A, B, C_mid), float(1 - by_noise[0]),
        float(by_noise[1:] @ CORRELATIONS / max(by_noise[1:].sum(), 1e-300)), weight, overdispersion,
    )  # fmt: skip
