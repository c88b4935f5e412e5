"""The posterior of the sigmoid's four parameters: draws, with the size of the noise integrated out.

For given B and C_mid, marginal.py integrates over R0, A and the noise. B and C_mid are integrated
numerically, on a logarithmic grid with a flat prior that is refined around the mode. Outliers are down-
weighted first. docs/validation.md shows how often the intervals cover the truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.special import ndtr, ndtri, stdtrit

from trainer.scaling.curve.marginal import (
    CORRELATIONS,
    STRATA,
    Array,
    Cells,
    Data,
    Noise,
    R0_within,
    linear_fit,
    marginal,
    noise_models,
)
from trainer.scaling.curve.sigmoid import Sigmoid, compute_for, fraction_gained

B_RANGE = (0.3, 20.0)
MAX_C_MID = 30.0  # C_mid is sought up to this multiple of the largest compute
OUTLIER = 3.0  # standard deviations from which a point loses weight
OUTLIER_WEIGHT = 0.25  # a point of less weight is counted as an outlier
ROBUST_ROUNDS, HUBER_ROUNDS = 6, 3
ZOOMS = ((17, 41, 12.0), (17, 41, 9.0), (25, 41, 7.0))  # cells in B and C_mid; nats below the peak to keep
MIN_HEADROOM = 1e-6  # a given R0 nearer to 1 leaves no ceiling to estimate
DRAWS = 4000
FLAT_SD = 1e4  # sd of A from which it is drawn uniformly: a quantile of the t would lose its digits


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
        lift = (slice(None),) + (None,) * c.ndim
        R0, A, B, C_mid = (x[lift] for x in (self.R0, self.A, self.B, self.C_mid))
        result: Array = R0 + (A - R0) * fraction_gained(c, B, C_mid)
        return result

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
    outliers: int


@dataclass(frozen=True, slots=True)
class _Grid:
    """Values of B and C_mid; cells are numbered along C_mid first."""

    B: Array
    C_mid: Array

    @classmethod
    def over(cls, box: tuple[float, float, float, float], b_cells: int, c_cells: int) -> _Grid:
        """A logarithmic grid between these ends of B and of C_mid."""
        return cls(np.geomspace(*box[:2], b_cells), np.geomspace(*box[2:], c_cells))

    def cell(self, k: int) -> tuple[float, float]:
        """B and C_mid of a cell."""
        return float(self.B[k // len(self.C_mid)]), float(self.C_mid[k % len(self.C_mid)])

    def fractions(self, data: Data) -> Array:
        """(cells, n): s of every cell."""
        s = fraction_gained(
            data.with_start(data.compute, 0.0), self.B[:, None, None], self.C_mid[None, :, None]
        )
        return s.reshape(-1, s.shape[-1])

    def box_around(self, kept: NDArray[np.bool_]) -> tuple[float, float, float, float]:
        """The ends of B and C_mid of the cells kept, one step further out."""
        b, c_mid = np.nonzero(kept.reshape(len(self.B), len(self.C_mid)))
        return *_one_step_out(self.B, b), *_one_step_out(self.C_mid, c_mid)


def posterior(data: Data, draws: int = DRAWS, seed: int = 0) -> Posterior:
    """The same draws for the same data and seed."""
    weight, overdispersion = robust(data)
    data = replace(data, R0_se=data.start_error(overdispersion))
    noises = noise_models(data, weight)
    box = full_box(data)
    for b_cells, c_cells, keep in ZOOMS:
        grid = _Grid.over(box, b_cells, c_cells)
        s = grid.fractions(data)
        cells = [marginal(data, noise, s) for noise in noises]
        log_weight = np.stack([c.log_weight for c in cells])
        peak = log_weight.max()
        box = grid.box_around((log_weight > peak - keep).any(0))
    p = np.exp(log_weight - peak)
    sigmoid = _most_likely(data, noises, cells, p, grid)
    autocorrelated_prob = float(1 - p[0].sum() / p.sum())
    autocorrelation = float(p[1:].sum(1) @ CORRELATIONS / max(p[1:].sum(), 1e-300))
    drawn = _draw(data, cells, p, grid, draws, seed)
    return Posterior(
        sigmoid, drawn, autocorrelated_prob, autocorrelation, int((weight < OUTLIER_WEIGHT).sum())
    )


def full_box(data: Data) -> tuple[float, float, float, float]:
    """The ends of the ranges in which B and C_mid are sought."""
    return (*B_RANGE, float(data.compute[0]) / 3, float(data.compute[-1]) * MAX_C_MID)


def robust(data: Data) -> tuple[Array, float]:
    """Weights (n,) in (0, 1], at first Huber's, then redescending ones; and the residuals' size in sd."""
    weight = np.ones(len(data.compute))
    grid = _Grid.over(full_box(data), 25, 61)
    s = grid.fractions(data)
    for i in range(ROBUST_ROUNDS):
        whiten = np.diag(data.with_start(np.sqrt(weight) / data.sd, 1 / max(data.R0_se, 1e-9)))
        fit = linear_fit(data, whiten, s)
        allowed = (fit.A <= 1) & (fit.R0 >= 0)
        k = int((np.where(allowed, fit.sse, np.inf) if allowed.any() else fit.sse).argmin())
        sigmoid = Sigmoid(float(fit.R0[k]), min(float(fit.A[k]), 1.0), *grid.cell(k))
        z = np.abs(data.reward - sigmoid.reward(data.compute)) / data.sd
        scale = max(float(np.median(z)) * 1.4826, 1.0 if data.sd_known else 1e-6)
        weight = np.minimum(1, (OUTLIER * scale / np.maximum(z, 1e-9)) ** (1 if i < HUBER_ROUNDS else 4))
        if i == 0 and (weight == 1).all():  # no outliers: the other rounds would repeat this one
            break
    return weight, scale


def _one_step_out(axis: Array, kept: NDArray[np.intp]) -> tuple[float, float]:
    return float(axis[max(kept.min() - 1, 0)]), float(axis[min(kept.max() + 1, len(axis) - 1)])


def _most_likely(data: Data, noises: list[Noise], cells: list[Cells], p: Array, grid: _Grid) -> Sigmoid:
    """Least squares under the most likely noise, started from the most likely cell of the grid."""
    k = int(p.sum(0).argmax())
    model = int(p[:, k].argmax())
    linear, whiten = cells[model].fit, noises[model].whiten
    B, C_mid = grid.cell(k)
    floor = data.lowest_A
    A = float(np.clip(linear.A[k], floor, 1))
    R0 = float(np.clip(linear.R0[k] + linear.R0_slope[k] * (A - linear.A[k]), 0, A))
    if 1 - floor < MIN_HEADROOM:
        return Sigmoid(floor, 1.0, B, C_mid)
    c, y = data.with_start(data.compute, 0.0), whiten @ data.with_start(data.reward, data.R0 or 0.0)

    def sigmoid(x: Array) -> Sigmoid:
        R0 = floor if data.exact else float(x[3])
        return Sigmoid(R0, float(x[2]), math.exp(x[0]), math.exp(x[1]))

    box = full_box(data)
    low = [math.log(box[0]), math.log(box[2]), floor, 0.0]
    high = [math.log(box[1]), math.log(box[3]), 1.0, 1.0]
    start = [math.log(B), math.log(C_mid), A, R0]
    n = 3 if data.exact else 4
    inside = np.clip(start, np.add(low, 1e-9), np.subtract(high, 1e-9))[:n]
    solution = least_squares(
        lambda x: whiten @ sigmoid(x).reward(c) - y, inside, bounds=(low[:n], high[:n]), x_scale="jac"
    )
    best = sigmoid(solution.x)
    if best.R0 <= best.A:
        return best
    ones = whiten.sum(1)  # the rewards fall with compute: the best constant instead
    level = float(np.clip((ones @ y) / (ones @ ones), 0, 1))
    return Sigmoid(level, level, best.B, best.C_mid)


def _draw(data: Data, cells: list[Cells], p: Array, grid: _Grid, draws: int, seed: int) -> Draws:
    rng = np.random.default_rng(seed)
    total = p.ravel().cumsum()
    k = np.searchsorted(total / total[-1], (np.arange(draws) + 0.5) / draws)
    model, cell = np.divmod(rng.permutation(np.minimum(k, p.size - 1)), p.shape[1])
    R0, A = draw_ends(data, cells, model, cell, rng)
    within = rng.random((2, draws)) - 0.5  # a cell is as wide as a step of the grid
    B = grid.B[cell // len(grid.C_mid)] * (grid.B[1] / grid.B[0]) ** within[0]
    C_mid = grid.C_mid[cell % len(grid.C_mid)] * (grid.C_mid[1] / grid.C_mid[0]) ** within[1]
    return Draws(R0, A, B, C_mid)


def draw_ends(
    data: Data,
    cells: Sequence[Cells],
    model: NDArray[np.intp],
    cell: NDArray[np.intp],
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """R0 and A, of the numbers of a noise model and a cell; (draws,) each."""
    draws = len(cell)
    columns = [(c.fit.R0, c.fit.A, c.A_sd, c.A_low, c.A_high, c.fit.R0_slope, c.R0_sd) for c in cells]
    drawn = (np.stack(column)[model, cell] for column in zip(*columns, strict=True))
    R0_mean, A_mean, A_sd, low, high, slope, R0_sd = drawn
    quantile = rng.random(draws)  # of A's distribution within its bounds
    if not data.exact:
        parts = R0_within(R0_mean, A_mean, A_sd, low, high, slope, R0_sd).cumsum(-1)
        part = (parts < (rng.random(draws) * parts[:, -1])[:, None]).sum(-1)
        quantile = (np.minimum(part, STRATA - 1) + quantile) / STRATA
    t = stdtrit(cells[0].freedom, np.clip(low + (high - low) * quantile, 1e-12, 1 - 1e-12))
    floor = data.lowest_A
    A = np.where(A_sd > FLAT_SD, floor + (1 - floor) * quantile, np.clip(A_mean + A_sd * t, floor, 1))
    R0, sd = R0_mean + slope * (A - A_mean), np.maximum(R0_sd, 1e-12)
    if not data.exact:
        first, last = ndtr(-R0 / sd), ndtr((A - R0) / sd)
        R0 = R0 + sd * ndtri(np.clip(first + (last - first) * rng.random(draws), 1e-12, 1 - 1e-12))
    return np.clip(R0, 0, A), A
