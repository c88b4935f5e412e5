"""`compare`: do recipes differ (ceiling, efficiency, midpoint), and which one wins at which budget."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling.commands.text import check_outputs, percent, write_json
from trainer.scaling.compare import (
    AHEAD,
    CONFIDENCE,
    DIFFER,
    SAME,
    Comparison,
    Pair,
    Recipe,
    compare,
)
from trainer.scaling.compare_plot import plot_recipes
from trainer.scaling.fit import FLAGS
from trainer.scaling.points import Curve
from trainer.scaling.reading.read import add_input_arguments, read_curves, same_unit
from trainer.scaling.seeds import MARGIN
from trainer.scaling.text import WIDTH, amount, amounts, paragraph, short_names, words

MANY = 3  # pairs; of more than that only ceilings and leads are told
LIKELY = 0.8  # share of the draws with a crossing from which it is told


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to compare, where to look, where to write."""
    add_input_arguments(command)
    command.epilog = "Several seeds of one recipe: NAME=RUN,RUN,... in place of RUN_OR_FILE."
    command.add_argument(
        "--at", type=float, nargs="+", default=[], metavar="BUDGET",
        help="say who is best at these budgets (default: the last compute, 2 and 10 times as much)",
    )  # fmt: skip
    command.add_argument(
        "--margin", type=float, default=MARGIN,
        help=f"what the ceilings of two runs of one recipe differ by, 90%% (default: {MARGIN}, published; "
        "seeds correct it)",
    )  # fmt: skip
    command.add_argument("--json", type=Path, help="write all of it here")
    command.add_argument("--plot", type=Path, help="write the efficiency plot here (.png, .svg or .pdf)")


def run(args: argparse.Namespace) -> None:
    """Print who differs from whom, and who wins where."""
    check_outputs((args.json, (".json",)), (args.plot, (".png", ".svg", ".pdf")))
    if not 0 < args.margin < 1:
        raise ConfigError(f"--margin {args.margin:g}: expected a difference of ceilings between 0 and 1")
    if wrong := [at for at in args.at if not 0 < at < float("inf")]:
        raise ConfigError(f"--at {wrong[0]:g}: expected a budget above 0")
    groups = _groups(args)
    unit = same_unit([curve for curves in groups.values() for curve in curves])
    found = compare(groups, args.at, args.margin)
    if args.json:
        write_json(args.json, to_json(found, unit))
    if args.plot:
        plot_recipes(found, args.plot)
    print(describe(found, unit))


def describe(found: Comparison, unit: str) -> str:
    """For a terminal."""
    brief = len(found.pairs) > MANY
    return "\n\n".join((
        _table(found.recipes, unit),
        _spread(found),
        *(_pair_words(pair, found, unit, brief) for pair in found.pairs),
        _budget_words(found, unit),
    ))  # fmt: skip


def to_json(found: Comparison, unit: str) -> dict[str, Any]:
    """Everything `describe` tells."""
    return {
        "unit": unit,
        "confidence": CONFIDENCE,
        "spread_over_seeds": asdict(found.spread) | {"seeds": found.seeds},
        "recipes": {
            recipe.name: {
                **{name: asdict(recipe.mean(name)) for name in ("A", "B", "C_mid", "R0")},
                "doubts": recipe.doubts,
                "runs": {c.name: f.to_json() for c, f in zip(recipe.curves, recipe.fits, strict=True)},
            }
            for recipe in found.recipes
        },
        "pairs": [asdict(pair) for pair in found.pairs],
        "budgets": [{"compute": at, "standings": [asdict(s) for s in row]} for at, row in found.budgets],
    }


