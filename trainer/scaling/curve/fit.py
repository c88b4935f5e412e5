"""The sigmoid of a run: its parameters with intervals, and flags for what the data cannot identify.

The statistics are in posterior.py: an interval holds quantiles of its draws, a value is that of the most
likely sigmoid.
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
from trainer.jsonl import nan_to_null
from trainer.scaling.curve.arrays import Columns, evaluated
from trainer.scaling.curve.average import DEFAULT, Average, Prior, average
from trainer.scaling.curve.marginal import Data
from trainer.scaling.curve.points import averaged, checked, data_of
from trainer.scaling.curve.posterior import B_RANGE, Draws, Posterior, posterior
from trainer.scaling.curve.shape import OtherShape, another_shape, last_drop
from trainer.scaling.curve.sigmoid import Curve, EvalPoint, Sigmoid, curve_of

Array = NDArray[np.float64]

MIN_POINTS = 5  # beyond R0: the sigmoid has three more parameters
MIN_FORECAST = 3  # from which there is a wide forecast all the same, if R0 is known
MAX_INTERVAL_SHARE = 0.2  # of the rise A − R0: where the interval of A is wider, A is not identified
MAX_INTERVAL = 0.1  # nor where it is wider than this
OVERDISPERSED = 2.0  # residual sd / reported standard error from which the reported errors are too small
MAX_OUTLIER_SHARE = 0.2  # of the points; with more outliers the fit is poor
MIN_SIGMOID = 0.1  # probability of the sigmoid below which its ceiling is not identified
MIN_R2 = 0.2  # below it, where the reported errors do not explain the residuals, the fit is poor
REPORTED_ERRORS = "given standard errors"
FLAGS = {
    "too-few-points": "there are fewer than 5 evaluations after the start",
    "flat": "the reward has not risen beyond its noise",
    "A-at-bound": "a ceiling of 1, the highest possible, fits the data as well",
    "C_mid-beyond-data": "half of the rise is beyond the data, or in the last point alone",
    "falling": "the reward has fallen from its peak, which a sigmoid cannot describe",
    "not-sigmoid": "another shape describes the points better than a sigmoid",
    "other-shape": "other shapes describe the points as well as a sigmoid, or better, with another end",
    "wide": "the interval of A is wider than a fifth of the rise from R0, or than 0.10",
    "last-point-low": "the last evaluation is far below the curve: a collapse, or a bad evaluation",
    "poor-fit": "a fifth of the points are outliers, or the curve explains less than a fifth of the variance",
    "B-at-bound": "the rise was over before the evaluations could show how steep it was",
    "R0-unknown": "the reward at zero compute was not measured, and B and C_mid depend on it",
}
SUFFICIENT = {"too-few-points", "falling", "flat"}  # reasons that explain the other ones
HARMLESS = {"B-at-bound", "R0-unknown"}  # the ceiling is identified all the same
NO_CURVE = {"flat", "falling", "poor-fit"}  # no shape describes such points


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Estimate:
        """In another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Fit:
    """The sigmoid of some points. `flags` say what is not identified; with too few points all is NaN."""

    A: Estimate
    B: Estimate
    C_mid: Estimate
    R0: Estimate
    at_2x: Estimate  # forecast of the reward at twice the last compute, and below at ten times
    at_10x: Estimate
    band: tuple[tuple[float, float, float, float], ...] = field(repr=False)  # (compute, value, low, high)
    flags: tuple[str, ...]
    r2: float
    overdispersion: float  # residual sd in standard errors; where none are reported, in units of EQUAL_ERROR
    autocorrelated_prob: float  # probability that the errors of neighbouring points are correlated
    autocorrelation: float  # their correlation, if they are
    outliers: int  # points that have lost three quarters of their weight or more
    confidence: float
    points: int  # beyond R0
    compute_range: tuple[float, float]
    R0_source: str  # "measured", "given" or "unknown"
    R0_reported: float | None  # as measured or given; `R0` is that of the sigmoid
    noise: str
    data_hash: str
    within: float | None  # how far A's interval may reach from its value; None: in relation to the rise
    details: dict[str, str]  # what a flag means for this fit, where FLAGS says less
    sigmoid_prob: float = math.nan  # of the laws over which forecasts are averaged, that of the sigmoid
    draws: Draws | None = field(default=None, repr=False, compare=False)  # None: too few points
    averaged_draws: Average | None = field(default=None, repr=False, compare=False)  # None: the same

    @property
    def identified(self) -> bool:
        """Whether the data identify the ceiling."""
        return not set(self.flags) - HARMLESS

    @property
    def has_forecast(self) -> bool:
        """Whether the curve may be carried beyond the data, if only as an interval."""
        return self.averaged_draws is not None and not {"falling", "flat"} & set(self.flags)

    @property
    def predictable(self) -> bool:
        """The same, from enough points for a sigmoid."""
        return self.has_forecast and self.draws is not None

    @property
    def reasons(self) -> str:
        """Why they do not, without what follows from another reason; empty if they do."""
        flags = [flag for flag in self.flags if flag not in HARMLESS]
        named = [flag for flag in flags if flag in SUFFICIENT] or [flag for flag in flags if flag != "wide"]
        return "; ".join(self.describe(flag) for flag in named or flags)

    def describe(self, flag: str) -> str:
        """What a flag means for this fit."""
        return self.details.get(flag, FLAGS[flag])

    @property
    def overdispersed(self) -> bool:
        """Whether the points scatter more than their reported standard errors explain."""
        return self.noise == REPORTED_ERRORS and self.overdispersion > OVERDISPERSED

    @property
    def sigmoid(self) -> Sigmoid:
        """The most likely sigmoid."""
        return Sigmoid(self.R0.value, self.A.value, self.B.value, self.C_mid.value)

    def at(self, compute: float) -> Estimate:
        """The reward at a compute, averaged over laws, without the noise of an evaluation."""
        return median(self.forecast.reward(compute), self.confidence)

    def compute_for(self, reward: float) -> Estimate:
        """The compute at which the run reaches a reward; infinite if it never does."""
        return median(self.forecast.compute_for(reward), self.confidence)

    @property
    def forecast(self) -> Average:
        """Equally likely curves. ConfigError: too few points."""
        if self.averaged_draws is None:
            raise ConfigError(f"the fit has {self.points} points beyond R0; {FLAGS['too-few-points']}")
        return self.averaged_draws

    def to_json(self) -> dict[str, Any]:
        """As valid JSON, the answer first and the band last, without the draws."""
        content = {"identified": self.identified} | asdict(replace(self, draws=None, averaged_draws=None))
        del content["draws"], content["averaged_draws"]
        if not self.predictable:  # what lies beyond the data would be a forecast
            measured = [row for row in self.band if row[0] <= self.compute_range[1]]
            content |= {"at_2x": None, "at_10x": None, "band": measured}
        return dict(nan_to_null(content | {"band": content.pop("band")}))


