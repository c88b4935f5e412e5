"""The marginal likelihood of a curve that is linear in R0 and A, under one model of the noise.

With the right fraction s(C) of the gain this is the sigmoid, for given B and C_mid, and many another curve:

    R = R0 (1 − s) + A s + σ w,    w ~ N(0, D K_ρ D),    D = diag(standard errors)

K_ρ[i, j] = .98 ρ^(|C_i − C_j| / gap), and 1 for i = j, where gap is the median distance of neighbouring
evaluations: their errors are correlated in most runs, and a fit that takes them for independent gives
intervals far too narrow. ρ = 0 has half of the prior; the other values share the rest. σ² has an inverse χ²
prior where standard errors are given, else 1/σ². The extra variance of outliers and the error of R0 are
independent. σ, R0 and A are integrated analytically (Student's t, 0 ≤ R0 ≤ A ≤ 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag
from scipy.special import gammaln, ndtr, ndtri, stdtr, stdtrit

Array = NDArray[np.float64]

CORRELATIONS = (0.4, 0.7, 0.85, 0.93, 0.97)  # ρ, of points a median gap apart
FEW_CORRELATIONS = CORRELATIONS[1::2]  # more of them do not change which law is likelier
CORRELATED_SHARE = 0.98  # of the variance, where there is correlation
NOISE_PRIOR_POINTS = 3.0  # the reported standard errors count as much as this many points
MIN_SD = 1e-3  # of an evaluation: more precise ones are taken for as precise as this
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
    flops: Array | None = None  # (n,) until each point; None: not known of all

    def start_error(self, overdispersion: float) -> float:
        """R0's error in the units of `sd`: a reported one is not scaled by how far the points scatter."""
        if self.sd_known:
            return self.R0_se / max(1.0, overdispersion)
        return self.R0_se / overdispersion if self.R0_se_reported else self.R0_se

    @property
    def exact(self) -> bool:
        """True if R0 is known without an error."""
        return self.R0 is not None and self.R0_se == 0

    @property
    def gap(self) -> float:
        """The median distance of two evaluations: ρ is the correlation of errors this far apart."""
        gaps = np.diff(self.compute)
        return float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 1.0

    @property
    def lowest_A(self) -> float:
        """The lowest ceiling: an exact R0, or 0."""
        return float(self.R0 or 0) if self.exact else 0.0

    def prepend_R0(self, x: Array, start: float) -> Array:
        """x, (n,), after the entry `start` for R0, if that is measured."""
        return x if self.exact or self.R0 is None else np.concatenate([[start], x])


@dataclass(frozen=True, slots=True)
class Noise:
    """One correlation of the noise."""

    whiten: Array  # W with W Σ Wᵀ = 1
    log_prior: float  # log(prior / √|Σ|)

    def plus(self, direction: Array) -> Noise:
        """Noise with covariance Σ + h hᵀ: the curve has a further term x h, x ~ N(0, 1), in units of σ."""
        u = self.whiten @ direction
        q = float(u @ u)
        shrink = (1 - 1 / math.sqrt(1 + q)) / max(q, 1e-300)
        whiten = self.whiten - shrink * np.outer(u, u @ self.whiten)
        return Noise(whiten, self.log_prior - 0.5 * math.log1p(q))


@dataclass(frozen=True, slots=True, eq=False)
class LinearFit:
    """Least squares of R0 and A for every (B, C_mid): (cells,) each."""

    R0: Array
    A: Array
    sse: Array  # whitened
    determinant: Array  # of the normal equations' matrix
    A_variance: Array  # over σ²
    R0_variance: Array  # over σ², for a given A
    R0_slope: Array  # dR0/dA at the least squares for a given A
    parameters: int  # of R0 and A, those that are estimated


@dataclass(frozen=True, slots=True, eq=False)
class GridCells:
    """The posterior of R0 and A on a grid of (B, C_mid) under one noise model."""

    fit: LinearFit  # its R0 and A are the means
    log_weight: Array  # (cells,)
    # (7, cells): R0 at the mean of A, that mean, A's sd, the quantiles of A's bounds under its unbounded t
    # distribution, dR0/dA, and R0's sd for a given A
    ends: Array
    dof: float


