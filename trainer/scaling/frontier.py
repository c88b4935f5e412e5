"""The efficient frontier over an axis of a sweep: which of its values is best at which budget.

A value is as good at a budget as the best recipe that has it there: whatever else is varied is at its best
for each value and budget. Budgets are halves of the compute to which the recipes are compared, down to the
first evaluation that all have.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np

from trainer.scaling.budgets import Curves, simultaneous_band
from trainer.scaling.compare import Comparison, curves_of
from trainer.scaling.curve.sigmoid import Array, Estimate, median
from trainer.scaling.layout import Block, amount, level
from trainer.scaling.plot import lines


@dataclass(frozen=True, slots=True)
class Row:
    """The values at one budget."""

    compute: float
    rewards: dict[str, Estimate]  # by value: of the best recipe with it
    recipes: dict[str, str]  # by value: that recipe
    best: tuple[str, ...]  # the value with the highest reward, and those that are not surely below it


def frontier(comparison: Comparison, values: Mapping[str, str]) -> tuple[Row, ...]:
    """Each budget of the frontier, rising. `values`: of the recipes on the axis.

    All differences of two values at all these budgets are sure together, at the level of the differences of
    recipes; each allows for any of a value's recipes being its best.
    """
    on_axis = draws_by_value(comparison, values)
    if on_axis is None:
        return ()
    curves, best_of = on_axis
    gaps = {
        (budget, a, b): draws[a] - draws[b]
        for budget, draws in best_of.items()
        for a, b in permutations(draws, 2)
    }
    if not gaps:
        return ()
    lows = simultaneous_band(np.stack(list(gaps.values()), axis=1), curves.sure)[0].tolist()
    sure = {gap for gap, low in zip(gaps, lows, strict=True) if low > 0}
    return tuple(_row(curves, budget, values, sure) for budget in best_of)


def draws_by_value(
    comparison: Comparison, values: Mapping[str, str], further: Sequence[float] = ()
) -> tuple[Curves, dict[float, dict[str, Array]]] | None:
    """The recipes' curves, and at each budget the draws of each value's highest reward, if there are two.

    `further`: budgets besides the halves. None: the rewards cannot be compared, or all runs have fallen.
    """
    if comparison.end is None or comparison.incomparable:
        return None
    end, ranges = comparison.end[0], [f.compute_range for r in comparison.recipes for f in r.forecasts]
    halvings = int(np.log2(end / max(low for low, _ in ranges)))
    budgets = sorted({*(end / 2**i for i in range(halvings, -1, -1)), *further})
    curves = curves_of(comparison.recipes, budgets, end)
    assert curves is not None  # as there is an end
    best_of = {b: draws for b in budgets if len(draws := _best_of_values(curves, b, values)) > 1}
    return curves, best_of


def _best_of_values(curves: Curves, budget: float, values: Mapping[str, str]) -> dict[str, Array]:
    """(n,) the highest reward of the recipes with each value, in each draw."""
    best: dict[str, Array] = {}
    for name, x in curves.ranked_at(budget).items():
        best[values[name]] = np.maximum(x, best.get(values[name], x))
    return best


def _row(curves: Curves, budget: float, values: Mapping[str, str], sure: set[tuple[float, str, str]]) -> Row:
    ranked = curves.ranked_at(budget).items()
    rewards = {k: median(np.clip(x, 0, 1), curves.confidence) for k, x in ranked}
    recipes: dict[str, str] = {}
    for name in sorted(rewards, key=lambda name: -rewards[name].value):
        recipes.setdefault(values[name], name)  # the best value first
    first = next(iter(recipes))
    near = tuple(value for value in recipes if (budget, first, value) not in sure)
    return Row(budget, {value: rewards[name] for value, name in recipes.items()}, recipes, near)


def table(axis: str, rows: Sequence[Row], unit: str, confidence: float) -> Block:
    """The reward of each value at each budget, and the best values there."""
    values = _in_order({value for row in rows for value in row.rewards})
    cells = [
        (amount(r.compute), *(_cell(r.rewards.get(v)) for v in values), " or ".join(r.best)) for r in rows
    ]
    sure = level((1 + confidence) / 2)
    return Block(
        [(unit, *values, "best"), *cells],
        f"Efficient frontier over {axis} (all else at its best):",
        [f"(± half of the {level(confidence)} interval; several best: not distinguished, {sure} overall)"],
    )


def draw(axes: Mapping[str, Sequence[Row]], path: Path, unit: str) -> None:
    """A picture of each axis: the reward of each value over the budgets, coloured by value."""
    panels: dict[str, dict[str, list[tuple[float, Estimate]]]] = {}
    for axis, rows in axes.items():
        values = _in_order({value for row in rows for value in row.rewards})
        panels[axis] = {v: [(r.compute, r.rewards[v]) for r in rows if v in r.rewards] for v in values}
    lines(panels, path, unit)


def _cell(reward: Estimate | None) -> str:
    return f"{reward.value:.3f}±{(reward.high - reward.low) / 2:.3f}" if reward else ""


def _in_order(values: set[str]) -> list[str]:
    """Numbers by size, then names."""

    def number(value: str) -> float:
        try:
            return float(value)
        except ValueError:
            return math.inf

    return sorted(values, key=lambda value: (number(value), value))
