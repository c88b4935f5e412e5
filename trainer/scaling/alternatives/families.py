"""The sigmoid beside other laws of reward over compute, fitted alike: how each describes and foretells."""

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
from trainer.scaling.fit import LEAST_POINTS
from trainer.scaling.points import Curve
from trainer.scaling.posterior import Data, full_box
from trainer.scaling.sigmoid import Sigmoid, rise

Array = NDArray[np.float64]

POWER_RANGE = (0.005, 10.0)  # exponents of the power laws
DEPTH = -10.0  # a power law is let fall this far below 0 at the first point


@dataclass(frozen=True, slots=True)
class Logistic:
    """R(C) = L + (U − L) / (1 + exp(−k (C − c))): logistic in linear compute, as in a popular article."""

    L: float  # far to the left, which may be below zero compute
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


Law = Sigmoid | Logistic | PowerLaw | LogPower


@dataclass(frozen=True, slots=True)
class FamilyFit:
    """One family on one curve."""

    family: str
    law: Law
    fitted: int  # parameters
    sse: float  # Σ (R − law)²
    aicc: float | None  # of Gaussian errors in proportion to the told ones; None: too few points
    held_out: float | None  # median |error| beyond half of the compute of a fit up to there; None: too few

    def to_json(self) -> dict[str, Any]:
        """As valid JSON."""
        return {**asdict(self), "law": asdict(self.law)}


def fit_sigmoid(data: Data) -> Sigmoid:
    """The sigmoid, over the B and C_mid of the default fit; R0 as told, however measured, or else fitted."""
    box, R0 = np.log(full_box(data)), data.R0
    corners = triangle(0.0, 1.0) if R0 is None else ((R0, R0), (R0, 1.0))
    axes = [np.linspace(box[0], box[1], 31), np.linspace(box[2], box[3], 61)]
    best = least_squares_of(
        data.compute, data.reward, data.sd, lambda c, b, m: rise(c, np.exp(b), np.exp(m)), axes, corners
    )
    B, C_mid = np.exp(best.parameters)
    return Sigmoid(best.low, best.high, float(B), float(C_mid))


def fit_logistic(data: Data) -> Logistic:
    """The logistic with 0 ≤ L ≤ U ≤ 1; it knows nothing of R0."""
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
    A, at_first, B = _power(data, triangle(DEPTH, 1.0))
    return PowerLaw(A, (A - at_first) * float(data.compute[0]) ** B, B)


def fit_log_power(data: Data) -> LogPower:
    """The log-power law, by least squares in the reward, as the others."""
    _, at_first, k = _power(data, ((DEPTH, 1.0), (1 - 1e-9, 1.0)))
    return LogPower(k, math.log(1 - at_first) + k * math.log(data.compute[0]))


def _power(data: Data, corners: Corners) -> tuple[float, float, float]:
    """A, the reward at the first point, and the exponent."""
    first, (low, high) = data.compute[0], np.log(POWER_RANGE)

    def won(c: Array, log_exponent: Array) -> Array:
        result: Array = -np.expm1(-np.exp(log_exponent) * np.log(c / first))
        return result

    axes = [np.linspace(low, high, 200)]
    best = least_squares_of(data.compute, data.reward, data.sd, won, axes, corners)
    return best.high, best.low, math.exp(best.parameters[0])


def compare_families(curve: Curve) -> tuple[FamilyFit, ...]:
    """The sigmoid, then the others. All have the same points, weights and least squares.

    The sigmoid takes R0 as it is told; the others have no place for it. AICc counts what is fitted, R0 among
    it only where it is not known.
    """
    data = data_of(curve)
    if len(data.compute) < LEAST_POINTS:
        raise ConfigError(
            f"{curve.name}: {len(data.compute)} points beyond R0; to compare families, {LEAST_POINTS} or more"
        )
    families: dict[str, tuple[Callable[[Data], Law], int]] = {
        "sigmoid": (fit_sigmoid, 4 if data.R0 is None else 3),
        "logistic": (fit_logistic, 4),
        "power law": (fit_power_law, 3),
        "log-power": (fit_log_power, 2),
    }
    return tuple(_family(name, fit, count, data) for name, (fit, count) in families.items())


def _family(name: str, fit: Callable[[Data], Law], count: int, data: Data) -> FamilyFit:
    law = fit(data)
    errors = data.reward - law.reward(data.compute)
    n, k = len(errors), count + 1  # the errors' size is fitted too
    aicc = None
    if n > k + 1:
        chi2 = max(float(((errors / data.sd) ** 2).mean()), 1e-300)
        aicc = n * math.log(chi2) + 2 * k + 2 * k * (k + 1) / (n - k - 1)
    return FamilyFit(name, law, count, float((errors**2).sum()), aicc, _held_out(fit, data))


def _held_out(fit: Callable[[Data], Law], data: Data) -> float | None:
    half = data.compute <= data.compute[-1] / 2
    if half.sum() < LEAST_POINTS:
        return None
    first = replace(data, compute=data.compute[half], reward=data.reward[half], sd=data.sd[half])
    ahead = fit(first).reward(data.compute[~half])
    return float(np.median(np.abs(ahead - data.reward[~half])))
