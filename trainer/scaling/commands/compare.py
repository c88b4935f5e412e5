"""`compare`: do recipes differ (ceiling, efficiency, midpoint), and which is best at which budget."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling import compare_text as text_of
from trainer.scaling.commands import add_fit_arguments, check_outputs, groups_of, write_json
from trainer.scaling.comparability import add_same_metric, check_seeds, incomparable, warnings
from trainer.scaling.compare import Comparison, Recipe, compare, without_ranking
from trainer.scaling.plot import plot_recipes, reward_title
from trainer.scaling.reading.groups import curves_of
from trainer.scaling.reading.options import ReadOptions, add_input_arguments
from trainer.scaling.reading.read import Reading, same_unit
from trainer.scaling.seeds import MARGIN
from trainer.scaling.tables import parts
from trainer.scaling.text import paragraph, sources

EXAMPLES = """\
Several seeds of one recipe: NAME=RUN,RUN,... instead of RUN_OR_FILE.

examples:
  python -m trainer.scaling compare ours=seed1.csv,seed2.csv baseline=seed3.csv --plot curves.svg
  python -m trainer.scaling compare a=verl.jsonl@devices=64,reward=aime b=prime.jsonl@devices=32 --same-metric
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to compare, at which budgets, and where to write it."""
    add_input_arguments(command)
    add_fit_arguments(command)
    add_same_metric(command)
    command.formatter_class, command.epilog = argparse.RawDescriptionHelpFormatter, EXAMPLES
    command.add_argument(
        "--at", type=float, nargs="+", default=[], metavar="BUDGET",
        help="compare rewards at these budgets (default: ¼, ½, 1 and 2 times what all have data to)",
    )  # fmt: skip
    command.add_argument(
        "--margin", type=float, default=MARGIN,
        help="likely difference (90%%) between the ceilings of two runs of a recipe, before seeds update it "
        f"(default: {MARGIN}, from the paper)",
    )  # fmt: skip
    text = "all pairs in sentences, and of each recipe why its ceiling is not identified"
    command.add_argument("--details", action="store_true", help=text)
    command.add_argument("--json", type=Path, help="write everything here")
    text = "draw the curves and the efficiency plot in this file (.png, .svg or .pdf)"
    command.add_argument("--plot", type=Path, help=text)


def run(args: argparse.Namespace) -> None:
    """Print which recipes differ, and which is best at each budget."""
    check_outputs(args.json, args.plot)
    if not 0 < args.margin < 1:
        raise ConfigError(f"--margin {args.margin:g}: expected a difference of ceilings between 0 and 1")
    if wrong := [at for at in args.at if not 0 < at < float("inf")]:
        raise ConfigError(f"--at {wrong[0]:g}: expected a budget above 0")
    readings = groups_of(args.inputs, ReadOptions.from_arguments(args))
    if len(readings) < 2:
        raise ConfigError(f"there is only one recipe, {next(iter(readings))}; expected two or more")
    groups = curves_of(readings)
    unit = same_unit([curve for curves in groups.values() for curve in curves])
    check_seeds(readings)
    comparison = compare(groups, args.at, args.margin, args.confidence, args.within)
    if why := incomparable(readings, args.same_metric):
        comparison = without_ranking(comparison, why)
    if args.json:
        write_json(args.json, to_json(comparison, readings, unit))
    if args.plot:
        columns = [reading.reward_column for runs in readings.values() for reading in runs]
        plot_recipes(comparison, args.plot, reward_title(columns))
    print(describe(comparison, readings, unit, args.details))


def describe(
    comparison: Comparison, readings: Mapping[str, Sequence[Reading]], unit: str, details: bool = False
) -> str:
    """For a terminal: the answer, the tables, the pairs (if many, only with `details`), the sources."""
    notes = [f"Note: {note}" for note in warnings(readings)]
    notes += [comparison.incomparable] if comparison.incomparable else []
    return "\n\n".join([
        *(["\n".join(paragraph(note, "") for note in notes)] if notes else []),
        *(
            paragraph(part, "") if isinstance(part, str) else str(part)
            for part in parts(comparison, unit, details)
        ),
        sources([reading for several in readings.values() for reading in several]),
    ])  # fmt: skip


def to_json(comparison: Comparison, readings: Mapping[str, Sequence[Reading]], unit: str) -> dict[str, Any]:
    """All numbers and sentences of `describe`."""
    return {
        "unit": unit,
        "confidence": comparison.confidence,
        "warnings": warnings(readings),
        "incomparable": comparison.incomparable,
        "notes": [*text_of.recipe_sentences(comparison), *text_of.budget_sentences(comparison)],
        "spread_over_seeds": {name: asdict(e) for name, e in comparison.spread.items()}
        | {"seeds": comparison.seeds, "margin": comparison.margin}
        | {"reward_margin": comparison.reward_margin},
        "recipes": {
            recipe.name: _recipe_json(recipe, readings[recipe.name]) for recipe in comparison.recipes
        },
        "answer": list(text_of.answer(comparison, unit)),
        "end": comparison.end
        and {"compute": comparison.end[0], "standings": [asdict(s) for s in comparison.end[1]]},
        "costs": [{"reward": r, "recipes": [asdict(c) for c in row]} for r, row in comparison.costs],
        "pairs": [
            asdict(pair)
            | {"ahead": pair.ahead}
            | {"sentences": text_of.pair_sentences(pair, comparison, unit)}
            for pair in comparison.pairs
        ],
        "budgets": [{"compute": at, "standings": [asdict(s) for s in row]} for at, row in comparison.budgets],
    }


def _recipe_json(recipe: Recipe, readings: Sequence[Reading]) -> dict[str, Any]:
    runs = zip(readings, recipe.curves, recipe.fits, strict=True)
    return {
        **{name: asdict(recipe.estimate(name)) for name in ("A", "B", "C_mid", "R0")},
        "doubts": recipe.doubts,
        "described": recipe.described,
        "evaluations": recipe.evaluations,
        "data_to": recipe.last,
        "runs": {
            curve.name: fit.to_json()
            | {"source": str(reading), "reading_notes": reading.notes, "settings": dict(reading.settings)}
            | {"used": i in recipe.used}
            for i, (reading, curve, fit) in enumerate(runs)
        },
    }
