"""The posterior of the sigmoid's four parameters: draws, with the size of the noise integrated out.

For given B and C_mid the sigmoid is linear in R0 and A. With s = fraction_gained(C; B, C_mid) and noise w,

    R = R0 (1 − s) + A s + σ w,    w ~ N(0, D K_ρ D),    D = diag(standard errors)

K_ρ[i, j] = .98 ρ^(|C_i − C_j| / gap), and 1 for i = j, where gap is the median distance of neighbouring
evaluations: their errors are correlated in most runs, and a fit that takes them for independent gives
intervals far too narrow. ρ = 0 has half of the prior; the values of CORRELATIONS share the rest. σ² has an
inverse χ² prior where standard errors are given, else 1/σ². The extra variance of outliers and the error of
R0 are independent. σ, R0 and A are integrated analytically (Student's t, 0 ≤ R0 ≤ A ≤ 1); B and C_mid
numerically, on a logarithmic grid with a flat prior that is refined around the mode. Outliers are down-
weighted first. docs/validation.md shows how often the intervals cover the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from trainer.scaling.sigmoid import Sigmoid, compute_for, fraction_gained

Array = NDArray[np.float64]

B_RANGE = (0.3, 20.0)
MAX_C_MID = 30.0  # C_mid is sought up to this multiple of the largest compute
CORRELATIONS = (0.4, 0.7, 0.85, 0.93, 0.97)  # ρ, of points a median gap apart
CORRELATED_SHARE = 0.98  # of the variance, where there is correlation
NOISE_PRIOR_POINTS = 3.0  # the reported standard errors count as much as this many points
OUTLIER = 3.0  # standard deviations from which a point loses weight
OUTLIER_WEIGHT = 0.25  # a point of less weight is counted as an outlier
ROBUST_ROUNDS, HUBER_ROUNDS = 6, 3
ZOOMS = ((17, 41, 12.0), (17, 41, 9.0), (25, 41, 7.0))  # cells in B and C_mid; nats below the peak to keep
MIN_HEADROOM = 1e-6  # a given R0 nearer to 1 leaves no ceiling to estimate
DRAWS = 4000
WIDE_SD = 1.0  # sd of A from which it is uniform enough within its bounds for the range of R0
FLAT_SD = 1e4  # sd of A from which it is drawn uniformly: a quantile of the t would lose its digits
STRATA = 16  # equally likely parts of A's distribution, for the bounds on R0


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Points to fit, and what is known of R0: exact (`R0_se` 0), measured, or unknown (`R0` None)."""

    compute: Array  # (n,) > 0, ascending
    reward: Array  # (n,)
    sd: Array  # (n,) standard errors, or equal numbers where they are unknown
    sd_known: bool
    R0: float | None
    R0_se: float
    R0_se_reported: bool = True  # False: R0 is as uncertain as the most certain point, known or not

    def start_error(self, overdispersion: float) -> float:
        """R0's error in the units of `sd`: a reported one is not scaled by how far the points scatter."""
        if self.sd_known:
            return self.R0_se / max(1.0, overdispersion)
        return self.R0_se / overdispersion if self.R0_se_reported else self.R0_se

    @property
    def exact(self) -> bool:
        """Whether R0 is a given number."""
        return self.R0 is not None and self.R0_se == 0

    @property
    def lowest_A(self) -> float:
        """The lowest ceiling: an exact R0, or 0."""
        return float(self.R0 or 0) if self.exact else 0.0

    def with_start(self, x: Array, start: float) -> Array:
        """x, (n,), after the entry `start` for R0, if that is measured."""
        return x if self.exact or self.R0 is None else np.concatenate([[start], x])


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
class _Noise:
    """One correlation of the noise."""

    whiten: Array  # W with W Σ Wᵀ = 1
    log_prior: float  # log(prior / √|Σ|)


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


@dataclass(frozen=True, slots=True, eq=False)
class _LinearFit:
    """Least squares of R0 and A for every (B, C_mid): (cells,) each."""

    R0: Array
    A: Array
    sse: Array  # whitened
    determinant: Array  # of the normal equations' matrix
    A_variance: Array  # over σ²
    R0_variance: Array  # over σ², for a given A
    R0_slope: Array  # dR0/dA at the least squares for a given A


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """The posterior of R0 and A on a grid of (B, C_mid) under one noise model: (cells,) each."""

    fit: _LinearFit  # its R0 and A are the means
    log_weight: Array
    A_sd: Array
    A_low: Array  # quantiles of A's bounds under its unbounded t distribution
    A_high: Array
    R0_sd: Array  # for a given A
    freedom: float


