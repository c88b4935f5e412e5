"""Fits the sigmoid to a run's points, with intervals, and says what the data cannot identify.

For given B and C_mid the law is linear in R0 and A. With s = rise(C), r = R − measured R0, and the unknowns
d = R0 − measured R0, a = A − measured R0, χ² is a parabola in both:

    χ²(d, a) = Σ w (r − d (1 − s) − a s)² + (d / R0's error)²

so a grid over (B, C_mid) holds the whole likelihood. The estimate is its minimum; an interval is the
projection of the region χ² ≤ χ²_min + Δ, which is the profile likelihood. Outliers are weighed down (Huber);
if the points scatter more than their standard errors say, the errors are scaled up, and further if
neighbouring points err to the same side. For noise that is independent from point to point the intervals
cover; for a run that wanders slowly they are still too narrow, since the fit follows part of the wandering.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import fdtri

from trainer.config import ConfigError
from trainer.scaling.law import Sigmoid, rise

Array = NDArray[np.float64]

B_RANGE = (0.3, 20.0)
REACH = 30.0  # C_mid is sought up to this multiple of the largest compute
GRID = (41, 121)  # B × C_mid
HUBER_ROUNDS, ZOOMS = 4, 3  # looks at the whole grid, then at the region around the minimum
LEAST_POINTS = 5  # beyond R0: the law has three parameters
WIDEST = 0.06  # an interval of A wider than ±.03 tells no two recipes apart
HUBER = 2.0  # standard deviations from which a point counts linearly
EQUAL_ERROR = 1e-2  # where no errors are given; only their being equal matters
FLAGS = {
    "too-few-points": "there are fewer than 5 evaluations beyond R0",
    "flat": "the score has not risen beyond its noise",
    "A-at-bound": "the data still allow a ceiling of 1, the highest there is",
    "C_mid-beyond-data": "half of the rise lies beyond the data",
    "falling": "the score has fallen from its peak: the sigmoid cannot describe that",
    "wide": "the interval of A is wider than 0.06",
    "B-at-bound": "the rise is over before the evaluations can show how steep it was",
}
HARMLESS = {"B-at-bound"}  # says nothing against A


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
    """The sigmoid of some points. `flags` say what the data cannot identify; without points it is all NaN."""

    A: Estimate
    B: Estimate
    C_mid: Estimate
    R0: Estimate
    at_2x: Estimate  # reward at twice and at ten times the last compute
    at_10x: Estimate
    band: tuple[tuple[float, float, float, float], ...]  # (compute, value, low, high)
    flags: tuple[str, ...]
    r2: float
    scatter: float  # residual standard deviation in standard errors
    confidence: float
    points: int  # beyond R0
    compute_range: tuple[float, float]
    R0_at: float | None  # compute at which R0 was measured; None: given
    R0_told: float  # as measured or given; `R0` is the law's
    noise: str
    data_hash: str

    @property
    def identified(self) -> bool:
        """Whether the data tell the ceiling."""
        return not set(self.flags) - HARMLESS

    @property
    def law(self) -> Sigmoid:
        """The best sigmoid."""
        return Sigmoid(self.R0.value, self.A.value, self.B.value, self.C_mid.value)

    def to_json(self) -> dict[str, Any]:
        """As valid JSON, with `identified`; what is unknown (NaN) is null."""

        def plain(x: Any) -> Any:
            if isinstance(x, dict):
                return {k: plain(v) for k, v in x.items()}
            if isinstance(x, tuple):
                return [plain(v) for v in x]
            return None if isinstance(x, float) and not math.isfinite(x) else x

        return {**plain(asdict(self)), "identified": self.identified}


@dataclass(frozen=True, slots=True)
class _Grid:
    """χ² over (B, C_mid), minimised over d and over a within [0, 1 − R0]; (I, J) or broadcasting to it."""

    R0: float  # as measured
    b: Array
    c_mid: Array
    u: Array  # χ²'s coefficient of d²
    v: Array  # of 2da
    m: Array  # of −2d
    q: Array  # of a², once d is eliminated
    centre: Array  # the a of least χ², unbounded
    a: Array  # the same within bounds
    chi2: Array

    def best(self) -> Sigmoid:
        """The law of least χ²."""
        i, j = np.unravel_index(int(self.chi2.argmin()), self.chi2.shape)
        a = self.a[i, j]
        d = (self.m[i, j] - a * self.v[i, j]) / self.u[i, j]
        start = float(np.clip(self.R0 + d, 0, 1))
        return Sigmoid(start, self.R0 + float(a), float(self.b[i, 0]), float(self.c_mid[0, j]))


def fit_run(points: Sequence[EvalPoint], confidence: float = 0.9) -> Fit:
    """Fit a run's evaluations; the one at step 0 (or at least compute) is R0."""
    if not points:
        raise ConfigError("fit: there are no points; expected R0 and at least one evaluation beyond it")
    first, *rest = sorted(points, key=lambda p: p.compute)
    return fit(
        [p.compute for p in rest], [p.pass_rate for p in rest], [p.pass_rate_se for p in rest],
        R0=first.pass_rate, R0_se=first.pass_rate_se, R0_at=first.compute, confidence=confidence,
    )  # fmt: skip


