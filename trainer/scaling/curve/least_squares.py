"""The sigmoid compared with other families of curves: how well each describes and predicts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import minimum_filter
from scipy.optimize import least_squares
from scipy.special import expit

from trainer.config import ConfigError
from trainer.scaling.curve.fit import MIN_POINTS
from trainer.scaling.curve.marginal import Data
from trainer.scaling.curve.points import averaged, checked
from trainer.scaling.curve.posterior import full_box
from trainer.scaling.curve.sigmoid import Curve, Sigmoid, fraction_gained

Array = NDArray[np.float64]

POWER_RANGE = (0.005, 10.0)  # exponents of the power laws
LOWEST_START = -10.0  # a power law may be this far below 0 at the first point
ROUNDS, STARTS = 8, 4  # of the search for the least squares


@dataclass(frozen=True, slots=True)
class Exponential:
    """R(C) = A − (A − R0) exp(−C / τ): an exponential approach to a ceiling."""

    R0: float
    A: float
    tau: float  # compute in which the distance from A falls to 1/e

    def reward(self, compute: ArrayLike) -> Array:
        """R(C)."""
        return self.R0 - (self.A - self.R0) * np.expm1(-np.asarray(compute, np.float64) / self.tau)


@dataclass(frozen=True, slots=True)
class Logistic:
    """R(C) = L + (U − L) / (1 + exp(−k (C − c))): logistic in linear compute.

    As its author has it, L is the score before training: where R0 is known, L is R0, and at compute 0 the
    curve is a little above it.
    """

    L: float  # limit at the left, at negative compute
    U: float  # ceiling
    k: float  # steepness, per unit of compute
    c: float  # compute of the midpoint

    def reward(self, compute: ArrayLike) -> Array:
        """R(C)."""
        c = np.asarray(compute, np.float64)
        return self.L + (self.U - self.L) * expit(self.k * (c - self.c))


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """R(C) = A − D / C^B, A ≤ 1: the sigmoid's limit at high compute (arXiv 2510.13786, A.4)."""

    A: float
    D: float
    B: float

    def reward(self, compute: ArrayLike) -> Array:
        """R(C), for C > 0."""
        return self.A - self.D / np.asarray(compute, np.float64) ** self.B


@dataclass(frozen=True, slots=True)
class LogPower:
    """log(1 − R) = −k log C + E (arXiv 2509.25300, L = 1 − pass rate): a power law whose ceiling is 1."""

    k: float
    E: float

    def reward(self, compute: ArrayLike) -> Array:
        """R(C), for C > 0."""
        return 1 - np.exp(self.E - self.k * np.log(np.asarray(compute, np.float64)))


FamilyCurve = Sigmoid | Exponential | Logistic | PowerLaw | LogPower


@dataclass(frozen=True, slots=True)
class FamilyFit:
    """One family fitted to one run."""

    family: str
    curve: FamilyCurve
    parameters: int  # how many are fitted
    sse: float  # Σ (R − curve)²
    aicc: float | None  # for Gaussian errors in proportion to the reported ones; None: too few points
    # median |error| in the second half of the compute of a fit to the first; None: too few points
    held_out: float | None


def fit_sigmoid(data: Data) -> Sigmoid:
    """The sigmoid, with B and C_mid as in the default fit; R0 is the reported value, or else fitted."""
    B_low, B_high, C_low, C_high = np.log(full_box(data))
    low, high, log_B, log_C = _least_squares(
        data,
        lambda c, b, m: fraction_gained(c, np.exp(b), np.exp(m)),
        [np.linspace(B_low, B_high, 31), np.linspace(C_low, C_high, 61)],
        low=(0.0, 1.0) if data.R0 is None else (data.R0, data.R0),
    )
    return Sigmoid(low, high, math.exp(log_B), math.exp(log_C))


