"""The posterior of the sigmoid's four parameters: draws, with the size of the noise integrated out.

For given B and C_mid, marginal.py integrates over R0, A and the noise; B and C_mid, with flat priors of their
logarithms, are integrated on a grid (families.py). Outliers are down-weighted first. docs/validation.md shows
how often the intervals cover the truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.special import ndtr, ndtri, softmax, stdtrit

from trainer.scaling.curve.families import Integrated, full_box, integrate, on_grid, sigmoids
from trainer.scaling.curve.marginal import (
    CORRELATIONS,
    MIN_RANGE,
    STRATA,
    Array,
    Data,
    Noise,
    R0_within,
    linear_fit,
    noise_models,
)
from trainer.scaling.curve.sigmoid import Sigmoid, add_axes, compute_for, fraction_gained

OUTLIER = 3.0  # standard deviations from which a point loses weight
OUTLIER_WEIGHT = 0.25  # a point of less weight is counted as an outlier
DRAWS = 4000
CELLS, KEEP_TAILS = (25, 41), 10.0  # of B and C_mid; nats: with 8, a vague ceiling loses its upper tail


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Equally likely sigmoids; (n,) each."""

    R0: Array
    A: Array
    B: Array
    C_mid: Array

    def reward(self, compute: ArrayLike) -> Array:
        """R(C) of each draw: (n,) for a number, (n, m) for m of them."""
        c = np.asarray(compute, np.float64)
        R0, A, B, C_mid = add_axes(c.ndim, self.R0, self.A, self.B, self.C_mid)
        return R0 + (A - R0) * fraction_gained(c, B, C_mid)

    def compute_for(self, reward: float) -> Array:
        """C at which each draw reaches `reward`: 0 if that is at most R0, infinite from A on."""
        return compute_for(reward, self.R0, self.A, self.B, self.C_mid)


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
        """(n,): the points that count as outliers."""
        return self.weight < OUTLIER_WEIGHT


def posterior(data: Data, draws: int = DRAWS) -> Posterior:
    """The same draws for the same data."""
    weight, overdispersion = robust(data)
    data = replace(data, R0_se=data.start_error(overdispersion))
    noises = noise_models(data, weight)
    found = integrate(data, noises, sigmoids(data, CELLS), KEEP_TAILS)
    by_noise = softmax(found.log_weight, axis=None).sum(1)
    rng = np.random.default_rng(0)
    model, cell = draw_cells(found, draws, rng)
    R0, A = draw_ends(data, found, model, cell, rng)
    B, C_mid = (
        x[cell, 0] * math.exp(axis.step) ** (rng.random(draws) - 0.5)  # anywhere in the cell
        for x, axis in zip(found.theta, found.axes, strict=True)
    )
    return Posterior(
        _most_likely(data, noises, found), Draws(R0, A, B, C_mid), float(1 - by_noise[0]),
        float(by_noise[1:] @ CORRELATIONS / max(by_noise[1:].sum(), 1e-300)), weight, overdispersion,
    )  # fmt: skip


def robust(data: Data) -> tuple[Array, float]:
    """Weights (n,) in (0, 1], at first Huber's, then redescending ones; and the residuals' size in sd."""
    weight = np.ones(len(data.compute))
    family = sigmoids(data, (25, 61))
    theta, s = on_grid(data, family, family.axes)
    for exponent in (1, 1, 1, 4, 4, 4):
        whiten = np.diag(data.prepend_R0(np.sqrt(weight) / data.sd, 1 / max(data.R0_se, 1e-9)))
        fit = linear_fit(data, whiten, s)
        allowed = (fit.A <= 1) & (fit.R0 >= 0)
        k = int((np.where(allowed, fit.sse, np.inf) if allowed.any() else fit.sse).argmin())
        sigmoid = Sigmoid(float(fit.R0[k]), min(float(fit.A[k]), 1.0), *(float(x[k, 0]) for x in theta))
        z = np.abs(data.reward - sigmoid.reward(data.compute)) / data.sd
        scale = max(float(np.median(z)) * 1.4826, 1.0 if data.sd_known else 1e-6)
        before, weight = weight, np.minimum(1, (OUTLIER * scale / np.maximum(z, 1e-9)) ** exponent)
        if (before == 1).all() and (weight == 1).all():  # no outliers: the other rounds would repeat this one
            break
    return weight, scale


