"""The first screen: how high the run will end, how certain that is, and at what cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.scaling.fit import Estimate, Fit, estimate
from trainer.scaling.report.run import Run
from trainer.scaling.text import amount

MOST = 0.9  # of the gain from R0 to A


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its answer as a number, and what the number means."""

    question: str
    short: str
    meaning: str


def answers(run: Run) -> tuple[Answer, ...]:
    """The three questions, answered for a run."""
    if not run.fit.identified:
        return _unidentified(run)
    fit, unit = run.fit, run.curve.unit
    A, last = fit.A, fit.compute_range[1]
    gained = float((fit.sigmoid.reward(last) - fit.R0.value) / (fit.A.value - fit.R0.value))
    share = f"{gained:.0%}" if gained < 0.995 else "over 99%"
    cost = compute_for_most(fit)
    return (
        Answer("How high will it end?", f"{A.value:.3f}", f"This is the ceiling A. {_latest(run)}"),
        Answer(
            "How certain is that?",
            f"{A.low:.3f} to {A.high:.3f}",
            f"The {fit.confidence:.0%} interval, from {fit.points} evaluations. {_notes(fit)}".strip(),
        ),
        Answer(
            "At what cost?",
            f"{amount(cost.value)} {unit}",
            f"gain {MOST:.0%} of the way from R0 to A ({amount(cost.low)} to {amount(cost.high)}). The "
            f"{amount(last)} spent so far have gained {share}. {_twice(fit)}",
        ),
    )


def _unidentified(run: Run) -> tuple[Answer, ...]:
    fit = run.fit
    spent = f"{amount(fit.compute_range[1])} {run.curve.unit}"
    if fit.draws is None:
        possible, meaning, ahead = "unknown", "Nothing can be said yet about", ""
    else:
        possible, ahead = f"{fit.A.low:.2f} to {fit.A.high:.2f}", _twice(fit)
        meaning = "is the range possible for"
    return (
        Answer(
            "How high will it end?", "not identified", f"The data do not determine it yet. {_latest(run)}"
        ),
        Answer("How certain is that?", possible, f"{meaning} the ceiling A: {fit.reasons}."),
        Answer("At what cost?", spent, f"have been spent so far. {ahead}".strip()),
    )


def compute_for_most(fit: Fit) -> Estimate:
    """The compute at which 90 % of A − R0 is gained: C_mid · 9^(1/B)."""
    odds = MOST / (1 - MOST)
    draws = fit.draws
    assert draws is not None  # the ceiling is identified
    return estimate(
        fit.C_mid.value * odds ** (1 / fit.B.value), draws.C_mid * odds ** (1 / draws.B), fit.confidence
    )


def whiskers(fits: Sequence[Fit]) -> list[Estimate | None]:
    """The ceilings in percent of one scale for all runs; None: not identified."""
    known = [f.A for f in fits if f.identified]
    if not known:
        return [None] * len(fits)
    low, high = min(a.low for a in known), max(a.high for a in known)
    margin = max(0.15 * (high - low), 0.01)
    low, span = low - margin, high - low + 2 * margin

    def at(x: float) -> float:
        return round(100 * (x - low) / span, 2)

    return [Estimate(at(f.A.value), at(f.A.low), at(f.A.high)) if f.identified else None for f in fits]


def _latest(run: Run) -> str:
    p = run.curve.evaluations[-1]
    error = f" ± {p.pass_rate_se:.3f}" if p.pass_rate_se else ""
    return f"Last measured: {p.pass_rate:.3f}{error}."


def _twice(fit: Fit) -> str:
    e = fit.at_2x
    wide = ", too wide to use" if fit.too_wide(e) else ""
    return f"Twice the compute gives {e.value:.3f} ({e.low:.3f} to {e.high:.3f}{wide})."


def _notes(fit: Fit) -> str:
    notes = [fit.describe(flag) for flag in fit.flags]
    if fit.outliers:
        notes.append(f"{fit.outliers} of them are outliers and count for little")
    if fit.overdispersed:
        notes.append(
            f"they scatter {fit.overdispersion:.1f} times as much as their standard errors say, which the "
            "interval allows for"
        )
    return f"Note: {'; '.join(notes)}." if notes else ""
