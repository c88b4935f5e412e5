"""Curves from the files of any trainer: finds the columns of compute and reward, and checks the values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from trainer.config import ConfigError
from trainer.scaling.curve.sigmoid import Curve, EvalPoint, curve_of, mean_point
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.compute import Compute, compute_of, steps_of
from trainer.scaling.reading.options import DEFAULT, Input, ReadOptions, expand
from trainer.scaling.reading.resumed import Survivors, survivors
from trainer.scaling.reading.settings import settings_of
from trainer.scaling.reading.tables import read_tables
from trainer.scaling.reading.values import Row, is_known, numbers

ROUNDING = 1e-6  # a mean of ones in single precision can exceed 1
MOST_NAMES = 4  # in a note


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
    path: Path = Path()  # as given
    drop_early: bool = False  # as asked: whoever fits the curve leaves out an early transient

    def __str__(self) -> str:
        return f"C: {self.compute}, in {self.curve.unit}. R: {self.reward}. Standard errors: {self.error}."


def read_inputs(inputs: Sequence[str], options: ReadOptions = DEFAULT) -> list[Reading]:
    """The curves and their sources, named by input, and by run if an input holds several.

    ConfigError: one line, what is wrong.
    """
    readings = [
        r for text in dict.fromkeys(inputs) for given in expand(text, options) for r in read_runs(given)
    ]
    given_names = [r.curve.name for r in readings]
    for i, r in enumerate(readings):
        if given_names.count(r.curve.name) > 1:
            readings[i] = replace(r, curve=replace(r.curve, name=f"{r.curve.name} ({r.reward_column})"))
    return readings


def read_runs(source: Input) -> list[Reading]:
    """All runs of an input."""
    return [r for path in dict.fromkeys(map(Path, source.runs)) for r in _read(path, source.options)]


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


def _read(path: Path, options: ReadOptions) -> list[Reading]:
    """All runs of a file, without those that lack the reward if others have it."""
    try:
        file, tables = read_tables(path)
    except ModuleNotFoundError as e:
        raise ConfigError(f"{path}: to read it, {e.name} is missing: pip install '.[logs]'") from e
    try:
        reward = options.reward_column
        chosen = {run: rows for run, rows in tables.items() if names.reward_columns(_columns(rows), reward)}
        prefix = f"{file}/" if file == path.parent else f"{path}: "
        labels = {run: f"{prefix}{run}" if run else str(path) for run in tables}
        readings = [_reading(labels[run], file, rows, options) for run, rows in (chosen or tables).items()]
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e
    found = () if file in (path, path.parent, path / "metrics.jsonl") else (f"Read from {file}.",)
    return [replace(r, path=path, notes=(*found, *r.notes)) for r in readings]


def _reading(name: str, path: Path, rows: list[Row], options: ReadOptions) -> Reading:
    columns = _columns(rows)
    reward = names.reward_column(columns, options.reward_column)
    error = None if options.samples else names.error_column(columns, reward, options.se_column)
    given = np.array([row.get(reward) not in (None, "") for row in rows])
    steps, step, step_notes = steps_of(rows, columns, given, options)
    run = survivors(rows, steps)
    has_reward = np.array([is_known(row.get(reward)) for row in run.rows])
    compute = compute_of(run, step, columns, has_reward, path, options)
    points, skipped = _points(run, compute, reward, error, options)
    merged, means = _merged(points, by_step=step is not None)
    kept = [p for p in merged if p.compute == 0 or p.compute >= options.drop_before]
    if not kept:
        beyond = f" from compute {options.drop_before:g} on (--drop-before)" if options.drop_before else ""
        raise ConfigError(f"no row holds {reward!r}{beyond}")
    measured = curve_of(name, compute.unit, kept)
    curve = _with_r0(measured, options)
    before = sum(0 < p.compute < curve.points[0].compute for p in merged) if curve.points else 0
    source = compute.source + (f" (without {before} before {curve.points[0].compute:.4g})" if before else "")
    low, high = options.reward_range
    mapped = f" ({low:g} to {high:g}, rescaled to 0 to 1)" if options.rescales else ""
    error_source = repr(error) if error else "none, estimated from the residuals"
    if options.samples:
        error_source = f"binomial, of {options.samples:g} samples"
    notes = (
        *_about_reward(columns, reward, options), *step_notes, *run.notes, *compute.notes,
        *([f"Evaluations without a finite reward, which are left out: {skipped}."] if skipped else []),
        *([f"{'Steps' if step else 'Computes'} with several evaluations, of which R is the mean: {means}."]
          if means else []),
        *_about_r0(measured, options),
    )  # fmt: skip
    settings = settings_of(path, reward, rows[0])
    return Reading(
        curve, source, f"{reward!r}{mapped}", error_source, reward, notes, settings, path, options.drop_early
    )


def _points(
    run: Survivors, compute: Compute, reward: str, error: str | None, options: ReadOptions
) -> tuple[list[EvalPoint], int]:
    """The evaluations in the order of their steps, and how many are not finite."""
    percent = 1.0 if options.rescales else 0.01
    rewards = numbers(run.rows, reward, percent)
    errors = numbers(run.rows, error, percent) if error else np.zeros(len(run.rows))
    given = np.array([row.get(reward) not in (None, "") for row in run.rows])
    skipped = int((given & np.isnan(rewards)).sum())
    points = []
    for i in np.flatnonzero(~np.isnan(rewards)).tolist():
        step = i + 1 if math.isnan(run.steps[i]) else int(run.steps[i])
        c = float(compute.values[i])
        if math.isnan(c):  # before step 1, no compute was spent, whether logged or not
            if step != 0:
                raise ConfigError(
                    f"row {i + 1} has a reward, but no row up to it has {compute.source}; set "
                    "--compute-column to another, or give --devices N for GPU-hours"
                )
            c = 0.0
        if c < 0:
            raise ConfigError(f"row {i + 1}: compute is {c:g}; expected at least 0")
        if not errors[i] >= 0:
            found = f"{error!r} is {run.rows[i].get(error)!r}"
            raise ConfigError(f"row {i + 1}: {found}; expected a standard error, at least 0")
        score = _score(float(rewards[i]), float(errors[i]), run.rows[i], i, reward, options)
        points.append(EvalPoint(step, c, *score))
    return points, skipped


def _score(
    reward: float, error: float, row: Row, i: int, column: str, options: ReadOptions
) -> tuple[float, float]:
    """The reward of a row, rescaled to 0 to 1, and its standard error; 0: unknown."""
    low, high = options.reward_range
    r = options.to_unit(reward)
    if not -ROUNDING <= r <= 1 + ROUNDING:
        likely = "-1 1" if -1 <= r < 0 else "0 100" if 1 < r <= 100 else "LOW HIGH"
        expected = f"expected 0 to 1; if it is on another scale, give --reward-range {likely}"
        if parts := names.summed(row, column):
            expected = f"expected 0 to 1; it is a sum: set --reward-column to one of {', '.join(parts)}"
        if options.rescales:
            expected = f"expected {low:g} to {high:g} (--reward-range)"
        raise ConfigError(f"row {i + 1}: {column!r} is {row[column]}; {expected}")
    r = min(1.0, max(0.0, r))
    return r, math.sqrt(r * (1 - r) / options.samples) if options.samples else error / (high - low)


def _merged(points: Sequence[EvalPoint], by_step: bool) -> tuple[list[EvalPoint], int]:
    """One evaluation for each step (without steps, for each compute), and how many are a mean of several."""
    by_place: dict[float, dict[float, EvalPoint]] = {}
    for p in points:  # equal evaluations count once
        by_place.setdefault(p.step if by_step else p.compute, {}).setdefault(p.pass_rate, p)
    merged = [mean_point(list(same.values())) for same in by_place.values()]
    for one, other in pairwise(p for p in merged if p.compute == 0):
        raise ConfigError(
            f"compute is 0 at steps {one.step} and {other.step}; expected one start: set "
            "--compute-column, or split the file if it holds several runs"
        )
    return merged, sum(len(same) > 1 for same in by_place.values())


def _with_r0(curve: Curve, options: ReadOptions) -> Curve:
    low, high = options.reward_range
    if options.r0 is None:
        return curve
    if not low <= options.r0 <= high:
        raise ConfigError(f"--r0 {options.r0:g}: expected a reward from {low:g} to {high:g}")
    return replace(curve, R0=options.to_unit(options.r0))


def _about_r0(curve: Curve, options: ReadOptions) -> list[str]:
    """What a given R0 replaces, and whether it may be on another scale than the rewards."""
    if options.r0 is None:
        return []
    notes, (low, high) = [], options.reward_range
    if isinstance(curve.R0, EvalPoint):
        notes.append(
            f"--r0 {options.r0:g} replaces the reward measured at compute 0, {curve.R0.pass_rate:.3g}."
        )
    lowest = low + (high - low) * min((p.pass_rate for p in curve.evaluations), default=0.0)
    if 0 < options.r0 <= 1 < high and 10 * options.r0 < lowest:
        notes.append(
            f"--r0 {options.r0:g} is on the scale of --reward-range, {low:g} to {high:g}, where the lowest "
            f"reward is {lowest:.3g}: is --r0 {options.r0 * high:g} meant?"
        )
    return notes


def _about_reward(columns: Sequence[str], reward: str, options: ReadOptions) -> list[str]:
    """Which other columns are held-out rewards, if this one was chosen here."""
    if options.reward_column is None and (parts := names.summed(columns, reward)):
        sum_of = f"R is {reward!r}, the weighted sum of {' and '.join(parts)}, which may exceed 1"
        return [f"{sum_of}; name one with --reward-column."]
    others = names.other_rewards(columns, reward) if options.reward_column is None else []
    more = f" and {len(others) - MOST_NAMES} more" if len(others) > MOST_NAMES else ""
    listed = ", ".join(others[:MOST_NAMES]) + more
    return [f"R is {reward!r}; other held-out rewards are {listed} (--reward-column)."] if others else []


def _columns(rows: Sequence[Row]) -> list[str]:
    """The columns with any value, in the order of the file."""
    return list(dict.fromkeys(c for row in rows for c, v in row.items() if is_known(v)))
