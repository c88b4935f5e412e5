"""Inputs as recipes: `NAME=RUN,RUN` names the seeds of one recipe; any other input is a recipe of its own."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from trainer.config import ConfigError
from trainer.scaling.curve.sigmoid import Curve
from trainer.scaling.reading.options import DEFAULT, ReadOptions, expand
from trainer.scaling.reading.read import Reading, read_runs
from trainer.scaling.text import short_names


def curves_of(groups: Mapping[str, Sequence[Reading]]) -> dict[str, list[Curve]]:
    """The curves of each recipe."""
    return {name: [reading.curve for reading in readings] for name, readings in groups.items()}


def read_groups(inputs: Sequence[str], options: ReadOptions = DEFAULT) -> dict[str, list[Reading]]:
    """The runs of each recipe among the inputs. ConfigError: one line, what is wrong."""
    groups: dict[str, list[Reading]] = {}
    single: list[Reading] = []
    for given in [given for text in inputs for given in expand(text, options)]:
        if given.name is None:
            single += read_runs(given)
            continue
        if repeated := [run for i, run in enumerate(given.runs) if Path(run) in map(Path, given.runs[:i])]:
            raise ConfigError(f"{given.name}: {repeated[0]} is given twice; expected each run once")
        if given.name in groups:
            raise ConfigError(f"{given.name!r} names two groups; expected each name once")
        groups[given.name] = read_runs(given)
    names = short_names([reading.curve.name for reading in single]) if single else []
    for name, reading in zip(names, single, strict=True):
        if name in groups:
            raise ConfigError(f"two inputs are named {name!r}; expected each once, or NAME=RUN")
        groups[name] = [reading]
    curves = [reading.curve for readings in groups.values() for reading in readings]
    for a, b in combinations(curves, 2):
        if (a.points, a.R0) == (b.points, b.R0):
            which = " and ".join(dict.fromkeys((a.name, b.name)))
            raise ConfigError(f"{which}: the same points twice; expected each run once, in one recipe")
    return groups
