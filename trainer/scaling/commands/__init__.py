"""The commands of `python -m trainer.scaling`, one module each; what they share: options, inputs, outputs."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from trainer.config import ConfigError
from trainer.jsonl import nan_to_null
from trainer.scaling.curve.fit import without_transient
from trainer.scaling.earlier import Earlier, learn
from trainer.scaling.reading.arguments import Options
from trainer.scaling.reading.groups import curves_of, read_groups
from trainer.scaling.reading.options import INPUTS, ReadOptions
from trainer.scaling.reading.read import Reading, read_inputs

PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class FitOptions(Options):
    """How to fit a curve; `fit_curve` checks them."""

    group: ClassVar[tuple[str, ...]] = ("fit",)

    confidence: Annotated[float, "P"] = 0.9
    """probability of the intervals"""
    within: Annotated[float | None, "D"] = None
    """call the ceiling identified if its interval reaches no further than D from its value, on a scale from
    0 to 1 (default: if it is no wider than a fifth of the rise from R0, and than 0.10)"""


@dataclass(frozen=True, kw_only=True)
class ForecastOptions(FitOptions, ReadOptions):
    """How to read and fit runs, and which finished runs their forecasts learn from."""

    like: Annotated[tuple[str, ...], "RUN"] = ()
    """finished runs of the same kind, seeds of one recipe as NAME=RUN,RUN: forecasts learn from them which
    law such runs follow, how steep it is, and how far off forecasts of them would have been"""


def add_fit_arguments(command: argparse.ArgumentParser) -> None:
    """--confidence and --within."""
    FitOptions.add_to(command)


def add_options(
    command: argparse.ArgumentParser, options: type[Options], examples: str, nargs: str = "+"
) -> None:
    """The inputs, the options and the examples of a command."""
    command.formatter_class, command.epilog = argparse.RawDescriptionHelpFormatter, examples
    command.add_argument("inputs", nargs=nargs, metavar="RUN_OR_FILE", help=INPUTS)
    options.add_to(command)


def read_like(options: ForecastOptions) -> Earlier | None:
    """The information in the runs of --like; None: there are none."""
    return learn(curves_of(groups_of(options.like, options))) if options.like else None


def readings_of(inputs: Sequence[str], options: ReadOptions) -> list[Reading]:
    """The runs of all inputs, without early transients if that is asked for."""
    return [_without_early(reading) for reading in read_inputs(inputs, options)]


def groups_of(inputs: Sequence[str], options: ReadOptions) -> dict[str, list[Reading]]:
    """The same by recipe."""
    return {name: list(map(_without_early, group)) for name, group in read_groups(inputs, options).items()}


def _without_early(reading: Reading) -> Reading:
    curve = without_transient(reading.curve) if reading.drop_early else reading.curve
    if not (count := len(reading.curve.points) - len(curve.points)):
        return reading
    note = f"Evaluations before {curve.points[0].compute:.4g}, which --drop-early leaves out: {count}."
    return replace(reading, curve=curve, notes=(*reading.notes, note))


def check_amounts(name: str, amounts: Sequence[float], expected: str = "a budget above 0") -> None:
    """ConfigError: an amount of compute or money on the command line is not above 0, or infinite."""
    if wrong := [amount for amount in amounts if not 0 < amount < math.inf]:
        raise ConfigError(f"{name} {wrong[0]:g}: expected {expected}")


def check_outputs(json_path: Path | None, picture: Path | None = None) -> None:
    """Refuse output files that cannot be written, before any work is done."""
    for path, endings in ((json_path, (".json",)), (picture, PICTURES)):
        if path and path.suffix not in endings:
            raise ConfigError(f"{path}: expected a name ending in {' or '.join(endings)}")
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")


def write_json(path: Path, content: Any) -> None:
    """What is unknown or infinite becomes null."""
    path.write_text(json.dumps(nan_to_null(content), indent=1, allow_nan=False, ensure_ascii=False) + "\n")
