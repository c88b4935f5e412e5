"""`compare`: do recipes differ (ceiling, efficiency, midpoint), and which is best at which budget."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling import compare_text as text_of
from trainer.scaling.commands import add_fit_arguments, check_outputs, write_json
from trainer.scaling.compare import Comparison, Recipe, compare, without_ranking
from trainer.scaling.guards import add_same_metric, check_seeds, incomparable, warnings
from trainer.scaling.plot import plot_recipes
from trainer.scaling.reading.groups import read_groups
from trainer.scaling.reading.read import Reading, add_input_arguments, same_unit
from trainer.scaling.seeds import MARGIN
from trainer.scaling.text import WIDTH, amount, amounts, interval, paragraph, percent, sources, table

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
        help="compare rewards at these budgets (default: the last compute, 2 and 10 times as much)",
    )  # fmt: skip
    command.add_argument(
        "--margin", type=float, default=MARGIN,
        help="likely difference (90%%) between the ceilings of two runs of a recipe, before seeds update it "
        f"(default: {MARGIN}, from the paper)",
    )  # fmt: skip
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
    readings = read_groups(args)
    if len(readings) < 2:
        raise ConfigError(f"there is only one recipe, {next(iter(readings))}; expected two or more")
    groups = {name: [reading.curve for reading in runs] for name, runs in readings.items()}
    unit = same_unit([curve for curves in groups.values() for curve in curves])
    check_seeds(readings)
    comparison = compare(groups, args.at, args.margin, args.confidence, args.within)
    if why := incomparable(readings, args.same_metric):
        comparison = without_ranking(comparison, why)
    if args.json:
        write_json(args.json, to_json(comparison, readings, unit))
    if args.plot:
        columns = {reading.reward_column for runs in readings.values() for reading in runs}
        plot_recipes(comparison, args.plot, columns.pop() if len(columns) == 1 else "held-out reward")
    print(describe(comparison, readings, unit))


def describe(comparison: Comparison, readings: Mapping[str, Sequence[Reading]], unit: str) -> str:
    """For a terminal."""
    notes = [paragraph(f"Note: {note}", "") for note in warnings(readings)]
    notes += [paragraph(comparison.incomparable, "")] if comparison.incomparable else []
    pairs = [
        [f"{pair.a} against {pair.b}", *text_of.pair_sentences(pair, comparison, unit)]
        for pair in comparison.pairs
    ]
    return "\n\n".join((
        *(["\n".join(notes)] if notes else []),
        sources([reading for several in readings.values() for reading in several]),
        _table(comparison, unit),
        paragraph(f"{text_of.seed_sentence(comparison)} {text_of.level_sentence(comparison)}".rstrip(), ""),
        *("\n".join([head, *map(paragraph, sentences)]) for head, *sentences in pairs),
        _describe_budgets(comparison, unit),
    ))  # fmt: skip


def to_json(comparison: Comparison, readings: Mapping[str, Sequence[Reading]], unit: str) -> dict[str, Any]:
    """All numbers and sentences of `describe`."""
    return {
        "unit": unit,
        "confidence": comparison.confidence,
        "warnings": warnings(readings),
        "incomparable": comparison.incomparable,
        "notes": [*text_of.recipe_sentences(comparison), *text_of.budget_sentences(comparison)],
        "spread_over_seeds": {name: asdict(e) for name, e in comparison.spread.items()}
        | {"seeds": comparison.seeds, "margin": comparison.margin},
        "recipes": {
            recipe.name: _recipe_json(recipe, readings[recipe.name]) for recipe in comparison.recipes
        },
        "pairs": [
            asdict(pair) | {"sentences": text_of.pair_sentences(pair, comparison, unit)}
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


def _table(comparison: Comparison, unit: str) -> str:
    data: list[tuple[str, ...]] = [("recipe", "runs", "evaluations", f"data to ({unit})")]
    rows: list[tuple[str, ...]] = [("recipe", "ceiling A", "efficiency B", "midpoint C_mid")]
    for recipe in comparison.recipes:
        A, B, C_mid = (recipe.estimate(name) for name in ("A", "B", "C_mid"))
        cells = (interval(A, ".3f"), interval(B, ".2f"), amounts(C_mid))
        if recipe.doubts:
            cells = (f"not identified: {A.low:.2f} to {A.high:.2f}" if recipe.described else "none", "", "")
        used, runs = len(recipe.used), len(recipe.fits)
        count = f"{used} of {runs}" if used < runs else str(runs)
        data.append((recipe.name, count, str(recipe.evaluations), amount(recipe.last)))
        rows.append((recipe.name, *(cell.replace(" to ", "–") for cell in cells)))
    about = "intervals of the recipe, other seeds included"
    lines = [
        *table(data),
        "",
        *table(rows),
        f"({text_of.level(comparison.confidence)} {about}; C_mid in {unit})",
    ]
    lines += (paragraph(text, "") for text in text_of.recipe_sentences(comparison))
    return "\n".join(lines)


def _describe_budgets(comparison: Comparison, unit: str) -> str:
    width = max(len(recipe.name) for recipe in comparison.recipes)
    best = "" if comparison.incomparable else ", and the probability of being best"
    lines = [f"Reward at a budget{best} (other seeds included):"]
    for at, standings in comparison.budgets:
        rewards = {s.recipe: text_of.reward_at(s) for s in standings}
        column = max(map(len, rewards.values()), default=0)
        lines += [f"  {amount(at, 6)} {unit}"] if standings else []
        for s in sorted(standings, key=lambda s: -(s.best or 0)):
            best = "" if s.best is None else percent(s.best)
            line = f"    {s.recipe:{width}}  {rewards[s.recipe]:{column}}  {best:8}".rstrip()
            mark = text_of.extrapolated(s)
            fits = len(line) + 2 + len(mark) <= WIDTH
            lines += [f"{line}  {mark}".rstrip()] if fits else [line, f"      {mark}".rstrip()]
    return "\n".join([*lines, *map(paragraph, text_of.budget_sentences(comparison))])