def fit(
    compute: ArrayLike,  # (n,) ≥ 0; points at 0 tell nothing beyond R0 and are left out
    reward: ArrayLike,  # (n,) in [0, 1]
    se: ArrayLike | None = None,  # (n,) standard errors; None or all 0: equal ones, from the scatter
    *,
    R0: float,
    R0_se: float = 0.0,  # 0: R0 is exact where given, as uncertain as the best point where measured
    R0_at: float | None = None,  # compute at which R0 was measured; None: given
    confidence: float = 0.9,
) -> Fit:
    """The sigmoid through the points. ConfigError on NaN, C < 0, rewards outside [0, 1], other lengths."""
    c, r = np.asarray(compute, np.float64), np.asarray(reward, np.float64)
    sd = np.zeros(c.shape) if se is None else np.asarray(se, np.float64)
    _check(c, r, sd, R0, R0_se, R0_at, confidence)
    known = bool((sd > 0).any())
    # a perfect score has a binomial error of 0, but is no more certain than the surest point
    sd = np.where(sd > 0, sd, sd[sd > 0].min() if known else EQUAL_ERROR)[c > 0]
    c, r = c[c > 0], r[c > 0]
    if R0_at is not None and not R0_se:
        R0_se = float(sd.min(initial=EQUAL_ERROR))
    facts = (
        confidence, len(c), (float(c.min()), float(c.max())) if len(c) else (0.0, 0.0), R0_at, R0,
        "given standard errors" if known else "equal errors, from the scatter",
        hashlib.sha256(np.concatenate([c, r, sd, [R0, R0_se]]).tobytes()).hexdigest()[:16],
    )  # fmt: skip
    if len(c) < LEAST_POINTS:
        return _nothing(R0, R0_se, facts)
    w, free = 1 / sd**2, len(c) - 3
    box: tuple[float, ...] = (*B_RANGE, float(c.min()) / 3, float(c.max()) * REACH)
    for i in range(HUBER_ROUNDS + ZOOMS):
        grid = _grid(c, r, w, R0, R0_se, box)
        least = float(grid.chi2.min())
        residual = (r - grid.best().reward(c)) / sd
        noise = max(least / free, float(known)) * _correlation_time(c, residual, known)
        limit = least + noise * float(fdtri(1, free, confidence))
        if i >= HUBER_ROUNDS - 1:
            box = _inner_box(grid, limit)
        z = np.abs(residual)
        scale = max(float(known), float(np.median(z)) * 1.4826, 1e-3)
        w = np.minimum(1.0, HUBER * scale / np.maximum(z, 1e-9)) / sd**2
    return _result(grid, limit, c, r, sd, facts)


def _check(
    c: Array, r: Array, sd: Array, R0: float, R0_se: float, R0_at: float | None, confidence: float
) -> None:
    if not c.shape == r.shape == sd.shape or c.ndim != 1:
        raise ConfigError(
            f"fit: compute, reward and errors have lengths {c.size}, {r.size}, {sd.size}; expected one"
        )
    for name, x, most in (("compute", c, np.inf), ("reward", r, 1.0), ("standard error", sd, np.inf)):
        wrong = ~((x >= 0) & (x <= most) & np.isfinite(x))
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            expected = "in [0, 1]" if name == "reward" else "of at least 0"
            raise ConfigError(f"fit: {name} of point {i + 1} is {x[i]}; expected a number {expected}")
    for name, value, low, high in (
        ("R0", R0, 0.0, 1.0), ("R0's standard error", R0_se, 0.0, 1.0),
        ("the compute of R0", R0_at or 0.0, 0.0, 1e300), ("confidence", confidence, 0.5, 0.9999),
    ):  # fmt: skip
        if not low <= value <= high:
            raise ConfigError(f"fit: {name} is {value}; expected a number in [{low:g}, {high:g}]")


