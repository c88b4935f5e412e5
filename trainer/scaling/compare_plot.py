"""The efficiency plot of recipes, at a common ceiling as in the paper, unless two of theirs differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainer.scaling.compare import CONFIDENCE, DIFFER, Comparison, Recipe, at_ceiling
from trainer.scaling.fit import Estimate, estimate
from trainer.scaling.plot import Named, plot_efficiency


def plot_recipes(found: Comparison, path: Path) -> None:
    """Write a PNG, SVG or PDF, by the ending. Recipes whose ceiling is not identified are only named."""
    shown = [recipe for recipe in found.recipes if not recipe.doubts]
    hidden = [recipe for recipe in found.recipes if recipe.doubts]
    common = None
    if shown and not any(pair.verdict == DIFFER for pair in found.pairs):
        common = float(np.mean([fit.A.value for recipe in shown for fit in recipe.fits]))
    held = "each at its own ceiling" if common is None else f"all at the mean ceiling, {common:.3f}"
    missing = f"; ceiling not identified: {', '.join(r.name for r in hidden)}" if hidden else ""
    runs = [run for recipe in shown for run in _held(recipe, common)]
    runs += [
        (r.name, curve, fit) for r in hidden for curve, fit in zip(r.curves, r.fits, strict=True)
        if not fit.identified
    ]  # fmt: skip
    plot_efficiency(runs, path, f"Efficiency, {held}{missing}")


def _held(recipe: Recipe, A: float | None) -> Iterator[Named]:
    """The runs with their fits, the ceiling held where one is given."""
    for curve, fit, draws in zip(recipe.curves, recipe.fits, recipe.draws, strict=True):
        if A is None:
            yield recipe.name, curve, fit
            continue
        law, held = at_ceiling(fit.law, draws, A)
        B, C_mid, R0 = (
            estimate(getattr(law, name), getattr(held, name), CONFIDENCE) for name in ("B", "C_mid", "R0")
        )
        yield recipe.name, curve, replace(fit, A=Estimate(A, A, A), B=B, C_mid=C_mid, R0=R0)
