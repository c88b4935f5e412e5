"""What `compare` says of the recipes, for the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.scaling.comparability import incomparable, warnings
from trainer.scaling.compare import Comparison, Recipe, compare_fits, without_ranking
from trainer.scaling.compare_text import (
    answer,
    budget_sentences,
    extrapolated,
    level_sentence,
    pair_sentences,
    recipe_sentences,
    reward_seed_sentence,
    seed_sentence,
)
from trainer.scaling.curve.fit import Estimate
from trainer.scaling.report.answers import AHEAD
from trainer.scaling.report.run import Run


@dataclass(frozen=True, slots=True)
class Cell:
    """A ceiling or a reward of a recipe."""

    estimate: Estimate
    range_alone: bool  # the value is not shown: the ceiling is not identified
    best: float | None = None  # of a reward: the probability that the recipe is the best one
    mark: str = ""  # of a reward beyond the data


@dataclass(frozen=True, slots=True)
class Compared:
    """Recipes compared, in the sentences of the command."""

    warnings: tuple[str, ...]  # what the runs do not share
    answer: tuple[str, ...]  # which recipe is best, and how much runs of one differ
    budgets: tuple[float, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]  # by recipe: its ceiling, its reward at each budget
    notes: tuple[str, ...]
    pairs: tuple[tuple[str, tuple[str, ...]], ...]  # ("a against b", sentences)


def compare_runs(runs: Sequence[Run], same_metric: bool = False) -> Compared | None:
    """Compare the recipes, each by its runs that have a fit; None: there are not two of them."""
    with_fit = by_recipe([run for run in runs if run.fit.draws])
    fitted = {name: [(run.curve, run.fit) for run in group] for name, group in with_fit.items()}
    if len(fitted) < 2:
        return None
    longest, unit = max(run.fit.compute_range[1] for run in runs), runs[0].curve.unit
    comparison = compare_fits(fitted, [times * longest for times in (1, *AHEAD)])
    groups = {name: [run.reading for run in group] for name, group in by_recipe(runs).items()}
    said = warnings(groups)
    if why := incomparable(groups, same_metric):
        comparison, said = without_ranking(comparison, why), [*said, why]
    seeded = tuple(recipe for recipe in comparison.recipes if len(recipe.fits) > 1)  # of others, see the runs
    unfit = (f"{run.curve.name} is not compared: {run.fit.reasons}." for run in runs if not run.fit.draws)
    notes = [*unfit, *recipe_sentences(replace(comparison, recipes=seeded)), *budget_sentences(comparison)]
    notes.append(f"{seed_sentence(comparison)} {level_sentence(comparison)}".rstrip())
    pairs = (
        (f"{pair.a} against {pair.b}", tuple(pair_sentences(pair, comparison, unit)))
        for pair in comparison.pairs
    )
    return Compared(
        tuple(said),
        (*answer(comparison, unit), *reward_seed_sentence(comparison, unit)),
        tuple(at for at, _ in comparison.budgets),
        tuple((recipe.name, _cells(recipe, comparison)) for recipe in comparison.recipes),
        tuple(notes),
        tuple(pairs),
    )


def by_recipe(runs: Sequence[Run]) -> Mapping[str, Sequence[Run]]:
    """The runs of each recipe, in the order of the first ones."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.recipe, []).append(run)
    return groups


def _cells(recipe: Recipe, comparison: Comparison) -> tuple[Cell | None, ...]:
    """None: no sigmoid describes the recipe, or it has fallen."""
    cells: list[Cell | None] = [Cell(recipe.estimate("A"), bool(recipe.doubts)) if recipe.described else None]
    for _, standings in comparison.budgets:
        found = next((standing for standing in standings if standing.recipe == recipe.name), None)
        cells.append(
            Cell(found.reward, found.range_alone, found.best, extrapolated(found)) if found else None
        )
    return tuple(cells)
