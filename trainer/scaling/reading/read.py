"""Curves from the files of any trainer: finds the columns of compute and reward, and checks the values."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.compute import compute_of, number
from trainer.scaling.reading.tables import Rows, read_tables
from trainer.scaling.sigmoid import Curve, EvalPoint, curve_of
from trainer.scaling.transient import without_transient

UNIT_RANGE = (0.0, 1.0)
SETTINGS = ("model", "data", "held-out set", "samples per prompt", "scorer")
ROUNDING = 1e-6  # a mean of ones in single precision can exceed 1


@dataclass(frozen=True, slots=True)
class Reading:
    """A curve, where its compute, reward and errors come from (as text), and what is known of its run."""

    curve: Curve
    compute: str
    reward: str
    error: str
    reward_column: str  # as in the file
    notes: tuple[str, ...] = ()  # what was left out, assumed or chosen while reading; whole sentences
    # What runs must share to be compared, as far as their files say it: keys of `SETTINGS`.
    settings: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"C: {self.compute}, in {self.curve.unit}. R: {self.reward}. Standard errors: {self.error}."


def add_input_arguments(command: argparse.ArgumentParser, nargs: str = "+") -> None:
    """The options of every command that reads curves. `nargs`: number of inputs."""
    add = command.add_argument_group("input").add_argument
    command.add_argument(
        "inputs", nargs=nargs, metavar="RUN_OR_FILE",
        help="a run folder; .csv, .tsv, .jsonl, .json or .parquet; a W&B export; TensorBoard events",
    )  # fmt: skip
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
        "and checkpoints",
    )  # fmt: skip
    add("--seconds-column", metavar="NAME", help="with --devices: column of that time (default: by name)")
    add("--gpu-hours-per-step", type=_positive, metavar="X", help="C in GPU-hours: X times the step")
    add("--drop-before", type=float, default=0.0, metavar="C", help="leave out points before C, but not R0")
    text = "leave out the first quarter of the rise if it deviates from the curve"
    add("--drop-early", action="store_true", help=text)


def read_curves(args: argparse.Namespace, inputs: Sequence[str] | None = None) -> list[Curve]:
    """The curves of `inputs` (default: of all), in their order. ConfigError: one line, what is wrong."""
    return [reading.curve for reading in read_inputs(args, inputs)]


def read_inputs(args: argparse.Namespace, inputs: Sequence[str] | None = None) -> list[Reading]:
    """The curves and their sources, named by input, and by run if an input holds several."""
    _check_options(args)
    paths = dict.fromkeys(map(Path, args.inputs if inputs is None else inputs))
    return [reading for path in paths for reading in _read(path, args)]


def same_unit(curves: Sequence[Curve]) -> str:
    """The unit of all curves. ConfigError: they have several, so they cannot be compared."""
    by_unit = {c.unit: c.name for c in curves}
    if len(by_unit) > 1:
        units = ", ".join(f"{unit} ({name})" for unit, name in by_unit.items())
        raise ConfigError(
            f"the inputs' compute is in different units: {units}; convert them (--gpu-hours-per-step, "
            "--devices), or give --unit if the columns are misnamed"
        )
    return next(iter(by_unit))


def _check_options(args: argparse.Namespace) -> None:
    ways = ("compute_column", "devices", "gpu_hours_per_step")
    given = [f"--{way.replace('_', '-')}" for way in ways if getattr(args, way) is not None]
    if len(given) > 1 and given != ["--compute-column", "--gpu-hours-per-step"]:
        raise ConfigError(f"{' and '.join(given)} were given; expected one of them, as each defines C")
    if args.seconds_column is not None and args.devices is None:
        raise ConfigError("--seconds-column needs --devices N: C is elapsed time × N GPUs")
    if args.se_column is not None and args.samples is not None:
        raise ConfigError("--se-column and --samples were given; expected one, as each gives the error of R")
    low, high = args.reward_range
    if not -math.inf < low < high < math.inf:
        raise ConfigError(f"--reward-range {low:g} {high:g}: expected the lowest reward, then the highest")


def _read(path: Path, args: argparse.Namespace) -> list[Reading]:
    """All runs of a file, without those that lack the reward if others have it."""
    try:
        tables = read_tables(path)
    except ModuleNotFoundError as e:
        raise ConfigError(f"{path}: to read it, {e.name} is missing: pip install '.[logs]'") from e
    try:
        if len(tables) > 1:
            has = {n: names.reward_columns(_columns(rows), args.reward_column) for n, rows in tables.items()}
            tables = {n: rows for n, rows in tables.items() if has[n]} or tables
        return [
            _reading(f"{path}: {run}" if run else str(path), path, rows, args) for run, rows in tables.items()
        ]
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def _reading(name: str, path: Path, rows: Rows, args: argparse.Namespace) -> Reading:
    columns = _columns(rows)
    compute, unit, compute_source = compute_of(rows, columns, path, args)
    reward = names.reward_column(columns, args.reward_column)
    error = None if args.samples else names.error_column(columns, reward, args.se_column)
    step = names.find_step(columns)
    points = []
    for i, (row, c) in enumerate(zip(rows, compute.tolist(), strict=True), 1):
        if row.get(reward) in (None, ""):
            continue
        at = i if step is None or row.get(step) in (None, "") else int(number(row, step, i))
        if math.isnan(c):  # before step 1, no compute was spent, whether logged or not
            if at != 0:
                raise ConfigError(f"row {i} has a reward, but no row up to it has {compute_source}")
            c = 0.0
        if c < 0:
            raise ConfigError(f"row {i}: compute is {c:g}; expected at least 0")
        points.append(EvalPoint(at, c, *_score(row, reward, error, i, args)))
    kept = [p for p in points if p.compute == 0 or p.compute >= args.drop_before]
    if not kept:
        beyond = f" from compute {args.drop_before:g} on (--drop-before)" if args.drop_before else ""
        raise ConfigError(f"no row holds {reward!r}{beyond}")
    _check_distinct(kept, step)
    curve = curve_of(name, unit, kept)
    low, high = args.reward_range
    if args.r0 is not None:
        if not low <= args.r0 <= high:
            raise ConfigError(f"--r0 {args.r0:g}: expected a reward from {low:g} to {high:g}")
        curve = replace(curve, R0=(args.r0 - low) / (high - low))
    if args.drop_early:
        curve = without_transient(curve)
    before = sum(0 < p.compute < curve.points[0].compute for p in points) if curve.points else 0
    compute_source += f" (without {before} before {curve.points[0].compute:.4g})" if before else ""
    mapped = "" if (low, high) == UNIT_RANGE else f" ({low:g} to {high:g}, rescaled to 0 to 1)"
    error_source = repr(error) if error else "none, estimated from the residuals"
    if args.samples:
        error_source = f"binomial, of {args.samples:g} samples"
    return Reading(curve, compute_source, f"{reward!r}{mapped}", error_source, reward)


def _score(
    row: dict[str, Any], reward: str, error: str | None, line: int, args: argparse.Namespace
) -> tuple[float, float]:
    """The reward of a row, rescaled to 0 to 1, and its standard error; 0: unknown."""
    low, high = args.reward_range
    r = (number(row, reward, line) - low) / (high - low)
    if not -ROUNDING <= r <= 1 + ROUNDING:
        likely = "-1 1" if -1 <= r < 0 else "0 100" if 1 < r <= 100 else "LOW HIGH"
        expected = f"expected 0 to 1; if it is on another scale, give --reward-range {likely}"
        if (low, high) != UNIT_RANGE:
            expected = f"expected {low:g} to {high:g} (--reward-range)"
        raise ConfigError(f"row {line}: {reward!r} is {row[reward]}; {expected}")
    r = min(1.0, max(0.0, r))
    if args.samples:
        return r, math.sqrt(r * (1 - r) / args.samples)
    se = number(row, error, line) / (high - low) if error else 0.0
    if se < 0:
        raise ConfigError(f"row {line}: {error!r} is {se:g}; expected a standard error, at least 0")
    return r, se


def _check_distinct(points: Sequence[EvalPoint], step: str | None) -> None:
    """Refuse several rewards at one compute, which are of several runs unless their steps differ."""
    ordered = sorted(points, key=lambda p: (p.compute, p.step))
    for one, other in pairwise(ordered):
        of_one_run = step is not None and one.step != other.step and one.compute > 0
        if one.compute == other.compute and one.pass_rate != other.pass_rate and not of_one_run:
            raise ConfigError(
                f"two rewards at compute {one.compute:g}: {one.pass_rate:g} and {other.pass_rate:g}; "
                "expected one: average them, or split the file if it holds several runs"
            )


def _columns(rows: Rows) -> list[str]:
    """The columns with any value, in the order of the file."""
    return list(dict.fromkeys(c for row in rows for c, v in row.items() if v not in (None, "")))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