def _groups(args: argparse.Namespace) -> dict[str, list[Curve]]:
    """Curves by recipe; an input that is no group is a recipe of its own."""
    groups: dict[str, list[Curve]] = {}
    alone: list[Curve] = []
    for text in args.inputs:
        name, sign, runs = text.partition("=")
        if not sign or Path(text).exists():
            alone += read_curves(argparse.Namespace(**{**vars(args), "inputs": [text]}))
            continue
        inputs = [part for part in runs.split(",") if part]
        if not name or not inputs:
            raise ConfigError(f"{text!r}: expected NAME=RUN,RUN,... or a run or a file")
        if len(set(map(Path, inputs))) < len(inputs):
            raise ConfigError(f"{text!r}: one run stands there twice; expected each run once")
        if name in groups:
            raise ConfigError(f"two groups are called {name!r}; expected NAME=RUN,RUN,... once for each name")
        groups[name] = read_curves(argparse.Namespace(**{**vars(args), "inputs": inputs}))
    names = short_names([curve.name for curve in alone]) if alone else []
    for name, curve in zip(names, alone, strict=True):
        if name in groups:
            raise ConfigError(f"two inputs are {name!r}; expected each once")
        groups[name] = [curve]
    if len(groups) < 2:
        raise ConfigError(f"there is one recipe, {next(iter(groups))}; expected two or more to compare")
    runs = [curve for curves in groups.values() for curve in curves]
    for a, b in combinations(runs, 2):
        if (a.points, a.R0) == (b.points, b.R0):
            which = " and ".join(dict.fromkeys((a.name, b.name)))
            raise ConfigError(f"{which}: the same points twice; expected each run once, in one recipe")
    return groups


