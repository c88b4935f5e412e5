"""The sigmoid of a run: its numbers with intervals, and flags for what the data cannot identify.

The statistics are posterior.py's: intervals are quantiles of its draws, a value is that of the likeliest law.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.config import ConfigError
from trainer.scaling.points import Curve, EvalPoint, curve_of
from trainer.scaling.posterior import B_RANGE, Data, Draws, Posterior, posterior
from trainer.scaling.sigmoid import Sigmoid

Array = NDArray[np.float64]

LEAST_POINTS = 5  # beyond R0: the law has three parameters
MOST_POINTS = 150  # longer series are averaged over neighbours
WIDEST = 0.06  # an interval of A wider than ±.03 tells no two recipes apart
SCATTERS = 2.0  # times the told errors, from which they do not explain how far points lie off the law
LEAST_SHARE = 0.2  # of outliers from which, and of explained variance up to which, a curve is no law
EQUAL_ERROR = 1e-2  # where no errors are given; for the fit only their being equal matters
TOLD_ERRORS = "given standard errors"
FLAGS = {
    "too-few-points": "there are fewer than 5 evaluations beyond R0",
    "flat": "the score has not risen beyond its noise",
    "A-at-bound": "the data still allow a ceiling of 1, the highest there is",
    "C_mid-beyond-data": "half of the rise lies beyond the data, or in the last of them alone",
    "falling": "the score has fallen from its peak: the sigmoid cannot describe that",
    "wide": "the interval of A is wider than 0.06",
    "misfit": "the curve leaves a fifth of the points, or four fifths of their variance, unexplained",
    "B-at-bound": "the rise is over before the evaluations can show how steep it was",
    "R0-unknown": "the reward at zero compute was not measured, and B and C_mid hang on it",
}
HARMLESS = {"B-at-bound", "R0-unknown"}  # say nothing against A


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
    scatter: float  # residual standard deviation in standard errors; none told: in hundredths of the scale
    wander: float  # probability that neighbouring points err together,
    correlation: float  # and by how much, if they do
    outliers: int  # points that have lost three quarters of their weight or more
    confidence: float
    points: int  # beyond R0
    compute_range: tuple[float, float]
    R0_source: str  # "measured", "given" or "unknown"
    R0_told: float | None  # as measured or given; `R0` is the law's
    noise: str
    data_hash: str
    draws: Draws | None = field(default=None, repr=False, compare=False)  # None: too few points

    @property
    def identified(self) -> bool:
        """Whether the data tell the ceiling."""
        return not set(self.flags) - HARMLESS

    @property
    def reasons(self) -> str:
        """Why they do not; empty where they do."""
        return "; ".join(FLAGS[f] for f in self.flags if f not in HARMLESS)

    @property
    def scatters(self) -> bool:
        """Whether the points lie farther from the law than the standard errors say that were told."""
        return self.noise == TOLD_ERRORS and self.scatter > SCATTERS

    @property
    def law(self) -> Sigmoid:
        """The likeliest sigmoid."""
        return Sigmoid(self.R0.value, self.A.value, self.B.value, self.C_mid.value)

    def at(self, compute: float) -> Estimate:
        """The law's reward at a compute."""
        return estimate(float(self.law.reward(compute)), self._draws.reward(compute), self.confidence)

    def compute_for(self, reward: float) -> Estimate:
        """The compute at which the law reaches a reward; infinite where it does not."""
        return estimate(self.law.compute_for(reward), self._draws.compute_for(reward), self.confidence)

    @property
    def _draws(self) -> Draws:
        if self.draws is None:
            raise ConfigError(f"the fit has {self.points} points beyond R0; expected at least {LEAST_POINTS}")
        return self.draws

    def to_json(self) -> dict[str, Any]:
        """As valid JSON, with `identified` and without the draws."""
        content = {k: getattr(self, k) for k in self.__dataclass_fields__ if k != "draws"}
        content = {k: asdict(v) if isinstance(v, Estimate) else v for k, v in content.items()}
        return {**valid_json(content), "identified": self.identified}


