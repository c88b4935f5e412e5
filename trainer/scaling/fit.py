"""Fits the sigmoid to a run's points, with intervals, and says what the data cannot identify.

For given B, C_mid and R0 the law is linear in A − R0, so χ² is a parabola in it:

    χ²(a; B, C_mid) = S − 2aP + a²Q,   S = Σ w r²,  P = Σ w r s,  Q = Σ w s²,   r = R − R0,  s = rise(C)

A grid over (R0, B, C_mid) then holds the whole likelihood. The estimate is its minimum; an interval is the
projection of the region χ² ≤ χ²_min + Δ, which is the profile likelihood. Outliers are weighed down (Huber);
if the points scatter more than their standard errors say, the errors are scaled up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import fdtri

from trainer.config import ConfigError
from trainer.scaling.law import Sigmoid, rise

Array = NDArray[np.float64]

B_RANGE = (0.3, 8.0)
REACH = 30.0  # C_mid is sought up to this multiple of the largest compute
GRID = (41, 121)  # B × C_mid; refined once inside the region
LEAST_POINTS = 5  # beyond R0: the law has three parameters
WIDEST = 0.06  # an interval of A wider than ±.03 tells no two recipes apart
HUBER = 2.0  # standard deviations from which a point counts linearly
FLAGS = {
    "too-few-points": "there are fewer than 5 evaluations beyond R0",
    "flat": "the score has not risen beyond its noise",
    "A-at-bound": "the data allow a ceiling of 1, the highest there is: the curve has not bent yet",
    "C_mid-beyond-data": "half of the rise lies beyond the data",
    "falling": "the score has fallen from its peak: the sigmoid cannot describe that",
    "wide": "the interval of A is wider than 0.06",
}


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """An evaluation: C in the ledger's unit, mean@k with its standard error. Step 0 is R0."""

    step: int
    compute: float
    pass_rate: float
    pass_rate_se: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The sigmoid of some points. With `flags` the numbers are not to be trusted; the flags say why."""

    A: Estimate
    B: Estimate
    C_mid: Estimate
    R0: Estimate
    at_2x: Estimate  # reward at twice and at ten times the last compute
    at_10x: Estimate
    band: tuple[tuple[float, float, float, float], ...]  # (compute, value, low, high)
    flags: tuple[str, ...]
    confidence: float
    points: int  # beyond R0
    compute_range: tuple[float, float]
    r2: float
    scatter: float  # residual standard deviation in standard errors
    noise: str
    data_hash: str

    @property
    def identified(self) -> bool:
        """Whether the data tell the ceiling."""
        return not self.flags

    @property
    def law(self) -> Sigmoid:
        """The best sigmoid."""
        return Sigmoid(self.R0.value, self.A.value, self.B.value, self.C_mid.value)

    def to_json(self) -> dict[str, Any]:
        """JSON-able, with `identified`."""
        return asdict(self) | {"identified": self.identified}


@dataclass(frozen=True, slots=True)
class _Grid:
    """χ² over (R0, B, C_mid), minimised over a = A − R0 within [0, 1 − R0]."""

    r0: Array  # (K, 1, 1)
    b: Array  # (1, I, 1)
    c_mid: Array  # (1, 1, J)
    p: Array  # (K, I, J)
    q: Array
    a: Array
    chi2: Array


def fit_run(points: Sequence[EvalPoint], confidence: float = 0.9) -> Fit:
    """Fit a run's evaluations; the one at step 0 (or at least compute) is R0."""
    first, *rest = sorted(points, key=lambda p: p.compute)
    compute = [p.compute for p in rest]
    rewards, errors = [p.pass_rate for p in rest], [p.pass_rate_se for p in rest]
    return fit(compute, rewards, errors, R0=first.pass_rate, R0_se=first.pass_rate_se, confidence=confidence)