def estimate(value: float, draws: Array, confidence: float) -> Estimate:
    """A value and the interval of its draws, widened where that leaves out the value."""
    tail = (1 - confidence) / 2
    low, high = (float(x) for x in np.quantile(draws, [tail, 1 - tail], method="inverted_cdf"))
    return Estimate(value, min(low, value), max(high, value))


def median(draws: Array, confidence: float) -> Estimate:
    """The median and the interval of draws, of which some can be infinite."""
    return estimate(float(np.quantile(draws, 0.5, method="inverted_cdf")), draws, confidence)


def is_wide(e: Estimate, rise: float, within: float | None) -> bool:
    """Whether an interval reaches further than `within` from its value; None: is too wide for the rise."""
    if within is not None:
        return max(e.high - e.value, e.value - e.low) > within
    return e.high - e.low > min(MAX_INTERVAL_SHARE * rise, MAX_INTERVAL)


def fit_run(
    points: Sequence[EvalPoint], confidence: float = 0.9, within: float | None = None, prior: Prior = DEFAULT
) -> Fit:
    """Fit a run's evaluations; the one at compute 0 is R0."""
    if not points:
        raise ConfigError("fit: there are no points; expected R0 and at least one evaluation beyond it")
    return fit_curve(curve_of("", "", points), confidence, within, prior=prior)


def fit_curve(
    curve: Curve,
    confidence: float = 0.9,
    within: float | None = None,
    check_shape: bool = True,  # False: it is known to be a sigmoid, and no other shape is tried
    prior: Prior = DEFAULT,  # of the forecasts
) -> Fit:
    """Fit a curve. ConfigError as `fit`, after the curve's name."""
    try:
        return _fit(checked(curve), confidence, within, prior if check_shape else None)
    except ConfigError as e:
        raise ConfigError(f"{curve.name}: {e}" if curve.name else str(e)) from e


def fit_with_draws(
    curve: Curve, confidence: float = 0.9, within: float | None = None, prior: Prior = DEFAULT
) -> tuple[Fit, Draws]:
    """Fit a curve that must have enough points for a posterior. ConfigError: too few, or as `fit`."""
    fit = fit_curve(curve, confidence, within, prior=prior)
    if fit.draws is None:
        raise ConfigError(f"{curve.name}: {FLAGS['too-few-points']}; evaluate more often, or leave it out")
    return fit, fit.draws