def noise_models(data: Data, weight: Array, correlations: Sequence[float] = CORRELATIONS) -> list[Noise]:
    """One without correlation, then one for each.

    The extra variance of an outlier is independent of the other points. So is the error of a measured R0: it
    is an evaluation of a model that has not been trained.
    """
    sd = data.sd
    outlier_variance = np.diag(sd**2 * (1 / weight - 1))
    gap = np.abs(np.subtract.outer(data.compute, data.compute)) / data.gap
    models = []
    for rho in (0.0, *correlations):
        correlation = np.eye(len(sd))
        if rho:
            correlation = CORRELATED_SHARE * rho**gap + (1 - CORRELATED_SHARE) * correlation
        factor = np.linalg.cholesky(correlation * np.outer(sd, sd) + outlier_variance)
        inverse = np.linalg.inv(factor)
        if not data.exact and data.R0 is not None:
            inverse = block_diag(1 / data.R0_se, inverse)
        prior = 0.5 if rho == 0 else 0.5 / len(correlations)
        models.append(Noise(inverse, math.log(prior) - float(np.log(np.diag(factor)).sum())))
    return models


def linear_fit(data: Data, whiten: Array, s: Array, ceiling: float | None = None) -> LinearFit:
    """Weighted least squares of R0 and A for every row of s, (cells, n), in closed form.

    With the whitened columns x_R0 = W (1 − s) and x_A = W s and the whitened rewards y = W R, the normal
    equations are

        [x_R0·x_R0  x_R0·x_A] [R0]   [x_R0·y]
        [x_R0·x_A   x_A·x_A ] [A ] = [x_A·y ]        SSE = y·y − R0 (x_R0·y) − A (x_A·y)

    If R0 is exact, or A is given as `ceiling`, its row is that of the unit matrix with the value at the
    right, and y is without its part.
    """
    free_R0, free_A = not data.exact, ceiling is None
    x_A = s @ whiten.T
    x_R0 = whiten.sum(1) - x_A
    y = whiten @ data.prepend_R0(data.reward, data.R0 or 0.0)
    if not free_R0:
        y = y - data.lowest_A * x_R0
    if ceiling is not None:
        y = y - ceiling * x_A
    cells, both = np.ones(len(s)), free_R0 and free_A
    R0_R0 = np.maximum((x_R0 * x_R0).sum(1), 1e-300) if free_R0 else cells
    A_A = np.maximum((x_A * x_A).sum(1), 1e-300) if free_A else cells
    R0_A = (x_R0 * x_A).sum(1) if both else 0 * cells
    R0_y = (x_R0 * y).sum(1) if free_R0 else data.lowest_A * cells
    A_y = (x_A * y).sum(1) if ceiling is None else ceiling * cells
    determinant = R0_R0 * A_A - R0_A * R0_A
    if both:  # the columns can be alike
        determinant = np.maximum(determinant, 1e-12 * R0_R0 * A_A + 1e-300)
    R0, A = (A_A * R0_y - R0_A * A_y) / determinant, (R0_R0 * A_y - R0_A * R0_y) / determinant
    return LinearFit(
        R0, A, (y * y).sum(-1) - free_R0 * R0 * R0_y - free_A * A * A_y, determinant,
        A_variance=free_A * R0_R0 / determinant, R0_variance=free_R0 / R0_R0, R0_slope=-R0_A / R0_R0,
        parameters=free_R0 + free_A,
    )  # fmt: skip


