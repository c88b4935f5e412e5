"""Options as fields of a dataclass: those of every command that reads curves, and those of one input alone.

An input is `[NAME=]RUN,RUN[@OPTION=VALUE,OPTION=VALUE]`, or a .toml of recipes; docs/logs.md explains both.
"""

import argparse
import inspect
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, get_args, get_origin, get_type_hints

from trainer.config import ConfigError
from trainer.config.values import Range, field_docs
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.values import numbers

WAYS = ("compute_column", "devices", "gpu_hours_per_step")  # each defines C


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one ConfigError line."""

    def error(self, message: str) -> NoReturn:
        see = f"; see {self.prog} --help" if self.prog else ""
        raise ConfigError(message.removeprefix("argument ") + see)


@dataclass(frozen=True, kw_only=True)
class Options:
    """A base of frozen dataclasses. A field's type says how its option is read, its docstring is the help.

    `Annotated` adds the name of its value in `--help` (text), the Range of its numbers, or a function that
    reads it. A field without a default must be given.
    """

    group: ClassVar[tuple[str, ...]] = ()  # title and description in `--help`; empty: none of its own

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """An option for each field, in the groups of the classes that define them."""
        hints = get_type_hints(cls, include_extras=True)
        for part in reversed(cls.__mro__):
            defined = [option for option in fields(cls) if option.name in inspect.get_annotations(part)]
            group = vars(part).get("group") if defined else None
            place = parser.add_argument_group(*group) if group else parser
            for option in defined:
                text, how = field_docs(part)[option.name], _argument(hints[option.name])
                if option.default not in (None, False, (), MISSING) and "default" not in text:
                    text += f" (default: {as_typed(option.default)})"
                default = {"required": True} if option.default is MISSING else {"default": option.default}
                if option.default == ():
                    default = {"default": [], "action": "extend"}  # so that it may be given again
                place.add_argument(flag(option.name), help=text.replace("%", "%%"), **how, **default)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """The options on a command line that has them."""
        values = {option.name: getattr(arguments, option.name) for option in fields(cls)}
        return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})


def flag(name: str) -> str:
    """A field as on the command line."""
    return f"--{name.replace('_', '-')}"


def as_typed(value: Any) -> str:
    """A default as on the command line."""
    if isinstance(value, tuple):
        return " ".join(map(as_typed, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _argument(hint: Any) -> dict[str, Any]:
    """The arguments of `add_argument` for a value of this type."""
    hint, *extra = get_args(hint) if get_origin(hint) is Annotated else [hint]
    kinds = get_args(hint) if NoneType in get_args(hint) else [hint]
    kind = next(one for one in kinds if one is not NoneType)
    argument: dict[str, Any] = {"type": kind}
    if kind is bool:
        argument = {"action": "store_true"}
    elif get_origin(kind) is Literal:
        argument = {"choices": get_args(kind)}
    elif get_origin(kind) is tuple:
        item, *rest = get_args(kind)
        argument = {"type": item, "nargs": "+" if rest == [...] else 1 + len(rest)}
    for one in extra:
        if isinstance(one, Range):
            argument["type"] = _within(one, argument["type"])
        else:
            argument["type" if callable(one) else "metavar"] = one
    return argument


def _within(limits: Range, kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if value not in limits:
            finite = ", finite" * (not math.isfinite(value))
            raise argparse.ArgumentTypeError(f"{text} is out of range; expected {limits}{finite}")
        return value

    read.__name__ = kind.__name__  # for argparse's message about what is no number
    return read


def _start(text: str) -> float | str:
    if text == "first":
        return text
    try:
        return float(numbers([{"--start": text}], "--start")[0])
    except ConfigError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is no date, no number and not 'first'") from e


Name = Annotated[str | None, "NAME"]
ABOVE_0 = Range(above=0)


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Options):
    """Options for reading curves. A column is given by its name, or by a part of it that no other has."""

    group: ClassVar[tuple[str, ...]] = ("input", "columns by name, or by a part of it that no other has")

    compute_column: Name = None
    """column or tag of C, the compute (default: by its name)"""
    reward_column: Name = None
    """column or tag of R, the held-out pass rate (default: by its name)"""
    se_column: Name = None
    """column of R's standard error (default: by its name)"""
    samples: Annotated[float | None, "N", ABOVE_0] = None
    """without such a column: R is the mean of N samples (prompts × k), as if the prompts were drawn again
    each time; if they stay the same, these errors are too large"""
    r0: Annotated[float | None, "R"] = None
    """reward at zero compute (default: the one measured there, if any)"""
    reward_range: Annotated[tuple[float, float], ("LOW", "HIGH")] = (0.0, 1.0)
    """scale of R and --r0 (-1 1, or 0 100 for percent); the output is on a scale from 0 to 1"""
    unit: Annotated[str | None, names.unit_of] = None
    """unit of compute: GPU-hours, core-hours, FLOPs, steps (default: by C's name)"""
    devices: Annotated[float | None, "N", ABOVE_0] = None
    """C in GPU-hours: elapsed time × N GPUs; wall time of TensorBoard and W&B includes evaluations and
    checkpoints, but pauses are left out"""
    time_column: Name = None
    """with --devices: column of that time (default: by name)"""
    time_unit: Literal["ms", "s", "min", "h", "d"] | None = None
    """with --devices: unit of that time (default: by the column's name, else seconds)"""
    start: Annotated[float | str | None, _start, "TIME"] = None
    """with --devices: when training began, a date or a value of the time column; first: at the first row
    (default: at step 0)"""
    gpu_hours_per_step: Annotated[float | None, "X", ABOVE_0] = None
    """C in GPU-hours: X times the step"""
    drop_before: Annotated[float, "C"] = 0.0
    """leave out points before C, but not R0"""

    def check(self) -> None:
        """ConfigError: options contradict each other."""
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
        if self.r0 is not None and not low <= self.r0 <= high:
            raise ConfigError(f"--r0 {self.r0:g}: expected a reward from {low:g} to {high:g}")

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


def expand(text: str, options: ReadOptions) -> list[Input]:
    """The recipes of an input: `[NAME=]RUN,RUN[@OPTION=VALUE,OPTION=VALUE]`, or those of a .toml."""
    if Path(text).suffix == ".toml":
        return _from_toml(Path(text), options)
    runs, *rest = [text] if Path(text).exists() else re.split(r"@(?=[a-z][\w-]*=)", text, maxsplit=1)
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
    if not texts:
        options.check()
        return options
    chosen = {SHORT.get(key, key.replace("-", "_")): value for key, value in texts.items()}
    values = {option.name: getattr(options, option.name) for option in fields(ReadOptions)}
    if set(WAYS) & set(chosen):
        values |= dict.fromkeys(WAYS)
    parser, words = Parser(prog="", add_help=False, allow_abbrev=False), list[str]()
    ReadOptions.add_to(parser)
    try:
        for name, value in chosen.items():
            if name not in values:
                known = ", ".join([*SHORT, *(flag(name)[2:] for name in values)])
                raise ConfigError(f"unknown option {flag(name)[2:]!r}; expected one of {known}")
            pair = name == "reward_range"
            words += [flag(name), *re.split("[: ]+", value)] if pair else [f"{flag(name)}={value}"]
        result = ReadOptions.from_arguments(parser.parse_args(words, argparse.Namespace(**values)))
        result.check()
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from e
    return result
