"""What a reader wants first, in words: how high will it end, how sure is that, at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.scaling.fit import FLAGS, WIDEST, Estimate, Fit, estimate
from trainer.scaling.report.run import Run
from trainer.scaling.text import amount

TENTHS = 0.9  # of the rise


@dataclass(frozen=True, slots=True)
class Answer:
    """A question of the first screen: a number to read at a glance, and what it means."""

    question: str
    short: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Whisker:
    """A ceiling and its interval, in percent of the scale that all runs share."""

    value: float
    low: float
    high: float


def answers(run: Run) -> tuple[Answer, ...]:
    """How high, how sure, at what cost."""
    if not run.fit.identified:
        return _unidentified(run)
    fit, unit = run.fit, run.curve.unit
    A, last = fit.A, fit.compute_range[1]
    won = float((fit.law.reward(last) - fit.R0.value) / (fit.A.value - fit.R0.value))
    share = f"{won:.0%}" if won < 0.995 else "over 99%"
    cost = nine_tenths(fit)
    return (
        Answer("How high will it end?", f"{A.value:.3f}", f"The ceiling A. {_latest(run)}"),
        Answer(
            "How sure is that?",
            f"{A.low:.3f} to {A.high:.3f}",
            f"The {fit.confidence:.0%} interval, from {fit.points} evaluations. {_mind(fit)}".strip(),
        ),
        Answer(
            "At what cost?",
            f"{amount(cost.value)} {unit}",
            f"wins nine tenths of the rise ({_to(cost)}). Spent: {amount(last)}, where {share} is won. "
            f"{_twice(fit)}",
        ),
    )


def _unidentified(run: Run) -> tuple[Answer, ...]:
    fit = run.fit
    spent = f"{amount(fit.compute_range[1])} {run.curve.unit}"
    if fit.draws is None:
        allowed, allows, ahead = "no", "Nothing can be said yet", ""
    else:
        allowed, ahead = f"{fit.A.low:.2f} to {fit.A.high:.2f}", _twice(fit)
        allows = "is what the data allow"
    return (
        Answer("How high will it end?", "not identified", f"The data do not tell yet. {_latest(run)}"),
        Answer("How sure is that?", allowed, f"{allows} for the ceiling A: {fit.reasons}."),
        Answer("At what cost?", spent, f"spent so far. {ahead}".strip()),
    )


def cautions(fit: Fit) -> str:
    """All flags in words."""
    return "; ".join(FLAGS[f] for f in fit.flags)


def nine_tenths(fit: Fit) -> Estimate:
    """The compute at which nine tenths of A − R0 are won: C_mid · 9^(1/B)."""
    odds = TENTHS / (1 - TENTHS)
    draws = fit.draws
    assert draws is not None  # the ceiling is identified
    return estimate(
        fit.C_mid.value * odds ** (1 / fit.B.value), draws.C_mid * odds ** (1 / draws.B), fit.confidence
    )


def whiskers(fits: Sequence[Fit]) -> list[Whisker | None]:
    """The ceilings on one scale; None: not identified."""
    known = [f.A for f in fits if f.identified]
    if not known:
        return [None] * len(fits)
    low, high = min(a.low for a in known), max(a.high for a in known)
    margin = max(0.15 * (high - low), 0.01)
    low, span = low - margin, high - low + 2 * margin

    def at(x: float) -> float:
        return round(100 * (x - low) / span, 2)

    return [Whisker(at(f.A.value), at(f.A.low), at(f.A.high)) if f.identified else None for f in fits]


def _to(e: Estimate) -> str:
    return f"{amount(e.low)} to {amount(e.high)}"


def _latest(run: Run) -> str:
    p = run.measured[-1]
    error = f" ± {p.pass_rate_se:.3f}" if p.pass_rate_se else ""
    return f"Last measured: {p.pass_rate:.3f}{error}."


def _twice(fit: Fit) -> str:
    e = fit.at_2x
    wide = ", too wide to use" if e.high - e.low > WIDEST else ""
    return f"Twice as much: {e.value:.3f} ({e.low:.3f} to {e.high:.3f}{wide})."


def _mind(fit: Fit) -> str:
    notes = [FLAGS[f] for f in fit.flags]
    if fit.outliers:
        notes.append(f"{fit.outliers} of them lie far from the curve and count for little")
    if fit.scatters:
        notes.append(f"they scatter {fit.scatter:.1f}× their standard errors, which the interval allows for")
    return f"Mind: {'; '.join(notes)}." if notes else ""