def fit(
    compute: ArrayLike | str | Curve,  # (n,) ≥ 0, in any unit; what was measured at 0 is R0. Or a Curve alone
    reward: ArrayLike | str | None = None,  # (n,) from 0 to 1; NaN: not evaluated there, left out
    se: ArrayLike | str | None = None,  # (n,) standard errors; None or all 0: equal ones, from the residuals
    *,
    data: Columns | None = None,  # a DataFrame, whose columns `compute`, `reward` and `se` then name
    R0: float | None = None,  # the reward at zero compute; None: as measured there, else unknown
    R0_se: float | None = 0.0,  # of that R0. 0: it is exact; None: as uncertain as the most certain point
    confidence: float = 0.9,  # of the intervals
    within: float | None = None,  # A is identified if its interval reaches no further from its value
) -> Fit:
    """The sigmoid through the points: `fit(hours, acc)`, `fit("hours", "acc", data=frame)`, `fit(curve(…))`.

    ConfigError: C < 0 or NaN, rewards outside [0, 1], columns of different lengths, or that are not numbers.
    """
    if isinstance(compute, Curve):
        return fit_curve(compute, confidence, within)
    c, r, sd = evaluated(compute, reward, se, data)
    start = c == 0
    if R0 is None and start.any():
        R0, R0_se = float(r[start].mean()), float(np.hypot.reduce(sd[start])) / int(start.sum()) or None
        c, r, sd = c[~start], r[~start], sd[~start]
    return _fit(data_of(c, r, sd, R0, R0_se), confidence, within)


def _fit(data: Data, confidence: float, within: float | None, prior: Prior | None = DEFAULT) -> Fit:
    if not 0.5 <= confidence <= 0.9999:
        raise ConfigError(f"--confidence {confidence:g}: expected a number from 0.5 to 0.9999, such as 0.9")
    if within is not None and not 0 < within < 1:
        raise ConfigError(f"--within {within:g}: expected a reward between 0 and 1, such as 0.02")
    c, r, sd, R0 = data.compute, data.reward, data.sd, data.R0
    content = np.concatenate([c, r, sd, [-1.0 if R0 is None else R0, data.R0_se]])
    facts: dict[str, Any] = {
        "confidence": confidence,
        "within": within,
        "points": len(c),
        "compute_range": (float(c[0]), float(c[-1])) if len(c) else (0.0, 0.0),
        "R0_source": "unknown" if R0 is None else "measured" if data.R0_se else "given",
        "R0_reported": R0,
        "noise": REPORTED_ERRORS if data.sd_known else "equal errors, from the residuals",
        "data_hash": hashlib.sha256(content.tobytes()).hexdigest()[:16],
    }
    if len(c) < MIN_POINTS:
        nan = math.nan
        unknown, start, ahead = Estimate(nan, nan, nan), Estimate(nan, 0.0, 1.0), None
        if R0 is not None:
            start = Estimate(R0, max(0.0, R0 - 1.645 * data.R0_se), min(1.0, R0 + 1.645 * data.R0_se))
            ahead = average(data, prior) if prior and len(c) >= MIN_FORECAST else None
        flags = ("too-few-points", *_no_rise(data))
        return Fit(
            unknown, unknown, unknown, start, unknown, unknown, (), flags, details={},
            r2=nan, overdispersion=nan, autocorrelated_prob=nan, autocorrelation=nan, outliers=0,
            averaged_draws=ahead, **facts,
        )  # fmt: skip
    data = averaged(data)
    return _result(data, posterior(data), facts, prior)


def _result(data: Data, found: Posterior, facts: dict[str, Any], prior: Prior | None) -> Fit:
    sigmoid, draws, confidence = found.sigmoid, found.draws, facts["confidence"]
    c, r, sd = data.compute, data.reward, data.sd
    A, B, C_mid, R0 = (
        estimate(getattr(sigmoid, name), getattr(draws, name), confidence)
        for name in ("A", "B", "C_mid", "R0")
    )
    residual, spread = r - sigmoid.reward(c), float(((r - r.mean()) ** 2).sum())
    wide = is_wide(A, A.value - R0.value, facts["within"])
    drop = last_drop(data, sigmoid)
    flags = _flags(data, A, B, C_mid.value, wide, drop, _is_poor(data, found))
    averaged_over = prior if NO_CURVE.isdisjoint(flags) else None
    shape = another_shape(data, found) if averaged_over else None
    ahead = average(data, averaged_over) if averaged_over else Average.of_sigmoids(draws, float(c[-1]))
    if shape is None and ahead.sigmoid_prob < MIN_SIGMOID:
        text = f"other laws are more probable (a sigmoid: {ahead.sigmoid_prob:.1%} probable)"
        shape = OtherShape(text, better=False)
    at_2x, at_10x = (median(ahead.reward(x), confidence) for x in (2 * c[-1], 10 * c[-1]))
    band_at, tail = np.geomspace(c[0] / 10, c[-1] * 10, 100), (1 - confidence) / 2
    levels = np.quantile(ahead.reward(band_at), [0.5, tail, 1 - tail], axis=0, method="inverted_cdf")
    band = np.stack([band_at, *levels], 1)
    return Fit(
        A, B, C_mid, R0, at_2x, at_10x,
        band=tuple((x, value, low, high) for x, value, low, high in band.tolist()),
        flags=(_shape_flag(shape), *flags) if shape else flags,
        details=_details(A, A.value - R0.value, facts["within"], drop, shape),
        r2=1 - float((residual**2).sum()) / spread if spread else math.nan,
        overdispersion=float(np.sqrt(((residual / sd) ** 2).sum() / max(1, len(c) - 3))),
        autocorrelated_prob=found.autocorrelated_prob, autocorrelation=found.autocorrelation,
        outliers=found.outliers, sigmoid_prob=ahead.sigmoid_prob, draws=draws, averaged_draws=ahead, **facts,
    )  # fmt: skip