def _table(recipes: Sequence[Recipe], unit: str) -> str:
    head = ("runs", "ceiling A", "efficiency B", "midpoint C_mid")
    rows = []
    for recipe in recipes:
        if recipe.doubts:
            A = recipe.mean("A")
            cells = (f"not identified: {A.low:.2f} to {A.high:.2f}", "", "")
        else:
            e = {name: recipe.mean(name) for name in ("A", "B", "C_mid")}
            cells = (words(e["A"], ".3f"), words(e["B"], ".2f"), amounts(e["C_mid"]))
        rows.append((str(len(recipe.fits)), *(cell.replace(" to ", "–") for cell in cells)))
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    table = [
        "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    names = ["recipe", *(recipe.name for recipe in recipes)]
    column = max(map(len, names))
    if column + 2 + max(map(len, table)) <= WIDTH:
        lines = [f"{name:{column}}  {line}" for name, line in zip(names, table, strict=True)]
    else:  # long names on lines of their own
        lines = [x for name, line in zip(names, table, strict=True) for x in (name, f"  {line}")][1:]
    lines.append(f"({CONFIDENCE:.0%} intervals; C_mid in {unit})")
    lines += [
        paragraph(f"{recipe.name}: {'; '.join(FLAGS[flag] for flag in recipe.doubts)}.", "")
        for recipe in recipes
        if recipe.doubts
    ]
    return "\n".join(lines)


def _spread(found: Comparison) -> str:
    runs = [fit for recipe in found.recipes for fit in recipe.fits]
    if not found.seeds:
        return paragraph(
            "There is one run of each recipe. How far the ceilings of runs of one recipe differ is taken "
            "from the paper: up to ±.02 (--margin). For B nothing is published, and nothing allowed for.",
            "",
        )
    return paragraph(
        f"The ceilings of runs of one recipe have a standard deviation of {words(found.spread, '.3f')}: the "
        f"paper's ±.02, corrected by {len(runs)} runs of {len(found.recipes)} recipes.",
        "",
    )


def _pair_words(pair: Pair, found: Comparison, unit: str, brief: bool) -> str:
    two = [recipe for recipe in found.recipes if recipe.name in (pair.a, pair.b)]
    lines = [f"{pair.a} against {pair.b}", paragraph(_ceilings(pair, two))]
    if not pair.doubts and not brief:
        lines += [paragraph(_efficiency(pair, two)), paragraph(_midpoints(pair))]
    lines += [paragraph(text) for text in _who_leads(pair, unit)]
    return "\n".join(lines)


def _ceilings(pair: Pair, two: Sequence[Recipe]) -> str:
    gap = f"A {pair.A.value:+.3f} ({pair.A.low:+.3f} to {pair.A.high:+.3f})"
    seeds = f"runs of one recipe differ by up to ±{pair.margin:.3f}"
    if pair.doubts:
        which = " and ".join(recipe.name for recipe in two if recipe.doubts)
        return f"Whether the ceilings differ cannot be told: not identified for {which}."
    if pair.verdict == DIFFER:
        return f"The ceilings differ: {gap}; {seeds}."
    if pair.verdict == SAME:
        return f"The ceilings do not differ: {gap}; {seeds}."
    return f"Whether the ceilings differ cannot be told: {gap}; {seeds}. Train longer, or more seeds."


def _efficiency(pair: Pair, two: Sequence[Recipe]) -> str:
    differ = pair.verdict == DIFFER
    B = [recipe.mean("B") for recipe in two] if differ else pair.B_held
    ratio = pair.B_ratio if differ else pair.B_held_ratio
    how = "each at its own ceiling" if differ else f"both at the mean ceiling {pair.common_A:.3f}"
    apart = ratio.low > 1 or ratio.high < 1
    text = (
        f"Efficiency, {how}: B {words(B[0], '.2f')} against {words(B[1], '.2f')}, ratio "
        f"{words(ratio, '.2f')}: {'they differ' if apart else 'no difference is seen'}."
    )
    flags = {flag for recipe in two for fit in recipe.fits for flag in fit.flags}
    for flag in ("B-at-bound", "R0-unknown"):
        if flag in flags:
            text += f" Careful: {FLAGS[flag]}."
    return text


def _midpoints(pair: Pair) -> str:
    ratio = pair.C_mid_ratio
    text = f"Half of its rise takes {pair.a} {words(ratio, '.2f')} times the compute that it takes {pair.b}"
    return f"{text}." if ratio.low > 1 or ratio.high < 1 else f"{text}: no difference is seen."


def _who_leads(pair: Pair, unit: str) -> list[str]:
    low, high = pair.searched
    if "falling" in pair.doubts:
        return ["Who is ahead where is not said: the sigmoid cannot describe a falling curve."]
    lines = []
    for crossing in pair.crossings:
        if crossing.share >= LIKELY and not pair.doubts:
            beyond = " (beyond the data)" if crossing.compute.value > high / AHEAD else ""
            lines.append(
                f"{crossing.winner} overtakes at {amounts(crossing.compute)} {unit}{beyond}; "
                f"{percent(crossing.share)} of the draws have such a crossing."
            )
    for lead in pair.leads:
        start = f"from {amount(lead.low)} " if lead.low > low else ""
        end = f"up to {amount(lead.high)} " if lead.high < high else "on" if start else ""
        where = f"{start}{end}".strip() or f"everywhere from {amount(low)} to {amount(high)}"
        lines.append(f"With 90% or more, {lead.winner} is ahead {where} ({unit}).")
    if not pair.leads:
        lines.append(f"From {amount(low)} to {amount(high)} {unit} neither is ahead with 90%.")
    return lines


def _budget_words(found: Comparison, unit: str) -> str:
    width = max(len(recipe.name) for recipe in found.recipes)
    falling = [r.name for r in found.recipes if "falling" in r.doubts]
    unsure = [r.name for r in found.recipes if r.doubts and "falling" not in r.doubts]
    lines = ["Reward at a budget, and the chance to be the best there (allowing for seeds):"]
    for at, standings in found.budgets:
        lines.append(f"  {amount(at, 6)} {unit}")
        for s in sorted(standings, key=lambda s: -s.best):
            lines.append(f"    {s.recipe:{width}}  {words(s.reward, '.3f')}  {percent(s.best)}")
    if unsure:
        names = " and ".join(unsure)
        text = f"Beyond the data of {names} these are guesses: a ceiling that is not identified may be any."
        lines.append(paragraph(text))
    if falling:
        lines.append(
            paragraph(f"Not for {' and '.join(falling)}: the sigmoid cannot describe a falling curve.")
        )
    return "\n".join(lines)
