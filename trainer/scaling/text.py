"""Fits, numbers and names as text: what can be concluded from a fit, and what cannot."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from trainer.scaling.backtest import Backtest, error_at_2x
from trainer.scaling.curve.fit import FLAGS, HARMLESS, Estimate, Fit, estimate
from trainer.scaling.reading.read import Reading

WIDTH = 79
TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".json")  # file endings that short names leave out
DETERMINED = 3.0  # B and C_mid are shown if the ends of their intervals differ by less than this factor
UNDESCRIBED = {"flat", "falling", "poor-fit", "not-sigmoid"}  # flags of runs that no B and C_mid describe
NO_FORECAST = "There is no forecast for such a run."
TOO_SHORT = {"wide", "other-shape", "A-at-bound", "C_mid-beyond-data"}  # flags that a longer run can clear


def explain(fit: Fit, unit: str) -> str:
    """Several lines for a terminal; `unit` is that of compute."""
    if "too-few-points" in fit.flags:
        return paragraph(f"{why_not(fit)} Evaluate more often or train longer.")
    formula = f"R(C) = R0 + (A − R0) / (1 + (C_mid/C)^B), from {evaluations(fit)}"
    lines = [*_parameters(fit, unit), _start(fit)]
    if fit.predictable:
        lines += [assumption(fit), *(_ahead(fit, unit, times) for times in (2, 10))]
    lines.append(paragraph(f"{formula}; R² {r_squared(fit)}; {fit.confidence:.0%} intervals."))
    return "\n".join([*lines, *map(paragraph, noise(fit))])


def evaluations(fit: Fit) -> str:
    """How many there are; the one that is R0 is none of them."""
    return f"{fit.points} evaluations" + (" after the start" if fit.R0_source == "measured" else "")


def why_not(fit: Fit) -> str:
    """Why the ceiling is not identified, and what can be said of it nevertheless."""
    text = f"The ceiling A is not identified: {fit.reasons}."
    if "too-few-points" in fit.flags:
        return text
    if not fit.predictable:
        return f"{text} {NO_FORECAST}"
    low = "last-point-low" in fit.flags
    text += f" {'If it is a bad evaluation, ' if low else ''}A could be anywhere from {fit.A.low:.2f} to "
    text += f"{fit.A.high:.2f}: do not quote a value."
    if low:
        text += " Evaluate the last checkpoint again."
    if set(fit.flags) - HARMLESS <= TOO_SHORT:
        text += " Train longer."
    assumes = not {"not-sigmoid", "other-shape"}.isdisjoint(fit.flags)
    return f"{text} This range assumes a sigmoid." if assumes else text


def assumption(fit: Fit) -> str:
    """What stands above every forecast."""
    low = "the last evaluation is a bad one and " if "last-point-low" in fit.flags else ""
    law = f" (a sigmoid: {percent(fit.sigmoid_prob)} probable, or another law)"
    return f"  If {low}the run goes on as it did{'' if math.isnan(fit.sigmoid_prob) else law}:"


def r_squared(fit: Fit) -> str:
    """The share of the variance that the sigmoid explains."""
    return "–" if math.isnan(fit.r2) else f"{round(fit.r2, 3) + 0.0:.3f}"


def determined(fit: Fit, e: Estimate) -> bool:
    """Whether the data determine B or C_mid, if only as a range where they do not identify the ceiling."""
    if UNDESCRIBED & set(fit.flags) or "B-at-bound" in fit.flags:
        return False
    return fit.identified or e.high < DETERMINED * e.low


def _parameters(fit: Fit, unit: str) -> list[str]:
    """The ceiling, and B and C_mid where they are determined; ranges alone where the ceiling is not."""
    ceiling = f"  ceiling     A     {interval(fit.A, '.3f')}"
    lines = [ceiling if fit.identified else paragraph(why_not(fit))]
    if determined(fit, fit.B):
        lines.append(f"  efficiency  B     {interval(fit.B, '.2f', fit.identified)}")
    if determined(fit, fit.C_mid):
        lines.append(f"  midpoint    C_mid {amounts(fit.C_mid, fit.identified)} {unit}")
    if fit.identified and "B-at-bound" in fit.flags:
        most = f"B (at least {fit.B.low:.2g}) and C_mid (at most {amount(fit.C_mid.high)} {unit})"
        lines.append(paragraph(f"{most} are not identified: {FLAGS['B-at-bound']}."))
    elif fit.identified:
        cost = amount(compute_for_most(fit).value)
        lines.append(f"  90% of the gain from R0 to A takes about {cost} {unit}")
    return lines


def _start(fit: Fit) -> str:
    if fit.R0_reported is None:
        return (
            f"  start       R0    not measured, between {fit.R0.low:.2f} and {fit.R0.high:.2f}\n"
            "    B and C_mid depend on it: evaluate before step 1, or give it (--r0)."
        )
    where = "given" if fit.R0_source == "given" else f"measured before step 1: {fit.R0_reported:.3f}"
    return f"  start       R0    {fit.R0.value:.3f} ({where})"


def _ahead(fit: Fit, unit: str, times: int) -> str:
    e = fit.at_2x if times == 2 else fit.at_10x
    compute = amount(times * fit.compute_range[1])
    return f"  at {f'{times}×':>3} the compute ({compute} {unit}): {interval(e, '.3f', fit.identified)}"


def compute_for_most(fit: Fit) -> Estimate:
    """The compute at which 90% of A − R0 is gained: C_mid · 9^(1/B)."""
    draws = fit.draws
    assert draws is not None  # the ceiling is identified
    return estimate(
        fit.C_mid.value * 9 ** (1 / fit.B.value), draws.C_mid * 9 ** (1 / draws.B), fit.confidence
    )


def noise(fit: Fit) -> list[str]:
    """Sentences about the scatter of the points."""
    sentences = []
    if fit.outliers:
        points = "1 point is an outlier and counts" if fit.outliers == 1 else None
        sentences.append(f"{points or f'{fit.outliers} points are outliers and count'} for little.")
    if fit.overdispersed:
        sentences.append(
            f"The points scatter {fit.overdispersion:.1f} times as much as their standard errors say; the "
            "intervals allow for that."
        )
    if fit.autocorrelated_prob > 0.9 and fit.overdispersion > 0.5:
        sentences.append(
            "The errors of neighbouring points are correlated, or the run follows no sigmoid; the "
            "intervals allow for correlated errors of a sigmoid."
        )
    return sentences


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def describe_backtest(test: Backtest | None, unit: str) -> str:
    """For a terminal; empty if there was no test."""
    if test is None or (error := error_at_2x(test)) is None:
        return ""
    end, inside = test.end, test.end.inside
    outcome = "inside the interval: the first half predicted the end."
    if not test.identified:
        outcome = "inside the interval, which confirms little where the ceiling is not identified."
    if not inside:
        outcome = (
            "outside the interval. The first half did not predict the end, so do not rely on a forecast of "
            "this run, unless you know the cause. (By chance, about 1 run in 10 misses.)"
        )
    return paragraph(
        f"Backtest: a fit of the first {amount(test.seen)} {unit} alone (ceiling "
        f"{'' if test.identified else 'not '}identified) predicts "
        f"{interval(end.predicted, '.3f', test.identified)} for the last evaluation; measured: "
        f"{end.measured:.3f}, {outcome} Error at twice the compute: {error:+.3f}."
    )


def sources(readings: Sequence[Reading]) -> str:
    """Which columns were read, and what was noticed in reading; runs that were read alike share the lines."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for reading in readings:
        runs.setdefault((str(reading), *reading.notes), []).append(reading.curve.name)
    blocks = ([paragraph(", ".join(names), ""), *map(paragraph, texts)] for texts, names in runs.items())
    return "\n".join(map("\n".join, blocks))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns, the head first; long names, in the first column, go on lines of their own."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if max(map(len, lines)) <= WIDTH:
        return lines
    lines = ["  " + "  ".join(map(str.ljust, row[1:], widths[1:])).rstrip() for row in rows]
    return [x for row, line in zip(rows, lines, strict=True) for x in (row[0], line)][1:]


