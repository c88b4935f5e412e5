"""Fits as others make them: the laws of several papers, and the procedure of arXiv 2510.13786.

That is a grid over A and C_mid, with B by least squares for each pair (`paper_fit`). The sigmoid is linear
in A, so that one table of Σ s·y and Σ s² over (B, C_mid) gives the sum of squares for every A. Between two
values of B the root of that sum cannot change faster than a known slope, which rules out nearly every pair; B
of the remaining pairs is refined to its optimum. The result is that of the literal loop.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from trainer.config import ConfigError
from trainer.scaling.curve.families import families_to_fit, least_squares_curve
from trainer.scaling.curve.marginal import Data
from trainer.scaling.curve.points import MIN_POINTS, averaged, checked
from trainer.scaling.curve.sigmoid import Array, Curve, Sigmoid

B_TABLE = np.geomspace(0.05, 20.0, 121)  # the values of B tried first


@dataclass(frozen=True, slots=True)
class PaperGrid:
    """The paper's ranges. Its C_mid is in GPU-hours: set it for any other unit.

    The spacing is linear because the published C_mid of Table 1 are: seven of ten are among 100 equally
    spaced values in [100, 4000].
    """

    A: tuple[float, float, float] = (0.450, 0.800, 0.005)  # low, high, step
    C_mid: tuple[float, float, int] = (100.0, 40_000.0, 100)  # low, high, how many
    spacing: Literal["linear", "log"] = "linear"  # of C_mid

    def values(self) -> tuple[Array, Array]:
        """A's values and C_mid's."""
        low, high, step = self.A
        if not (0 <= low < high <= 1 and 0 < step <= high - low):
            raise ConfigError(
                f"paper's grid of A is {self.A}; expected 0 ≤ low < high ≤ 1 and a step between"
            )
        first, last, n = self.C_mid
        if not (0 < first < last < np.inf and n >= 2 and n == int(n)):
            raise ConfigError(f"paper's grid of C_mid is {self.C_mid}; expected 0 < low < high and 2 or more")
        A = low + step * np.arange(round((high - low) / step) + 1, dtype=np.float64)
        return A, (np.linspace if self.spacing == "linear" else np.geomspace)(first, last, int(n))


@dataclass(frozen=True, slots=True)
class PaperFit:
    """The pair of the grid with the least sum of squares, and its B."""

    sigmoid: Sigmoid
    sse: float  # Σ (R − sigmoid)²
    # A-at-grid-edge, C_mid-at-grid-edge: the best is the first or last of its grid, so move its ends;
    # B-at-bound: the best lies at an end of B_TABLE.
    flags: tuple[str, ...]


def paper_fit(
    compute: ArrayLike,  # (n,) > 0; without early points (the paper drops the first ~1.5k GPU-hours)
    reward: ArrayLike,  # (n,)
    R0: float,  # reward at zero compute, given or measured
    grid: PaperGrid | None = None,  # None: the paper's
) -> PaperFit:
    """The paper's fit. It has no intervals and ignores the standard errors."""
    grid = grid or PaperGrid()
    c, r = np.asarray(compute, np.float64), np.asarray(reward, np.float64)
    if c.shape != r.shape or c.ndim != 1 or len(c) < 3:  # the parameters besides R0
        raise ConfigError(f"paper's fit: {c.size} computes and {r.size} rewards; expected as many, 3 or more")
    if not (np.isfinite(c).all() and np.isfinite(r).all() and (c > 0).all()):
        raise ConfigError("paper's fit: a compute or reward is not a number, or a compute is not above 0")
    A, C_mid = grid.values()
    first = int((R0 >= A).sum())
    if first == len(A):
        raise ConfigError(f"paper's fit: R0 is {R0:g}, and no A of the grid up to {A[-1]:g} lies above it")
    x, y, lift = np.log(c) - np.log(C_mid)[:, None], r - R0, A[first:] - R0  # (C_mid, n), (n,), (A,)
    i, j, row = _can_win(x, y, lift)
    log_B, sse = _refined_B(x[j], y, lift[i, None], row)
    best = int(sse.argmin())
    B, i_best, j_best = float(np.exp(log_B[best])), int(i[best]) + first, int(j[best])
    flags = (
        *(["A-at-grid-edge"] if i_best in (0, len(A) - 1) else []),
        *(["C_mid-at-grid-edge"] if j_best in (0, len(C_mid) - 1) else []),
        *(["B-at-bound"] if not B_TABLE[0] * 1.001 < B < B_TABLE[-1] * 0.999 else []),
    )
    return PaperFit(Sigmoid(R0, float(A[i_best]), B, float(C_mid[j_best])), float(sse[best]), flags)


def _can_win(x: Array, y: Array, lift: Array) -> tuple[NDArray[np.intp], ...]:
    """The pairs (A, C_mid) that can have the least sum of squares, and the best row of B_TABLE for each.

    The table has a B within half a step of the best one for a pair, and
    |√SSE(B) − √SSE(B')| ≤ (A − R0)·.224·√n·|log B − log B'|, as ∂s/∂ log B = x σ(x) σ(−x) is at most .2239.
    """
    s = expit(B_TABLE[:, None, None] * x)  # (B, C_mid, n)
    sse = y @ y + lift[:, None] ** 2 * (s * s).sum(-1)[:, None] - 2 * lift[:, None] * (s @ y)[:, None]
    root, half_step = np.sqrt(np.maximum(sse.min(0), 0)), np.log(B_TABLE[1] / B_TABLE[0]) / 2  # (A, C_mid)
    i, j = np.nonzero(root - (lift * 0.224 * len(y) ** 0.5 * half_step)[:, None] <= root.min())
    return i, j, sse.argmin(0)[i, j]


def _refined_B(x: Array, y: Array, lift: Array, row: NDArray[np.intp]) -> tuple[Array, Array]:
    """log B of least squares within a step of its row of the table, and the sum of squares; (pairs,) each."""
    table = np.log(B_TABLE)
    low, high = table[np.maximum(row - 1, 0)], table[np.minimum(row + 1, len(table) - 1)]
    for _ in range(40):  # halvings of the range in which the slope of the sum of squares changes its sign
        middle = (low + high) / 2
        s = expit(np.exp(middle)[:, None] * x)
        falls = (lift * s * (1 - s) * x * (y - lift * s)).sum(1) > 0
        low, high = np.where(falls, middle, low), np.where(falls, high, middle)
    return middle, ((y - lift * s) ** 2).sum(1)


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
    return tuple(_family(name, data) for name in families_to_fit(data))


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
