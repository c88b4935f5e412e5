"""The sigmoid of a run: its parameters with intervals, and flags for what the data cannot identify.

The statistics are in average.py: an interval holds quantiles of its draws, a value is that of the most
likely sigmoid.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from trainer.config import ConfigError
from trainer.jsonl import nan_to_null
from trainer.scaling.curve.average import DEFAULT, FURTHEST, Average, Prior, average, posterior
from trainer.scaling.curve.axis import Axis
from trainer.scaling.curve.flags import FLAGS, HARMLESS, NO_CURVE, SURPRISING, few_points, flags_of, reasons
from trainer.scaling.curve.marginal import MIN_SD, Data
from trainer.scaling.curve.points import MIN_FORECAST, MIN_POINTS, averaged, checked, curve, usual_error
from trainer.scaling.curve.shape import UNLIKELY, another_shape
from trainer.scaling.curve.sigmoid import Array, Curve, Draws, Estimate, EvalPoint, Sigmoid, estimate, median

REPORTED_ERRORS = "given standard errors"
USUAL_ERRORS = "usual errors, since most rewards are the same"


@dataclass(frozen=True, slots=True)
class Fit:
    """The sigmoid of some points. `flags` say what is not identified; with too few points all is NaN."""

    A: Estimate
    B: Estimate
    C_mid: Estimate  # of work where there is an `axis`: `midpoint` is its compute
    at_2x: Estimate  # forecast of the reward at twice the last compute, and below at ten times
    at_10x: Estimate
    R0: Estimate
    flags: tuple[str, ...]
    confidence: float
    points: int  # beyond R0
    compute_range: tuple[float, float]
    R0_source: str  # "measured", "given" or "unknown"
    R0_reported: float | None  # as measured or given; `R0` is that of the sigmoid
    noise: str
    data_hash: str
    within: float | None  # how far A's interval may reach from its value; None: in relation to the rise
    r2: float = math.nan
    overdispersion: float = math.nan  # residual sd in standard errors; without these, in usual_error
    autocorrelated_prob: float = math.nan  # probability that the errors of neighbouring points are correlated
    autocorrelation: float = math.nan  # their correlation, if they are
    outliers: int = 0  # points that have lost three quarters of their weight or more
    details: dict[str, str] = field(default_factory=dict)  # what a flag means here, where FLAGS says less
    sigmoid_prob: float = math.nan  # of the laws over which forecasts are averaged, that of the sigmoid
    band: tuple[tuple[float, float, float, float], ...] = field(default=(), repr=False)  # C, value, low, high
    draws: Draws | None = field(default=None, repr=False, compare=False)  # None: too few points
    averaged_draws: Average | None = field(default=None, repr=False, compare=False)  # None: the same

    @property
    def identified(self) -> bool:
        """True if the data identify the ceiling."""
        return not set(self.flags) - HARMLESS

    @property
    def has_forecast(self) -> bool:
        """True if the curve may be carried beyond the data, if only as an interval."""
        return self.averaged_draws is not None and "falling" not in self.flags

    @property
    def predictable(self) -> bool:
        """True if there is a forecast, of a run that has risen and has enough points for a sigmoid."""
        return self.has_forecast and self.draws is not None and "flat" not in self.flags

    @property
    def reasons(self) -> str:
        """The reasons why the ceiling is not identified, but for those that follow from others; or empty."""
        return "; ".join(map(self.describe, reasons(self.flags)))

    def describe(self, flag: str) -> str:
        """The meaning of a flag for this fit."""
        return self.details.get(flag, FLAGS[flag])

    @property
    def axis(self) -> Axis | None:
        """The work to which the curve is fitted; None: it is fitted to compute."""
        return self.averaged_draws.axis if self.averaged_draws else None

    @property
    def midpoint(self) -> Estimate:
        """The compute at which half of A − R0 is gained."""
        return self.C_mid if self.draws is None else self.compute_of(self.C_mid.value, self.draws.C_mid)

    def compute_of(self, value: float, draws: Array) -> Estimate:
        """The compute until a value of the curve's C, and draws of it; another where there is an `axis`."""
        if self.axis:
            ahead = self.axis.ahead
            value = float(self.axis.hours(np.array(value), np.median(ahead)))
            draws = self.axis.hours(draws, ahead)
        return estimate(value, draws, self.confidence)

    @property
    def sigmoid(self) -> Sigmoid:
        """The most likely sigmoid."""
        return Sigmoid(self.R0.value, self.A.value, self.B.value, self.C_mid.value)

    def at(self, compute: float) -> Estimate:
        """The reward at a compute, averaged over laws, without the noise of an evaluation."""
        return median(self.forecast.reward(compute), self.confidence)

    def along(self, compute: Sequence[float]) -> list[Estimate]:
        """The rewards at many computes: as `at`, in one call."""
        return [median(draws, self.confidence) for draws in self.forecast.reward(compute).T]

    def compute_for(self, reward: float) -> Estimate:
        """The compute at which the run reaches a reward; infinite if it never does."""
        return median(self.forecast.compute_for(reward), self.confidence)

    def level(self, points: Sequence[EvalPoint]) -> Estimate:
        """The mean reward expected of evaluations at the points' computes, with the noise of that mean; of a
        single point, of that evaluation."""
        rewards, measured = self.level_draws(points)
        return estimate(float(np.median(rewards)), measured, self.confidence)

    def level_draws(self, points: Sequence[EvalPoint]) -> tuple[Array, Array]:
        """(n,) equally likely mean rewards at the points' computes, and means of evaluations there."""
        rewards = self.forecast.reward([p.compute for p in points]).mean(1)
        scale = 1.0 if math.isnan(self.overdispersion) else self.overdispersion
        noise = usual_error(rewards) * (max(1.0, scale) if self.noise == USUAL_ERRORS else scale)
        if self.noise == REPORTED_ERRORS:
            error = max(MIN_SD, float(np.mean([p.pass_rate_se for p in points])))
            noise = np.full(len(rewards), error * max(1.0, scale))
        # Of errors that are correlated, a mean keeps more.
        shared = np.nan_to_num(self.autocorrelated_prob * self.autocorrelation)
        noise = noise * math.sqrt(shared + (1 - shared) / len(points))
        return rewards, np.clip(
            rewards + noise * np.random.default_rng(0).standard_normal(len(rewards)), 0, 1
        )

    @property
    def forecast(self) -> Average:
        """Equally likely curves. ConfigError: too few points."""
        if self.averaged_draws is None:
            raise ConfigError(f"the fit has {self.points} points beyond R0; {FLAGS['too-few-points']}")
        return self.averaged_draws

    def to_json(self) -> dict[str, Any]:
        """The fit as valid JSON, the answer first and the band last, without the draws."""
        content = {"identified": self.identified} | asdict(replace(self, draws=None, averaged_draws=None))
        del content["draws"], content["averaged_draws"]
        if self.axis:
            content["midpoint"] = asdict(self.midpoint)
            content["rate_ahead"] = asdict(self.axis.rate_ahead(self.confidence))
        if not self.has_forecast:  # what lies beyond the data would be a forecast
            measured = [row for row in self.band if row[0] <= self.compute_range[1]]
            content |= {"at_2x": None, "at_10x": None, "band": measured}
        return dict(nan_to_null(content))


