"""The options of every command that reads curves, for all inputs or for one: `RUN@devices=32,reward=aime`."""

import argparse
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    if Path(text).exists():
        return [_checked(Input(None, (text,), args), text)]
    options = "|".join(map(re.escape, (*SHORT, *_known_options())))
    runs, *given = re.split(rf"@(?=(?:{options})=)", text, maxsplit=1)
    if given:
        pairs = re.split(rf",(?=(?:{options})=)", given[0])
        args = _with_options(args, dict(pair.split("=", 1) for pair in pairs), text)
    elif unknown := re.search(r"@([\w-]+)=", text):
        raise ConfigError(f"{text}: {_no_option(unknown[1])}")
    name, sign, listed = runs.partition("=")
    if not sign or Path(runs).exists():
        return [_checked(Input(None, (runs,), args), text)]
    inputs = tuple(part for part in listed.split(",") if part)
    if not name or not inputs:
        raise ConfigError(f"{text!r}: expected NAME=RUN,RUN,... or a run or a file")
    return [_checked(Input(name, inputs, args), text)]


def _checked(given: Input, where: str) -> Input:
    try:
        check_options(given.args)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from e
    return given


def _no_option(key: str) -> str:
    known = ", ".join((*SHORT, *_known_options()))
    return f"{key!r} is no option of a run; expected one of {known}"


def _known_options() -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    _add_options(parser)
    return [name.replace("_", "-") for name in vars(parser.parse_args([]))]


def _with_options(args: argparse.Namespace, given: Mapping[str, Any], where: str) -> argparse.Namespace:
    """The options with those of an input, as on the command line."""
    parser = argparse.ArgumentParser(prog=where, add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_options(parser)
    words: list[str] = []
    chosen: list[str] = []
    for key, value in given.items():
        option = SHORT.get(key, key.replace("_", "-"))
        if option not in _known_options():
            raise ConfigError(f"{where}: {_no_option(key)}")
        chosen.append(option.replace("-", "_"))
        if option == "reward-range":
            low_high = value if isinstance(value, list) else re.split(r"[: ]+", str(value))
            words += ["--reward-range", *map(str, low_high)]
        elif option != "drop-early":
            words.append(f"--{option}={value}")
        elif str(value).lower() not in ("false", "no", "0"):
            words.append("--drop-early")
    try:
        found = vars(parser.parse_args(words))
    except argparse.ArgumentError as e:
        raise ConfigError(f"{where}: {e}") from e
    ways = dict.fromkeys(WAYS) if set(WAYS) & set(chosen) else {}  # one for all runs gives way
    return argparse.Namespace(**{**vars(args), **ways, **{name: found[name] for name in chosen}})


def _from_toml(path: Path, args: argparse.Namespace) -> list[Input]:
    """`[recipe.NAME]` with `runs = [...]`, relative to the file, and options; those above all are for all."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: {' '.join(str(e).split())}; expected a TOML file of runs") from e
    recipes = content.pop("recipe", None)
    if not isinstance(recipes, dict) or not all(
        isinstance(r, dict) and r.get("runs") for r in recipes.values()
    ):
        raise ConfigError(f'{path}: expected [recipe.NAME] with runs = ["FILE", ...] and options')
    inputs = []
    for name, recipe in recipes.items():
        given = {k: v for k, v in {**content, **recipe}.items() if k != "runs"}
        runs = [recipe["runs"]] if isinstance(recipe["runs"], str) else recipe["runs"]
        files = tuple(str(path.parent / run) for run in runs)
        where = f"{path}: {name}"
        inputs.append(_checked(Input(name, files, _with_options(args, given, where)), where))
    return inputs


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
