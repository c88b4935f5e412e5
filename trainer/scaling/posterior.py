"""What the data tell of the law's four numbers: draws from their posterior, the noise integrated out.

For given B and C_mid the law is linear in R0 and A. With s = rise(C; B, C_mid) and w the reward's errors,

    R = R0 (1 − s) + A s + σ w,    w ~ N(0, D K_ρ D),    D = diag(standard errors),    σ² ~ inverse χ²

K_ρ[i, j] = ρ^|i − j|: a run's wanderings last longer than the distance of two evaluations, and whoever
takes neighbouring points for independent gets intervals far too narrow. ρ = 0 has half of the prior, the
values of CORRELATIONS share the rest. σ, R0 and A are integrated by hand (Student's t, 0 ≤ R0 ≤ A ≤ 1),
B and C_mid on a logarithmic grid with a flat prior, which closes in on where the posterior is. Outliers
lose their weight first. How often the intervals cover: docs/validation.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from trainer.scaling.sigmoid import Sigmoid, compute_for, rise

Array = NDArray[np.float64]

B_RANGE = (0.3, 20.0)
REACH = 30.0  # C_mid is sought up to this multiple of the largest compute
CORRELATIONS = (0.4, 0.7, 0.85, 0.93, 0.97)  # of neighbouring points
CORRELATED = 0.98  # share of the variance that is, where any is
TOLD_WEIGHT = 3.0  # told standard errors count for as much as this many points
OUTLIER = 3.0  # standard deviations from which a point loses weight
ROBUST_ROUNDS, HUBER_ROUNDS = 6, 3
ZOOMS = ((17, 41, 12.0), (17, 41, 9.0), (25, 41, 7.0))  # grid over B × C_mid; nats below the peak to keep
NO_ROOM = 1e-6  # a given R0 so near to 1 leaves no ceiling to seek
DRAWS = 4000
VAGUE = 1.0  # sd of A from which it is near enough to uniform within its bounds to tell what R0 that allows
NOTHING = 1e4  # sd of A from which it is uniform within its bounds, and a quantile has too few digits to tell
STRATA = 16  # equally likely parts of A's distribution, for R0 within its bounds


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Points to fit, and what is known of R0: exact (`R0_se` 0), measured, or nothing (`R0` None)."""

    compute: Array  # (n,) > 0, ascending
    reward: Array  # (n,)
    sd: Array  # (n,) standard errors, or any equal numbers where they are not known
    sd_known: bool
    R0: float | None
    R0_se: float
    R0_se_told: bool = True  # else it is that of the surest point, and as little known as `sd` is

    def start_error(self, scatter: float) -> float:
        """R0's error, as all are scaled by the scatter: one told is of an untrained model and stays."""
        if self.sd_known:
            return self.R0_se / max(1.0, scatter)
        return self.R0_se / scatter if self.R0_se_told else self.R0_se

    @property
    def exact(self) -> bool:
        """Whether R0 is a given number."""
        return self.R0 is not None and self.R0_se == 0


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Equally likely laws; (n,) each."""

    R0: Array
    A: Array
    B: Array
    C_mid: Array

    def reward(self, compute: ArrayLike) -> Array:
        """R(C) under each law: (n,) for a number, (n, m) for m of them."""
        c = np.asarray(compute, np.float64)
        lift = (slice(None),) + (None,) * c.ndim
        R0, A, B, C_mid = (x[lift] for x in (self.R0, self.A, self.B, self.C_mid))
        result: Array = R0 + (A - R0) * rise(c, B, C_mid)
        return result

    def compute_for(self, reward: float) -> Array:
        """C at which each law reaches `reward`: 0 up to R0, infinite from A on."""
        return compute_for(reward, self.R0, self.A, self.B, self.C_mid)


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """The most likely law, draws, and what the noise is like."""

    law: Sigmoid
    draws: Draws
    wander: float  # probability that neighbouring points err together
    correlation: float  # of them, if they do: its mean over CORRELATIONS
    outliers: int


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """A grid of (B, C_mid) under one noise model, flat: (cells,) each."""

    log_weight: Array
    R0: Array  # means
    A: Array
    A_sd: Array
    A_low: Array  # quantiles of A's bounds under its unbounded t
    A_high: Array
    R0_tilt: Array  # dR0/dA along the ridge
    R0_sd: Array  # of R0 for a given A
    freedom: float
    misfit: Array  # weighted sum of squares


def posterior(data: Data, draws: int = DRAWS, seed: int = 0) -> Posterior:
    """The same draws for the same data and seed."""
    weight, scatter = robust(data)
    data = replace(data, R0_se=data.start_error(scatter))
    noises = _noise_models(data, weight)
    box = full_box(data)
    for b_cells, c_cells, keep in ZOOMS:
        b, c_mid = np.geomspace(*box[:2], b_cells), np.geomspace(*box[2:], c_cells)
        won = _won(data, b, c_mid)
        grids = [_cells(data, whiten, prior, won) for whiten, prior in noises]
        log_weight = np.stack([g.log_weight for g in grids])
        peak = log_weight.max()
        inside = (log_weight > peak - keep).any(0).reshape(b_cells, c_cells)
        box = (*_reach(b, inside.any(1)), *_reach(c_mid, inside.any(0)))
    p = np.exp(log_weight - peak)
    law = _most_likely(data, noises, grids, p, b, c_mid)
    wander = float(1 - p[0].sum() / p.sum())
    correlation = float(p[1:].sum(1) @ CORRELATIONS / max(p[1:].sum(), 1e-300))
    drawn = _draw(data, grids, p, b, c_mid, draws, seed)
    return Posterior(law, drawn, wander, correlation, int((weight < 0.25).sum()))


def full_box(data: Data) -> tuple[float, float, float, float]:
    """Where B and C_mid are sought."""
    return (*B_RANGE, float(data.compute[0]) / 3, float(data.compute[-1]) * REACH)


def robust(data: Data) -> tuple[Array, float]:
    """Weights (n,) in (0, 1], Huber's first, later ones redescending; and the scatter, in sd."""
    weight = np.ones(len(data.compute))
    box = full_box(data)
    b, c_mid = np.geomspace(*box[:2], 25), np.geomspace(*box[2:], 61)
    won = _won(data, b, c_mid)
    for i in range(ROBUST_ROUNDS):
        whiten = np.diag(_with_start(data, np.sqrt(weight) / data.sd, 1 / max(data.R0_se, 1e-9)))
        cells = _cells(data, whiten, 0.0, won)
        allowed = (cells.A <= 1) & (cells.R0 >= 0)
        k = (
            int(np.where(allowed, cells.misfit, np.inf).argmin())
            if allowed.any()
            else int(cells.misfit.argmin())
        )
        law = Sigmoid(float(cells.R0[k]), min(float(cells.A[k]), 1.0), b[k // 61], c_mid[k % 61])
        z = np.abs(data.reward - law.reward(data.compute)) / data.sd
        scale = max(float(np.median(z)) * 1.4826, 1.0 if data.sd_known else 1e-6)
        weight = np.minimum(1, (OUTLIER * scale / np.maximum(z, 1e-9)) ** (1 if i < HUBER_ROUNDS else 4))
        if i == 0 and (weight == 1).all():  # as it was: every round is like this one
            break
    return weight, scale


def _noise_models(data: Data, weight: Array) -> list[tuple[Array, float]]:
    """(matrix W with W Σ Wᵀ = 1, log(prior / √|Σ|)) for each correlation; the first has none.

    What an outlier errs beyond the others is its own. The measured R0 is an evaluation of a model that has
    not been trained: it wanders with no other.
    """
    sd = data.sd
    alone = np.diag(sd**2 * (1 / weight - 1))
    gap = np.abs(np.subtract.outer(np.arange(len(sd)), np.arange(len(sd))))
    models = []
    for rho in (0.0, *CORRELATIONS):
        together = CORRELATED * rho**gap + (1 - CORRELATED) * np.eye(len(sd)) if rho else np.eye(len(sd))
        factor = np.linalg.cholesky(together * np.outer(sd, sd) + alone)
        inverse = np.linalg.inv(factor)
        if not data.exact and data.R0 is not None:
            inverse = np.block([[np.array([[1 / data.R0_se]]), np.zeros((1, len(sd)))],
                                [np.zeros((len(sd), 1)), inverse]])  # fmt: skip
        prior = 0.5 if rho == 0 else 0.5 / len(CORRELATIONS)
        models.append((inverse, math.log(prior) - float(np.log(np.diag(factor)).sum())))
    return models


def _with_start(data: Data, x: Array, start: float) -> Array:
    """x with the entry of a measured R0 before it."""
    return x if data.exact or data.R0 is None else np.concatenate([[start], x])


def _won(data: Data, b: Array, c_mid: Array) -> Array:
    """(cells, n): s of every cell."""
    s = rise(_with_start(data, data.compute, 0.0), b[:, None, None], c_mid[None, :, None])
    return s.reshape(-1, s.shape[-1])


def _cells(data: Data, whiten: Array, log_prior: float, s: Array) -> _Cells:
    """Everything linear, in closed form, for every cell of s."""
    ws = s @ whiten.T
    w1 = whiten.sum(1)
    y = whiten @ _with_start(data, data.reward, data.R0 or 0.0)
    told = TOLD_WEIGHT if data.sd_known else 0.0
    if data.exact:
        R0 = np.full(len(ws), float(data.R0 or 0))
        residual = y - R0[0] * (w1 - ws)
        q = np.maximum((ws * ws).sum(1), 1e-300)
        A = (ws * residual).sum(1) / q
        misfit = (residual * residual).sum(1) - A * A * q
        determinant, A_variance, R0_variance, tilt = q, 1 / q, 0 * q, 0 * q
    else:
        w0 = w1 - ws
        u, v, q = (w0 * w0).sum(1), (w0 * ws).sum(1), (ws * ws).sum(1)
        g, h = w0 @ y, ws @ y
        u = np.maximum(u, 1e-300)
        determinant = np.maximum(u * q - v * v, 1e-12 * u * q + 1e-300)  # two columns alike: nothing known
        R0, A = (q * g - v * h) / determinant, (u * h - v * g) / determinant
        misfit = y @ y - R0 * g - A * h
        A_variance, R0_variance, tilt = u / determinant, 1 / u, -v / u
    freedom = len(y) - (1 if data.exact else 2) + told
    spread = told + np.maximum(misfit, 1e-12)
    A_sd = np.sqrt(spread / freedom * A_variance)
    floor = R0 if data.exact else 0.0
    low, high = (stdtr(freedom, np.clip((x - A) / A_sd, -1e8, 1e8)) for x in (floor, 1.0))
    log_weight = log_prior - 0.5 * np.log(determinant) - 0.5 * freedom * np.log(spread)
    log_weight += np.log(np.maximum(high - low, 1e-300))
    R0_sd = np.sqrt(spread / freedom * R0_variance)
    cells = _Cells(log_weight, R0, A, A_sd, low, high, tilt, R0_sd, freedom, misfit)
    if not data.exact:  # else a cell that tells nothing of R0 would win by all the R0 beyond its bounds
        log_weight += np.log(np.maximum(_R0_within(R0, A, A_sd, low, high, tilt, R0_sd).mean(-1), 1e-300))
    return cells


def _R0_within(
    R0: Array, A: Array, A_sd: Array, A_low: Array, A_high: Array, R0_tilt: Array, R0_sd: Array
) -> Array:
    """(n, STRATA): probability that 0 ≤ R0 ≤ A in each of the equally likely parts of A's distribution."""
    middle = (np.arange(STRATA) + 0.5) / STRATA
    z = ndtri(np.clip(A_low[:, None] + (A_high - A_low)[:, None] * middle, 1e-12, 1 - 1e-12))
    at = np.where(A_sd[:, None] > VAGUE, middle, A[:, None] + A_sd[:, None] * z)  # A there
    mean, sd = R0[:, None] + R0_tilt[:, None] * (at - A[:, None]), np.maximum(R0_sd, 1e-12)[:, None]
    result: Array = np.maximum(ndtr((at - mean) / sd) - ndtr(-mean / sd), 0)
    return result


def _reach(axis: Array, hit: NDArray[np.bool_]) -> tuple[float, float]:
    at = np.flatnonzero(hit)
    return float(axis[max(at[0] - 1, 0)]), float(axis[min(at[-1] + 1, len(axis) - 1)])


def _most_likely(
    data: Data, noises: list[tuple[Array, float]], grids: list[_Cells], p: Array, b: Array, c_mid: Array
) -> Sigmoid:
    """The likeliest (B, C_mid) of the grid, and from there the least squares under its likeliest noise."""
    k = int(p.sum(0).argmax())
    model = int(p[:, k].argmax())
    grid, whiten = grids[model], noises[model][0]
    floor = float(data.R0 or 0) if data.exact else 0.0
    A = float(np.clip(grid.A[k], floor, 1))
    R0 = float(np.clip(grid.R0[k] + grid.R0_tilt[k] * (A - grid.A[k]), 0, A))
    if 1 - floor < NO_ROOM:
        return Sigmoid(floor, 1.0, float(b[k // len(c_mid)]), float(c_mid[k % len(c_mid)]))
    c, y = _with_start(data, data.compute, 0.0), whiten @ _with_start(data, data.reward, data.R0 or 0.0)

    def law(x: Array) -> Sigmoid:
        R0 = floor if data.exact else float(x[3])
        return Sigmoid(R0, float(x[2]), math.exp(x[0]), math.exp(x[1]))

    box = full_box(data)
    low = [math.log(box[0]), math.log(box[2]), floor, 0.0]
    high = [math.log(box[1]), math.log(box[3]), 1.0, 1.0]
    start = [math.log(b[k // len(c_mid)]), math.log(c_mid[k % len(c_mid)]), A, R0]
    n = 3 if data.exact else 4
    inside = np.clip(start, np.add(low, 1e-9), np.subtract(high, 1e-9))[:n]
    found = least_squares(
        lambda x: whiten @ law(x).reward(c) - y, inside, bounds=(low[:n], high[:n]), x_scale="jac"
    )
    best = law(found.x)
    if best.R0 <= best.A:
        return best
    w1 = whiten.sum(1)  # no rise: the level of least squares
    level = float(np.clip((w1 @ y) / (w1 @ w1), 0, 1))
    return Sigmoid(level, level, best.B, best.C_mid)


def _draw(data: Data, grids: list[_Cells], p: Array, b: Array, c_mid: Array, draws: int, seed: int) -> Draws:
    rng = np.random.default_rng(seed)
    total = p.ravel().cumsum()
    k = np.searchsorted(total / total[-1], (np.arange(draws) + 0.5) / draws)
    model, cell = np.divmod(rng.permutation(np.minimum(k, p.size - 1)), p.shape[1])

    def of(name: str) -> Array:
        return np.stack([getattr(g, name) for g in grids])[model, cell]

    low, high, A_mean, A_sd = of("A_low"), of("A_high"), of("A"), of("A_sd")
    share = rng.random(draws)  # of A's distribution within its bounds
    if not data.exact:
        parts = _R0_within(of("R0"), A_mean, A_sd, low, high, of("R0_tilt"), of("R0_sd")).cumsum(-1)
        part = (parts < (rng.random(draws) * parts[:, -1])[:, None]).sum(-1)
        share = (np.minimum(part, STRATA - 1) + share) / STRATA
    t = stdtrit(grids[0].freedom, np.clip(low + (high - low) * share, 1e-12, 1 - 1e-12))
    floor = float(data.R0 or 0) if data.exact else 0.0
    A = np.where(A_sd > NOTHING, floor + (1 - floor) * share, np.clip(A_mean + A_sd * t, floor, 1))
    R0, sd = of("R0") + of("R0_tilt") * (A - A_mean), np.maximum(of("R0_sd"), 1e-12)
    if not data.exact:
        first, last = ndtr(-R0 / sd), ndtr((A - R0) / sd)
        R0 = R0 + sd * ndtri(np.clip(first + (last - first) * rng.random(draws), 1e-12, 1 - 1e-12))
    within = rng.random((2, draws)) - 0.5  # a cell is as wide as a step of the grid
    B = b[cell // len(c_mid)] * (b[1] / b[0]) ** within[0]
    C_mid = c_mid[cell % len(c_mid)] * (c_mid[1] / c_mid[0]) ** within[1]
    return Draws(np.clip(R0, 0, A), A, B, C_mid)