def fit(
    compute: ArrayLike,  # (n,) > 0
    reward: ArrayLike,  # (n,) in [0, 1]
    se: ArrayLike | None = None,  # (n,) standard errors; None: equal ones, from the scatter
    *,
    R0: float,
    R0_se: float = 0.0,
    confidence: float = 0.9,
) -> Fit:
    """The sigmoid through the points. ConfigError on NaN, C ≤ 0, rewards outside [0, 1], other lengths."""
    c, r = np.asarray(compute, np.float64), np.asarray(reward, np.float64)
    sd = np.full(c.shape, 1e-2) if se is None else np.asarray(se, np.float64)
    _check(c, r, sd, R0)
    data_hash = hashlib.sha256(np.concatenate([c, r, sd, [R0, R0_se]]).tobytes()).hexdigest()[:16]
    noise = "equal errors, from the scatter" if se is None else "given standard errors"
    if len(c) < LEAST_POINTS:
        nothing = Estimate(float("nan"), float("nan"), float("nan"))
        span = (float(c.min()), float(c.max())) if len(c) else (0.0, 0.0)
        start = Estimate(R0, R0 - 1.645 * R0_se, R0 + 1.645 * R0_se)
        return Fit(
            nothing, nothing, nothing, start, nothing, nothing, (), ("too-few-points",), confidence, len(c),
            span, float("nan"), float("nan"), noise, data_hash,
        )  # fmt: skip
    w = 1 / sd**2
    box = (*B_RANGE, float(c.min()) / 3, float(c.max()) * REACH)
    for _ in range(4):  # Huber: weigh points beyond 2 sd down, look again
        grid = _grid(c, r, w, R0, R0_se, box)
        z = np.abs(_residuals(grid, c, r)) / sd
        scale = max(1.0 if se is not None else 0.0, float(np.median(z)) * 1.4826, 1e-3)
        w = np.minimum(1.0, HUBER * scale / np.maximum(z, 1e-9)) / sd**2
    free = len(c) - 3
    variance = float(grid.chi2.min()) / free
    variance = max(variance, 1.0) if se is not None else variance
    limit = float(grid.chi2.min()) + variance * float(fdtri(1, free, confidence))
    grid = _grid(c, r, w, R0, R0_se, _inner_box(grid, limit))
    limit += min(0.0, float(grid.chi2.min()) + variance * float(fdtri(1, free, confidence)) - limit)
    return _result(grid, limit, c, r, sd, R0, confidence, noise, data_hash)


def _check(c: Array, r: Array, sd: Array, R0: float) -> None:
    if not c.shape == r.shape == sd.shape or c.ndim != 1:
        raise ConfigError(
            f"fit: compute, reward and errors have lengths {c.size}, {r.size}, {sd.size}; expected one"
        )
    for name, x, wrong in (
        ("compute", c, ~(c > 0)), ("reward", r, ~((r >= 0) & (r <= 1))), ("standard error", sd, ~(sd > 0)),
    ):  # fmt: skip
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            expected = "in [0, 1]" if name == "reward" else "above 0"
            raise ConfigError(f"fit: {name} of point {i + 1} is {x[i]}; expected a number {expected}")
    if not 0 <= R0 < 1:
        raise ConfigError(f"fit: R0 is {R0}; expected a number in [0, 1)")


def _grid(c: Array, r: Array, w: Array, R0: float, R0_se: float, box: tuple[float, ...]) -> _Grid:
    """χ² on a logarithmic grid over the box (B from, to, C_mid from, to) and R0 within ±2 errors."""
    steps = np.array([-2.0, -1.0, 0.0, 1.0, 2.0]) if R0_se else np.zeros(1)
    r0 = np.clip(R0 + R0_se * steps, 0, 0.999)[:, None, None]
    b = np.geomspace(box[0], box[1], GRID[0])[None, :, None]
    c_mid = np.geomspace(box[2], box[3], GRID[1])[None, None, :]
    s = rise(c, b[..., None], c_mid[..., None])[0]  # (I, J, n)
    q = np.broadcast_to((s * s) @ w, (len(r0), *s.shape[:2]))
    p = (s @ (w * r))[None] - r0 * (s @ w)[None]
    total = (w * (r - r0) ** 2).sum(-1)[..., None]  # (K, 1, 1)
    a = np.clip(p / q, 0, 1 - r0)
    chi2 = total - 2 * a * p + a * a * q + (steps**2)[:, None, None]
    return _Grid(r0, b, c_mid, p, q, a, chi2)


def _best(grid: _Grid) -> tuple[float, float, float, float]:
    """R0, A, B, C_mid of least χ²."""
    k, i, j = np.unravel_index(int(grid.chi2.argmin()), grid.chi2.shape)
    r0 = float(grid.r0[k, 0, 0])
    return r0, r0 + float(grid.a[k, i, j]), float(grid.b[0, i, 0]), float(grid.c_mid[0, 0, j])


def _residuals(grid: _Grid, c: Array, r: Array) -> Array:
    return r - Sigmoid(*_best(grid)).reward(c)


def _inner_box(grid: _Grid, limit: float) -> tuple[float, ...]:
    """The box around the region, a step of the grid wider on each side."""
    inside = np.any(grid.chi2 <= limit, axis=0)
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    b, c_mid = grid.b[0, :, 0], grid.c_mid[0, 0]
    return (
        float(b[max(rows[0] - 1, 0)]),
        float(b[min(rows[-1] + 1, len(b) - 1)]),
        float(c_mid[max(columns[0] - 1, 0)]),
        float(c_mid[min(columns[-1] + 1, len(c_mid) - 1)]),
    )


