"""`compare`: do recipes differ (ceiling, efficiency, midpoint), and which is best at which budget."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.config import ConfigError
from trainer.scaling.commands import Budgets, GroupCommand, Json, Picture, sources, write_json
from trainer.scaling.comparability import Groups, check_seeds, incomparable, warnings
from trainer.scaling.compare import Comparison, Recipe, compare, without_ranking
from trainer.scaling.layout import Block
from trainer.scaling.plot import plot, reward_title
from trainer.scaling.reading.read import Reading, curves_of, read_groups, same_unit
from trainer.scaling.seeds import MARGIN
from trainer.scaling.tables import answer, budget_sentences, pair_sentences, parts, recipe_sentences


@dataclass(frozen=True, kw_only=True)
class Command(GroupCommand):
    """Several seeds of one recipe: NAME=RUN,RUN,... instead of RUN_OR_FILE.

    examples:
      python -m trainer.scaling compare ours=seed1.csv,seed2.csv baseline=seed3.csv --plot curves.svg
      python -m trainer.scaling compare a=verl.jsonl@devices=64,reward=aime b=prime.jsonl@devices=32
    """

    at: Budgets = ()
    """compare rewards at these budgets (default: ¼, ½, 1 and 2 times what all have data to)"""
    details: bool = False
    """all pairs in sentences, and of each recipe why its ceiling is not identified"""
    json: Json = None
    """write everything here"""
    plot: Picture = None
    """draw the curves and the efficiency plot in this file (.png, .svg or .pdf)"""

    def run(self, inputs: Sequence[str]) -> None:
        """Print which recipes differ, and which is best at each budget."""
        readings = read_groups(inputs, self)
        if len(readings) < 2:
            raise ConfigError(f"there is only one recipe, {next(iter(readings))}; expected two or more")
        groups = curves_of(readings)
        unit = same_unit([curve for curves in groups.values() for curve in curves])
        check_seeds(readings)
        comparison = compare(groups, self.at, confidence=self.confidence, within=self.within)
        comparison = without_ranking(comparison, incomparable(readings, self.same_metric))
        write_json(self.json, to_json(comparison, readings, unit))
        if self.plot:
            columns = [reading.reward_column for runs in readings.values() for reading in runs]
            recipes = comparison.recipes
            runs = [(r.name, *run) for r in recipes for run in zip(r.curves, r.fits, strict=True)]
            plot(runs, self.plot, reward_title(columns), "log efficiency")
        print(describe(comparison, readings, unit, self.details))


def describe(comparison: Comparison, readings: Groups, unit: str, details: bool = False) -> str:
    """Text for a terminal: the answer, the tables, the pairs (if many, only with `details`), the sources."""
    notes = [f"Note: {note}" for note in (*warnings(readings), comparison.incomparable) if note]
    blocks = [*[Block(notes=notes)] * bool(notes), *parts(comparison, unit, details)]
    runs = [reading for several in readings.values() for reading in several]
    return "\n\n".join([*map(str, blocks), sources(runs)])


def to_json(comparison: Comparison, readings: Groups, unit: str) -> dict[str, Any]:
    """All numbers and sentences of `describe`."""
    end, seeds = comparison.end, sum(len(recipe.used) - 1 for recipe in comparison.recipes)
    return {
        "unit": unit,
        "confidence": comparison.confidence,
        "warnings": warnings(readings),
        "incomparable": comparison.incomparable,
        "notes": [*recipe_sentences(comparison), *budget_sentences(comparison)],
        "spread_over_seeds": {name: asdict(e) for name, e in comparison.spread.items()}
        | {"seeds": seeds, "margin": MARGIN, "reward_margin": comparison.reward_margin},
        "recipes": {
            recipe.name: _recipe_json(recipe, readings[recipe.name]) for recipe in comparison.recipes
        },
        "answer": [text] if (text := answer(comparison, unit)) else [],
        "end": end and {"compute": end[0], "standings": list(map(asdict, end[1]))},
        "costs": [{"reward": r, "recipes": list(map(asdict, row))} for r, row in comparison.costs],
        "pairs": [
            asdict(pair) | {"ahead": pair.ahead, "sentences": pair_sentences(pair, comparison, unit)}
            for pair in comparison.pairs
        ],
        "budgets": [{"compute": c, "standings": list(map(asdict, row))} for c, row in comparison.budgets],
    }


def _recipe_json(recipe: Recipe, readings: Sequence[Reading]) -> dict[str, Any]:
    runs = enumerate(zip(readings, recipe.fits, strict=True))
    return {
        **{name: asdict(recipe.estimate(name)) for name in ("A", "B", "C_mid", "R0")},
        **{name: getattr(recipe, name) for name in ("doubts", "described", "evaluations")},
        "data_to": recipe.last,
        "runs": {
            reading.curve.name: fit.to_json()
            | {"source": str(reading), "reading_notes": reading.notes, "settings": dict(reading.settings)}
            | {"used": i in recipe.used}
            for i, (reading, fit) in runs
        },
    }