def fit_curve(
    curve: Curve,
    confidence: float = 0.9,
    within: float | None = None,
    prior: Prior | None = DEFAULT,  # of the forecasts; None: it is known to be a sigmoid
) -> Fit:
    """Fit a curve. ConfigError as `fit`, after the curve's name."""
    data = checked(curve)
    if not 0.5 <= confidence <= 0.9999:
        raise ConfigError(f"--confidence {confidence:g}: expected a number from 0.5 to 0.9999, such as 0.9")
    if within is not None and not 0 < within < 1:
        raise ConfigError(f"--within {within:g}: expected a reward between 0 and 1, such as 0.02")
    c, R0 = data.compute, data.R0
    content = np.concatenate([c, data.reward, data.sd, [-1.0 if R0 is None else R0, data.R0_se]])
    content = content if data.flops is None else np.append(content, data.flops)
    noise = REPORTED_ERRORS if any(p.pass_rate_se > 0 for p in curve.points) else USUAL_ERRORS
    facts: dict[str, Any] = {
        "confidence": confidence,
        "within": within,
        "points": len(c),
        "compute_range": (float(c[0]), float(c[-1])) if len(c) else (0.0, 0.0),
        "R0_source": "unknown" if R0 is None else "measured" if data.R0_se else "given",
        "R0_reported": R0,
        "noise": noise if data.sd_known else "equal errors, from the residuals",
        "data_hash": hashlib.sha256(content.tobytes()).hexdigest()[:16],
    }
    if len(c) >= MIN_POINTS:
        return _result(averaged(data), facts, prior)
    half = 1.645 * data.R0_se  # of the 90 % interval of a measured R0
    start = Estimate(math.nan, 0.0, 1.0)
    if R0 is not None:
        start = Estimate(R0, max(0.0, R0 - half), min(1.0, R0 + half))
    known = len(c) + (R0 is not None)
    ahead = average(data, prior) if prior and len(c) and known >= MIN_FORECAST else None
    nan = Estimate(math.nan, math.nan, math.nan)
    return Fit(nan, nan, nan, nan, nan, start, few_points(data), averaged_draws=ahead, **facts)


def fit_with_draws(
    curve: Curve, confidence: float = 0.9, within: float | None = None, prior: Prior | None = DEFAULT
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
    data: Any = None,  # a DataFrame, whose columns `compute`, `reward` and `se` then name
    R0: float | None = None,  # the reward at zero compute; None: as measured there, else unknown
    R0_se: float | None = 0.0,  # of that R0. 0: it is exact; None: as uncertain as the most certain point
    confidence: float = 0.9,  # of the intervals
    within: float | None = None,  # A is identified if its interval reaches no further from its value
) -> Fit:
    """The sigmoid through the points: `fit(hours, acc)`, `fit("hours", "acc", data=frame)`, `fit(curve(…))`.

    ConfigError: C < 0 or NaN, rewards outside [0, 1], columns of different lengths, or that are not numbers.
    """
    if not isinstance(compute, Curve):
        compute = curve(compute, reward, se, data=data, R0=R0)
        if R0 is not None and R0_se != 0:
            compute = replace(compute, R0=EvalPoint(0, 0.0, R0, R0_se or 0.0))
    return fit_curve(compute, confidence, within)


