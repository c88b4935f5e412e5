"""The forecast test: fit a finished run up to an earlier compute, and compare the forecast with what came.

What is forecast is evaluations, so an interval holds the noise of one besides the doubt of the fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.scaling.curve.average import DEFAULT
from trainer.scaling.curve.fit import Estimate, fit_curve
from trainer.scaling.curve.points import MIN_FORECAST, MIN_POINTS, last_error
from trainer.scaling.curve.sigmoid import Curve
from trainer.scaling.earlier import SEEN_SHARE, Earlier, prior_after


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
    identified: bool  # whether the evaluations up to `seen` identified the ceiling
    predictable: bool  # False: the reward had not risen or had fallen, and a forecast would not be shown
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
    if len(first) < (MIN_POINTS if curve.R0 is None else MIN_FORECAST) or not later:
        return None
    seen = replace(curve, points=first)
    fit = fit_curve(seen, confidence, within, prior=prior_after(like, seen) if like else DEFAULT)
    scored = tuple(
        ScoredForecast(
            p.compute, fit.evaluation(replace(p, pass_rate_se=last_error([*curve.points, p]))),
            p.pass_rate, p.pass_rate_se,
        )
        for p in later
    )  # fmt: skip
    return Backtest(
        first[-1].compute, len(first), scored[-1], scored, fit.identified, fit.has_forecast, fit.flags
    )


def error_at_2x(test: Backtest | None) -> float | None:
    """Measured less predicted, of the end, by a fit of the first half; None: there is no forecast."""
    return test.end.error if test is not None and test.predictable else None


@dataclass(frozen=True, slots=True)
class Summary:
    """The quality of the forecasts of the ends of several runs. NaN where no end was forecast."""

    runs: int
    forecast: int  # of these; the others were too short, flat or falling
    identified: int  # ceilings
    error: float  # median |measured − predicted| of the end
    bias: float  # median of measured − predicted: above 0, forecasts were too low
    coverage: float  # share of the intervals of the end that hold what was measured
    width: float  # median, of these intervals
    quarter_error: float  # median over runs, of the mean |error| in the last quarter
    quarter_coverage: float  # mean over runs, of the share held there


def summarize(tests: Sequence[Backtest | None]) -> Summary:
    """Over runs that were all fitted up to the same share of their compute."""
    shown = [test for test in tests if test is not None and test.predictable]

    def over_runs(values: Sequence[float], mean: bool = False) -> float:
        return float((np.mean if mean else np.median)(values)) if shown else float("nan")

    ends = [test.end for test in shown]
    quarters = [test.last_quarter for test in shown]
    return Summary(
        runs=len(tests),
        forecast=len(shown),
        identified=sum(test.identified for test in shown),
        error=over_runs([abs(end.error) for end in ends]),
        bias=over_runs([end.error for end in ends]),
        coverage=over_runs([end.inside for end in ends], mean=True),
        width=over_runs([end.predicted.high - end.predicted.low for end in ends]),
        quarter_error=over_runs([float(np.mean([abs(s.error) for s in q])) for q in quarters]),
        quarter_coverage=over_runs([float(np.mean([s.inside for s in q])) for q in quarters], mean=True),
    )
