"""The procedure of arXiv 2510.13786: a grid over A and C_mid, with B by least squares for each pair.

The sigmoid is linear in A, so that one table of Σ s·y and Σ s² over (B, C_mid) gives the sum of squares for
every A. Between two values of B the root of that sum cannot change faster than a known slope, which rules out
nearly every pair; B of the remaining pairs is refined to its optimum. The result is that of the literal loop.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from trainer.config import ConfigError
from trainer.scaling.curve.sigmoid import Sigmoid

Array = NDArray[np.float64]

B_TABLE = np.geomspace(0.05, 20.0, 121)  # the values of B tried first
_X = np.linspace(0, 5, 10_001)
MAX_SLOPE = float((_X * expit(_X) * expit(-_X)).max()) + 1e-6  # the largest |∂s/∂ log B|
FLAGS = {
    "A-at-grid-edge": "the best A is the first or last of its grid: move the grid's ends",
    "C_mid-at-grid-edge": "the best C_mid is the first or last of its grid: move the grid's ends",
    "B-at-bound": f"the best B lies at the end of {B_TABLE[0]:g} to {B_TABLE[-1]:g}",
}


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

    A: float
    B: float
    C_mid: float
    R0: float
    sse: float  # Σ (R − sigmoid)²
    grid: PaperGrid
    flags: tuple[str, ...]

    @property
    def sigmoid(self) -> Sigmoid:
        """The sigmoid with these parameters."""
        return Sigmoid(self.R0, self.A, self.B, self.C_mid)


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
    return PaperFit(float(A[i_best]), B, float(C_mid[j_best]), R0, float(sse[best]), grid, flags)


def _can_win(x: Array, y: Array, lift: Array) -> tuple[NDArray[np.intp], ...]:
    """The pairs (A, C_mid) that can have the least sum of squares, and the best row of B_TABLE for each.

    The table has a B within half a step of the best one for a pair, and
    |√SSE(B) − √SSE(B')| ≤ (A − R0)·MAX_SLOPE·√n·|log B − log B'|.
    """
    s = expit(B_TABLE[:, None, None] * x)  # (B, C_mid, n)
    sse = y @ y + lift[:, None] ** 2 * (s * s).sum(-1)[:, None] - 2 * lift[:, None] * (s @ y)[:, None]
    root, half_step = np.sqrt(np.maximum(sse.min(0), 0)), np.log(B_TABLE[1] / B_TABLE[0]) / 2  # (A, C_mid)
    i, j = np.nonzero(root - (lift * MAX_SLOPE * len(y) ** 0.5 * half_step)[:, None] <= root.min())
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
