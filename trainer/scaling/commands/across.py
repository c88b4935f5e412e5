"""`across`: ceiling and midpoint over the sizes of models, and what a size not trained yet would do."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

from trainer.config import ConfigError
from trainer.scaling.across import MIN_SIZES, SCATTER, Across, across, other_laws
from trainer.scaling.commands import Budgets, GroupCommand, Json, sources, write_json
from trainer.scaling.comparability import check_seeds, incomparable, warnings
from trainer.scaling.curve.fit import Estimate
from trainer.scaling.curve.flags import MAX_INTERVAL
from trainer.scaling.layout import amount, amounts, interval, paragraph, table
from trainer.scaling.reading.options import expand
from trainer.scaling.reading.read import curves_of, read_groups, same_unit
from trainer.scaling.text import DETERMINED

SUFFIX = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MAX_RATIO = 1e5  # between two sizes; a larger one is a forgotten suffix
COLUMNS = ("A", "C_mid", "B")


@dataclass(frozen=True, slots=True)
class Prediction:
    """One size: its rewards by budget, and the numbers of other laws; None: the law is not identified."""

    rewards: dict[float, Estimate]
    other_laws: dict[str, Estimate | None]


@dataclass(frozen=True, kw_only=True)
class Command(GroupCommand):
    """The sizes trained, the sizes to predict, and where to write it."""

    examples: ClassVar[str] = """\
Each input is named by its size, of the model or of its data: SIZE=RUN, or SIZE=RUN,RUN for several seeds.

examples:
  python -m trainer.scaling across 1.7B=small.csv 4B=middle.csv 8B=large.csv --size 14B
  python -m trainer.scaling across 1B=a1.csv,a2.csv 3B=b.csv 8B=c.csv 14B=d.csv --size 30B --at 100000