def posterior(data: Data, draws: int = DRAWS, seed: int = 0) -> Posterior:
    """The same draws for the same data and seed."""
    weight, overdispersion = robust(data)
    data = replace(data, R0_se=data.start_error(overdispersion))
    noises = _noise_models(data, weight)
    box = full_box(data)
    for b_cells, c_cells, keep in ZOOMS:
        grid = _Grid.over(box, b_cells, c_cells)
        s = grid.fractions(data)
        cells = [_cells(data, noise, s) for noise in noises]
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
        fit = _linear_fit(data, whiten, s)
        allowed = (fit.A <= 1) & (fit.R0 >= 0)
        k = int((np.where(allowed, fit.sse, np.inf) if allowed.any() else fit.sse).argmin())
        sigmoid = Sigmoid(float(fit.R0[k]), min(float(fit.A[k]), 1.0), *grid.cell(k))
        z = np.abs(data.reward - sigmoid.reward(data.compute)) / data.sd
        scale = max(float(np.median(z)) * 1.4826, 1.0 if data.sd_known else 1e-6)
        weight = np.minimum(1, (OUTLIER * scale / np.maximum(z, 1e-9)) ** (1 if i < HUBER_ROUNDS else 4))
        if i == 0 and (weight == 1).all():  # no outliers: the other rounds would repeat this one
            break
    return weight, scale


def typical_gap(compute: Array) -> float:
    """The median distance of two evaluations: ρ is the correlation of errors this far apart."""
    gaps = np.diff(compute)
    return float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 1.0


def _noise_models(data: Data, weight: Array) -> list[_Noise]:
    """One for each correlation; the first has none.

    The extra variance of an outlier is independent of the other points. So is the error of a measured R0: it
    is an evaluation of a model that has not been trained.
    """
    sd = data.sd
    outlier_variance = np.diag(sd**2 * (1 / weight - 1))
    gap = np.abs(np.subtract.outer(data.compute, data.compute)) / typical_gap(data.compute)
    models = []
    for rho in (0.0, *CORRELATIONS):
        correlation = np.eye(len(sd))
        if rho:
            correlation = CORRELATED_SHARE * rho**gap + (1 - CORRELATED_SHARE) * correlation
        factor = np.linalg.cholesky(correlation * np.outer(sd, sd) + outlier_variance)
        inverse = np.linalg.inv(factor)
        if not data.exact and data.R0 is not None:
            inverse = np.block([[np.array([[1 / data.R0_se]]), np.zeros((1, len(sd)))],
                                [np.zeros((len(sd), 1)), inverse]])  # fmt: skip
        prior = 0.5 if rho == 0 else 0.5 / len(CORRELATIONS)
        models.append(_Noise(inverse, math.log(prior) - float(np.log(np.diag(factor)).sum())))
    return models


def _linear_fit(data: Data, whiten: Array, s: Array) -> _LinearFit:
    """Weighted least squares of R0 and A for every row of s, (cells, n), in closed form.

    With the whitened columns x_R0 = W (1 − s) and x_A = W s and the whitened rewards y = W R, the normal
    equations are

        [x_R0·x_R0  x_R0·x_A] [R0]   [x_R0·y]
        [x_R0·x_A   x_A·x_A ] [A ] = [x_A·y ]        SSE = y·y − R0 (x_R0·y) − A (x_A·y)

    If R0 is exact, only the row of A is left, with y less R0 x_R0.
    """
    x_A = s @ whiten.T
    x_R0 = whiten.sum(1) - x_A
    y = whiten @ data.with_start(data.reward, data.R0 or 0.0)
    A_A = (x_A * x_A).sum(1)
    if data.exact:
        R0 = np.full(len(s), data.lowest_A)
        y_less_R0 = y - R0[0] * x_R0
        A_A, zero = np.maximum(A_A, 1e-300), 0 * A_A
        A = (x_A * y_less_R0).sum(1) / A_A
        sse = (y_less_R0 * y_less_R0).sum(1) - A * A * A_A
        return _LinearFit(R0, A, sse, A_A, 1 / A_A, R0_variance=zero, R0_slope=zero)
    R0_R0, R0_A = (x_R0 * x_R0).sum(1), (x_R0 * x_A).sum(1)
    R0_y, A_y = x_R0 @ y, x_A @ y
    R0_R0 = np.maximum(R0_R0, 1e-300)
    determinant = np.maximum(R0_R0 * A_A - R0_A * R0_A, 1e-12 * R0_R0 * A_A + 1e-300)  # columns can be alike
    R0, A = (A_A * R0_y - R0_A * A_y) / determinant, (R0_R0 * A_y - R0_A * R0_y) / determinant
    return _LinearFit(
        R0, A, y @ y - R0 * R0_y - A * A_y, determinant,
        A_variance=R0_R0 / determinant, R0_variance=1 / R0_R0, R0_slope=-R0_A / R0_R0,
    )  # fmt: skip


