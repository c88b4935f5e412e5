"""The options of every command that reads curves, for all inputs or for one: `RUN@devices=32,reward=aime`."""

import argparse
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ConfigError
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.values import numbers

UNIT_RANGE = (0.0, 1.0)
WAYS = ("compute_column", "devices", "gpu_hours_per_step")  # each defines C
SHORT = {"compute": "compute-column", "reward": "reward-column", "se": "se-column", "time": "time-column"}
INPUTS = (
    "a run folder; .csv, .tsv, .jsonl, .json or .parquet; a W&B export; TensorBoard events; verl's console "
    "log. NAME=RUN,RUN: seeds of one recipe. RUN@devices=32,reward=aime: options of these runs alone (those "
    "below, also compute, reward, se and time for the columns). A .toml of runs: see docs/logs.md"
)


@dataclass(frozen=True, slots=True)
class Input:
    """The runs of an input, the recipe's name if it has one, and their options."""

    name: str | None
    runs: tuple[str, ...]
    args: argparse.Namespace


def add_input_arguments(command: argparse.ArgumentParser, nargs: str = "+") -> None:
    """The inputs and how to read them. `nargs`: number of inputs."""
    command.add_argument("inputs", nargs=nargs, metavar="RUN_OR_FILE", help=INPUTS)
    _add_options(command)


def _add_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group(
        "input", "columns by name, or by a part of it that no other has"
    ).add_argument
    add("--compute-column", metavar="NAME", help="column or tag of C, the compute (default: by its name)")
    text = "column or tag of R, the held-out pass rate (default: by its name)"
    add("--reward-column", metavar="NAME", help=text)
    add("--se-column", metavar="NAME", help="column of R's standard error (default: by its name)")
    add(
        "--samples", type=_positive, metavar="N",
        help="without such a column: R is the mean of N samples (prompts × k), as if the prompts were drawn "
        "again each time; if they stay the same, these errors are too large",
    )  # fmt: skip
    text = "reward at zero compute (default: the one measured there, if any)"
    add("--r0", type=float, metavar="R", help=text)
    add(
        "--reward-range", type=float, nargs=2, default=UNIT_RANGE, metavar=("LOW", "HIGH"),
        help="scale of R and --r0 (-1 1, or 0 100 for percent); the output is on a scale from 0 to 1",
    )  # fmt: skip
    text = f"unit of compute: {', '.join(names.UNITS)} (default: by C's name)"
    add("--unit", type=names.unit_of, help=text)
    add(
        "--devices", type=_positive, metavar="N",
        help="C in GPU-hours: elapsed time × N GPUs; wall time of TensorBoard and W&B includes evaluations "
        "and checkpoints, but pauses are left out",
    )  # fmt: skip
    add("--time-column", metavar="NAME", help="with --devices: column of that time (default: by name)")
    text = "with --devices: unit of that time (default: by the column's name, else seconds)"
    add("--time-unit", choices=tuple(names.TIME_UNITS), help=text)
    add(
        "--start", type=_start, metavar="TIME",
        help="with --devices: when training began, a date or a value of the time column; first: at the first "
        "row (default: at step 0)",
    )  # fmt: skip
    add("--gpu-hours-per-step", type=_positive, metavar="X", help="C in GPU-hours: X times the step")
    add("--drop-before", type=float, default=0.0, metavar="C", help="leave out points before C, but not R0")
    text = "leave out the first quarter of the rise if it deviates from the curve"
    add("--drop-early", action="store_true", help=text)


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    given = [f"--{way.replace('_', '-')}" for way in WAYS if getattr(args, way) is not None]
    if len(given) > 1 and given != ["--compute-column", "--gpu-hours-per-step"]:
        raise ConfigError(f"{' and '.join(given)} were given; expected one of them, as each defines C")
    for option in ("time_column", "time_unit", "start"):
        if getattr(args, option) is not None and args.devices is None:
            raise ConfigError(f"--{option.replace('_', '-')} needs --devices N: C is elapsed time × N GPUs")
    if args.se_column is not None and args.samples is not None:
        raise ConfigError("--se-column and --samples were given; expected one, as each gives the error of R")
    low, high = args.reward_range
    if not -math.inf < low < high < math.inf:
        raise ConfigError(f"--reward-range {low:g} {high:g}: expected the lowest reward, then the highest")