def _no_rise(data: Data) -> tuple[str, ...]:
    """Whether a few points have fallen from their peak or the start, or not risen: by three errors."""
    if data.R0 is None or not len(data.reward):
        return ()
    noise = 3 * math.hypot(float(data.sd[-1]), data.R0_se)
    if float(data.reward[-1]) < max(float(data.reward.max()), data.R0) - noise:
        return ("falling",)
    return ("flat",) if float(data.reward[-1]) < data.R0 + noise else ()


def _is_poor(data: Data, found: Posterior) -> bool:
    """Whether too many points are outliers, or the sigmoid explains too little of the variance.

    So a single jump or mere noise is not taken for a curve. R0 counts as a point, because much of the rise
    can come before the first evaluation.
    """
    start = [] if data.R0 is None else [data.R0]
    r, predicted = np.r_[start, data.reward], found.sigmoid.reward(np.r_[[0.0] * len(start), data.compute])
    if found.outliers >= MAX_OUTLIER_SHARE * len(data.reward):
        return True
    z = (data.reward - predicted[len(start) :]) / data.sd
    if data.sd_known and float(np.sqrt((z**2).mean())) < OVERDISPERSED:  # the reported errors explain it
        return False
    return float(((r - predicted) ** 2).sum()) > (1 - MIN_R2) * float(((r - r.mean()) ** 2).sum())


def _shape_flag(shape: OtherShape) -> str:
    return "not-sigmoid" if shape.better else "other-shape"


def _details(
    A: Estimate, rise: float, within: float | None, drop: float, shape: OtherShape | None
) -> dict[str, str]:
    limit = f"a fifth of the rise from R0 ({MAX_INTERVAL_SHARE * rise:.3f})"
    if MAX_INTERVAL_SHARE * rise > MAX_INTERVAL:
        limit = f"{MAX_INTERVAL:.2f}"
    wide = f"the interval of A is {A.high - A.low:.3f} wide, which is more than {limit}"
    if within:
        wide = f"the interval of A reaches further than {within:g} from its value"
    texts = {_shape_flag(shape): shape.text} if shape else {}
    if is_wide(A, rise, within):
        texts["wide"] = wide
    if drop:
        low = f"the last evaluation is {drop:.2f} below the curve: a collapse, or a bad evaluation"
        texts["last-point-low"] = low
    return texts


def _flags(
    data: Data, A: Estimate, B: Estimate, c_mid: float, wide: bool, drop: float, poor: bool
) -> tuple[str, ...]:
    r, sd = data.reward, data.sd
    if not data.sd_known:  # the noise, from how far each point is from the mean of its neighbours
        sd = np.maximum(sd, 1.4826 * float(np.median(np.abs(np.diff(r, 2)))) / 6**0.5)
    last = max(2, len(r) // 5)
    start = float(r[0]) if data.R0 is None else data.R0
    width = min(len(r), max(3, last))  # the median of three ignores one outlier
    windows = np.median(np.lib.stride_tricks.sliding_window_view(r, width), axis=-1)
    ends = (width, windows[-1]), (3, np.median(r[-3:]))  # a late fall shows in a few points only
    falling = any(windows.max() - end > max(0.03, 4 * sd.mean() / n**0.5) for n, end in ends)
    flat = not falling and r[-last:].mean() - start < 3 * sd[-last:].mean() / last**0.5
    raised = {
        "flat": flat,
        "A-at-bound": A.high >= 0.99 and A.low < 0.95,
        "C_mid-beyond-data": c_mid > data.compute[-2],
        "falling": falling,
        "last-point-low": drop > 0 and not falling,
        "wide": wide,
        "poor-fit": poor and not flat and not falling,  # these say why
        "B-at-bound": B.high > 0.9 * B_RANGE[1],
        "R0-unknown": data.R0 is None,
    }
    return tuple(flag for flag, is_raised in raised.items() if is_raised)
