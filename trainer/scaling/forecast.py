"""The live forecast of a run: its next evaluation, its end, and whether more compute is worthwhile.

Each evaluation is compared with the interval that the earlier ones predicted for it. Two in a row outside of
it on the same side, or one by more than twice the interval, raise an alarm: something in the training has
changed, and the forecast no longer holds. `backtest` asks the same of a finished run, which is fitted up to
an earlier compute: the forecast of its last evaluations is compared with what came. What is forecast is an
evaluation, so its interval holds the noise of one besides the doubt of the fit.

A run may end by itself (`forecast.stop`) where each of its last `patience` forecasts, one an evaluation,
gives a probability of 90 % or more that further compute gains less than the rule says. None counts of a run
that has not risen or has fallen, or that raises an alarm. The flags not-sigmoid and other-shape do not
count: they doubt a sigmoid's ceiling, and the average has other laws (docs/curve.md has the numbers).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from trainer.config.forecast import StopRule
from trainer.scaling.curve.average import DEFAULT, MIN_GAIN
from trainer.scaling.curve.fit import Estimate, Fit, fit_curve, median
from trainer.scaling.curve.points import MIN_FORECAST, last_error
from trainer.scaling.curve.shape import UNLIKELY
from trainer.scaling.curve.sigmoid import Curve, EvalPoint, curve_of, mean_point
from trainer.scaling.earlier import SEEN_SHARE, Earlier, prior_after
from trainer.scaling.layout import interval

CARRIED = 5  # evaluations whose mean is carried on, to compare with
DOUBTS = {"not-sigmoid", "other-shape", "last-point-low"}  # flags that forbid a recommendation

Recommendation = Literal["investigate", "stop", "continue", "none"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """The state of a run after one evaluation. `None`: there are too few evaluations."""

    fit: Fit  # where it has fallen, no end is predicted
    predicted: Estimate | None = None  # this evaluation, from the earlier ones
    missed: int = 0  # evaluations in a row above (+) or below (−) their predicted interval
    far_off: bool = False  # this one is outside by more than twice the interval
    end: Estimate | None = None  # the reward at the end of the run
    gain: Estimate | None = None  # how much of that is still to come
    gain_probability: float | None = None  # that the gain is at least MIN_GAIN

    @property
    def alarm(self) -> bool:
        """True if the run no longer follows its curve."""
        return abs(self.missed) >= 2 or self.far_off

    @property
    def recommendation(self) -> Recommendation:
        """The action for the rest of the run; "none" if the data do not say."""
        if self.alarm:
            return "investigate"
        if self.gain is None or self.gain_probability is None or not DOUBTS.isdisjoint(self.fit.flags):
            return "none"
        if not self.fit.predictable:  # from too few points to act on
            return "none"
        if self.gain_probability < UNLIKELY:
            return "stop"
        return "continue" if self.gain.low >= MIN_GAIN else "none"

    def metrics(self) -> dict[str, float]:
        """The forecast as entries of metrics.jsonl, without unknown values."""
        line: dict[str, float] = {}
        ceiling = self.fit.A if self.fit.identified else None
        rate = self.fit.axis.rate_ahead(self.fit.confidence) if self.fit.axis else None
        estimates = {"predicted": self.predicted, "end": self.end, "gain": self.gain}
        estimates |= {"ceiling": ceiling, "rate": rate}
        for name, e in estimates.items():
            if e is not None:
                line |= {f"forecast/{name}": e.value, f"forecast/{name}_low": e.low}
                line[f"forecast/{name}_high"] = e.high
        if self.gain_probability is not None:
            line["forecast/gain_probability"] = self.gain_probability
        if self.predicted is not None:
            line["forecast/alarm"] = float(self.alarm)
        return line


def forecast(
    points: Sequence[EvalPoint], end: float, before: Forecast | None, like: Earlier | None = None
) -> Forecast:
    """The forecast after the last of `points`, which are in order; `end` is the compute of the whole run.

    `like`: what earlier runs say, of the same kind and with compute in the same unit.
    """
    prior = prior_after(like, curve_of("", like.unit, points)) if like else DEFAULT
    fit, point = fit_curve(curve_of("", "", points), prior=prior), points[-1]
    predicted, missed, far_off = None, 0, False
    if before is not None and before.fit.averaged_draws is not None and point.compute > 0:
        predicted = before.fit.level([replace(point, pass_rate_se=last_error(points))])
        side = int(point.pass_rate > predicted.high) - int(point.pass_rate < predicted.low)
        missed = side + (before.missed if side * before.missed > 0 else 0)
        reach = predicted.high - predicted.value if side > 0 else predicted.value - predicted.low
        far_off = side != 0 and abs(point.pass_rate - predicted.value) > 2 * reach
    if not fit.has_forecast or is_over(point.compute, end):
        return Forecast(fit, predicted, missed, far_off)
    gains = fit.forecast.reward(end) - fit.forecast.reward(point.compute)
    gain = median(gains, fit.confidence)
    probability = float((gains >= MIN_GAIN).mean())
    return Forecast(fit, predicted, missed, far_off, fit.at(end), gain, probability)


def is_over(compute: float, end: float) -> bool:
    """True at the end of a run, but for rounding."""
    return compute >= end or math.isclose(compute, end)


def describe_recommendation(now: Forecast, unit: str, remaining: float) -> str:
    """The recommendation as a sentence; empty if there is none. `remaining`: compute not spent yet."""
    if now.recommendation == "investigate" and now.predicted is not None:
        side, look = ("above", "") if now.missed > 0 else ("below", ": look at entropy, truncation and ρ")
        where = f"{side} the predicted interval ({interval(now.predicted, '.3f', False)})"
        return f"the last evaluations are {where}, so the forecast no longer holds{look}"
    if now.recommendation == "none" or now.gain is None:
        return ""
    gain = interval(now.gain, "+.3f")
    if now.recommendation == "stop":
        return f"consider stopping: the remaining {remaining:.3g} {unit} will probably gain only {gain}"
    return f"continue: the remaining {remaining:.3g} {unit} will probably gain {gain}"


def reason_to_stop(
    points: Sequence[EvalPoint],
    now: Forecast,
    end: float,
    unit: str,
    rule: StopRule,
    patience: int,
    like: Earlier | None = None,
) -> str:
    """The gain forgone by ending after the last of `points`, as a sentence; empty: the run goes on.

    `now` is the forecast after that point; `end` is the compute of the whole run, as planned; `like`, what
    earlier runs say.
    """
    compute, look, says = points[-1].compute, None, list[bool]()
    if is_over(compute, end) or not says_stop(now, compute, end, rule):
        return ""
    for n in range(max(1, len(points) - patience - 1), len(points) + 1):  # an alarm takes two evaluations
        look = forecast(points[:n], 0.0, look, like)
        says.append(says_stop(look, points[n - 1].compute, end, rule))
    if len(says) < patience or not all(says[-patience:]):
        return ""
    rewards = now.fit.forecast.reward([compute, 2 * compute, end])
    gains = [median(rewards[:, i] - rewards[:, 0], now.fit.confidence) for i in (1, 2)]
    doubled, forgone = (interval(e, "+.3f") for e in gains)
    return (
        f"a doubling of the compute would probably gain {doubled} [{rule.text} for {patience} evaluations "
        f"in a row]; forgone until the planned end: {forgone}, about {end - compute:.3g} {unit} saved"
    )


def says_stop(look: Forecast, compute: float, end: float, rule: StopRule) -> bool:
    """True if a forecast made at this compute may be acted on and says that more gains too little."""
    if not look.fit.predictable or look.alarm:
        return False
    rewards = look.fit.forecast.reward([compute, 2 * compute if rule.per_doubling else end])
    return float((rewards[:, 1] - rewards[:, 0] >= rule.gain).mean()) < UNLIKELY


@dataclass(frozen=True, slots=True)
class ScoredForecast:
    """An evaluation: as predicted and as measured."""

    compute: float
    predicted: Estimate  # its noise included
    measured: float
    measured_se: float  # 0: unknown

    @property
    def error(self) -> float:
        """Measured less predicted."""
        return self.measured - self.predicted.value

    @property
    def inside(self) -> bool:
        """True if the measured reward is inside the interval."""
        return self.predicted.low <= self.measured <= self.predicted.high


@dataclass(frozen=True, slots=True)
class Backtest:
    """A run forecast from its evaluations up to `seen`."""

    seen: float  # compute
    points: int  # evaluations up to there, R0 not counted
    end: ScoredForecast  # the last evaluation
    last_quarter: tuple[ScoredForecast, ...]  # of the compute, the end included
    level: ScoredForecast  # the mean of the last quarter's evaluations
    carried: float  # mean of the last evaluations seen, a quarter of them and CARRIED at most
    identified: bool  # whether the evaluations up to `seen` identified the ceiling
    predictable: bool  # False: the reward had fallen, and a forecast would not be shown
    flags: tuple[str, ...]  # of the fit


def backtest(
    curve: Curve,
    until: float | None = None,  # compute up to which the run is fitted; None: half of it
    confidence: float = 0.9,
    within: float | None = None,
    like: Earlier | None = None,  # runs of the same kind; its own recipe's among them are not used
) -> Backtest | None:
    """Forecast the last quarter of a run from its beginning; None: there are too few points for a fit."""
    if not curve.points:
        return None
    last = curve.points[-1].compute
    limit = SEEN_SHARE * last if until is None else until
    first = tuple(p for p in curve.points if p.compute <= limit)
    later = [p for p in curve.points[len(first) :] if p.compute >= 0.75 * last]
    seen = replace(curve, points=first)
    if not first or len(first) + (curve.R0 is not None) < MIN_FORECAST or not later:
        return None
    fit = fit_curve(seen, confidence, within, prior=prior_after(like, seen) if like else DEFAULT)
    noisy = [replace(p, pass_rate_se=last_error([*curve.points, p])) for p in later]
    scored = tuple(
        ScoredForecast(p.compute, fit.level([n]), p.pass_rate, p.pass_rate_se)
        for p, n in zip(later, noisy, strict=True)
    )
    measured, rewards = mean_point(later), [p.pass_rate for p in seen.evaluations]
    level = ScoredForecast(last, fit.level(noisy), measured.pass_rate, measured.pass_rate_se)
    carried = float(np.mean(rewards[-max(1, min(CARRIED, len(rewards) // 4)) :]))
    return Backtest(
        first[-1].compute, len(first), scored[-1], scored, level, carried, fit.identified, fit.has_forecast,
        fit.flags,
    )  # fmt: skip


def error_at_2x(test: Backtest | None) -> float | None:
    """Measured less predicted, of the end, by a fit of the first half; None: there is no forecast."""
    return test.end.error if test is not None and test.predictable else None


def summarize(tests: Sequence[Backtest | None]) -> dict[str, float]:
    """The quality of the forecasts of the ends of several runs; NaN where no end was forecast.

    All runs were fitted up to the same share of their compute.
    """
    shown = [test for test in tests if test is not None and test.predictable]

    def over_runs(values: Sequence[float], mean: bool = False) -> float:
        return float((np.mean if mean else np.median)(values)) if shown else float("nan")

    ends = [test.end for test in shown]
    return {
        "runs": len(tests),
        "forecast": len(shown),  # of these; the others were too short, flat or falling
        "identified": sum(test.identified for test in shown),  # ceilings
        "error": over_runs([abs(end.error) for end in ends]),
        "bias": over_runs([end.error for end in ends]),  # above 0, forecasts were too low
        "coverage": over_runs([end.inside for end in ends], mean=True),
        "width": over_runs([end.predicted.high - end.predicted.low for end in ends]),
        "level_error": over_runs([abs(test.level.error) for test in shown]),  # of the last quarter's mean
        "carried_error": over_runs([abs(test.level.measured - test.carried) for test in shown]),
        "level_coverage": over_runs([test.level.inside for test in shown], mean=True),
    }