def fit_exponential(data: Data) -> Exponential:
    """The exponential approach; R0 is the reported value, or else fitted."""
    c, low = data.compute, (0.0, 1.0) if data.R0 is None else (data.R0, data.R0)
    axis = np.linspace(math.log(c[0] / 10), math.log(c[-1] * 10), 200)
    R0, A, log_tau = _least_squares(data, lambda c, t: -np.expm1(-c / np.exp(t)), [axis], low=low)
    return Exponential(R0, A, math.exp(log_tau))


def fit_logistic(data: Data) -> Logistic:
    """The logistic with 0 ≤ L ≤ U ≤ 1; L is R0 where that is known."""
    c = data.compute
    span = float(c[-1] - c[0])
    gap = max(float(np.diff(c).min()), 1e-6 * span)
    steepness = np.linspace(math.log(0.05 / span), math.log(10 / gap), 41)
    before, after = c[0] - span * np.linspace(1, 0.1, 10), c[-1] + span * np.linspace(0.1, 2, 20)
    middle = np.unique(np.concatenate([before, np.quantile(c, np.linspace(0, 1, 81)), after]))
    low, high, log_k, mid = _least_squares(
        data, lambda c, k, m: expit(np.exp(k) * (c - m)), [steepness, middle],
        low=(0.0, 1.0) if data.R0 is None else (data.R0, data.R0),
    )  # fmt: skip
    return Logistic(low, high, math.exp(log_k), mid)


def fit_power_law(data: Data) -> PowerLaw:
    """The power law with A ≤ 1 and D ≥ 0."""
    at_first, A, B = _power(data, 1.0, (LOWEST_START, 1.0))
    return PowerLaw(A, (A - at_first) * float(data.compute[0]) ** B, B)


def fit_log_power(data: Data) -> LogPower:
    """The log-power law, by least squares in the reward like the others."""
    at_first, _, k = _power(data, 1 - 1e-9, (1.0, 1.0))
    return LogPower(k, math.log(1 - at_first) + k * math.log(data.compute[0]))


def _power(data: Data, most: float, high: tuple[float, float]) -> tuple[float, float, float]:
    """The reward at the first point, at most `most`; A within `high`; the exponent."""
    first, (shallow, steep) = data.compute[0], np.log(POWER_RANGE)

    def fraction(c: Array, log_exponent: ArrayLike) -> Array:
        return -np.expm1(-np.exp(log_exponent) * np.log(c / first))

    at_first, A, log_exponent = _least_squares(
        data, fraction, [np.linspace(shallow, steep, 200)], (LOWEST_START, most), high
    )
    return at_first, A, math.exp(log_exponent)