def _nothing(R0: float, R0_se: float, facts: tuple[Any, ...]) -> Fit:
    """What too few points tell: R0."""
    unknown = Estimate(math.nan, math.nan, math.nan)
    start = Estimate(R0, max(0.0, R0 - 1.645 * R0_se), min(1.0, R0 + 1.645 * R0_se))
    few, nan = ("too-few-points",), math.nan
    return Fit(unknown, unknown, unknown, start, unknown, unknown, (), few, nan, nan, *facts)


def _grid(c: Array, r: Array, w: Array, R0: float, R0_se: float, box: tuple[float, ...]) -> _Grid:
    """χ² on a logarithmic grid over the box (B from, to, C_mid from, to)."""
    b = np.geomspace(box[0], box[1], GRID[0])[:, None]
    c_mid = np.geomspace(box[2], box[3], GRID[1])[None, :]
    s = rise(c, b[..., None], c_mid[..., None])  # (I, J, n)
    above, prior = r - R0, 1 / max(R0_se, 1e-9) ** 2
    ws, wss, wsr = s @ w, (s * s) @ w, s @ (w * above)
    u, v, m = w.sum() - 2 * ws + wss + prior, ws - wss, (w * above).sum() - wsr
    q = np.maximum(wss - v * v / u, 1e-300)  # 0 where C_mid is out of every point's sight
    centre = (wsr - m * v / u) / q
    a = np.clip(centre, 0, 1 - R0)
    least = (w * above**2).sum() - m * m / u - q * centre**2
    return _Grid(R0, b, c_mid, u, v, m, q, centre, a, np.maximum(least, 0) + q * (a - centre) ** 2)


def _correlation_time(c: Array, residual: Array, known: bool) -> float:
    """How many points tell as much as one independent one: (1 + ρ) / (1 − ρ), ρ that of neighbours.

    A run's wanderings last longer than the distance of two evaluations. Where errors are known, residuals
    smaller than these say nothing.
    """
    z = residual[np.argsort(c)]
    power = max(float((z * z).sum()), len(z) * float(known), 1e-300)
    rho = float(np.clip((z[1:] * z[:-1]).sum() / power, 0, 0.9))
    return (1 + rho) / (1 - rho)


def _inner_box(grid: _Grid, limit: float) -> tuple[float, ...]:
    """The box around the region, a step of the grid wider on each side."""
    inside = grid.chi2 <= limit
    edges: list[float] = []
    for axis, hit in ((grid.b[:, 0], inside.any(1)), (grid.c_mid[0], inside.any(0))):
        at = np.flatnonzero(hit)
        edges += [float(axis[max(at[0] - 1, 0)]), float(axis[min(at[-1] + 1, len(axis) - 1)])]
    return tuple(edges)