def to_unit(reward: float, args: argparse.Namespace) -> float:
    """A reward on the scale of --reward-range, on a scale from 0 to 1."""
    low, high = args.reward_range
    return float((reward - low) / (high - low))


def expand(text: str, args: argparse.Namespace) -> list[Input]:
    """The recipes of an input: `[NAME=]RUN,RUN[@OPTION=VALUE,OPTION=VALUE]`, or those of a .toml."""
    if Path(text).suffix == ".toml":
        return _from_toml(Path(text), args)
    options = "|".join(map(re.escape, _known_options()))
    runs, *given = [text] if Path(text).exists() else re.split(rf"@(?=(?:{options})=)", text, maxsplit=1)
    if not given and not Path(text).exists():  # a misspelt option
        runs, *given = re.split(r"@(?=[a-z][\w-]*=)", text, maxsplit=1)
    pairs = [pair for part in given for pair in re.split(r",(?=[a-z][\w-]*=)", part)]
    name, sign, listed = runs.partition("=")
    if not sign or Path(runs).exists():
        return [_input(None, [runs], args, pairs, text)]
    inputs = [part for part in listed.split(",") if part]
    if not name or not inputs:
        raise ConfigError(f"{text!r}: expected NAME=RUN,RUN,... or a run or a file")
    return [_input(name, inputs, args, pairs, text)]


def _from_toml(path: Path, args: argparse.Namespace) -> list[Input]:
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
        runs = [recipe["runs"]] if isinstance(recipe["runs"], str) else recipe["runs"]
        given = {k: v if isinstance(v, list) else [v] for k, v in {**content, **recipe}.items()}
        pairs = [f"{key}={' '.join(map(str, values))}" for key, values in given.items() if key != "runs"]
        inputs.append(_input(name, [str(path.parent / run) for run in runs], args, pairs, f"{path}: {name}"))
    return inputs


def _input(
    name: str | None, runs: Sequence[str], args: argparse.Namespace, pairs: Sequence[str], where: str
) -> Input:
    """An input whose options, KEY=VALUE, replace those of all inputs."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_options(parser)
    words: dict[str, list[str]] = {}
    try:
        for key, value in (pair.split("=", 1) for pair in pairs):
            option = SHORT.get(key, key.replace("_", "-"))
            if key not in _known_options():
                known = ", ".join(_known_options())
                raise ConfigError(f"unknown option {key!r}; expected one of {known}")
            words[option] = [f"--{option}={value}"]
            if option == "reward-range":
                words[option] = ["--reward-range", *re.split("[: ]+", value)]
            elif option == "drop-early":
                words[option] = ["--drop-early"] if value.lower() != "false" else []
        found = vars(parser.parse_args([word for option in words.values() for word in option]))
        chosen = {name: found[name] for name in (option.replace("-", "_") for option in words)}
        ways = dict.fromkeys(WAYS) if set(WAYS) & set(chosen) else {}  # the way of all runs gives way
        args = argparse.Namespace(**{**vars(args), **ways, **chosen})
        check_options(args)
    except (argparse.ArgumentError, ConfigError) as e:
        raise ConfigError(f"{where}: {e}" if pairs else str(e)) from e
    return Input(name, tuple(runs), args)


def _known_options() -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    _add_options(parser)
    return [*SHORT, *(name.replace("_", "-") for name in vars(parser.parse_args([])))]


def _start(text: str) -> float | str:
    if text == "first":
        return text
    try:
        return float(numbers([{"--start": text}], "--start")[0])
    except ConfigError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is no date, no number and not 'first'") from e


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
