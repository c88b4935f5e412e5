"""Inputs as recipes: `NAME=RUN,RUN` names the seeds of one recipe; any other input is a recipe of its own."""

import argparse
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from trainer.config import ConfigError
from trainer.scaling.reading.options import expand
from trainer.scaling.reading.read import Reading, read_runs
from trainer.scaling.text import short_names


def read_groups(args: argparse.Namespace, inputs: Sequence[str] | None = None) -> dict[str, list[Reading]]:
    """The runs of each recipe among `inputs` (default: all). ConfigError: one line, what is wrong."""
    groups: dict[str, list[Reading]] = {}
    single: list[Reading] = []
    for given in [given for text in inputs or args.inputs for given in expand(text, args)]:
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
