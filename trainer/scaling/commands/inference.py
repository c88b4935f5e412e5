"""`inference`: how much training doubling the completions of a question is worth."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from trainer.config import ConfigError
from trainer.config.values import Range
from trainer.scaling.commands import Budgets, Json, Picture, ReadCommand, sources, write_json
from trainer.scaling.curve.points import MIN_POINTS
from trainer.scaling.inference import Curves, Doubling, doublings, rewards
from trainer.scaling.layout import Block, Rows, amount, interval, paragraph, short_names
from trainer.scaling.plot import lines
from trainer.scaling.reading.held_out import Worth, completion_cost, later_evaluation, read_worth
from trainer.scaling.reading.read import Reading, read_inputs, same_unit

ROWS = 8  # of the table of rewards


@dataclass(frozen=True, kw_only=True)
class Command(ReadCommand):
    """Read the held-out completions of our run folders; N is 1, 2, 4, ... up to evaluation.samples.

    examples:
      python -m trainer.scaling inference runs/demo-0 --plot inference.png
      python -m trainer.scaling inference runs/mixed-0 --set math/aime --at 100 400
      python -m trainer.scaling inference runs/demo-0 --set many    (python -m trainer.evaluate --name many)
    """

    set: Annotated[str | None, "NAME"] = None
    """task of a mixture, further held-out set, or later evaluation (default: the run's only task)"""
    at: Budgets = ()
    """compute at which N is doubled (default: an eighth and a quarter of the run's)"""
    confidence: Annotated[float, "P", Range(above=0, most=0.999)] = 0.9
    """probability of the intervals"""
    json: Json = None
    """write everything here"""
    plot: Picture = None
    """plot pass@N, maj@N and best@N over compute in this file (.png, .svg or .pdf)"""

    def run(self, inputs: Sequence[str]) -> None:
        """Print a table of rewards and one of doublings for each measure, and what the last doubling says."""
        later = not self.reward_column and any(later_evaluation(Path(one), self.set) for one in inputs)
        options = replace(self, reward_column=f"eval/{self.set}/pass_rate") if later else self
        readings = read_inputs(inputs, options)
        unit = same_unit([reading.curve for reading in readings])
        panels, results, texts = dict[str, Curves](), dict[str, dict[str, Any]](), list[str]()
        for label, reading in zip(short_names([r.curve.name for r in readings]), readings, strict=True):
            compute = {point.step: point.compute for point in reading.curve.evaluations}
            measures = read_worth(reading.path, self.set, compute)
            at, cost = self._at(reading, measures[0]), None
            if "compute/total" in reading.compute:  # an engine is not paid in FLOPs or steps
                cost = completion_cost(reading.path, self.set or "")
            texts.append(sources([reading]))
            results[label] = {"unit": unit, "completion_cost": cost}
            for worth in measures:
                title, curves = f"{worth.measure}@N", rewards(worth, self.confidence)
                changes = doublings(worth, at, self.confidence)
                panels[f"{label} {title}" if len(readings) > 1 else title] = {
                    n: [point for point in row if point[0] > 0] for n, row in curves.items()
                }
                said = (_sentence(one, title, worth, unit, cost) for one in changes[-len(at) :])
                texts += [_rewards(curves, title, unit), self._table(changes, at, title, unit)]
                texts.append("\n".join(map(paragraph, said)))
                table = {n: [{"compute": c, **asdict(e)} for c, e in row] for n, row in curves.items()}
                results[label][title] = {"rewards": table, "doublings": list(map(asdict, changes))}
        if self.plot:
            lines(panels, self.plot, unit)
        write_json(self.json, results)
        print("\n\n".join(texts))

    def _at(self, reading: Reading, worth: Worth) -> tuple[float, ...]:
        """The computes at which N is doubled. ConfigError: the run is too short for it."""
        last, name = float(worth.compute[-1]), reading.curve.name
        if len(np.unique(worth.compute)) < MIN_POINTS or len(worth.ns) < 2:
            raise ConfigError(
                f"{name}: {len(worth.compute)} evaluations of {worth.ns[-1]} completions a prompt; expected "
                f"{MIN_POINTS} or more (evaluation.every), and 2 or more (evaluation.samples)"
            )
        if beyond := [c for c in self.at if not worth.compute[0] <= c <= last]:
            raise ConfigError(
                f"--at {beyond[0]:g}: {name} was evaluated from {worth.compute[0]:g} to {last:g}"
            )
        return self.at or (last / 8, last / 4)

    def _table(self, changes: Sequence[Doubling], at: Sequence[float], title: str, unit: str) -> str:
        rows: Rows = [(f"doubling N of {title}", *(f"at {amount(c)} {unit}" for c in at))]
        for i in range(0, len(changes), len(at)):
            n = changes[i].n
            rows.append((f"from {n} to {2 * n}", *map(_cell, changes[i : i + len(at)])))
        about = (
            f"In {unit} of training worth the same, {self.confidence:.0%} intervals; ∞: more than was left."
        )
        return str(Block(rows, notes=[about]))


def _cell(change: Doubling) -> str:
    return "∞" if math.isinf(change.worth.low) else interval(change.worth)


def _rewards(curves: Curves, title: str, unit: str) -> str:
    """A row for each of some evaluations, at even distances."""
    rows: Rows = [(f"{title} at {unit}", *(f"N = {n}" for n in curves))]
    points = list(zip(*curves.values(), strict=True))
    for i in np.unique(np.linspace(0, len(points) - 1, ROWS).round().astype(int)).tolist():
        rows.append((amount(points[i][0][0]), *(f"{e.value:.3f}" for _, e in points[i])))
    return str(Block(rows))


def _sentence(change: Doubling, title: str, worth: Worth, unit: str, cost: float | None) -> str:
    """The worth of a doubling, and where training is the cheaper of the two."""
    n, e = change.n, change.worth
    start = f"At {amount(change.compute)} {unit}, doubling N of {title} from {n} to {2 * n} is worth"
    if math.isinf(e.value):
        left = amount(float(worth.compute[-1]) - change.compute)
        return f"{start} more than the {left} {unit} of training that were left in the run."
    text = f"{start} {interval(e)} {unit} of training."
    if cost is None or e.value <= 0:
        return text
    more = f" It takes {amount(n * cost)} {unit} more for a question, at the pace of the run's engines"
    return f"{text}{more}: training is the cheaper for more than {amount(e.value / (n * cost))} questions."
