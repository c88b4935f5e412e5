"""The efficiency plot of recipes: log[(R − R0)/(A − R)] over log C, where a sigmoid is a straight line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainer.scaling.compare import DIFFER, Comparison, Recipe, at_ceiling
from trainer.scaling.efficiency import straighten
from trainer.scaling.fit import Estimate, Fit
from trainer.scaling.plot import STYLE
from trainer.scaling.points import Curve

COLORS = ("#1f6feb", "#d1495b", "#2a9d57", "#b07d12", "#7b52ab", "#3b8ea5", "#66717e", "#a3476f")
MARKS = "os^DvP*X"


def plot_efficiency(found: Comparison, path: Path, unit: str) -> None:
    """Write a PNG, SVG or PDF, by the ending. Runs whose ceiling is not identified are left out, and named.

    The ceiling is held at the mean of the runs, as in the paper, unless two of the ceilings differ.
    """
    from matplotlib import rc_context  # imported here: a second that only a picture needs
    from matplotlib.figure import Figure

    shown = [recipe for recipe in found.recipes if not recipe.doubts]
    differ = any(pair.verdict == DIFFER for pair in found.pairs)
    common = None
    if shown and not differ:
        common = float(np.mean([fit.A.value for recipe in shown for fit in recipe.fits]))
    with rc_context(rc=STYLE):  # type: ignore[arg-type]  # its keys are literals in the stubs
        figure = Figure(figsize=(7.5, 5), layout="constrained")
        axes = figure.subplots()
        for i, recipe in enumerate(shown):
            color, mark = COLORS[i % len(COLORS)], MARKS[i % len(MARKS)]
            for j, (curve, fit) in enumerate(_held(recipe, common)):
                points = straighten(curve, fit)
                errors = np.maximum(0, [points.value - points.low, points.high - points.value])
                axes.errorbar(
                    points.compute, points.value, np.where(np.isfinite(errors), errors, 0), fmt=mark, ms=4,
                    color=color, elinewidth=0.8, alpha=0.8,
                )  # fmt: skip
                ends = np.array(fit.compute_range)
                line = fit.B.value * (np.log(ends) - np.log(fit.C_mid.value))
                name = _label(recipe, fit)
                axes.plot(ends, line, color=color, lw=1.5, label=name if j == 0 else None)
        axes.set(xscale="log", xlabel=f"compute ({unit}, log scale)", ylabel="log[(R − R0) / (A − R)]")
        axes.axhline(0, color="#7d8793", lw=0.8)
        axes.grid(alpha=0.2)
        if shown:
            axes.legend(frameon=False, fontsize=9, loc="upper left")
        held = "each at its own ceiling" if common is None else f"all at the mean ceiling, {common:.3f}"
        hidden = [recipe.name for recipe in found.recipes if recipe.doubts]
        missing = f"; ceiling not identified: {', '.join(hidden)}" if hidden else ""
        figure.suptitle(f"Efficiency, {held}{missing}", x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=130)


def _held(recipe: Recipe, A: float | None) -> Iterator[tuple[Curve, Fit]]:
    """The runs with their fits, the ceiling held where one is given."""
    for curve, fit, draws in zip(recipe.curves, recipe.fits, recipe.draws, strict=True):
        law = fit.law if A is None else at_ceiling(fit.law, draws, A)[0]
        ceiling, B, C_mid, R0 = (Estimate(x, x, x) for x in (law.A, law.B, law.C_mid, law.R0))
        yield curve, replace(fit, A=ceiling, B=B, C_mid=C_mid, R0=R0)


def _label(recipe: Recipe, fit: Fit) -> str:
    if len(recipe.fits) > 1:
        return f"{recipe.name} ({len(recipe.fits)} runs)"
    return f"{recipe.name}: B {fit.B.value:.2f}, A {fit.A.value:.3f}"