"""

    size: Annotated[tuple[str, ...], "N"]
    """predict a run of these sizes, such as 14B"""
    at: Budgets = ()
    """predict its rewards at these budgets, in the unit of compute"""
    json: Json = None
    """write everything here"""

    def run(self, inputs: Sequence[str]) -> None:
        """Print what each size does, and what the sizes asked for would do."""
        unnamed = [one.runs[0] for text in inputs for one in expand(text, self) if one.name is None]
        if unnamed:
            raise ConfigError(f"{unnamed[0]}: expected its size before it, as in 8B={unnamed[0]}")
        readings = read_groups(inputs, self)
        sizes = sizes_of([*readings, *self.size])
        check_seeds(readings)
        if incomparable(readings, self.same_metric):
            raise ConfigError(
                "the rewards are of different columns, held-out sets or scorers; expected one metric for all "
                "sizes: choose it with --reward-column, or give --same-metric if only its name differs"
            )
        curves = {sizes[name]: runs for name, runs in curves_of(readings).items()}
        unit = same_unit([curve for runs in curves.values() for curve in runs])
        law = across(curves, [sizes[name] for name in self.size], self.confidence, self.within)
        runs = {size: [r.curves[i] for i in r.used] for size, r in law.recipes.items()}
        predicted = {
            size: Prediction(
                {budget: law.reward(size, budget) for budget in self.at},
                other_laws(runs, size, law.estimate(size, "R0").value, self.confidence),
            )
            for size in law.predicted
        }
        names = {size: name for name, size in sizes.items()}
        write_json(self.json, _to_json(law, predicted, names, unit))
        notes = [x for x in warnings(readings) if not x.startswith("The runs differ in the model")]
        print("\n\n".join([
            *(paragraph(f"Note: {note}", "") for note in notes),
            sources([reading for several in readings.values() for reading in several]),
            _table(law, names, unit),
            "\n".join(paragraph(text, "") for text in law_sentences(law, names)),
            *("\n".join(_describe(law, size, names, rows, unit)) for size, rows in predicted.items()),
        ]))  # fmt: skip


def sizes_of(names: Sequence[str]) -> dict[str, float]:
    """The size that each name stands for, such as 8B or 8e9. ConfigError: it is none, or two are the same."""
    sizes: dict[str, float] = {}
    for name in names:
        parsed = re.fullmatch(r"(\d*\.?\d+(?:e\+?\d+)?)([KMBT]?)", name, re.IGNORECASE)
        size = float(parsed[1]) * SUFFIX[parsed[2].upper()] if parsed else 0.0
        if not 0 < size < math.inf:
            raise ConfigError(f"{name!r} is no size; expected a number above 0, such as 360M, 1.7B or 1.7e9")
        if same := [other for other, known in sizes.items() if known == size]:
            raise ConfigError(
                f"the sizes {same[0]} and {name} are the same; expected each once: seeds as {name}=RUN,RUN, "
                "and as --size one that was not trained"
            )
        sizes[name] = size
    smallest, *_, largest = sorted(sizes, key=lambda name: sizes[name])
    if sizes[largest] > MAX_RATIO * sizes[smallest]:
        unit = "expected all in one unit: is K, M, B or T missing?"
        raise ConfigError(f"sizes from {smallest} to {largest}; {unit}")
    return sizes


def _to_json(
    law: Across, predicted: Mapping[float, Prediction], names: Mapping[float, str], unit: str
) -> dict[str, Any]:
    """All numbers and sentences of the command."""
    rows = {
        names[n]: {"size": n, "trained": n in law.recipes}
        | {name: asdict(law.estimate(n, name)) for name in (*COLUMNS, "R0")}
        | (asdict(predicted[n]) if n in predicted else {"doubts": law.recipes[n].doubts})
        for n in (*law.recipes, *law.predicted)
    }
    return {
        "unit": unit,
        "confidence": law.confidence,
        "sizes": rows,
        "law": law_sentences(law, names),
        "slopes": {name: asdict(e) for name, e in law.slopes.items()},
        "check": law.check and asdict(law.check),
        "left_out": law.left_out,
    }


def _table(law: Across, names: Mapping[float, str], unit: str) -> str:
    rows: list[tuple[str, ...]] = [("size", "runs", "ceiling A", "midpoint C_mid", "efficiency B")]
    for size in (*law.recipes, *law.predicted):
        recipe = law.recipes.get(size)
        identified = not recipe.doubts if recipe else None
        cells = [_cell(name, law.estimate(size, name), identified) for name in COLUMNS]
        runs = str(len(recipe.used)) if recipe else "predicted"
        rows.append((names[size], runs, *(cell.replace(" to ", "–") for cell in cells)))
    about = (
        f"({law.confidence:.0%} intervals: of a size trained with other seeds included, of a size predicted "
        f"for one run; C_mid in {unit}; a range alone: not identified)"
    )
    texts = [about, *([f"Left out: {'; '.join(law.left_out)}."] if law.left_out else [])]
    if vague := [names[size] for size, recipe in law.recipes.items() if recipe.doubts]:
        texts.append(f"Not identified, and therefore of little weight: the ceiling of {', '.join(vague)}.")
    return "\n".join([*table(rows), *(paragraph(text, "") for text in texts)])


def _cell(name: str, e: Estimate, identified: bool | None = None) -> str:
    """An estimate as text, its value only where it is identified; None: where the interval is narrow."""
    if name == "A":
        return interval(e, ".3f", _is_narrow(e) if identified is None else identified)
    known = e.high < DETERMINED * e.low if identified is None else identified
    return amounts(e, known) if name == "C_mid" else interval(e, ".2f", known)


def _is_narrow(e: Estimate) -> bool:
    return e.high - e.low <= MAX_INTERVAL


def law_sentences(law: Across, names: Mapping[float, str]) -> list[str]:
    """Sentences on the assumptions, on what the sizes say of them, and on the check of the law."""
    odds, C_mid = (interval(e, ".2f") for e in law.slopes.values())
    n, largest = len(law.recipes), list(law.recipes)[-1]
    check = f"The law is not checked here: that takes {MIN_SIZES + 1} sizes or more."
    if law.check:
        measured = law.recipes[largest].estimate("A").value
        outcome = "inside" if law.check.low <= measured <= law.check.high else "outside"
        check = (
            f"Check: the {n - 1} smaller sizes predict a ceiling of {interval(law.check, '.3f', False)} for "
            f"{names[largest]}; its own is {measured:.3f}, {outcome}"
            f"{' the interval: do not rely on this law' if outcome == 'outside' else ''}."
        )
    return [
        f"The law, from {n} sizes: the log-odds of A and log C_mid are straight lines over the log of the "
        f"size N, and B does not depend on N. The odds A/(1 − A) grow as N to the power {odds}, and C_mid "
        f"to the power {C_mid}. It assumes that the sizes, also the predicted one, differ in nothing else: "
        "one family of models, one recipe, the same prompts.",
        f"How far sizes lie from the line is assumed ({SCATTER['A']:g} in log-odds, which is 0.05 in a "
        f"ceiling of 0.5, {SCATTER['C_mid']:.0%} in C_mid, {SCATTER['B']:.0%} in B) and updated with these "
        f"{n} sizes; the intervals allow for several times that.",
        check,
    ]


def _describe(
    law: Across, size: float, names: Mapping[float, str], ahead: Prediction, unit: str
) -> list[str]:
    """The prediction for a size, in lines."""
    A, C_mid = (law.estimate(size, name) for name in ("A", "C_mid"))
    smallest, *_, largest = law.recipes
    where = "between the sizes"
    if size > largest:
        where = f"{amount(size / largest)} times the largest"
    elif size < smallest:
        where = f"{amount(smallest / size)} times smaller than the smallest"
    texts = [f"Ceiling A {_cell('A', A)}, midpoint C_mid {_cell('C_mid', C_mid)} {unit}."]
    if not _is_narrow(A):
        texts[0] += " So wide a range is no forecast to plan with: train another size."
    texts += [f"At {amount(C, 6)} {unit}: reward {_cell('A', e)}." for C, e in ahead.rewards.items()]
    unknown = f"not identified by {len(law.recipes)} sizes, so there is no number"
    for name, e in ahead.other_laws.items():
        texts.append(f"Another law, {name} is {interval(e, '.3f') if e else unknown}.")
    return [f"{names[size]}, {where} trained", *map(paragraph, texts)]
