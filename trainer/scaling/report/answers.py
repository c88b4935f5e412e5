"""The first screen: how high the run will end, how certain that is, and at what cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.scaling.curve.fit import HARMLESS, Estimate, Fit
from trainer.scaling.report.run import Run
from trainer.scaling.text import amount, compute_for_most, evaluations, interval, noise, sentence

AHEAD = (2, 10)  # the budgets at which rewards are forecast, in multiples of the longest run's compute
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
    certain = f"The {fit.confidence:.0%} interval, from {evaluations(fit)}. {cautions(fit)}".strip()
    gain = f"gain 90% of the way from R0 to A ({spread})"
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
    sure = fit.reasons
    if low := "last-point-low" in fit.flags and fit.predictable:
        sure = f"if the last evaluation is a bad one, A is {possible}"
        possible, meaning = "unknown", f"{sentence(fit.describe('last-point-low'))} {_latest(run)}"
    needed = next((NEEDED[flag] for flag in fit.flags if flag in NEEDED), LONGER)
    spent = f"The {amount(fit.compute_range[1])} {run.curve.unit} so far do not identify the ceiling."
    ahead = _twice(fit) if fit.predictable and not low else ""
    return (
        Answer("How high will it end?", possible, meaning),
        Answer("How certain is that?", "not identified", f"Do not quote a ceiling: {sure}."),
        Answer("At what cost?", "cannot be said", f"{spent} {needed} {ahead}".strip()),
    )


def budgets(runs: Sequence[Run]) -> tuple[float, ...]:
    """The computes at which the rewards of all runs are forecast, so that they can be compared."""
    longest = max(run.fit.compute_range[1] for run in runs)
    return tuple(times * longest for times in AHEAD) if longest > 0 else ()


@dataclass(frozen=True, slots=True)
class Whiskers:
    """The ceilings of all runs on one scale, in percent of its width. None: nothing is known of a ceiling."""

    ticks: tuple[tuple[float, str], ...]  # (percent, reward)
    runs: tuple[Estimate | None, ...]


def whiskers(fits: Sequence[Fit]) -> Whiskers:
    """The ceilings, or their ranges, on one scale with ticks."""
    from matplotlib.ticker import MaxNLocator  # not needed for a single run

    known = [f.A for f in fits if f.predictable]
    if not known:
        return Whiskers((), (None,) * len(fits))
    low, high = min(a.low for a in known), max(a.high for a in known)
    margin = max(0.08 * (high - low), 0.01)
    low, high = low - margin, high + margin

    def at(x: float) -> float:
        return round(100 * (x - low) / (high - low), 2)

    ticks = [x for x in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= x <= high]
    digits = max(len(f"{x:.6g}".partition(".")[2]) for x in ticks)
    shown = (Estimate(*map(at, (f.A.value, f.A.low, f.A.high))) if f.predictable else None for f in fits)
    return Whiskers(tuple((at(x), f"{x:.{digits}f}") for x in ticks), tuple(shown))


def _latest(run: Run) -> str:
    p = run.curve.evaluations[-1]
    error = f" ± {p.pass_rate_se:.3f}" if p.pass_rate_se else ""
    return f"Last measured: {p.pass_rate:.3f}{error}."


def _twice(fit: Fit) -> str:
    e = fit.at_2x
    gives = interval(e, ".3f") if fit.identified else interval(e, ".2f", quoted=False)
    return f"If the run goes on as it did, twice the compute gives {gives}."


def cautions(fit: Fit) -> str:
    """What to know of a fit besides the reasons why its ceiling is not identified."""
    return " ".join([*(sentence(fit.describe(flag)) for flag in fit.flags if flag in HARMLESS), *noise(fit)])