def _result(grid: _Grid, limit: float, c: Array, r: Array, sd: Array, facts: tuple[Any, ...]) -> Fit:
    """Estimates, and intervals as projections of the region χ² ≤ limit."""
    i, j = np.nonzero(grid.chi2 <= limit)
    b, c_mid, law = grid.b[i, 0], grid.c_mid[0, j], grid.best()
    u, v, m, q, centre = (x[i, j] for x in (grid.u, grid.v, grid.m, grid.q, grid.centre))
    slack = limit - grid.chi2[i, j] + q * (grid.a[i, j] - centre) ** 2  # above the unbounded minimum

    def interval(value: float, s: Any) -> Estimate:
        """Of R0 + d (1 − s) + a s: the extremes over each ellipse χ²(d, a) ≤ limit, cut at a's bounds."""
        tilt = s - (1 - s) * v / u
        reach = tilt / q * np.sqrt(slack / ((1 - s) ** 2 / u + tilt**2 / q))
        ends = []
        for sign in (-1, 1):
            a = np.clip(centre + sign * reach, 0, 1 - grid.R0)
            d = (m - a * v) / u + sign * np.sqrt(np.maximum(slack - q * (a - centre) ** 2, 0) / u)
            ends.append(np.clip(grid.R0 + d * (1 - s) + a * s, 0, 1))
        return Estimate(value, float(ends[0].min()), float(ends[1].max()))

    def at(compute: float) -> Estimate:
        return interval(float(law.reward(compute)), rise(compute, b, c_mid))

    A, B = interval(law.A, 1.0), Estimate(law.B, float(b.min()), float(b.max()))
    residual, spread = r - law.reward(c), float(((r - r.mean()) ** 2).sum())
    return Fit(
        A,
        B,
        Estimate(law.C_mid, float(c_mid.min()), float(c_mid.max())),
        interval(law.R0, 0.0),
        at(2 * float(c.max())),
        at(10 * float(c.max())),
        tuple((x, *asdict(at(x)).values()) for x in _band_points(c)),
        _flags(c, r, sd, grid.R0, A, B, law.C_mid),
        1 - float((residual**2).sum()) / spread if spread else math.nan,
        float(np.sqrt(((residual / sd) ** 2).sum() / (len(c) - 3))),
        *facts,
    )


def _band_points(c: Array) -> list[float]:
    return [float(x) for x in np.geomspace(c.min() / 10, c.max() * 10, 100)]


def _flags(
    c: Array, r: Array, sd: Array, R0: float, A: Estimate, B: Estimate, c_mid: float
) -> tuple[str, ...]:
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
    if B.high > 0.99 * B_RANGE[1]:
        flags.append("B-at-bound")
    return tuple(flags)


def explain(fit: Fit, unit: str) -> str:
    """What can be concluded from the fit, and what cannot."""
    reasons = "; ".join(FLAGS[f] for f in fit.flags if f not in HARMLESS)
    if "too-few-points" in fit.flags:
        return f"The ceiling is not identified: {reasons}. Evaluate more often or train longer."
    lines = [
        f"R(C) = R0 + (A − R0) / (1 + (C_mid/C)^B), from {fit.points} evaluations, "
        f"{fit.confidence:.0%} intervals:"
    ]
    if fit.identified:
        lines.append(f"  ceiling     A     {_words(fit.A, '.3f')}")
        if "B-at-bound" in fit.flags:
            lines.append(
                f"  B (at least {fit.B.low:.2g}) and C_mid (at most {fit.C_mid.high:.3g} {unit}) are not"
            )
            lines.append(f"  identified: {FLAGS['B-at-bound']}.")
        else:
            lines.append(f"  efficiency  B     {_words(fit.B, '.2f')}")
            lines.append(f"  midpoint    C_mid {_words(fit.C_mid, '.3g')} {unit}")
            most = fit.law.compute_for(fit.R0.value + 0.9 * (fit.A.value - fit.R0.value))
            lines.append(f"  nine tenths of the rise are won at about {most:.3g} {unit}")
    else:
        lines.append(f"  The ceiling A is not identified: {reasons}.")
        lines.append(f"  The data allow A from {fit.A.low:.2f} to {fit.A.high:.2f}; take no number of it.")
    where = "given" if fit.R0_at is None else f"measured before step 1: {fit.R0_told:.3f}"
    if fit.R0_at:
        where = f"the first point, at {fit.R0_at:.3g} {unit}: B and C_mid hang on it, so measure it at 0"
    lines.append(f"  at the start R0   {fit.R0.value:.3f} ({where})")
    for times, e in ((2, fit.at_2x), (10, fit.at_10x)):
        at = times * fit.compute_range[1]
        wide = " - too wide to use" if e.high - e.low > WIDEST else ""
        lines.append(f"  at {f'{times}×':>3} the compute ({at:.3g} {unit}): {_words(e, '.3f')}{wide}")
    if fit.scatter > 2:
        lines.append(
            f"  The points scatter {fit.scatter:.1f}× their standard errors: the intervals are widened,"
            "\n  but may still be too narrow if a longer run wanders."
        )
    return "\n".join(lines)


def _words(e: Estimate, form: str) -> str:
    return f"{e.value:{form}} ({e.low:{form}} to {e.high:{form}})"
