"""How inputs are read: the options of every command that reads curves, and those of one input alone.

An input is `[NAME=]RUN,RUN[@OPTION=VALUE,OPTION=VALUE]`, or a .toml of recipes; docs/logs.md explains both.
"""

import argparse
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from trainer.config import ConfigError
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.arguments import Options, flag
from trainer.scaling.reading.values import numbers

WAYS = ("compute_column", "devices", "gpu_hours_per_step")  # each defines C
INPUTS = (
    "a run folder; .csv, .tsv, .jsonl, .json or .parquet; a W&B export; TensorBoard events; verl's console "
    "log. NAME=RUN,RUN: seeds of one recipe. RUN@devices=32,reward=aime: options of these runs alone (those "
    "below, also compute, reward, se and time for the columns). A .toml of runs: see docs/logs.md"
)


def _start(text: str) -> float | str:
    if text == "first":
        return text
    try:
        return float(numbers([{"--start": text}], "--start")[0])
    except ConfigError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is no date, no number and not 'first'") from e


Name = Annotated[str | None, "NAME"]


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Options):
    """How to read curves from files. A column is given by its name, or by a part of it that no other has."""

    group: ClassVar[tuple[str, ...]] = ("input", "columns by name, or by a part of it that no other has")

    compute_column: Name = None
    """column or tag of C, the compute (default: by its name)"""
    reward_column: Name = None
    """column or tag of R, the held-out pass rate (default: by its name)"""
    se_column: Name = None
    """column of R's standard error (default: by its name)"""
    samples: Annotated[float | None, "N"] = None
    """without such a column: R is the mean of N samples (prompts × k), as if the prompts were drawn again
    each time; if they stay the same, these errors are too large"""
    r0: Annotated[float | None, "R"] = None
    """reward at zero compute (default: the one measured there, if any)"""
    reward_range: Annotated[tuple[float, float], ("LOW", "HIGH")] = (0.0, 1.0)
    """scale of R and --r0 (-1 1, or 0 100 for percent); the output is on a scale from 0 to 1"""
    unit: Annotated[str | None, names.unit_of] = None
    """unit of compute: GPU-hours, core-hours, FLOPs, steps (default: by C's name)"""
    devices: Annotated[float | None, "N"] = None
    """C in GPU-hours: elapsed time × N GPUs; wall time of TensorBoard and W&B includes evaluations and
    checkpoints, but pauses are left out"""
    time_column: Name = None
    """with --devices: column of that time (default: by name)"""
    time_unit: Literal["ms", "s", "min", "h", "d"] | None = None
    """with --devices: unit of that time (default: by the column's name, else seconds)"""
    start: Annotated[float | str | None, _start, "TIME"] = None
    """with --devices: when training began, a date or a value of the time column; first: at the first row
    (default: at step 0)"""
    gpu_hours_per_step: Annotated[float | None, "X"] = None
    """C in GPU-hours: X times the step"""
    drop_before: Annotated[float, "C"] = 0.0
    """leave out points before C, but not R0"""
    drop_early: bool = False
    """leave out the first quarter of the rise if it deviates from the curve"""

    def check(self) -> None:
        """ConfigError: options contradict each other, or a value is impossible."""
        for name in ("samples", "devices", "gpu_hours_per_step"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{flag(name)} {value:g}: expected a number above 0")
        ways = [flag(way) for way in WAYS if getattr(self, way) is not None]
        if len(ways) > 1 and ways != ["--compute-column", "--gpu-hours-per-step"]:
            raise ConfigError(f"{' and '.join(ways)} were given; expected one of them, as each defines C")
        for name in ("time_column", "time_unit", "start"):
            if getattr(self, name) is not None and self.devices is None:
                raise ConfigError(f"{flag(name)} needs --devices N: C is elapsed time × N GPUs")
        if self.se_column is not None and self.samples is not None:
            raise ConfigError(
                "--se-column and --samples were given; expected one, as each gives the error of R"
            )
        low, high = self.reward_range
        if not -math.inf < low < high < math.inf:
            raise ConfigError(
                f"--reward-range {low:g} {high:g}: expected the lowest reward, then the highest"
            )

    @property
    def rescales(self) -> bool:
        """True if rewards are on another scale than from 0 to 1."""
        return self.reward_range != (0.0, 1.0)

    def to_unit(self, reward: float) -> float:
        """A reward on the scale of `reward_range`, on a scale from 0 to 1."""
        low, high = self.reward_range
        return float((reward - low) / (high - low))


DEFAULT = ReadOptions()
SHORT = {o.name.removesuffix("_column"): o.name for o in fields(ReadOptions) if o.name.endswith("_column")}


@dataclass(frozen=True, slots=True)
class Input:
    """The runs of an input, the recipe's name if it has one, and their options."""

    name: str | None
    runs: tuple[str, ...]
    options: ReadOptions


def add_input_arguments(command: argparse.ArgumentParser, nargs: str = "+") -> None:
    """The inputs and how to read them. `nargs`: number of inputs."""
    command.add_argument("inputs", nargs=nargs, metavar="RUN_OR_FILE", help=INPUTS)
    ReadOptions.add_to(command)


def expand(text: str, options: ReadOptions) -> list[Input]:
    """The recipes of an input: `[NAME=]RUN,RUN[@OPTION=VALUE,OPTION=VALUE]`, or those of a .toml."""
    if Path(text).suffix == ".toml":
        return _from_toml(Path(text), options)
    known = "|".join(map(re.escape, _known_options()))
    runs, *rest = [text] if Path(text).exists() else re.split(rf"@(?=(?:{known})=)", text, maxsplit=1)
    if not rest and not Path(text).exists():  # a misspelt option
        runs, *rest = re.split(r"@(?=[a-z][\w-]*=)", text, maxsplit=1)
    pairs = [pair.split("=", 1) for part in rest for pair in re.split(r",(?=[a-z][\w-]*=)", part)]
    chosen = _with_texts(options, {key: value for key, value in pairs}, text)
    name, sign, listed = runs.partition("=")
    if not sign or Path(runs).exists():
        return [Input(None, (runs,), chosen)]
    inputs = tuple(part for part in listed.split(",") if part)
    if not name or not inputs:
        raise ConfigError(f"{text!r}: expected NAME=RUN,RUN,... or a run or a file")
    return [Input(name, inputs, chosen)]


def _from_toml(path: Path, options: ReadOptions) -> list[Input]:
    """`[recipe.NAME]` with `runs = [...]`, relative to the file, and options; those above all are for all."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: {' '.join(str(e).split())}; expected a TOML file of runs") from e
    recipes = content.pop("recipe", None) or {"": {}}
    inputs = []
    for name, recipe in recipes.items():
        if not isinstance(recipe, dict) or not recipe.get("runs"):
            raise ConfigError(f'{path}: expected [recipe.NAME] with runs = ["FILE", ...] and options')
        lists = {k: v if isinstance(v, list) else [v] for k, v in {**content, **recipe}.items()}
        runs = tuple(str(path.parent / run) for run in lists.pop("runs"))
        texts = {key: " ".join(map(str, values)) for key, values in lists.items()}
        inputs.append(Input(name, runs, _with_texts(options, texts, f"{path}: {name}")))
    return inputs


def _with_texts(options: ReadOptions, texts: Mapping[str, str], where: str) -> ReadOptions:
    """The options with others in their place, written as text; a way to define C replaces any other way."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    ReadOptions.add_to(parser)
    chosen = {SHORT.get(key, key.replace("-", "_")): value for key, value in texts.items()}
    replaced = {*chosen, *(WAYS if set(WAYS) & set(chosen) else ())}
    values = {
        option.name: option.default if option.name in replaced else getattr(options, option.name)
        for option in fields(ReadOptions)
    }
    words: list[str] = []
    try:
        for name, value in chosen.items():
            if name not in values:
                known = ", ".join(_known_options())
                raise ConfigError(f"unknown option {flag(name)[2:]!r}; expected one of {known}")
            if name == "reward_range":
                words += [flag(name), *re.split("[: ]+", value)]
            elif name == "drop_early":
                words += [flag(name)] * (value.lower() != "false")
            else:
                words.append(f"{flag(name)}={value}")
        result = ReadOptions.from_arguments(parser.parse_args(words, argparse.Namespace(**values)))
        result.check()
    except (argparse.ArgumentError, ConfigError) as e:
        raise ConfigError(f"{where}: {e}" if texts else str(e)) from e
    return result


def _known_options() -> Sequence[str]:
    return [*SHORT, *(flag(option.name)[2:] for option in fields(ReadOptions))]
