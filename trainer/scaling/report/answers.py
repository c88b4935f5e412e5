"""The first screen: how high the run will end, how certain that is, and at what cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.scaling.curve.fit import HARMLESS, Estimate, Fit, estimate
from trainer.scaling.report.run import Run
from trainer.scaling.text import amount, evaluations

MOST = 0.9  # of the gain from R0 to A
AHEAD = (2, 10)  # the budgets at which rewards are forecast, in multiples of the longest run's compute
MAX_TICKS = 4  # on the scale of the ceilings
NEEDED = {  # what an unidentified ceiling needs, by flag; any other: a longer run
    "too-few-points": "Evaluate more often or train longer.",
    "flat": "Train until the reward rises.",
    "falling": "Find out why the run fell, and mend it.",
    "last-point-low": "Evaluate the last checkpoint again.",
    "poor-fit": "Look at the points: a sigmoid does not describe them.",
    "not-sigmoid": "Look at the points: a sigmoid may not describe them.",
    "other-shape": "A longer run will tell the two shapes apart.",
}
LONGER = "The command plan, given this run, shows how much longer it must be."


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its answer as a number, and what the number means."""

    question: str
    short: str
    meaning: str


def answers(run: Run) -> tuple[Answer, ...]:
    """The three questions, answered for a run."""
    fit, unit = run.fit, run.curve.unit
    if not fit.identified:
        return _unidentified(run)
    A, last = fit.A, fit.compute_range[1]
    gained = float((fit.sigmoid.reward(last) - fit.R0.value) / (fit.A.value - fit.R0.value))
    share = f"{gained:.0%}" if gained < 0.995 else "over 99%"
    cost = compute_for_most(fit)
    short, spread = f"{amount(cost.value)} {unit}", f"{amount(cost.low)} to {amount(cost.high)}"
    if "B-at-bound" in fit.flags:  # the data give no lower end
        short, spread = f"at most {amount(cost.high)} {unit}", "they were over before the first evaluations"
    certain = f"The {fit.confidence:.0%} interval, from {evaluations(fit)}. {notes(fit)}".strip()
    gain = f"gain {MOST:.0%} of the way from R0 to A ({spread})"
    return (
        Answer("How high will it end?", f"{A.value:.3f}", f"This is the ceiling A. {_latest(run)}"),
        Answer("How certain is that?", f"{A.low:.3f} to {A.high:.3f}", certain),
        Answer(
            "At what cost?", short, f"{gain}. The {amount(last)} so far have gained {share}. {_twice(fit)}"
        ),
    )


def _unidentified(run: Run) -> tuple[Answer, ...]:
    fit, possible, meaning = run.fit, "unknown", f"There is no curve yet. {_latest(run)}"
    if fit.predictable:
        possible = f"{fit.A.low:.2f} to {fit.A.high:.2f}"
        meaning = f"The {fit.confidence:.0%} interval of the ceiling A. {_latest(run)}"
    elif fit.draws is not None:
        possible, meaning = "no forecast", _latest(run)
    sure = reasons(fit)
    if low := "last-point-low" in fit.flags and fit.predictable:
        sure = f"if the last evaluation is a bad one, A is {possible}"
        fell = fit.describe("last-point-low")
        possible, meaning = "unknown", f"{fell[0].upper()}{fell[1:]}. {_latest(run)}"
    needed = next((NEEDED[flag] for flag in fit.flags if flag in NEEDED), LONGER)
    spent = f"The {amount(fit.compute_range[1])} {run.curve.unit} so far do not identify the ceiling."
    ahead = _twice(fit) if fit.predictable and not low else ""
    return (
        Answer("How high will it end?", possible, meaning),
        Answer("How certain is that?", "not identified", f"Do not quote a ceiling: {sure}."),
        Answer("At what cost?", "cannot be said", f"{spent} {needed} {ahead}".strip()),
    )


def compute_for_most(fit: Fit) -> Estimate:
    """The compute at which 90 % of A − R0 is gained: C_mid · 9^(1/B)."""
    odds = MOST / (1 - MOST)
    draws = fit.draws
    assert draws is not None  # the ceiling is identified
    return estimate(
        fit.C_mid.value * odds ** (1 / fit.B.value), draws.C_mid * odds ** (1 / draws.B), fit.confidence
    )


def budgets(runs: Sequence[Run]) -> tuple[float, ...]:
    """The computes at which the rewards of all runs are forecast, so that they can be compared."""
    longest = max(run.fit.compute_range[1] for run in runs)
    return tuple(times * longest for times in AHEAD) if longest > 0 else ()


@dataclass(frozen=True, slots=True)
class Whisker:
    """A ceiling on the common scale, in percent of its width."""

    low: float
    high: float
    value: float | None  # None: the ceiling is not identified, so that only its range is shown


@dataclass(frozen=True, slots=True)
class Whiskers:
    """The ceilings of all runs on one scale. None: nothing is known of a ceiling."""

    ticks: tuple[tuple[float, str], ...]  # (percent, reward)
    runs: tuple[Whisker | None, ...]


def whiskers(fits: Sequence[Fit]) -> Whiskers:
    """The ceilings, or their ranges, on one scale with ticks."""
    known = [f.A for f in fits if f.predictable]
    if not known:
        return Whiskers((), (None,) * len(fits))
    low, high = min(a.low for a in known), max(a.high for a in known)
    margin = max(0.08 * (high - low), 0.01)
    low, span = low - margin, high - low + 2 * margin

    def at(x: float) -> float:
        return round(100 * (x - low) / span, 2)

    size = 10.0 ** math.floor(math.log10(span / MAX_TICKS))
    step = next(m * size for m in (1, 2, 5, 10) if span / (m * size) <= MAX_TICKS)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = (i * step for i in range(math.ceil(low / step), math.floor((low + span) / step) + 1))
    shown = (
        Whisker(at(f.A.low), at(f.A.high), at(f.A.value) if f.identified else None) if f.predictable else None
        for f in fits
    )
    return Whiskers(tuple((at(x), f"{x:.{digits}f}") for x in ticks), tuple(shown))


def _latest(run: Run) -> str:
    p = run.curve.evaluations[-1]
    error = f" ± {p.pass_rate_se:.3f}" if p.pass_rate_se else ""
    return f"Last measured: {p.pass_rate:.3f}{error}."


def _twice(fit: Fit) -> str:
    e = fit.at_2x
    gives = f"{e.low:.2f} to {e.high:.2f}"
    if fit.identified:
        gives = f"{e.value:.3f} ({e.low:.3f} to {e.high:.3f})"
    return f"If the run goes on as it did, twice the compute gives {gives}."


def reasons(fit: Fit) -> str:
    """Why the ceiling is not identified: of a run that has fallen, that alone."""
    return fit.describe("falling") if "falling" in fit.flags else fit.reasons


def notes(fit: Fit) -> str:
    """What to know of a fit besides the reasons why its ceiling is not identified."""
    found = [fit.describe(flag) for flag in fit.flags if flag in HARMLESS]
    if fit.outliers:
        several = f"{fit.outliers} evaluations are outliers and count"
        one = "1 evaluation is an outlier and counts"
        found.append(f"{one if fit.outliers == 1 else several} for little")
    if fit.overdispersed:
        found.append(
            f"the evaluations scatter {fit.overdispersion:.1f} times as much as their standard errors say, "
            "which the intervals allow for"
        )
    return f"Note: {'; '.join(found)}." if found else ""
