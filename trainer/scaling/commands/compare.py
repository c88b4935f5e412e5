"""`compare`: do recipes differ (ceiling, efficiency, midpoint), and which is best at which budget."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling.commands import check_outputs, write_json
from trainer.scaling.compare import (
    CONFIDENCE,
    DIFFERENT,
    EQUIVALENT,
    MARGIN,
    SEARCH_REACH,
    Comparison,
    Pair,
    Recipe,
    compare,
)
from trainer.scaling.fit import FLAGS, Estimate
from trainer.scaling.plot import plot_recipes
from trainer.scaling.reading.groups import read_groups
from trainer.scaling.reading.read import add_input_arguments, same_unit
from trainer.scaling.text import WIDTH, amount, amounts, interval, paragraph, percent

MAX_DETAILED_PAIRS = 3  # for more pairs, only ceilings and leads are printed
MIN_CROSSING_SHARE = 0.8  # of the draws, from which a crossing is printed


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to compare, at which budgets, and where to write it."""
    add_input_arguments(command)
    command.epilog = "Several seeds of one recipe: NAME=RUN,RUN,... instead of RUN_OR_FILE."
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
    command.add_argument("--plot", type=Path, help="write the efficiency plot here (.png, .svg or .pdf)")


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
    comparison = compare(groups, args.at, args.margin)
    if args.json:
        write_json(args.json, to_json(comparison, unit))
    if args.plot:
        plot_recipes(comparison, args.plot)
    print(describe(comparison, unit))


def describe(comparison: Comparison, unit: str) -> str:
    """For a terminal."""
    brief = len(comparison.pairs) > MAX_DETAILED_PAIRS
    return "\n\n".join((
        _table(comparison.recipes, unit),
        _describe_seeds(comparison),
        *(_describe_pair(pair, comparison, unit, brief) for pair in comparison.pairs),
        _describe_budgets(comparison, unit),
    ))  # fmt: skip


def to_json(comparison: Comparison, unit: str) -> dict[str, Any]:
    """All numbers of `describe`."""
    return {
        "unit": unit,
        "confidence": CONFIDENCE,
        "spread_over_seeds": asdict(comparison.spread) | {"seeds": comparison.seeds},
        "recipes": {
            recipe.name: {
                **{name: asdict(recipe.mean(name)) for name in ("A", "B", "C_mid", "R0")},
                "doubts": recipe.doubts,
                "runs": {c.name: f.to_json() for c, f in zip(recipe.curves, recipe.fits, strict=True)},
            }
            for recipe in comparison.recipes
        },
        "pairs": [asdict(pair) for pair in comparison.pairs],
        "budgets": [{"compute": at, "standings": [asdict(s) for s in row]} for at, row in comparison.budgets],
    }


def _table(recipes: Sequence[Recipe], unit: str) -> str:
    head = ("runs", "ceiling A", "efficiency B", "midpoint C_mid")
    rows = []
    for recipe in recipes:
        if recipe.doubts:
            A = recipe.mean("A")
            cells = (f"not identified: {A.low:.2f} to {A.high:.2f}", "", "")
        else:
            e = {name: recipe.mean(name) for name in ("A", "B", "C_mid")}
            cells = (interval(e["A"], ".3f"), interval(e["B"], ".2f"), amounts(e["C_mid"]))
        rows.append((str(len(recipe.fits)), *(cell.replace(" to ", "–") for cell in cells)))
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    names = ["recipe", *(recipe.name for recipe in recipes)]
    column = max(map(len, names))
    if column + 2 + max(map(len, table)) <= WIDTH:
        lines = [f"{name:{column}}  {line}" for name, line in zip(names, table, strict=True)]
    else:  # long names go on lines of their own
        lines = [x for name, line in zip(names, table, strict=True) for x in (name, f"  {line}")][1:]
    lines.append(f"({CONFIDENCE:.0%} intervals; C_mid in {unit})")
    for recipe in recipes:
        if recipe.doubts:
            lines.append(paragraph(f"{recipe.name}: {'; '.join(FLAGS[flag] for flag in recipe.doubts)}.", ""))
    return "\n".join(lines)


def _describe_seeds(comparison: Comparison) -> str:
    text = (
        "There is one run of each recipe, so the difference between runs of one recipe is taken from the "
        "paper: their ceilings differ by up to ±.02 (--margin). No such number is published for B, and "
        "none is allowed for."
    )
    if comparison.seeds:
        runs = sum(len(recipe.fits) for recipe in comparison.recipes)
        text = (
            "The ceilings of runs of one recipe have a standard deviation of "
            f"{interval(comparison.spread, '.3f')}: the paper's ±.02, updated with {runs} runs of "
            f"{len(comparison.recipes)} recipes."
        )
    return paragraph(text, "")


