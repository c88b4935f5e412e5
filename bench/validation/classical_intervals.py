"""Two classical intervals of the parameters, for comparison with posterior.py: profile and bootstrap.

Both use least squares and treat R0 as `fit` does: exact if given, a point at compute 0 if measured, else
anything from 0 to A. Outliers are down-weighted first, as there. Errors are assumed to be white (except with
blocks): where they are correlated, these intervals are too narrow, and those of the posterior should be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import f as f_distribution

from bench.validation.least_squares import Corners, Moments, best_ends, least_squares_of, moments, triangle
from trainer.config import ConfigError
from trainer.scaling.curve.fit import MIN_POINTS, Estimate, estimate
from trainer.scaling.curve.points import averaged, checked
from trainer.scaling.curve.posterior import Draws, full_box, robust
from trainer.scaling.curve.sigmoid import Curve, Sigmoid, fraction_gained

Array = NDArray[np.float64]
Resampling = Literal["residual", "parametric", "block"]

GRID = (21, 41)  # where log B and log C_mid are sought first
COARSE = (13, 25)  # the same for each resample
FIRST_STEP = {"A": 0.004, "B": 0.04, "C_mid": 0.04}  # towards an end of an interval; of logarithms but for A
ROUNDS = 60  # damped Gauss-Newton steps of a resample at most
NUDGE = 1e-4  # for slopes in log B and log C_mid, by central differences
STILL = 1e-11  # share of χ² below which a step is the last


@dataclass(frozen=True, slots=True)
class Intervals:
    """The least-squares law and intervals of its numbers."""

    method: str
    law: Sigmoid
    A: Estimate
    B: Estimate
    C_mid: Estimate
    confidence: float
    draws: Draws | None = field(default=None, repr=False, compare=False)  # the refits of a bootstrap


@dataclass(frozen=True, slots=True, eq=False)
class _IntervalProblem:
    """What is fitted: the points, and before them a measured R0 as one at compute 0."""

    R0: float | None  # exact, else fitted
    box: Array  # ends of log B and log C_mid: (2, 2), low and high
    c: Array  # (n,)
    y: Array
    sd: Array

    @property
    def freedom(self) -> int:
        """Points less parameters."""
        return len(self.y) - (4 if self.R0 is None else 3)

    def axes(self, cells: tuple[int, int]) -> list[Array]:
        """Values of log B and log C_mid."""
        return [np.linspace(self.box[0, i], self.box[1, i], n) for i, n in enumerate(cells)]

    def corners(self, A: float | None = None) -> Corners:
        """Of (R0, A)."""
        if self.R0 is None:
            return triangle(0.0, 1.0) if A is None else ((0.0, A), (A, A))
        return ((self.R0, self.R0), (self.R0, 1.0)) if A is None else ((self.R0, A),)

    def best(
        self, A: float | None = None, log_B: float | None = None, log_C_mid: float | None = None
    ) -> tuple[Sigmoid, float]:
        """The law of least squares, with what is given held, and its χ²."""
        held = (log_B, log_C_mid)
        sought = [i for i in (0, 1) if held[i] is None]

        def both(x: tuple[Any, ...]) -> list[Any]:
            at: list[Any] = list(held)
            for i, value in zip(sought, x, strict=True):
                at[i] = value
            return at

        def won(c: Array, *x: Array) -> Array:
            return fraction_gained(c, *(np.exp(value) for value in both(x)))

        axes = self.axes(GRID)
        starts = 4 if A is None and len(sought) == 2 else 2
        found = least_squares_of(
            self.c, self.y, self.sd, won, [axes[i] for i in sought], self.corners(A), starts
        )
        B, C_mid = np.exp(both(found.parameters))
        return Sigmoid(found.low, found.high, float(B), float(C_mid)), found.chi2


def _problem(curve: Curve) -> _IntervalProblem:
    data = averaged(checked(curve))
    if len(data.compute) < MIN_POINTS:
        raise ConfigError(
            f"{curve.name}: {len(data.compute)} points beyond R0; for an interval, {MIN_POINTS} or more"
        )
    box = np.log(full_box(data)).reshape(2, 2).T
    weight, scatter = robust(data)
    c, y, sd = data.compute, data.reward, data.sd / np.sqrt(weight)
    if data.R0 is None or data.exact:
        return _IntervalProblem(data.R0, box, c, y, sd)
    start = ((0.0, c), (data.R0, y), (data.start_error(scatter), sd))
    return _IntervalProblem(None, box, *(np.r_[a, b].astype(np.float64) for a, b in start))


def profile(curve: Curve, confidence: float = 0.9) -> Intervals:
    """Profile likelihood: a value is within if the best law with it held has χ² ≤ χ²_min (1 + F/(n − p)).

    F is the quantile of F(1, n − p): white Gaussian errors, their size from the scatter. An end beyond the
    law's bounds, or beyond where B and C_mid are sought, is the bound.
    """
    problem = _problem(curve)
    law, chi2 = problem.best()
    F = float(f_distribution.ppf(confidence, 1, problem.freedom))
    most = chi2 * (1 + F / problem.freedom) + 1e-12
    (low_B, low_C), (high_B, high_C) = problem.box.tolist()
    A = _interval(lambda x: problem.best(A=x)[1] - most, law.A, problem.R0 or 0.0, 1.0, FIRST_STEP["A"])
    log_B, log_C = float(np.log(law.B)), float(np.log(law.C_mid))
    B = _interval(lambda x: problem.best(log_B=x)[1] - most, log_B, low_B, high_B, FIRST_STEP["B"])
    C = _interval(lambda x: problem.best(log_C_mid=x)[1] - most, log_C, low_C, high_C, FIRST_STEP["C_mid"])
    B, C = (Estimate(*np.exp([e.value, e.low, e.high]).tolist()) for e in (B, C))
    return Intervals("profile likelihood", law, A, B, C, confidence)


def _interval(over: Callable[[float], float], at: float, low: float, high: float, step: float) -> Estimate:
    """Where `over` crosses 0 on both sides of `at`, or the bound."""

    def end(bound: float) -> float:
        inside, stride = at, step if bound > at else -step
        while inside != bound:
            x = min(inside + stride, bound) if stride > 0 else max(inside + stride, bound)
            if over(x) > 0:
                return float(brentq(over, inside, x, xtol=1e-6))
            inside, stride = x, 1.7 * stride
        return bound

    return Estimate(at, end(low), end(high))


def bootstrap(
    curve: Curve,
    resamples: int = 1000,
    resampling: Resampling = "residual",
    confidence: float = 0.9,
    seed: int = 0,
) -> Intervals:
    """Percentiles of the law refitted to resamples: the law plus errors drawn anew.

    residual    its own residuals, each as likely anywhere: white errors of any distribution
    parametric  Gaussian: white errors in proportion to the reported sizes
    block       runs of √n neighbouring residuals: errors correlated over a shorter distance

    A measured R0 errs as a Gaussian in all of them.
    """
    if resampling not in get_args(Resampling):
        raise ConfigError(f"bootstrap: {resampling!r}; expected one of {', '.join(get_args(Resampling))}")
    if resamples < 100:
        raise ConfigError(f"bootstrap: {resamples} refits are too few for quantiles; expected 100 or more")
    problem = _problem(curve)
    law, _ = problem.best()
    fitted = law.reward(problem.c)
    errors = _errors((problem.y - fitted) / problem.sd, problem, resamples, resampling, seed)
    draws = refit(problem, fitted + problem.sd * errors)
    A, B, C_mid = (estimate(getattr(law, k), getattr(draws, k), confidence) for k in ("A", "B", "C_mid"))
    return Intervals(f"bootstrap, {resampling}", law, A, B, C_mid, confidence, draws)


def _errors(z: Array, problem: _IntervalProblem, m: int, resampling: Resampling, seed: int) -> Array:
    """(m, n) errors in standard errors, from the residuals z."""
    rng = np.random.default_rng(seed)
    scatter = float(np.sqrt((z * z).sum() / problem.freedom))
    errors = scatter * rng.standard_normal((m, len(z)))
    after = int(problem.c[0] == 0)  # the measured R0 is no point of the run
    pool = z[after:] * (len(z) / problem.freedom) ** 0.5
    n = len(pool)
    if resampling == "residual":
        errors[:, after:] = pool[rng.integers(n, size=(m, n))]
    elif resampling == "block":
        length = round(n**0.5)
        starts = rng.integers(n, size=(m, -(-n // length)))
        at = (starts[:, :, None] + np.arange(length)).reshape(m, -1)[:, :n]
        errors[:, after:] = pool[at % n]
    return errors


def refit(problem: _IntervalProblem, series: Array) -> Draws:
    """The least squares of each of m series (m, n): damped Gauss-Newton from a grid's best, all at once.

    R0 and A are solved for within every step, so that it goes in log B and log C_mid alone.
    """
    log_c = np.log(problem.c, out=np.full(len(problem.c), -np.inf), where=problem.c > 0)
    corners, (low, high) = problem.corners(), problem.box

    def law(x: Array, y: Array) -> tuple[Array, Array, Array]:
        """Residuals (m, n) in standard errors, R0 and A, for log B and log C_mid in x (m, 2)."""
        s = expit(np.exp(x[:, :1]) * (log_c - x[:, 1:]))
        R0, A, _ = best_ends(moments(s, y, problem.sd), corners)
        return (R0[:, None] + (A - R0)[:, None] * s - y) / problem.sd, R0, A

    found = _grid_best(problem, log_c, series)
    at, x, y, damping = np.arange(len(found)), found.copy(), series, np.full(len(found), 1e-3)
    error = law(x, y)[0]
    for _ in range(ROUNDS):
        slopes = [(law(x + d, y)[0] - law(x - d, y)[0]) / (2 * NUDGE) for d in NUDGE * np.eye(2)]
        new = np.clip(x + _step(x, slopes, error, damping, low, high), low, high)
        new_error, chi2 = law(new, y)[0], (error**2).sum(1)
        gain = chi2 - (new_error**2).sum(1)
        better = gain > 0
        x, error = np.where(better[:, None], new, x), np.where(better[:, None], new_error, error)
        damping = np.where(better, damping / 5, damping * 5)
        found[at] = x
        on = ~(better & (gain < STILL * chi2)) & (damping < 1e8)
        at, x, y, error, damping = at[on], x[on], y[on], error[on], damping[on]
        if not len(at):
            break
    _, R0, A = law(found, series)
    return Draws(R0, A, *np.exp(found.T))


def _grid_best(problem: _IntervalProblem, log_c: Array, series: Array) -> Array:
    """(m, 2) log B and log C_mid of the best cell for each series."""
    cells = np.stack([x.ravel() for x in np.meshgrid(*problem.axes(COARSE), indexing="ij")], 1)
    s = expit(np.exp(cells[:, :1]) * (log_c - cells[:, 1:]))
    one = moments(s, series[0], problem.sd)
    w2y = (series / problem.sd**2).T
    all_ = Moments(one.u[:, None], one.v[:, None], one.q[:, None], (1 - s) @ w2y, s @ w2y)
    chosen: Array = cells[best_ends(all_, problem.corners())[2].argmax(0)]
    return chosen


def _step(
    x: Array, slopes: list[Array], error: Array, damping: Array, low: Array, high: Array
) -> Array:  # (m, 2)
    """Levenberg and Marquardt's, along the bounds where x lies on one and would leave."""
    g = np.stack([(slope * error).sum(1) for slope in slopes], 1)
    free = ~((x <= low) & (g > 0) | (x >= high) & (g < 0))
    g = np.where(free, g, 0.0)
    bend = np.stack([(slope * slope).sum(1) for slope in slopes], 1) * (1 + damping[:, None]) + 1e-300
    cross = np.where(free.all(1), (slopes[0] * slopes[1]).sum(1), 0.0)
    determinant = np.maximum(bend[:, 0] * bend[:, 1] - cross**2, 1e-300)
    return (
        np.stack([bend[:, 1] * g[:, 0] - cross * g[:, 1], bend[:, 0] * g[:, 1] - cross * g[:, 0]], 1)
        / -determinant[:, None]
    )