def _result(data: Data, facts: dict[str, Any], prior: Prior | None) -> Fit:
    ahead = average(data, prior) if prior else None
    compute, confidence = data.compute, facts["confidence"]
    if ahead and ahead.axis:  # the curve is one of work, its forecasts are of device-hours
        data = replace(data, compute=ahead.axis.work[1:])
    result = posterior(data)
    sigmoid, draws, c, r = result.sigmoid, result.draws, data.compute, data.reward
    A, B, C_mid, R0 = (
        estimate(getattr(sigmoid, name), getattr(draws, name), confidence)
        for name in ("A", "B", "C_mid", "R0")
    )
    flags = flags_of(data, sigmoid, result.outliers, A, B, facts["within"])
    if ahead is None:  # of the sigmoid alone
        ahead = Average((draws,), math.nan, float(c[-1]), np.zeros(len(draws.A)))
    elif NO_CURVE.isdisjoint(flags):
        correlated = result.autocorrelated_prob > 1 - UNLIKELY
        shape = another_shape(data, draws, result.weight, result.scale, correlated)
        if not shape and ahead.sigmoid_prob < UNLIKELY:
            text = f"other laws are more probable (a sigmoid: {ahead.sigmoid_prob:.1%} probable)"
            shape = {"other-shape": text}
        flags = shape | flags
    at_2x, at_10x = (median(ahead.reward(x * c[-1]), confidence) for x in (2, FURTHEST))
    compute, tail = np.geomspace(compute[0] / 10, c[-1] * FURTHEST, 100), (1 - confidence) / 2
    levels = np.quantile(ahead.reward(compute), [0.5, tail, 1 - tail], axis=0, method="inverted_cdf")
    residual, spread = r - sigmoid.reward(c), float(((r - r.mean()) ** 2).sum())
    return Fit(
        *(A, B, C_mid, at_2x, at_10x, R0),
        band=tuple(zip(*(x.tolist() for x in (compute, *levels)), strict=True)),
        flags=tuple(flags),
        r2=1 - float((residual**2).sum()) / spread if spread else math.nan,
        overdispersion=float(np.sqrt(((residual / data.sd) ** 2).sum() / max(1, len(c) - 3))),
        autocorrelated_prob=result.autocorrelated_prob,
        autocorrelation=result.autocorrelation,
        outliers=int((result.outliers & (result.weight < 1)).sum()),
        details={flag: text for flag, text in flags.items() if text != FLAGS[flag]},
        sigmoid_prob=ahead.sigmoid_prob,
        draws=draws,
        averaged_draws=ahead,
        **facts,
    )


def without_transient(curve: Curve) -> Curve:
    """The curve without its early points if they are a transient; else the curve itself.

    A run's first evaluations can deviate from its curve: the model learns the format of the answers, or the
    optimizer warms up. The paper drops about the first epoch, 1.5k of 8k GPU-hours. Here the points before a
    quarter of the rise are dropped if two neighbours among them are off on the same side, each by more than
    two standard deviations, from what the later points and R0 predict. A single outlier drops nothing, nor
    is anything dropped if R0 is unknown, because the early points are then needed to estimate it, or if too
    few points would remain.

    In simulations (A .61, B 1.92, C_mid 2542, 32 points to 8k GPU-hours, noise .005, R0 measured, 40 runs
    each) with a transient of +.05, −.05 or +.1 times exp(−C/500), the ceiling is identified in 88, 97 and
    95 % of the runs, instead of 52, 44 and 24 % with all points, and the intervals cover it. Without a
    transient nothing is dropped.
    """
    if curve.R0 is None or len(curve.points) < MIN_POINTS:
        return curve
    sigmoid = fit_curve(curve, prior=None).sigmoid
    begin = sigmoid.compute_for((3 * sigmoid.R0 + sigmoid.A) / 4)
    early = [p for p in curve.points if p.compute < begin]
    later = replace(curve, points=curve.points[len(early) :])
    if len(early) < 2 or len(later.points) < 2 * MIN_POINTS:
        return curve
    fit, draws = fit_with_draws(later, prior=None)
    c, r, sd = np.array([(p.compute, p.pass_rate, p.pass_rate_se) for p in early]).T
    residual = np.array([p.pass_rate - float(fit.sigmoid.reward(p.compute)) for p in later.points])
    noise = np.sqrt((residual**2).sum() / (len(residual) - 3))  # A, B and C_mid are fitted
    z = (r - fit.sigmoid.reward(c)) / np.hypot(np.maximum(sd, noise), draws.reward(c).std(axis=0))
    surprising = np.minimum(np.abs(z[1:]), np.abs(z[:-1])) > SURPRISING
    return later if bool((surprising & (z[1:] * z[:-1] > 0)).any()) else curve
