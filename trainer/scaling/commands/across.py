"""`across`: ceiling and midpoint over the sizes of models, and what a size not trained yet would do."""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from trainer.config import ConfigError
from trainer.scaling.across import MIN_SIZES, SCATTER, Across, across
from trainer.scaling.commands import (
    FitOptions,
    add_options,
    check_amounts,
    check_outputs,
    groups_of,
    write_json,
)
from trainer.scaling.comparability import add_same_metric, check_seeds, incomparable, warnings
from trainer.scaling.curve.fit import Estimate
from trainer.scaling.curve.flags import MAX_INTERVAL
from trainer.scaling.reading.options import ReadOptions, expand
from trainer.scaling.reading.read import same_unit
from trainer.scaling.sizes import other_laws
from trainer.scaling.text import DETERMINED, amount, amounts, interval, paragraph, sources, table

SUFFIX = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MAX_RATIO = 1e5  # between two sizes; a larger one is a forgotten suffix
COLUMNS = ("A", "C_mid", "B")
EXAMPLES = """\
Each input is named by its size, of the model or of its data: SIZE=RUN, or SIZE=RUN,RUN for several seeds.

examples:
  python -m trainer.scaling across 1.7B=small.csv 4B=middle.csv 8B=large.csv --size 14B
  python -m trainer.scaling across 1B=a1.csv,a2.csv 3B=b.csv 8B=c.csv 14B=d.csv --size 30B --at 100000
"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one size: rewards by budget, and what the laws of others say; None: it is not identified."""

    rewards: dict[float, Estimate]
    other_laws: dict[str, Estimate | None]


@dataclass(frozen=True, kw_only=True)
class AcrossCommand(FitOptions, ReadOptions):
    """The sizes trained, the sizes to predict, and where to write it."""

    at: Annotated[tuple[float, ...], "BUDGET"] = ()
    """predict its rewards at these budgets, in the unit of compute"""
    json: Annotated[Path | None, "FILE"] = None
    """write everything here"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command line."""
    add_options(command, AcrossCommand, EXAMPLES)
    add_same_metric(command)
    text = "predict a run of these sizes, such as 14B"
    command.add_argument("--size", nargs="+", required=True, metavar="N", help=text)


def run(args: argparse.Namespace) -> None:
    """Print what each size does, and what the sizes asked for would do."""
    options = AcrossCommand.from_arguments(args)
    check_outputs(options.json)
    check_amounts("--at", options.at)
    if unnamed := [given.runs[0] for x in args.inputs for given in expand(x, options) if given.name is None]:
        raise ConfigError(f"{unnamed[0]}: expected its size before it, as in 8B={unnamed[0]}")
    readings = groups_of(args.inputs, options)
    sizes = sizes_of([*readings, *args.size])
    check_seeds(readings)
    if incomparable(readings, args.same_metric):
        raise ConfigError(
            "the rewards are of different columns, held-out sets or scorers; expected one metric for all "
            "sizes: choose it with --reward-column, or give --same-metric if only its name differs"
        )
    curves = {sizes[name]: [reading.curve for reading in runs] for name, runs in readings.items()}
    unit = same_unit([curve for runs in curves.values() for curve in runs])
    found = across(curves, [sizes[name] for name in args.size], options.confidence, options.within)
    names = {size: name for name, size in sizes.items()}
    runs = {size: [r.curves[i] for i in r.used] for size, r in found.recipes.items()}
    predicted = {
        size: Prediction(
            {at: found.reward(size, at) for at in options.at},
            other_laws(runs, size, found.estimate(size, "R0").value, options.confidence),
        )
        for size in found.predicted
    }
    if options.json:
        write_json(options.json, to_json(found, predicted, names, unit))
    notes = [x for x in warnings(readings) if not x.startswith("The runs differ in the model")]
    print("\n\n".join((
        *(paragraph(f"Note: {note}", "") for note in notes),
        sources([reading for several in readings.values() for reading in several]),
        _table(found, names, unit),
        "\n".join(paragraph(text, "") for text in law_sentences(found, names)),
        *("\n".join(_describe(found, size, names, rows, unit)) for size, rows in predicted.items()),
    )))  # fmt: skip


def sizes_of(names: Sequence[str]) -> dict[str, float]:
    """The size that each name stands for, such as 8B or 8e9. ConfigError: it is none, or two are the same."""
    sizes: dict[str, float] = {}
    for name in names:
        found = re.fullmatch(r"(\d*\.?\d+(?:e\+?\d+)?)([KMBT]?)", name, re.IGNORECASE)
        size = float(found[1]) * SUFFIX[found[2].upper()] if found else 0.0
        if not 0 < size < math.inf:
            raise ConfigError(f"{name!r} is no size; expected a number above 0, such as 360M, 1.7B or 1.7e9")
        if same := [other for other, known in sizes.items() if known == size]:
            raise ConfigError(
                f"the sizes {same[0]} and {name} are the same; expected each once: seeds as {name}=RUN,RUN, "
                "and as --size one that was not trained"
            )
        sizes[name] = size
    (least, low), *_, (most, high) = sorted(sizes.items(), key=lambda item: item[1])
    if high > MAX_RATIO * low:
        raise ConfigError(f"sizes from {least} to {most}; expected all in one unit: is K, M, B or T missing?")
    return sizes


