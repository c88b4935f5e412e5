"""A fit in words: what can be concluded from it, and what cannot; amounts and names as people write them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from trainer.scaling.fit import FLAGS, WIDEST, Estimate, Fit

WIDTH = 79
TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".json")  # endings that a name needs not


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
    if fit.identified:
        lines.append(f"  ceiling     A     {words(fit.A, '.3f')}")
        if "B-at-bound" in fit.flags:
            lines.append(
                f"  B (at least {fit.B.low:.2g}) and C_mid (at most {amount(fit.C_mid.high)} {unit}) are not"
            )
            lines.append(f"  identified: {FLAGS['B-at-bound']}.")
        else:
            lines.append(f"  efficiency  B     {words(fit.B, '.2f')}")
            lines.append(f"  midpoint    C_mid {amounts(fit.C_mid)} {unit}")
            most = fit.law.compute_for(fit.R0.value + 0.9 * (fit.A.value - fit.R0.value))
            lines.append(f"  nine tenths of the rise are won at about {amount(most)} {unit}")
    else:
        lines.append(paragraph(f"The ceiling A is not identified: {fit.reasons}."))
        lines.append(f"  The data allow A from {fit.A.low:.2f} to {fit.A.high:.2f}; take no number of it.")
    if fit.R0_told is None:
        lines.append(f"  at the start R0   not measured: from {fit.R0.low:.2f} to {fit.R0.high:.2f};")
        lines.append("    B and C_mid hang on it. Evaluate before step 1, or give it (--r0).")
    else:
        where = "given" if fit.R0_source == "given" else f"measured before step 1: {fit.R0_told:.3f}"
        lines.append(f"  at the start R0   {fit.R0.value:.3f} ({where})")
    for times, e in ((2, fit.at_2x), (10, fit.at_10x)):
        at = times * fit.compute_range[1]
        wide = " - too wide to use" if e.high - e.low > WIDEST else ""
        lines.append(f"  at {f'{times}×':>3} the compute ({amount(at)} {unit}): {words(e, '.3f')}{wide}")
    if fit.outliers:
        which = "of the points lies" if fit.outliers == 1 else "of the points lie"
        does = "counts" if fit.outliers == 1 else "count"
        lines.append(f"  {fit.outliers} {which} far from the curve and {does} for little.")
    if fit.scatters:
        text = f"The points scatter {fit.scatter:.1f}× their standard errors; the intervals allow for it."
        lines.append(paragraph(text))
    if fit.wander > 0.9 and fit.scatter > 0.5:
        lines.append(
            paragraph("Neighbouring points err together: the run wanders, and the intervals allow for it.")
        )
    return "\n".join(lines)


def paragraph(text: str, indent: str = "  ") -> str:
    """Wrapped for a terminal."""
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def words(e: Estimate, form: str) -> str:
    """`value (low to high)`."""
    return f"{e.value:{form}} ({e.low:{form}} to {e.high:{form}})"


def amount(x: float, digits: int = 3) -> str:
    """Of compute or money: 2,540 or 0.0513 or 2.54e+21; `digits` are significant."""
    if not math.isfinite(x):
        return "∞" if x > 0 else "–"
    rounded = float(f"{x:.{digits}g}")
    return f"{rounded:,.0f}" if 1000 <= rounded < 1e9 else f"{rounded:.{digits}g}"


def amounts(e: Estimate) -> str:
    """`value (low to high)` of compute."""
    return f"{amount(e.value)} ({amount(e.low)} to {amount(e.high)})"


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of paths: as many as tell them apart, without the file's ending where that does.

    Of runs that one file holds (`file: run`), the run's name where that does.
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