def _cells(data: Data, noise: _Noise, s: Array) -> _Cells:
    """The posterior of R0 and A for every row of s, and the row's weight, the marginal likelihood.

    With σ² integrated out, A has a t distribution with ν degrees of freedom and the weight is

        prior |Σ|^−½ |XᵀX|^−½ (ν₀ + SSE)^(−ν/2) P(A within bounds) P(0 ≤ R0 ≤ A),    ν = ν₀ + n − parameters

    where ν₀ is NOISE_PRIOR_POINTS if the standard errors are reported, else 0. Without the last factor, a
    cell in which the data do not determine R0 would gain from all the R0 out of bounds.
    """
    fit = _linear_fit(data, noise.whiten, s)
    prior_points = NOISE_PRIOR_POINTS if data.sd_known else 0.0
    freedom = len(noise.whiten) - (1 if data.exact else 2) + prior_points
    total = prior_points + np.maximum(fit.sse, 1e-12)
    A_sd, R0_sd = np.sqrt(total / freedom * fit.A_variance), np.sqrt(total / freedom * fit.R0_variance)
    floor = fit.R0 if data.exact else 0.0
    low, high = (stdtr(freedom, np.clip((x - fit.A) / A_sd, -1e8, 1e8)) for x in (floor, 1.0))
    log_weight = noise.log_prior - 0.5 * np.log(fit.determinant) - 0.5 * freedom * np.log(total)
    log_weight = log_weight + np.log(np.maximum(high - low, 1e-300))
    if not data.exact:
        within = _R0_within(fit.R0, fit.A, A_sd, low, high, fit.R0_slope, R0_sd)
        log_weight = log_weight + np.log(np.maximum(within.mean(-1), 1e-300))
    return _Cells(fit, log_weight, A_sd, low, high, R0_sd, freedom)


def _R0_within(
    R0: Array, A: Array, A_sd: Array, A_low: Array, A_high: Array, R0_slope: Array, R0_sd: Array
) -> Array:
    """(n, STRATA): probability that 0 ≤ R0 ≤ A in each of the equally likely parts of A's distribution."""
    middle = (np.arange(STRATA) + 0.5) / STRATA
    z = ndtri(np.clip(A_low[:, None] + (A_high - A_low)[:, None] * middle, 1e-12, 1 - 1e-12))
    A_there = np.where(A_sd[:, None] > WIDE_SD, middle, A[:, None] + A_sd[:, None] * z)
    mean, sd = R0[:, None] + R0_slope[:, None] * (A_there - A[:, None]), np.maximum(R0_sd, 1e-12)[:, None]
    result: Array = np.maximum(ndtr((A_there - mean) / sd) - ndtr(-mean / sd), 0)
    return result


def _one_step_out(axis: Array, kept: NDArray[np.intp]) -> tuple[float, float]:
    return float(axis[max(kept.min() - 1, 0)]), float(axis[min(kept.max() + 1, len(axis) - 1)])


def _most_likely(data: Data, noises: list[_Noise], cells: list[_Cells], p: Array, grid: _Grid) -> Sigmoid:
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


def _draw(data: Data, cells: list[_Cells], p: Array, grid: _Grid, draws: int, seed: int) -> Draws:
    rng = np.random.default_rng(seed)
    total = p.ravel().cumsum()
    k = np.searchsorted(total / total[-1], (np.arange(draws) + 0.5) / draws)
    model, cell = np.divmod(rng.permutation(np.minimum(k, p.size - 1)), p.shape[1])
    columns = [(c.fit.R0, c.fit.A, c.A_sd, c.A_low, c.A_high, c.fit.R0_slope, c.R0_sd) for c in cells]
    drawn = (np.stack(column)[model, cell] for column in zip(*columns, strict=True))
    R0_mean, A_mean, A_sd, low, high, slope, R0_sd = drawn
    quantile = rng.random(draws)  # of A's distribution within its bounds
    if not data.exact:
        parts = _R0_within(R0_mean, A_mean, A_sd, low, high, slope, R0_sd).cumsum(-1)
        part = (parts < (rng.random(draws) * parts[:, -1])[:, None]).sum(-1)
        quantile = (np.minimum(part, STRATA - 1) + quantile) / STRATA
    t = stdtrit(cells[0].freedom, np.clip(low + (high - low) * quantile, 1e-12, 1 - 1e-12))
    floor = data.lowest_A
    A = np.where(A_sd > FLAT_SD, floor + (1 - floor) * quantile, np.clip(A_mean + A_sd * t, floor, 1))
    R0, sd = R0_mean + slope * (A - A_mean), np.maximum(R0_sd, 1e-12)
    if not data.exact:
        first, last = ndtr(-R0 / sd), ndtr((A - R0) / sd)
        R0 = R0 + sd * ndtri(np.clip(first + (last - first) * rng.random(draws), 1e-12, 1 - 1e-12))
    within = rng.random((2, draws)) - 0.5  # a cell is as wide as a step of the grid
    B = grid.B[cell // len(grid.C_mid)] * (grid.B[1] / grid.B[0]) ** within[0]
    C_mid = grid.C_mid[cell % len(grid.C_mid)] * (grid.C_mid[1] / grid.C_mid[0]) ** within[1]
    return Draws(np.clip(R0, 0, A), A, B, C_mid)