def marginal(data: Data, noise: Noise, s: Array, ceiling: float | None = None) -> GridCells:
    """The posterior of R0 and A for every row of s, and the row's weight, the marginal likelihood.

    With σ² integrated out, A has a t distribution with ν degrees of freedom and the weight is

        prior |Σ|^−½ |XᵀX|^−½ (ν₀ + SSE)^(−ν/2) P(A within bounds) P(0 ≤ R0 ≤ A),    ν = ν₀ + n − parameters

    times π^(parameters/2) Γ(ν/2) and the density of A's prior, by which a given A, `ceiling`, compares with a
    free one. ν₀ is
    NOISE_PRIOR_POINTS if the standard errors are reported, else 0. Without the last factor, a cell in which
    the data do not determine R0 would gain from all the R0 out of bounds.
    """
    fit = linear_fit(data, noise.whiten, s, ceiling)
    prior_points = NOISE_PRIOR_POINTS if data.sd_known else 0.0
    dof = len(noise.whiten) - fit.parameters + prior_points
    total = prior_points + np.maximum(fit.sse, 1e-12)
    A_sd, R0_sd = np.sqrt(total / dof * fit.A_variance), np.sqrt(total / dof * fit.R0_variance)
    log_weight = noise.log_prior - 0.5 * np.log(fit.determinant) - 0.5 * dof * np.log(total)
    log_weight += 0.5 * fit.parameters * math.log(math.pi) + float(gammaln(dof / 2))
    low, high = np.zeros(len(s)), np.ones(len(s))
    if ceiling is None:  # A's prior density: 1 / (1 − R0), or 2 for R0 and A together if R0 is unknown
        log_weight += math.log(2) if data.R0 is None else -math.log(max(1 - data.R0, 1e-6))
        low, high = (stdtr(dof, np.clip((x - fit.A) / A_sd, -1e8, 1e8)) for x in (data.lowest_A, 1.0))
    log_weight = log_weight + np.log(np.maximum(high - low, 1e-300))
    ends = np.stack([fit.R0, fit.A, A_sd, low, high, fit.R0_slope, R0_sd])
    if not data.exact:
        log_weight = log_weight + np.log(np.maximum(R0_within(ends).mean(-1), 1e-300))
    return GridCells(fit, log_weight, ends, dof)


def R0_within(ends: Array) -> Array:
    """(n, STRATA): probability that 0 ≤ R0 ≤ A in each of the equally likely parts of A's distribution."""
    R0, A, A_sd, low, high, slope, R0_sd = ends[:, :, None]
    middle = (np.arange(STRATA) + 0.5) / STRATA
    z = ndtri(np.clip(low + (high - low) * middle, 1e-12, 1 - 1e-12))
    A_there = np.where(A_sd > 1, middle, A + A_sd * z)
    mean, sd = R0 + slope * (A_there - A), np.maximum(R0_sd, 1e-12)
    return np.maximum(ndtr((A_there - mean) / sd) - ndtr(-mean / sd), 0)


def draw_ends(data: Data, ends: Array, dof: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Draws of R0 and A, (n,) each, of cells with these `ends`, (7, n)."""
    R0_mean, A_mean, A_sd, low, high, slope, R0_sd = ends
    quantile = rng.random(len(A_mean))  # of A's distribution within its bounds
    if not data.exact:
        parts = R0_within(ends).cumsum(-1)
        part = (parts < (rng.random(len(A_mean)) * parts[:, -1])[:, None]).sum(-1)
        quantile = (np.minimum(part, STRATA - 1) + quantile) / STRATA
    t = stdtrit(dof, np.clip(low + (high - low) * quantile, 1e-12, 1 - 1e-12))
    floor = data.lowest_A
    # A quantile of so wide a t distribution would lose its digits; within its bounds it is uniform.
    A = np.where(A_sd > 1e4, floor + (1 - floor) * quantile, np.clip(A_mean + A_sd * t, floor, 1))
    R0, sd = R0_mean + slope * (A - A_mean), np.maximum(R0_sd, 1e-12)
    if not data.exact:
        first, last = ndtr(-R0 / sd), ndtr((A - R0) / sd)
        R0 = R0 + sd * ndtri(np.clip(first + (last - first) * rng.random(len(A)), 1e-12, 1 - 1e-12))
    return np.clip(R0, 0, A), A