def valid_json(x: Any) -> Any:
    """What is unknown or infinite is null."""
    if isinstance(x, dict):
        return {k: valid_json(v) for k, v in x.items()}
    if isinstance(x, tuple | list):
        return [valid_json(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def estimate(value: float, draws: Array, confidence: float) -> Estimate:
    """A value with the interval of its draws, which holds it."""
    tail = (1 - confidence) / 2
    low, high = (float(x) for x in np.quantile(draws, [tail, 1 - tail], method="inverted_cdf"))
    return Estimate(value, min(low, value), max(high, value))


def fit_run(points: Sequence[EvalPoint], confidence: float = 0.9) -> Fit:
    """Fit a run's evaluations; the one at compute 0 is R0."""
    if not points:
        raise ConfigError("fit: there are no points; expected R0 and at least one evaluation beyond it")
    return fit_curve(curve_of("", "", points), confidence)


def fit_curve(curve: Curve, confidence: float = 0.9) -> Fit:
    """Fit a curve with what it knows of R0. ConfigError as `fit`, with the curve's name."""
    try:
        return _fit(checked(curve), confidence)
    except ConfigError as e:
        raise ConfigError(f"{curve.name}: {e}" if curve.name else str(e)) from e


def fit(
    compute: ArrayLike,  # (n,) > 0
    reward: ArrayLike,  # (n,) in [0, 1]
    se: ArrayLike | None = None,  # (n,) standard errors; None or all 0: equal ones, from the scatter
    *,
    R0: float | None,  # reward at zero compute; None: unknown, anything from 0 to A
    R0_se: float | None = 0.0,  # 0: R0 is exact; None: as uncertain as the surest point, told or not
    confidence: float = 0.9,
) -> Fit:
    """The sigmoid through the points. ConfigError on NaN, C ≤ 0, rewards outside [0, 1], other lengths."""
    c, r = np.asarray(compute, np.float64), np.asarray(reward, np.float64)
    sd = np.zeros(c.shape) if se is None else np.asarray(se, np.float64)
    return _fit(_checked(c, r, sd, R0, R0_se), confidence)


def checked(curve: Curve) -> Data:
    """A curve's points as they are fitted: ascending, none with an error of 0. ConfigError as `fit`."""
    columns = [[getattr(p, name) for p in curve.points] for name in ("compute", "pass_rate", "pass_rate_se")]
    c, r, sd = (np.asarray(x, np.float64) for x in columns)
    if isinstance(curve.R0, EvalPoint):
        return _checked(c, r, sd, curve.R0.pass_rate, curve.R0.pass_rate_se or None)
    return _checked(c, r, sd, curve.R0, 0.0)


def averaged(data: Data) -> Data:
    """At most MOST_POINTS means of neighbours."""
    if len(data.compute) <= MOST_POINTS:
        return data
    parts = np.array_split(np.arange(len(data.compute)), MOST_POINTS)
    c, r = (np.array([x[i].mean() for i in parts]) for x in (data.compute, data.reward))
    sd = np.array([float(np.sqrt((data.sd[i] ** 2).sum())) / len(i) for i in parts])
    return replace(data, compute=c, reward=r, sd=sd)


def _checked(c: Array, r: Array, sd: Array, R0: float | None, R0_se: float | None) -> Data:
    _check(c, r, sd, R0, R0_se)
    order = np.argsort(c, kind="stable")
    c, r, sd = c[order], r[order], sd[order]
    known = bool((sd > 0).any())
    # a perfect score has a binomial error of 0, but is no more certain than the surest point
    sd = np.where(sd > 0, sd, sd[sd > 0].min() if known else EQUAL_ERROR)
    surest = float(sd.min(initial=EQUAL_ERROR))
    return Data(c, r, sd, known, R0, surest if R0_se is None else R0_se, R0_se is not None)


def _fit(data: Data, confidence: float) -> Fit:
    if not 0.5 <= confidence <= 0.9999:
        raise ConfigError(f"fit: confidence is {confidence}; expected a number in [0.5, 0.9999]")
    c, r, sd, R0 = data.compute, data.reward, data.sd, data.R0
    facts: dict[str, Any] = {
        "confidence": confidence,
        "points": len(c),
        "compute_range": (float(c[0]), float(c[-1])) if len(c) else (0.0, 0.0),
        "R0_source": "unknown" if R0 is None else "measured" if data.R0_se else "given",
        "R0_told": R0,
        "noise": TOLD_ERRORS if data.sd_known else "equal errors, from the scatter",
        "data_hash": hashlib.sha256(
            np.concatenate([c, r, sd, [-1.0 if R0 is None else R0, data.R0_se]]).tobytes()
        ).hexdigest()[:16],
    }
    if len(c) < LEAST_POINTS:
        return _nothing(R0, data.R0_se, facts)
    data = averaged(data)
    return _result(data, posterior(data), facts)


def _check(c: Array, r: Array, sd: Array, R0: float | None, R0_se: float | None) -> None:
    if not c.shape == r.shape == sd.shape or c.ndim != 1:
        raise ConfigError(
            f"fit: compute, reward and errors have lengths {c.size}, {r.size}, {sd.size}; expected one"
        )
    for name, x, most in (("compute", c, np.inf), ("reward", r, 1.0), ("standard error", sd, np.inf)):
        wrong = ~((x >= 0) & (x <= most) & np.isfinite(x))
        if name == "compute":
            wrong |= x == 0
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            expected = {"reward": "in [0, 1]", "compute": "above 0 (at 0 it is R0)"}
            wanted = expected.get(name, "of at least 0")
            raise ConfigError(f"fit: {name} of point {i + 1} is {x[i]}; expected a number {wanted}")
    for name, value, low, high in (
        ("R0", R0 or 0.0, 0.0, 1.0), ("R0's standard error", R0_se or 0.0, 0.0, 1.0),
    ):  # fmt: skip
        if not low <= value <= high:
            raise ConfigError(f"fit: {name} is {value}; expected a number in [{low:g}, {high:g}]")


def _nothing(R0: float | None, R0_se: float, facts: dict[str, Any]) -> Fit:
    """What too few points tell: R0."""
    nan = math.nan
    unknown = Estimate(nan, nan, nan)
    start = Estimate(nan, 0.0, 1.0)
    if R0 is not None:
        start = Estimate(R0, max(0.0, R0 - 1.645 * R0_se), min(1.0, R0 + 1.645 * R0_se))
    few = ("too-few-points",)
    return Fit(
        unknown, unknown, unknown, start, unknown, unknown, (), few,
        r2=nan, scatter=nan, wander=nan, correlation=nan, outliers=0, **facts,
    )  # fmt: skip


def _result(data: Data, found: Posterior, facts: dict[str, Any]) -> Fit:
    law, draws, confidence = found.law, found.draws, facts["confidence"]
    c, r, sd = data.compute, data.reward, data.sd

    def of(name: str) -> Estimate:
        return estimate(getattr(law, name), getattr(draws, name), confidence)

    band_at = np.geomspace(c[0] / 10, c[-1] * 10, 100)
    curves, middle = draws.reward(band_at), law.reward(band_at)
    tail = (1 - confidence) / 2
    low, high = np.quantile(curves, [tail, 1 - tail], axis=0, method="inverted_cdf")
    band = np.stack([band_at, middle, np.minimum(low, middle), np.maximum(high, middle)], 1)
    at_2x, at_10x = (
        estimate(float(law.reward(x)), draws.reward(x), confidence) for x in (2 * c[-1], 10 * c[-1])
    )
    residual, spread = r - law.reward(c), float(((r - r.mean()) ** 2).sum())
    A, B, C_mid = of("A"), of("B"), of("C_mid")
    return Fit(
        A, B, C_mid, of("R0"), at_2x, at_10x,
        band=tuple((x, value, low, high) for x, value, low, high in band.tolist()),
        flags=_flags(data, A, B, C_mid.value, _misfit(data, found)),
        r2=1 - float((residual**2).sum()) / spread if spread else math.nan,
        scatter=float(np.sqrt(((residual / sd) ** 2).sum() / max(1, len(c) - 3))),
        wander=found.wander, correlation=found.correlation, outliers=found.outliers, draws=draws, **facts,
    )  # fmt: skip


def _jitter(r: Array) -> float:
    """The noise of points whose errors are not told, by how far each is off its neighbours."""
    return 1.4826 * float(np.median(np.abs(np.diff(r, 2)))) / 6**0.5


def _misfit(data: Data, found: Posterior) -> bool:
    """Whether outliers make up the law, or it explains next to nothing: of one jump, or of mere noise.

    A measured or given R0 is one of the points: most of a late series' rise may lie before its first.
    """
    start = [] if data.R0 is None else [data.R0]
    r, law = np.r_[start, data.reward], found.law.reward(np.r_[[0.0] * len(start), data.compute])
    if found.outliers >= LEAST_SHARE * len(data.reward):
        return True
    off = float(np.sqrt((((data.reward - law[len(start) :]) / data.sd) ** 2).mean()))
    if data.sd_known and off < SCATTERS:  # the told errors explain the rest
        return False
    return float(((r - law) ** 2).sum()) > (1 - LEAST_SHARE) * float(((r - r.mean()) ** 2).sum())


def _flags(data: Data, A: Estimate, B: Estimate, c_mid: float, misfit: bool) -> tuple[str, ...]:
    flags = []
    r, sd = data.reward, data.sd if data.sd_known else np.maximum(data.sd, _jitter(data.reward))
    last = max(2, len(r) // 5)
    start = float(r[0]) if data.R0 is None else data.R0
    if r[-last:].mean() - start < 3 * sd[-last:].mean() / last**0.5:
        flags.append("flat")
    if A.high >= 0.99 and A.low < 0.95:
        flags.append("A-at-bound")
    if c_mid > data.compute[-2]:
        flags.append("C_mid-beyond-data")
    some = min(len(r), max(3, last))  # of three, one outlier is not the median
    windows = np.median(np.lib.stride_tricks.sliding_window_view(r, some), axis=-1)
    ends = (some, windows[-1]), (3, np.median(r[-3:]))  # a late fall is in a few points only
    if any(windows.max() - end > max(0.03, 4 * sd.mean() / n**0.5) for n, end in ends):
        flags = [*(flag for flag in flags if flag != "flat"), "falling"]
    if A.high - A.low > WIDEST:
        flags.append("wide")
    if misfit and not {"flat", "falling"} & set(flags):  # these say why
        flags.append("misfit")
    if B.high > 0.9 * B_RANGE[1]:
        flags.append("B-at-bound")
    if data.R0 is None:
        flags.append("R0-unknown")
    return tuple(flags)
