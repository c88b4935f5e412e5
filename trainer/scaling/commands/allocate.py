"""`allocate`: which value of an axis, such as the group size, is best at which budget, with an interval."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from trainer.config import ConfigError
from trainer.scaling.allocate import Allocation, Best, allocate
from trainer.scaling.budgets import END_TOLERANCE
from trainer.scaling.commands import Budgets, GroupCommand, Json, sources, write_json
from trainer.scaling.comparability import check_seeds, incomparable, warnings
from trainer.scaling.compare import compare
from trainer.scaling.frontier import draws_by_value
from trainer.scaling.layout import Block, Rows, amount, interval, level, paragraph, percent
from trainer.scaling.reading.read import Reading, curves_of, read_groups, same_unit

NUMBER = r"(\d*\.?\d+(?:e[-+]?\d+)?)"


@dataclass(frozen=True, kw_only=True)
class Command(GroupCommand):
    """A run's value of the axis is its name (8=RUN,RUN), or that in its config, or in its name (lr_0.0003).

    examples:
      python -m trainer.scaling allocate runs/lr/runs.toml --axis learner.lr
      python -m trainer.scaling allocate 4=a.csv 8=b.csv 16=c.csv 32=d.csv --axis group_size --at 20000
    """

    axis: Annotated[str, "KEY"]
    """a key of the configuration, or its last part in the names of the runs; its values are above 0"""
    at: Budgets = ()
    """also at these budgets (default: halves of the compute that all have)"""
    json: Json = None
    """write everything here"""

    def run(self, inputs: Sequence[str]) -> None:
        """Print the best value at each budget, and how it moves with compute."""
        readings = read_groups(inputs, self)
        values = {name: value_of(name, runs, self.axis) for name, runs in readings.items()}
        if len(set(values.values())) < 2:
            value = next(iter(values.values()))
            raise ConfigError(f"--axis {self.axis}: all runs have {value:g}; expected two values or more")
        groups = curves_of(readings)
        unit = same_unit([curve for runs in groups.values() for curve in runs])
        check_seeds(readings)
        if why := incomparable(readings, self.same_metric):
            raise ConfigError(f"--axis {self.axis}: {why}")
        comparison = compare(groups, confidence=self.confidence, within=self.within)
        known = max(curve.points[0].compute for runs in groups.values() for curve in runs)
        if early := [amount(budget) for budget in self.at if budget < known]:
            raise ConfigError(
                f"--at {' '.join(early)}: a run has no evaluation yet; expected {amount(known)} or more"
            )
        on_axis = draws_by_value(comparison, {name: str(x) for name, x in values.items()}, self.at)
        if on_axis is None or not on_axis[1]:
            raise ConfigError(f"--axis {self.axis}: at no budget are there rewards of two values")
        fallen = {values[r.name] for r in comparison.recipes if not r.forecasts}
        fallen -= {values[r.name] for r in comparison.recipes if r.forecasts}
        result = allocate(*on_axis)
        write_json(self.json, {"axis": self.axis, "unit": unit, "values": values} | asdict(result))
        notes = [paragraph(f"Note: {note}", "") for note in warnings(readings)]
        runs = [reading for several in readings.values() for reading in several]
        print("\n\n".join([*notes, str(describe(self.axis, result, unit, sorted(fallen))), sources(runs)]))


def value_of(name: str, readings: Sequence[Reading], key: str) -> float:
    """The value of the axis of a recipe. ConfigError: there is none, or its runs have several."""
    texts = {text for reading in readings if (text := _text(name, reading, key)) is not None}
    if len(texts) != 1:
        has = (
            f"its runs have {', '.join(sorted(texts))}" if texts else "neither a config nor the name says it"
        )
        raise ConfigError(f"--axis {key}: {name}: {has}; expected one value, such as in 8={readings[0].path}")
    try:
        value = float(text := texts.pop())
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--axis {key}: {name} has {text!r}; expected a number above 0")
    return value


def _text(name: str, reading: Reading, key: str) -> str | None:
    """The value as text: a name that was given to it, or in the config beside the metrics, or in its name."""
    folder = reading.path if reading.path.is_dir() else reading.path.parent
    number = re.fullmatch(NUMBER, name)
    if number and name != folder.name:  # as in 8=RUN; a folder may have a number, too
        return name
    if (config := folder / "config.yaml").is_file() and (value := _configured(config, key)) is not None:
        return value
    last = re.escape(key.rpartition(".")[2])
    match = number or re.search(rf"(?:^|[^a-z]){last}[-_=: ]{NUMBER}", name, re.IGNORECASE)
    return match[1] if match else None


def _configured(config: Path, key: str) -> str | None:
    import yaml

    try:
        value: Any = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{config}: it is not valid YAML: {why}; correct it, or name the value, as in 8=RUN"
        ) from None
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else str(value)


def describe(axis: str, result: Allocation, unit: str, fallen: Sequence[float] = ()) -> Block:
    """The best value at each budget, how it moves, and where the range that was tried ends it.

    `fallen`: values with which the reward of all runs has fallen, so that they are not in the result.
    """
    rows: Rows = [(unit, f"best {axis}", "of those tried", "reward with it")]
    rows += [(_budget(b), _value(b), b.tried, interval(b.reward, "A")) for b in result.budgets]
    sure = level(result.confidence)
    notes = [f"({sure} intervals, other seeds included; all else at its best; between values by a parabola)"]
    if any(b.ahead > END_TOLERANCE for b in result.budgets):
        notes.append("* A forecast, beyond the data: it assumes that the runs go on as they did.")
    if fallen:
        notes.append(f"With {', '.join(f'{x:g}' for x in fallen)} the reward has fallen: left out.")
    for side, share in (("lowest", "at_lowest"), ("highest", "at_highest")):
        ends = [b for b in result.budgets if getattr(b, share) > 1 - result.confidence]
        if ends:
            places = ", ".join(f"{amount(b.compute)} ({percent(getattr(b, share))})" for b in ends)
            x = float(ends[-1].tried)
            beyond = [y for y in fallen if y < x] if side == "lowest" else [y for y in fallen if y > x]
            advice = "between it and the one that has fallen" if beyond else "further"
            notes.append(
                f"The {side} value tried may be the best, or one beyond it, at {places}: try {advice}."
            )
    if (p := result.exponent) is not None:
        moves = "it grows" if p.low > 0 else "it falls" if p.high < 0 else "no trend is visible"
        notes.append(f"With compute: {moves}. The best value goes as C^p with p {interval(p, '.2f')}.")
    return Block(rows, notes=notes)


def _value(best: Best) -> str:
    if best.inside:
        return interval(best.value)
    if max(best.at_lowest, best.at_highest) <= 1 / 2:  # at an end, but not which
        return interval(best.value, quoted=False)
    lowest = best.at_lowest > best.at_highest
    return f"{amount(best.value.low if lowest else best.value.high)} or {'less' if lowest else 'more'}"


def _budget(best: Best) -> str:
    return amount(best.compute) + "*" * (best.ahead > END_TOLERANCE)
