"""The sigmoid compared with other families of curves: how well each describes and predicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from trainer.config import ConfigError
from trainer.scaling.alternatives.least_squares import Corners, data_of, least_squares_of, triangle
from trainer.scaling.fit import MIN_POINTS
from trainer.scaling.posterior import Data, full_box
from trainer.scaling.sigmoid import Curve, Sigmoid, fraction_gained

Array = NDArray[np.float64]

POWER_RANGE = (0.005, 10.0)  # exponents of the power laws
LOWEST_START = -10.0  # a power law may be this far below 0 at the first point


@dataclass(frozen=True, slots=True)
class Logistic:
    """R(C) = L + (U − L) / (1 + exp(−k (C − c))): logistic in linear compute."""

    L: float  # limit at the left, at negative compute
    U: float  # ceiling
    k: float  # steepness, per unit of compute
    c: float  # compute of the midpoint

    def reward(self, compute: ArrayLike) -> Array:
        """R(C)."""
        c = np.asarray(compute, np.float64)
        result: Array = self.L + (self.U - self.L) * expit(self.k * (c - self.c))
        return result


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """R(C) = A − D / C^B, A ≤ 1: the sigmoid's limit at high compute (arXiv 2510.13786, A.4)."""

    A: float
    D: float
    B: float

    def reward(self, compute: ArrayLike) -> Array:
        """R(C), for C > 0."""
        result: Array = self.A - self.D / np.asarray(compute, np.float64) ** self.B
        return result


@dataclass(frozen=True, slots=True)
class LogPower:
    """log(1 − R) = −k log C + E (arXiv 2509.25300, L = 1 − pass rate): a power law whose ceiling is 1."""

    k: float
    E: float

    def reward(self, compute: ArrayLike) -> Array:
        """R(C), for C > 0."""
        result: Array = 1 - np.exp(self.E - self.k * np.log(np.asarray(compute, np.float64)))
        return result


FamilyCurve = Sigmoid | Logistic | PowerLaw | LogPower


@dataclass(frozen=True, slots=True)
class FamilyFit:
    """One family fitted to one run."""

    family: str
    curve: FamilyCurve
    parameters: int  # how many are fitted
    sse: float  # Σ (R − curve)²
    aicc: float | None  # for Gaussian errors in proportion to the reported ones; None: too few points
    held_out: (
        float | None
    )  # median |error| in the second half of the compute of a fit to the first; None: too few

    def to_json(self) -> dict[str, Any]:
        """As valid JSON."""
        return asdict(self)


def fit_sigmoid(data: Data) -> Sigmoid:
    """The sigmoid, with B and C_mid as in the default fit; R0 is the reported value, or else fitted."""
    box, R0 = np.log(full_box(data)), data.R0
    corners = triangle(0.0, 1.0) if R0 is None else ((R0, R0), (R0, 1.0))
    axes = [np.linspace(box[0], box[1], 31), np.linspace(box[2], box[3], 61)]
    best = least_squares_of(
        data.compute,
        data.reward,
        data.sd,
        lambda c, b, m: fraction_gained(c, np.exp(b), np.exp(m)),
        axes,
        corners,
    )
    B, C_mid = np.exp(best.parameters)
    return Sigmoid(best.low, best.high, float(B), float(C_mid))


def fit_logistic(data: Data) -> Logistic:
    """The logistic with 0 ≤ L ≤ U ≤ 1; it ignores R0."""
    c = data.compute
    span = float(c[-1] - c[0])
    gap = max(float(np.diff(c).min()), 1e-6 * span)
    steepness = np.linspace(math.log(0.05 / span), math.log(10 / gap), 41)
    before, after = c[0] - span * np.linspace(1, 0.1, 10), c[-1] + span * np.linspace(0.1, 2, 20)
    middle = np.unique(np.concatenate([before, np.quantile(c, np.linspace(0, 1, 81)), after]))
    best = least_squares_of(
        c, data.reward, data.sd, lambda c, k, m: expit(np.exp(k) * (c - m)), [steepness, middle],
        triangle(0.0, 1.0),
    )  # fmt: skip
    return Logistic(best.low, best.high, math.exp(best.parameters[0]), best.parameters[1])


def fit_power_law(data: Data) -> PowerLaw:
    """The power law with A ≤ 1 and D ≥ 0."""
    A, at_first, B = _power(data, triangle(LOWEST_START, 1.0))
    return PowerLaw(A, (A - at_first) * float(data.compute[0]) ** B, B)


def fit_log_power(data: Data) -> LogPower:
    """The log-power law, by least squares in the reward like the others."""
    _, at_first, k = _power(data, ((LOWEST_START, 1.0), (1 - 1e-9, 1.0)))
    return LogPower(k, math.log(1 - at_first) + k * math.log(data.compute[0]))


def _power(data: Data, corners: Corners) -> tuple[float, float, float]:
    """A, the reward at the first point, and the exponent."""
    first, (low, high) = data.compute[0], np.log(POWER_RANGE)

    def fraction(c: Array, log_exponent: Array) -> Array:
        result: Array = -np.expm1(-np.exp(log_exponent) * np.log(c / first))
        return result

    axes = [np.linspace(low, high, 200)]
    best = least_squares_of(data.compute, data.reward, data.sd, fraction, axes, corners)
    return best.high, best.low, math.exp(best.parameters[0])


def compare_families(curve: Curve) -> tuple[FamilyFit, ...]:
    """The sigmoid, then the others, all with the same points, weights and least squares.

    Only the sigmoid uses R0. AICc counts the fitted parameters, R0 only if it is unknown.
    """
    data = data_of(curve)
    if len(data.compute) < MIN_POINTS:
        raise ConfigError(
            f"{curve.name}: {len(data.compute)} points beyond R0; to compare families, {MIN_POINTS} or more"
        )
    families: dict[str, tuple[Callable[[Data], FamilyCurve], int]] = {
        "sigmoid": (fit_sigmoid, 4 if data.R0 is None else 3),
        "logistic": (fit_logistic, 4),
        "power law": (fit_power_law, 3),
        "log-power": (fit_log_power, 2),
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