def to_json(
    found: Across, predicted: Mapping[float, Prediction], names: Mapping[float, str], unit: str
) -> dict[str, Any]:
    """All numbers and sentences of the command."""
    rows = {
        names[n]: {"size": n, "trained": n in found.recipes}
        | {name: asdict(found.estimate(n, name)) for name in (*COLUMNS, "R0")}
        | (asdict(predicted[n]) if n in predicted else {"doubts": found.recipes[n].doubts})
        for n in (*found.recipes, *predicted)
    }
    return {
        "unit": unit,
        "confidence": found.confidence,
        "sizes": rows,
        "law": law_sentences(found, names),
        "slopes": {name: asdict(e) for name, e in found.slopes.items()},
        "check": found.check and asdict(found.check),
        "left_out": found.left_out,
    }


def _table(found: Across, names: Mapping[float, str], unit: str) -> str:
    rows: list[tuple[str, ...]] = [("size", "runs", "ceiling A", "midpoint C_mid", "efficiency B")]
    for size in (*found.recipes, *found.predicted):
        recipe = found.recipes.get(size)
        identified = not recipe.doubts if recipe else None
        cells = [_cell(name, found.estimate(size, name), identified) for name in COLUMNS]
        runs = str(len(recipe.used)) if recipe else "predicted"
        rows.append((names[size], runs, *(cell.replace(" to ", "–") for cell in cells)))
    about = (
        f"({found.confidence:.0%} intervals: of a size trained with other seeds included, of a size "
        f"predicted for one run; C_mid in {unit}; a range alone: not identified)"
    )
    texts = [about, *([f"Left out: {'; '.join(found.left_out)}."] if found.left_out else [])]
    if vague := [names[size] for size, recipe in found.recipes.items() if recipe.doubts]:
        texts.append(f"Not identified, and therefore of little weight: the ceiling of {', '.join(vague)}.")
    return "\n".join([*table(rows), *(paragraph(text, "") for text in texts)])


def _cell(name: str, e: Estimate, identified: bool | None = None) -> str:
    """An estimate as text, its value only where it is identified; None: where the interval is narrow."""
    if name in ("A", "R"):
        return interval(e, ".3f", _is_narrow(e) if identified is None else identified)
    known = e.high < DETERMINED * e.low if identified is None else identified
    return amounts(e, known) if name == "C_mid" else interval(e, ".2f", known)


def _is_narrow(e: Estimate) -> bool:
    return e.high - e.low <= MAX_INTERVAL


def law_sentences(found: Across, names: Mapping[float, str]) -> list[str]:
    """What is assumed, what the sizes say of it, and whether it has been checked."""
    odds, C_mid = (interval(e, ".2f") for e in found.slopes.values())
    n, largest = len(found.recipes), list(found.recipes)[-1]
    law = (
        f"The law, from {n} sizes: the log-odds of A and log C_mid are straight lines over the log of the "
        f"size N, and B does not depend on N. The odds A/(1 − A) grow as N to the power {odds}, and C_mid "
        f"to the power {C_mid}. It assumes that the sizes, also the predicted one, differ in nothing else: "
        "one family of models, one recipe, the same prompts."
    )
    scatter = (
        f"How far sizes lie from the line is assumed ({SCATTER['A']:g} in log-odds, which is 0.05 in a "
        f"ceiling of 0.5, {SCATTER['C_mid']:.0%} in C_mid, {SCATTER['B']:.0%} in B) and updated with these "
        f"{n} sizes; the intervals allow for several times that."
    )
    check = f"The law is not checked here: that takes {MIN_SIZES + 1} sizes or more."
    if found.check:
        own = found.recipes[largest].estimate("A")
        inside = found.check.low <= own.value <= found.check.high
        check = (
            f"Check: the {n - 1} smaller sizes predict a ceiling of {interval(found.check, '.3f', False)} "
            f"for {names[largest]}; its own is {own.value:.3f}, "
            f"{'inside' if inside else 'outside the interval: do not rely on this law'}."
        )
    return [law, scatter, check]


def _describe(
    found: Across, size: float, names: Mapping[float, str], ahead: Prediction, unit: str
) -> list[str]:
    """What is predicted for a size, in lines."""
    A, C_mid = (found.estimate(size, name) for name in ("A", "C_mid"))
    least, *_, most = found.recipes
    far = f"{amount(size / most)} times the largest" if size > most else "between the sizes"
    far = f"{amount(least / size)} times smaller than the smallest" if size < least else far
    texts = [f"Ceiling A {_cell('A', A)}, midpoint C_mid {_cell('C_mid', C_mid)} {unit}."]
    if not _is_narrow(A):
        texts[0] += " So wide a range is no forecast to plan with: train another size."
    texts += [f"At {amount(at, 6)} {unit}: reward {_cell('R', e)}." for at, e in ahead.rewards.items()]
    unknown = f"not identified by {len(found.recipes)} sizes, so there is no number"
    for law, e in ahead.other_laws.items():
        texts.append(f"Another law, {law} is {interval(e, '.3f') if e else unknown}.")
    return [f"{names[size]}, {far} trained", *map(paragraph, texts)]