def _result(
    grid: _Grid,
    limit: float,
    c: Array,
    r: Array,
    sd: Array,
    R0: float,
    confidence: float,
    noise: str,
    data_hash: str,
) -> Fit:
    """Estimates, and intervals as projections of the region χ² ≤ limit."""
    k, i, j = np.nonzero(grid.chi2 <= limit)
    r0, b, c_mid = grid.r0[k, 0, 0], grid.b[0, i, 0], grid.c_mid[0, 0, j]
    q, centre = grid.q[k, i, j], grid.p[k, i, j] / grid.q[k, i, j]
    # χ²(a) ≤ limit around the unconstrained vertex, cut to 0 ≤ a ≤ 1 − R0
    vertex = grid.chi2[k, i, j] - q * (grid.a[k, i, j] - centre) ** 2
    width = np.sqrt(np.maximum(limit - vertex, 0) / q)
    low, high = np.clip(centre - width, 0, 1 - r0), np.clip(centre + width, 0, 1 - r0)
    best = _best(grid)
    law = Sigmoid(*best)

    def predicted(at: float) -> Estimate:
        s = rise(at, b, c_mid)
        return Estimate(float(law.reward(at)), float((r0 + low * s).min()), float((r0 + high * s).max()))

    A = Estimate(best[1], float((r0 + low).min()), float((r0 + high).max()))
    residual = r - law.reward(c)
    spread = float(((r - r.mean()) ** 2).sum())
    return Fit(
        A,
        Estimate(best[2], float(b.min()), float(b.max())),
        Estimate(best[3], float(c_mid.min()), float(c_mid.max())),
        Estimate(best[0], float(r0.min()), float(r0.max())),
        predicted(2 * float(c.max())),
        predicted(10 * float(c.max())),
        tuple((x, *asdict(predicted(x)).values()) for x in _band_points(c)),
        _flags(c, r, sd, R0, A, best[3]),
        confidence,
        len(c),
        (float(c.min()), float(c.max())),
        1 - float((residual**2).sum()) / spread if spread else float("nan"),
        float(np.sqrt(((residual / sd) ** 2).sum() / max(1, len(c) - 3))),
        noise,
        data_hash,
    )


def _band_points(c: Array) -> list[float]:
    return [float(x) for x in np.geomspace(c.min() / 10, c.max() * 10, 100)]


def _flags(c: Array, r: Array, sd: Array, R0: float, A: Estimate, c_mid: float) -> tuple[str, ...]:
    flags = []
    ordered, errors = r[np.argsort(c)], sd[np.argsort(c)]
    last = max(2, len(r) // 5)
    if ordered[-last:].mean() - R0 < 3 * errors[-last:].mean() / last**0.5:
        flags.append("flat")
    if A.high >= 0.999 and A.low < 0.95:
        flags.append("A-at-bound")
    if c_mid > c.max():
        flags.append("C_mid-beyond-data")
    windows = np.convolve(ordered, np.ones(last) / last, "valid")
    if windows.max() - windows[-1] > max(0.03, 4 * errors.mean() / last**0.5):
        flags.append("falling")
    if A.high - A.low > WIDEST:
        flags.append("wide")
    return tuple(flags)


def explain(fit: Fit, unit: str) -> str:
    """What can be concluded from the fit, and what cannot."""
    reasons = "; ".join(FLAGS[f] for f in fit.flags)
    if "too-few-points" in fit.flags:
        return f"The ceiling is not identified: {reasons}. Evaluate more often or train longer."
    sure = f"{fit.confidence:.0%}"

    def words(e: Estimate, digits: int = 3) -> str:
        return f"{e.value:.{digits}f} ({e.low:.{digits}f} to {e.high:.{digits}f})"

    lines = [f"R(C) = R0 + (A − R0) / (1 + (C_mid/C)^B), from {fit.points} evaluations, {sure} intervals:"]
    if fit.identified:
        lines.append(f"  ceiling     A     {words(fit.A)}")
        lines.append(f"  efficiency  B     {words(fit.B, 2)}")
        lines.append(f"  midpoint    C_mid {words(fit.C_mid, 4)} {unit}")
    else:
        lines.append(f"  The ceiling A is not identified: {reasons}.")
        lines.append(f"  The data allow A from {fit.A.low:.2f} to {fit.A.high:.2f}; take no number of it.")
    lines.append(f"  at the start R0   {fit.R0.value:.3f} (measured before step 1)")
    for name, e, times in (("2×", fit.at_2x, 2), ("10×", fit.at_10x, 10)):
        at = times * fit.compute_range[1]
        wide = " - too wide to use" if e.high - e.low > WIDEST else ""
        lines.append(f"  at {name:>3} the compute ({at:.3g} {unit}): {words(e)}{wide}")
    if fit.scatter > 2:
        lines.append(
            f"  The points scatter {fit.scatter:.1f}× their standard errors; the intervals allow for it."
        )
    return "\n".join(lines)
