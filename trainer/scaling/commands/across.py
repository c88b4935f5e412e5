"""`across`: ceiling and midpoint over the sizes of models, and what a size not trained yet would do."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from trainer.config import ConfigError
from trainer.scaling.across import MIN_SIZES, SCATTER, Across, across, other_laws
from trainer.scaling.commands import Budgets, GroupCommand, Json, sources, write_json
from trainer.scaling.comparability import check_seeds, incomparable, warnings
from trainer.scaling.curve.fit import Estimate
from trainer.scaling.curve.flags import MAX_INTERVAL
from trainer.scaling.layout import FORMS, Block, Rows, amount, interval, paragraph
from trainer.scaling.reading.options import expand
from trainer.scaling.reading.read import curves_of, read_groups, same_unit
from trainer.scaling.text import DETERMINED

SUFFIX = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MAX_RATIO = 1e5  # between two sizes; a larger one is a forgotten suffix


@dataclass(frozen=True, kw_only=True)
class Command(GroupCommand):
    """Each input is named by its size, of the model or of its data: SIZE=RUN, or SIZE=RUN,RUN for its seeds.

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
        names = {size: name for name, size in sizes.items()}
        rows: dict[str, dict[str, Any]] = {
            names[n]: {"size": n, "trained": n in law.recipes}
            | {name: asdict(law.estimate(n, name)) for name in (*FORMS, "R0")}
            for n in (*law.recipes, *law.predicted)
        }
        for size, recipe in law.recipes.items():
            rows[names[size]]["doubts"] = recipe.doubts
        texts = []
        for size in law.predicted:
            rewards = {budget: law.reward(size, budget) for budget in self.at}
            others = other_laws(runs, size, law.estimate(size, "R0").value, self.confidence)
            texts.append(_describe(law, size, names, rewards, others, unit))
            rows[names[size]]["rewards"] = {budget: asdict(e) for budget, e in rewards.items()}
            rows[names[size]]["other_laws"] = {name: e and asdict(e) for name, e in others.items()}
        said, slopes = law_sentences(law, names), {name: asdict(e) for name, e in law.slopes.items()}
        content: dict[str, Any] = {"unit": unit, "confidence": law.confidence, "sizes": rows}
        content |= {"left_out": law.left_out, "law": said, "check": law.check and asdict(law.check)}
        write_json(self.json, content | {"slopes": slopes})
        notes = [x for x in warnings(readings) if not x.startswith("The runs differ in the model")]
        print("\n\n".join([
            *(paragraph(f"Note: {note}", "") for note in notes),
            sources([reading for several in readings.values() for reading in several]),
            str(_table(law, names, unit)),
            str(Block(notes=said)),
            *map(str, texts),
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


def _table(law: Across, names: Mapping[float, str], unit: str) -> Block:
    rows: Rows = [("size", "runs", "ceiling A", "efficiency B", "midpoint C_mid")]
    for size in (*law.recipes, *law.predicted):
        recipe = law.recipes.get(size)
        identified = not recipe.doubts if recipe else None
        cells = [_cell(name, law.estimate(size, name), identified) for name in FORMS]
        rows.append((names[size], str(len(recipe.used)) if recipe else "predicted", *cells))
    notes = [
        f"({law.confidence:.0%} intervals: of a size trained with other seeds included, of a size predicted "
        f"for one run; C_mid in {unit}; a range alone: not identified)"
    ]
    if law.left_out:
        notes.append(f"Left out: {'; '.join(law.left_out)}.")
    if vague := [names[size] for size, recipe in law.recipes.items() if recipe.doubts]:
        notes.append(f"Not identified, and therefore of little weight: the ceiling of {', '.join(vague)}.")
    return Block(rows, notes=notes)


def _cell(name: str, e: Estimate, identified: bool | None = None) -> str:
    """An estimate as text, its value only where it is identified; None: where the interval is narrow."""
    if identified is None:
        identified = _is_narrow(e) if name == "A" else e.high < DETERMINED * e.low
    return interval(e, name, identified)


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
            f"Check: the {n - 1} smaller sizes predict a ceiling of {interval(law.check, 'A', False)} for "
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
    law: Across, size: float, names: Mapping[float, str], rewards: Mapping[float, Estimate],
    others: Mapping[str, Estimate | None], unit: str,
) -> Block:  # fmt: skip
    """The prediction for a size: its ceiling, its rewards by budget, and the numbers of other laws."""
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
    texts += [f"At {amount(C, 6)} {unit}: reward {_cell('A', e)}." for C, e in rewards.items()]
    unknown = f"not identified by {len(law.recipes)} sizes, so there is no number"
    texts += [f"Another law, {name} is {interval(e, 'A') if e else unknown}." for name, e in others.items()]
    return Block(title=f"{names[size]}, {where} trained", notes=texts)
