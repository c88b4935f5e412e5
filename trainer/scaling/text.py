"""Fits, numbers and names as text: what can be concluded from a fit, and what cannot."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from trainer.scaling.fit import FLAGS, Estimate, Fit
from trainer.scaling.forecast import Backtest

WIDTH = 79
TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".json")  # file endings that short names leave out


def explain(fit: Fit, unit: str) -> str:
    """Several lines for a terminal; `unit` is that of compute."""
    if "too-few-points" in fit.flags:
        return paragraph(
            f"The ceiling is not identified: {fit.reasons}. Evaluate more often or train longer.", ""
        )
    lines = [
        f"R(C) = R0 + (A − R0) / (1 + (C_mid/C)^B), from {fit.points} evaluations, "
        f"{fit.confidence:.0%} intervals:"
    ]
    if not fit.identified:
        lines.append(paragraph(f"The ceiling A is not identified: {fit.reasons}."))
        lines.append(f"  A could be anywhere from {fit.A.low:.2f} to {fit.A.high:.2f}: do not quote a value.")
    elif "B-at-bound" in fit.flags:
        lines.append(f"  ceiling     A     {interval(fit.A, '.3f')}")
        most = f"B (at least {fit.B.low:.2g}) and C_mid (at most {amount(fit.C_mid.high)} {unit})"
        lines.append(paragraph(f"{most} are not identified: {FLAGS['B-at-bound']}."))
    else:
        nine_tenths = fit.sigmoid.compute_for(fit.R0.value + 0.9 * (fit.A.value - fit.R0.value))
        lines += [
            f"  ceiling     A     {interval(fit.A, '.3f')}",
            f"  efficiency  B     {interval(fit.B, '.2f')}",
            f"  midpoint    C_mid {amounts(fit.C_mid)} {unit}",
            f"  90% of the gain from R0 to A takes about {amount(nine_tenths)} {unit}",
        ]
    lines += [_start(fit), *(_ahead(fit, unit, times) for times in (2, 10)), *_notes(fit)]
    return "\n".join(lines)


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
    wide = ", too wide to use" if fit.too_wide(e) else ""
    return f"  at {f'{times}×':>3} the compute ({compute} {unit}): {interval(e, '.3f')}{wide}"


def _notes(fit: Fit) -> list[str]:
    """What to know about the noise."""
    notes = []
    if fit.outliers:
        points = "1 point is an outlier and counts" if fit.outliers == 1 else None
        notes.append(f"{points or f'{fit.outliers} points are outliers and count'} for little.")
    if fit.overdispersed:
        notes.append(
            f"The points scatter {fit.overdispersion:.1f} times as much as their standard errors say; the "
            "intervals allow for that."
        )
    if fit.autocorrelated_prob > 0.9 and fit.overdispersion > 0.5:
        notes.append("The errors of neighbouring points are correlated; the intervals allow for that.")
    return [paragraph(note) for note in notes]


def describe_backtest(test: Backtest | None, unit: str) -> str:
    """For a terminal; empty if there was no test."""
    if test is None:
        return ""
    return paragraph(
        f"Backtest: a fit of the first {amount(test.seen)} {unit} alone (ceiling "
        f"{'' if test.identified else 'not '}identified) predicts {interval(test.predicted, '.3f')} for the "
        f"last evaluation; measured: {test.measured:.3f}."
    )


def paragraph(text: str, indent: str = "  ") -> str:
    """Wrapped for a terminal."""
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def interval(e: Estimate, form: str) -> str:
    """`value (low to high)`."""
    return f"{e.value:{form}} ({e.low:{form}} to {e.high:{form}})"


def percent(p: float) -> str:
    """A share of the draws; a few thousand draws cannot resolve more than 99%."""
    return "under 1%" if p < 0.01 else "over 99%" if p > 0.99 else f"{p:.0%}"


def amount(x: float, digits: int = 3) -> str:
    """Compute or money: 2,540 or 0.0513 or 2.54e+21; `digits` are significant."""
    if not math.isfinite(x):
        return "∞" if x > 0 else "–"
    rounded = float(f"{x:.{digits}g}")
    return f"{rounded:,.0f}" if 1000 <= rounded < 1e9 else f"{rounded:.{digits}g}"


def amounts(e: Estimate) -> str:
    """`value (low to high)` of compute."""
    return f"{amount(e.value)} ({amount(e.low)} to {amount(e.high)})"


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