def _describe_pair(pair: Pair, comparison: Comparison, unit: str, brief: bool) -> str:
    two = [recipe for recipe in comparison.recipes if recipe.name in (pair.a, pair.b)]
    texts = [_describe_ceilings(pair, two)]
    if not pair.doubts and not brief:
        seen = "" if _excludes_1(pair.C_mid_ratio) else ": no difference is visible"
        ratio = interval(pair.C_mid_ratio, ".2f")
        texts += [
            _describe_efficiency(pair, two),
            f"C_mid of {pair.a} is {ratio} times that of {pair.b}{seen}.",
        ]
    texts += _describe_leads(pair, unit)
    return "\n".join([f"{pair.a} against {pair.b}", *map(paragraph, texts)])


def _describe_ceilings(pair: Pair, two: Sequence[Recipe]) -> str:
    if pair.doubts:
        names = " and ".join(recipe.name for recipe in two if recipe.doubts)
        return f"Whether the ceilings differ is not known: that of {names} is not identified."
    gap = f"A {pair.A.value:+.3f} ({pair.A.low:+.3f} to {pair.A.high:+.3f})"
    numbers = f"{gap}; runs of one recipe differ by up to ±{pair.margin:.3f}"
    if pair.verdict == DIFFERENT:
        return f"The ceilings differ: {numbers}."
    if pair.verdict == EQUIVALENT:
        return f"The ceilings are equivalent: {numbers}."
    return f"Whether the ceilings differ is not known: {numbers}. Train longer, or run more seeds."


def _describe_efficiency(pair: Pair, two: Sequence[Recipe]) -> str:
    own_ceiling = pair.verdict == DIFFERENT
    B = [recipe.mean("B") for recipe in two] if own_ceiling else pair.B_held
    ratio = pair.B_ratio if own_ceiling else pair.B_held_ratio
    ceiling = "each at its own ceiling" if own_ceiling else f"both at the mean ceiling {pair.common_A:.3f}"
    text = (
        f"Efficiency, {ceiling}: B {interval(B[0], '.2f')} against {interval(B[1], '.2f')}, ratio "
        f"{interval(ratio, '.2f')}: {'they differ' if _excludes_1(ratio) else 'no difference is visible'}."
    )
    flags = {flag for recipe in two for fit in recipe.fits for flag in fit.flags}
    cautions = (f" Careful: {FLAGS[flag]}." for flag in ("B-at-bound", "R0-unknown") if flag in flags)
    return text + "".join(cautions)


def _excludes_1(ratio: Estimate) -> bool:
    return ratio.low > 1 or ratio.high < 1


def _describe_leads(pair: Pair, unit: str) -> list[str]:
    low, high = pair.searched
    if "falling" in pair.doubts:
        return ["Which one is ahead is not computed: a sigmoid cannot describe a falling curve."]
    texts = []
    for crossing in pair.crossings:
        if crossing.share >= MIN_CROSSING_SHARE and not pair.doubts:
            beyond = " (beyond the data)" if crossing.compute.value > high / SEARCH_REACH else ""
            texts.append(
                f"{crossing.winner} overtakes at {amounts(crossing.compute)} {unit}{beyond}, in "
                f"{percent(crossing.share)} of the draws."
            )
    for lead in pair.leads:
        start = f"from {amount(lead.low)} " if lead.low > low else ""
        end = f"up to {amount(lead.high)} " if lead.high < high else "on" if start else ""
        where = f"{start}{end}".strip() or f"everywhere from {amount(low)} to {amount(high)}"
        texts.append(f"{lead.winner} is ahead {where} ({unit}), with a probability of 90% or more.")
    if not pair.leads:
        texts.append(
            f"Neither is ahead with a probability of 90% from {amount(low)} to {amount(high)} {unit}."
        )
    return texts


def _describe_budgets(comparison: Comparison, unit: str) -> str:
    width = max(len(recipe.name) for recipe in comparison.recipes)
    falling = [r.name for r in comparison.recipes if "falling" in r.doubts]
    unsure = [r.name for r in comparison.recipes if r.doubts and "falling" not in r.doubts]
    lines = ["Reward at a budget, and the probability of being best (with other seeds):"]
    for at, standings in comparison.budgets:
        lines.append(f"  {amount(at, 6)} {unit}")
        for s in sorted(standings, key=lambda s: -s.best):
            lines.append(f"    {s.recipe:{width}}  {interval(s.reward, '.3f')}  {percent(s.best)}")
    if unsure:
        names = " and ".join(unsure)
        lines += [paragraph(f"The ceiling of {names} is not identified: beyond the data these are guesses.")]
    if falling:
        names = " and ".join(falling)
        lines += [paragraph(f"Ignore the rows of {names}: a sigmoid cannot describe a falling curve.")]
    return "\n".join(lines)