def paragraph(text: str, indent: str = "  ") -> str:
    """Wrapped for a terminal."""
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def interval(e: Estimate, form: str, quoted: bool = True) -> str:
    """`value (low to high)`, or `low to high` where the value is not to be quoted."""
    ends = f"{e.low:{form}} to {e.high:{form}}"
    return f"{e.value:{form}} ({ends})" if quoted else ends


def level(p: float) -> str:
    """The level of an interval: `97.5%`."""
    return f"{100 * p:.4g}%"


def signed(e: Estimate) -> str:
    """A difference and its interval."""
    return f"{e.value:+.3f} ({e.low:+.3f} to {e.high:+.3f})"


def percent(p: float) -> str:
    """A probability; the few thousand draws of a posterior cannot resolve more than 99%."""
    return "under 1%" if p < 0.01 else "over 99%" if p > 0.99 else f"{p:.0%}"


def amount(x: float, digits: int = 3) -> str:
    """Compute or money: 2,540 or 0.0513 or 2.54e+21; `digits` are significant."""
    if not math.isfinite(x):
        return "∞" if x > 0 else "–"
    rounded = float(f"{x:.{digits}g}")
    return f"{rounded:,.0f}" if 1000 <= rounded < 1e9 else f"{rounded:.{digits}g}"


def amounts(e: Estimate, quoted: bool = True) -> str:
    """The same of compute or money."""
    ends = f"{amount(e.low)} to {amount(e.high)}"
    return f"{amount(e.value)} ({ends})" if quoted else ends


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as tell them apart; without the file's ending if that suffices.

    If all are runs in files (`file: run`), the names of the runs, if these differ.
    """
    runs = [name.rpartition(": ")[2] for name in names]
    if all(": " in name for name in names) and len(set(runs)) == len(runs):
        return runs
    paths = [Path(name).resolve() for name in names]
    short = [path.stem if path.suffix in TABLES else path.name for path in paths]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        if len(set(short)) == len(short):
            return short
        short = ["/".join(path.parts[-depth:]) for path in paths]
    return list(names)