def _least_squares(
    data: Data,
    fraction: Callable[..., Array],  # of (compute, *parameters): what is gained, from 0 to 1; broadcasts
    axes: Sequence[Array],  # a grid of the parameters, so that no local optimum is taken for the global one
    low: tuple[float, float] = (0.0, 1.0),  # bounds, of which equal ones hold the value
    high: tuple[float, float] = (0.0, 1.0),
) -> list[float]:
    """low ≤ high and the parameters of least squares for R(C) = low + (high − low) · fraction(C)."""
    c, y, sd = data.compute, data.reward, data.sd
    grid = np.meshgrid(*axes, indexing="ij")
    s = fraction(c, *(x[..., None] for x in grid))
    to_low, to_high = (1 - s) / sd**2, s / sd**2
    both, lows, highs = (to_low * s).sum(-1), np.full(grid[0].shape, low[0]), np.full(grid[0].shape, high[1])
    for _ in range(ROUNDS):  # of least squares in low, then in high
        lows = (to_low @ y - both * highs) / np.maximum((to_low * (1 - s)).sum(-1), 1e-300)
        lows = np.clip(lows, low[0], np.minimum(highs, low[1]))
        highs = (to_high @ y - both * lows) / np.maximum((to_high * s).sum(-1), 1e-300)
        highs = np.clip(highs, np.maximum(lows, high[0]), high[1])
    starts = [
        (lows - low[0]) / np.maximum(np.minimum(highs, low[1]) - low[0], 1e-300),
        (highs - high[0]) / max(high[1] - high[0], 1e-300),
        *grid,
    ]
    chi2 = (((lows[..., None] * (1 - s) + highs[..., None] * s - y) / sd) ** 2).sum(-1)
    minima = np.flatnonzero(chi2 == minimum_filter(chi2, 3, mode="nearest"))
    minima = minima[np.argsort(chi2.ravel()[minima], kind="stable")][:STARTS]

    def ends(share: float, high_share: float) -> tuple[float, float]:
        at_most = high[0] + high_share * (high[1] - high[0])
        return low[0] + share * (min(at_most, low[1]) - low[0]), at_most

    def errors(x: Array) -> Array:
        (first, last), s = ends(*x[:2]), fraction(c, *x[2:])
        return (first + (last - first) * s - y) / sd

    bounds = np.array([[0, 1], [0, 1], *([axis[0], axis[-1]] for axis in axes)]).T
    inside = bounds + 1e-9 * np.array([1, -1])[:, None] * (bounds[1] - bounds[0])
    solutions = [
        least_squares(
            errors, np.clip([x.ravel()[k] for x in starts], *inside), bounds=bounds,
            x_scale="jac", jac="3-point", ftol=1e-13, xtol=1e-12, gtol=1e-13,
        )
        for k in minima
    ]  # fmt: skip
    best = min(solutions, key=lambda solution: float(solution.cost))
    return [float(x) for x in (*ends(*best.x[:2]), *best.x[2:])]


def compare_families(curve: Curve) -> tuple[FamilyFit, ...]:
    """The sigmoid, then the others, all with the same points, weights and least squares.

    The sigmoid, the exponential and the logistic start at R0; the power laws ignore it. AICc takes errors to
    be independent and counts the fitted parameters, R0 only if it is unknown. What describes a run better is
    said by the flag not-sigmoid, which allows for correlated errors; this table is for the errors ahead.
    """
    data = averaged(checked(curve))
    if len(data.compute) < MIN_POINTS:
        raise ConfigError(
            f"{curve.name}: {len(data.compute)} points beyond R0; to compare families, {MIN_POINTS} or more"
        )
    families: dict[str, tuple[Callable[[Data], FamilyCurve], int]] = {
        "sigmoid": (fit_sigmoid, 4 if data.R0 is None else 3),
        "logistic": (fit_logistic, 4 if data.R0 is None else 3),
        "power law": (fit_power_law, 3),
        "log-power": (fit_log_power, 2),
        "exponential": (fit_exponential, 3 if data.R0 is None else 2),
    }
    return tuple(_family(name, fit, count, data) for name, (fit, count) in families.items())


def _family(name: str, fit: Callable[[Data], FamilyCurve], count: int, data: Data) -> FamilyFit:
    curve = fit(data)
    errors = data.reward - curve.reward(data.compute)
    n, k = len(errors), count + 1  # the size of the errors is fitted, too
    aicc = None
    if n > k + 1:
        chi2 = max(float(((errors / data.sd) ** 2).mean()), 1e-300)
        aicc = n * math.log(chi2) + 2 * k + 2 * k * (k + 1) / (n - k - 1)
    return FamilyFit(name, curve, count, float((errors**2).sum()), aicc, _held_out(fit, data))


def _held_out(fit: Callable[[Data], FamilyCurve], data: Data) -> float | None:
    half = data.compute <= data.compute[-1] / 2
    if half.sum() < MIN_POINTS:
        return None
    first = replace(data, compute=data.compute[half], reward=data.reward[half], sd=data.sd[half])
    ahead = fit(first).reward(data.compute[~half])
    return float(np.median(np.abs(ahead - data.reward[~half])))
