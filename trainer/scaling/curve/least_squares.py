"""The sigmoid compared with the laws of others: how well each describes and predicts."""

import math
from dataclasses import dataclass, replace

import numpy as np

from trainer.config import ConfigError
from trainer.scaling.curve.families import families_to_fit, least_squares_curve
from trainer.scaling.curve.marginal import Array, Data
from trainer.scaling.curve.points import MIN_POINTS, averaged, checked
from trainer.scaling.curve.sigmoid import Curve

# The parameters as their authors name them: R0, A and those of the fraction, or numbers made from these.
NAMES = {
    "sigmoid": ("R0", "A", "B", "C_mid"),
    "logistic": ("L", "U", "k", "c"),
    "power law": ("A", "D", "B"),  # R = A − D / C^B: the sigmoid's limit at high compute (2510.13786, A.4)
    "log-power": ("k", "E"),  # log(1 − R) = −k log C + E (arXiv 2509.25300, L = 1 − pass rate)
    "exponential": ("R0", "A", "tau"),
}


@dataclass(frozen=True, slots=True)
class FamilyFit:
    """One family fitted to one run."""

    family: str
    curve: dict[str, float]  # the parameters by name
    parameters: int  # how many are fitted
    sse: float  # Σ (R − curve)²
    aicc: float | None  # for Gaussian errors in proportion to the reported ones; None: too few points
    # median |error| in the second half of the compute of a fit to the first; None: too few points
    held_out: float | None


def compare_families(curve: Curve) -> tuple[FamilyFit, ...]:
    """The sigmoid, then the others, all with the same points, weights and least squares.

    The sigmoid, the exponential and the logistic start at R0; the power laws ignore it. As its author has it,
    the logistic's limit at the left, L, is the score before training. AICc takes errors to be independent and
    counts the fitted parameters, R0 only if it is unknown. What describes a run better is said by the flag
    not-sigmoid, which allows for correlated errors; this table is for the errors ahead.
    """
    data = averaged(checked(curve))
    if len(data.compute) < MIN_POINTS:
        raise ConfigError(
            f"{curve.name}: {len(data.compute)} points beyond R0; to compare families, {MIN_POINTS} or more"
        )
    return tuple(_family(name, data) for name in NAMES)


def _family(name: str, data: Data) -> FamilyFit:
    curve, rewards = fit_family(name, data, data.compute)
    errors = data.reward - rewards
    fitted = len(curve) - (data.R0 is not None and not name.endswith(("law", "power")))
    n, k = len(errors), fitted + 1  # the size of the errors is fitted, too
    aicc = None
    if n > k + 1:
        chi2 = max(float(((errors / data.sd) ** 2).mean()), 1e-300)
        aicc = n * math.log(chi2) + 2 * k + 2 * k * (k + 1) / (n - k - 1)
    held_out, half = None, data.compute <= data.compute[-1] / 2
    if half.sum() >= MIN_POINTS:
        first = replace(data, compute=data.compute[half], reward=data.reward[half], sd=data.sd[half])
        ahead = fit_family(name, first, data.compute[~half])[1]
        held_out = float(np.median(np.abs(ahead - data.reward[~half])))
    return FamilyFit(name, curve, fitted, float((errors**2).sum()), aicc, held_out)


def fit_family(name: str, data: Data, compute: Array) -> tuple[dict[str, float], Array]:
    """The parameters of weighted least squares, and the rewards at some computes."""
    family, is_power = families_to_fit(data)[name], name in ("power law", "log-power")
    data = replace(data, R0=None if is_power else data.R0, R0_se=0.0)
    R0, A, *theta = least_squares_curve(data, family, np.diag(1 / data.sd))
    numbers = [R0, A, *theta]
    if is_power:
        k, log_first = theta[0], math.log(data.compute[0])
        numbers = (
            [k, math.log(1 - R0) + k * log_first]
            if family.ceiling
            else [A, (A - R0) * math.exp(k * log_first), k]
        )
    return dict(zip(NAMES[name], numbers, strict=True)), family.reward(compute, R0, A, *theta)