def _most_likely(data: Data, noises: Sequence[Noise], found: Integrated) -> Sigmoid:
    """Least squares under the most likely noise, started from the most likely cell of the grid."""
    k = int(np.logaddexp.reduce(found.log_weight).argmax())
    model = int(found.log_weight[:, k].argmax())
    linear, whiten = found.cells[model].fit, noises[model].whiten
    B, C_mid = (float(x[k, 0]) for x in found.theta)
    floor = data.lowest_A
    A = float(np.clip(linear.A[k], floor, 1))
    R0 = float(np.clip(linear.R0[k] + linear.R0_slope[k] * (A - linear.A[k]), 0, A))
    if 1 - floor < MIN_RANGE:
        return Sigmoid(floor, 1.0, B, C_mid)
    c, y = data.prepend_R0(data.compute, 0.0), whiten @ data.prepend_R0(data.reward, data.R0 or 0.0)

    def sigmoid(x: Array) -> Sigmoid:
        R0 = floor if data.exact else float(x[3])
        return Sigmoid(R0, float(x[2]), math.exp(x[0]), math.exp(x[1]))

    box = np.log(full_box(data)).tolist()
    n = 3 if data.exact else 4
    low, high = np.array([box[0], box[2], floor, 0.0])[:n], np.array([box[1], box[3], 1.0, 1.0])[:n]
    start = np.clip([math.log(B), math.log(C_mid), A, R0][:n], low + 1e-9, high - 1e-9)
    solution = least_squares(
        lambda x: whiten @ sigmoid(x).reward(c) - y, start, bounds=(low, high), x_scale="jac"
    )
    best = sigmoid(solution.x)
    if best.R0 <= best.A:
        return best
    ones = whiten.sum(1)  # the rewards fall with compute: the best constant instead
    level = float(np.clip((ones @ y) / (ones @ ones), 0, 1))
    return Sigmoid(level, level, best.B, best.C_mid)


def draw_cells(
    found: Integrated, count: int, rng: np.random.Generator
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The numbers of a noise model and a cell, in proportion to their probability; (count,) each."""
    total = softmax(found.log_weight, axis=None).ravel().cumsum()
    k = np.searchsorted(total / total[-1], (np.arange(count) + 0.5) / count)
    return np.divmod(rng.permutation(np.minimum(k, total.size - 1)), found.log_weight.shape[1])


def draw_ends(
    data: Data, found: Integrated, model: NDArray[np.intp], cell: NDArray[np.intp], rng: np.random.Generator
) -> tuple[Array, Array]:
    """R0 and A, of the numbers of a noise model and a cell; (draws,) each."""
    draws, cells = len(cell), found.cells
    columns = [(c.fit.R0, c.fit.A, c.A_sd, c.A_low, c.A_high, c.fit.R0_slope, c.R0_sd) for c in cells]
    drawn = (np.stack(column)[model, cell] for column in zip(*columns, strict=True))
    R0_mean, A_mean, A_sd, low, high, slope, R0_sd = drawn
    quantile = rng.random(draws)  # of A's distribution within its bounds
    if not data.exact:
        parts = R0_within(R0_mean, A_mean, A_sd, low, high, slope, R0_sd).cumsum(-1)
        part = (parts < (rng.random(draws) * parts[:, -1])[:, None]).sum(-1)
        quantile = (np.minimum(part, STRATA - 1) + quantile) / STRATA
    t = stdtrit(cells[0].dof, np.clip(low + (high - low) * quantile, 1e-12, 1 - 1e-12))
    floor = data.lowest_A
    # A quantile of so wide a t distribution would lose its digits; within its bounds it is uniform.
    A = np.where(A_sd > 1e4, floor + (1 - floor) * quantile, np.clip(A_mean + A_sd * t, floor, 1))
    R0, sd = R0_mean + slope * (A - A_mean), np.maximum(R0_sd, 1e-12)
    if not data.exact:
        first, last = ndtr(-R0 / sd), ndtr((A - R0) / sd)
        R0 = R0 + sd * ndtri(np.clip(first + (last - first) * rng.random(draws), 1e-12, 1 - 1e-12))
    return np.clip(R0, 0, A), A
