"""Curves from the files of any trainer: finds the columns of compute and reward, and checks the values."""

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

from trainer.config import ConfigError
from trainer.scaling.curve.points import MIN_POINTS
from trainer.scaling.curve.sigmoid import Curve, EvalPoint, curve_of, mean_point
from trainer.scaling.layout import MAX_NAMED, short_names
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.log import Log, compute_of, log_of
from trainer.scaling.reading.options import DEFAULT, Input, ReadOptions, expand
from trainer.scaling.reading.settings import settings_of
from trainer.scaling.reading.tables import read_tables, wandb_files
from trainer.scaling.reading.values import Row, Values, filled, is_known, numbers

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
    path: Path = Path()  # as given

    def __str__(self) -> str:
        return f"C: {self.compute}, in {self.curve.unit}. R: {self.reward}. Standard errors: {self.error}."


def curves_of(groups: Mapping[str, Sequence[Reading]]) -> dict[str, list[Curve]]:
    """The curves of each recipe."""
    return {name: [reading.curve for reading in readings] for name, readings in groups.items()}


def read_inputs(inputs: Sequence[str], options: ReadOptions = DEFAULT) -> list[Reading]:
    """The runs of all inputs, named by input, by run if it holds several, by reward if it is read twice.

    ConfigError: one line, what is wrong.
    """
    sources = [source for text in dict.fromkeys(inputs) for source in expand(text, options)]
    readings = [reading for source in sources for reading in _read_all(source)]
    run_names = [reading.curve.name for reading in readings]
    return [
        replace(r, curve=replace(r.curve, name=f"{n} ({r.reward_column})")) if run_names.count(n) > 1 else r
        for n, r in zip(run_names, readings, strict=True)
    ]


def read_groups(inputs: Sequence[str], options: ReadOptions = DEFAULT) -> dict[str, list[Reading]]:
    """The runs of each recipe: `NAME=RUN,RUN` are its seeds, any other run is a recipe of its own.

    ConfigError: one line, what is wrong.
    """
    groups: dict[str, list[Reading]] = {}
    single: list[Reading] = []
    for source in (source for text in inputs for source in expand(text, options)):
        if source.name is None:
            single += _read_all(source)
            continue
        paths = list(map(Path, source.runs))
        if repeated := [run for i, run in enumerate(source.runs) if Path(run) in paths[:i]]:
            raise ConfigError(f"{source.name}: {repeated[0]} is given twice; expected each run once")
        if source.name in groups:
            raise ConfigError(f"{source.name!r} names two groups; expected each name once")
        groups[source.name] = _read_all(source)
    labels = short_names([reading.curve.name for reading in single]) if single else []
    for name, reading in zip(labels, single, strict=True):
        if name in groups:
            raise ConfigError(f"two inputs are named {name!r}; expected each once, or NAME=RUN")
        groups[name] = [reading]
    for a, b in combinations([curve for curves in curves_of(groups).values() for curve in curves], 2):
        if (a.points, a.R0) == (b.points, b.R0):
            which = " and ".join(dict.fromkeys((a.name, b.name)))
            raise ConfigError(f"{which}: the same points twice; expected each run once, in one recipe")
    return groups


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


def _read_all(source: Input) -> list[Reading]:
    return [r for path in dict.fromkeys(map(Path, source.runs)) for r in _read(path, source.options)]


def _read(path: Path, options: ReadOptions) -> list[Reading]:
    """All runs of a file, without those that lack the reward if others have it."""
    try:
        file, tables = read_tables(path)
    except ModuleNotFoundError as e:
        raise ConfigError(f"{path}: to read it, {e.name} is missing: pip install '.[logs]'") from e
    try:
        columns = {run: _columns(rows) for run, rows in tables.items()}
        chosen = [run for run in columns if names.reward_columns(columns[run], options.reward_column)]
        chosen = chosen or [run for run in columns if names.matching(names.PLAIN_OR_TRAINING, columns[run])]
        chosen = chosen or list(columns)
        prefix = f"{file}/" if file == path.parent else f"{path}: "
        trained = names.matching(names.TRAINED, chosen) if names.matching(names.HELD_OUT, chosen) else []
        readings = {
            run: _reading(f"{prefix}{run}" if run else str(path), path, file, tables[run], options)
            for run in chosen
            if run not in trained
        }
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e
    short = [run for run, reading in readings.items() if len(reading.curve.points) < MIN_POINTS]
    short = short if len(short) < len(readings) else []
    empty = [f.name for f in wandb_files(file) if not f.stat().st_size] if file.is_dir() else []
    left_out = {
        "Files without a byte, as a killed run leaves them, which are left out": empty,
        f"Rows of the training batches, which are left out ({file}/NAME reads them)": trained,
        f"Runs of fewer than {MIN_POINTS} evaluations, which are left out": short,
    }
    notes = [f"{what}: {', '.join(map(repr, runs))}." for what, runs in left_out.items() if runs]
    first, *others = (reading for run, reading in readings.items() if run not in short)
    return [replace(first, notes=(*notes, *first.notes)), *others]


def _reading(name: str, path: Path, file: Path, rows: list[Row], options: ReadOptions) -> Reading:
    columns = _columns(rows)
    try:
        reward = names.reward_column(columns, options.reward_column)
        error = None if options.samples else names.error_column(columns, reward, options.se_column)
        log = log_of(rows, columns, reward, options)
        compute, unit, source = compute_of(log, file, options)
    except ConfigError as e:
        raise ConfigError(f"{e}{_all_at_once(rows, columns, options)}") from e
    measured = _points(log, compute, source, error, options)
    if source == repr(names.LEDGER) and names.FLOPS in columns:
        spent = filled(numbers(log.rows, names.FLOPS))[~np.isnan(numbers(log.rows, reward))]
        measured = [replace(p, flops=f) for p, f in zip(measured, np.nan_to_num(spent).tolist(), strict=True)]
    merged = _merged(measured, log)
    points = [p for p in merged if p.compute == 0 or p.compute >= options.drop_before]
    if not points:
        beyond = f" from compute {options.drop_before:g} on (--drop-before)" if options.drop_before else ""
        raise ConfigError(f"no row holds {reward!r}{beyond}")
    if len(points) == 1 and (rest := names.matching(names.PLAIN_OR_TRAINING, sorted({*columns} - {reward}))):
        log.notes.append(f"Training rewards, left out: {', '.join(rest[:MAX_NAMED])} (--reward-column).")
    curve = curve_of(name, unit, points)
    if options.r0 is not None:
        log.notes.extend(_about_r0(curve, options.r0, options))
        curve = replace(curve, R0=options.to_unit(options.r0))
    if curve.points and (before := sum(0 < p.compute < curve.points[0].compute for p in merged)):
        source += f" (without {before} before {curve.points[0].compute:.4g})"
    mapped = " ({:g} to {:g}, rescaled to 0 to 1)".format(*options.reward_range) if options.rescales else ""
    error_source = repr(error) if error else "none, estimated from the residuals"
    if options.samples:
        error_source = f"binomial, of {options.samples:g} samples"
    elsewhere = file not in (path, path.parent, path / "metrics.jsonl")
    chosen = () if options.reward_column else _about_reward(columns, reward)
    kind = names.training_reward(columns, reward)
    notes = (*([f"Read from {file}."] if elsewhere else ()), *chosen, *([kind] if kind else ()), *log.notes)
    settings = settings_of(file, reward, rows[0])
    return Reading(curve, source, f"{reward!r}{mapped}", error_source, reward, notes, settings, path)


def _all_at_once(rows: list[Row], columns: list[str], options: ReadOptions) -> str:
    """All options that the run needs, to paste, with the likeliest columns; empty if it is one at most."""
    flags, rewards = [], names.reward_columns(columns, options.reward_column)
    if len(rewards) != 1:
        rewards = names.likeliest(names.reward_candidates(columns))
        if options.reward_column is not None or not names.likely(rewards[0], "--reward-column"):
            return ""  # the error says which columns it may be
        flags.append(f"--reward-column {shlex.quote(rewards[0])}")
    asked = (options.compute_column, options.devices, options.gpu_hours_per_step)
    with suppress(ConfigError, ValueError, IndexError):  # a cell that is no number; no such column
        if asked == (None, None, None) and not names.compute_columns(columns, None):
            growing = [c for c in columns if c != rewards[0] and _grows(rows, c)]
            likely = names.likeliest(growing, "--compute-column")[:1]
            clock = names.time_columns(columns, None)
            flags += ["--devices N"] if clock else [f"--compute-column {shlex.quote(c)}" for c in likely]
        values = numbers(rows, rewards[0], 0.01)
        values = values[~np.isnan(values)]
        if not options.rescales and not 0 <= values.min() <= values.max() <= 1 + ROUNDING:
            flags.append(f"--reward-range {_range(values)}")
    return f"; all that it needs at once, such as {' '.join(flags)}" if len(flags) > 1 else ""


def _grows(rows: list[Row], column: str) -> bool:
    with suppress(ConfigError):
        values = numbers(rows, column)
        growth = np.diff(values[~np.isnan(values)])
        return growth.size > 0 and bool((growth > 0).all())
    return False


def _points(
    log: Log, compute: Values, source: str, error: str | None, options: ReadOptions
) -> list[EvalPoint]:
    """The evaluations in the order of their steps, without those that are not finite."""
    percent = 1.0 if options.rescales else 0.01
    rewards = numbers(log.rows, log.reward, percent)
    errors = numbers(log.rows, error, percent) if error else np.zeros(len(log.rows))
    logged = np.array([row.get(log.reward) not in (None, "") for row in log.rows])
    if skipped := int((logged & np.isnan(rewards)).sum()):
        log.notes.append(f"Evaluations without a finite reward, which are left out: {skipped}.")
    low, high = options.reward_range
    points = []
    for i in np.flatnonzero(~np.isnan(rewards)).tolist():
        step = i + 1 if math.isnan(log.steps[i]) else int(log.steps[i])
        c = 0.0 if step == 0 and math.isnan(compute[i]) else float(compute[i])  # before step 1 none was spent
        if math.isnan(c):
            raise ConfigError(
                f"row {i + 1} has a reward, but no row up to it has {source}; set --compute-column to "
                "another, or give --devices N for GPU-hours"
            )
        if c < 0:
            raise ConfigError(f"row {i + 1}: compute is {c:g}; expected at least 0")
        if not errors[i] >= 0:
            cell = f"{error!r} is {log.rows[i].get(error or '')!r}"
            raise ConfigError(f"row {i + 1}: {cell}; expected a standard error, at least 0")
        r, se = options.to_unit(float(rewards[i])), float(errors[i]) / (high - low)
        if not -ROUNDING <= r <= 1 + ROUNDING:
            expected = _expected(rewards, log.rows[i], log.reward, options)
            raise ConfigError(f"row {i + 1}: {log.reward!r} is {log.rows[i][log.reward]}; {expected}")
        r = min(1.0, max(0.0, r))
        if options.samples:
            rare = 1 / (options.samples + 2)  # Laplace's rule, where none or all samples are right
            p = min(1 - rare, max(rare, r))
            se = math.sqrt(p * (1 - p) / options.samples)
        points.append(EvalPoint(step, c, r, se))
    return points


def _expected(rewards: Values, row: Row, column: str, options: ReadOptions) -> str:
    """The expected range and the remedy where not all rewards are between 0 and 1."""
    if options.rescales:
        low, high = options.reward_range
        return f"expected {low:g} to {high:g} (--reward-range)"
    if parts := names.summed(row, column):
        return f"expected 0 to 1; it is a sum: set --reward-column to one of {', '.join(parts)}"
    low, high = float(np.nanmin(rewards)), float(np.nanmax(rewards))
    if _range(rewards) == "0 100":
        return f"expected 0 to 1; if it is in percent, give --reward-range 0 100 (it goes up to {high:g})"
    return (
        f"expected 0 to 1; it goes from {low:g} to {high:g}: give the lowest and the highest "
        f"reward that are possible, --reward-range LOW HIGH, such as {_range(rewards)}"
    )


def _range(rewards: Values) -> str:
    """The likely lowest and highest possible reward, given some of them; 0 100 if they may be percent."""
    low, high = float(np.nanmin(rewards)), float(np.nanmax(rewards))
    percent = low >= 0 and 10 < high <= 100
    return "0 100" if percent else f"{min(0, math.floor(low))} {max(1, math.ceil(high))}"


def _merged(points: Sequence[EvalPoint], log: Log) -> list[EvalPoint]:
    """One evaluation for each step (without steps, for each compute)."""
    by_place: dict[float, dict[float, EvalPoint]] = {}
    for p in points:  # equal evaluations count once
        by_place.setdefault(p.step if log.step else p.compute, {}).setdefault(p.pass_rate, p)
    merged = [mean_point(list(same.values())) for same in by_place.values()]
    for one, other in pairwise(p for p in merged if p.compute == 0):
        raise ConfigError(
            f"compute is 0 at steps {one.step} and {other.step}; expected one start: set "
            "--compute-column, or split the file if it holds several runs"
        )
    if means := sum(len(same) > 1 for same in by_place.values()):
        places = "Steps" if log.step else "Computes"
        log.notes.append(f"{places} with several evaluations, of which R is the mean: {means}.")
    return merged


def _about_r0(curve: Curve, r0: float, options: ReadOptions) -> list[str]:
    """Notes: an R0 that --r0 replaces, and a --r0 that seems to be on another scale than the rewards."""
    notes, (low, high) = [], options.reward_range
    if isinstance(curve.R0, EvalPoint):
        notes.append(f"--r0 {r0:g} replaces the reward measured at compute 0, {curve.R0.pass_rate:.3g}.")
    lowest = low + (high - low) * min((p.pass_rate for p in curve.evaluations), default=0.0)
    if 0 < r0 <= 1 < high and 10 * r0 < lowest:
        notes.append(
            f"--r0 {r0:g} is on the scale of --reward-range, {low:g} to {high:g}, where the lowest reward is "
            f"{lowest:.3g}: is --r0 {r0 * high:g} meant?"
        )
    return notes


def _about_reward(columns: Sequence[str], reward: str) -> list[str]:
    """A note on other held-out rewards, where this one was chosen by its name."""
    if parts := names.summed(columns, reward):
        sum_of = f"R is {reward!r}, the weighted sum of {' and '.join(parts)}, which may exceed 1"
        return [f"{sum_of}; name one with --reward-column."]
    others = names.other_rewards(columns, reward)
    more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
    listed = ", ".join(others[:MAX_NAMED]) + more
    return [f"R is {reward!r}; other held-out rewards are {listed} (--reward-column)."] if others else []


def column_names(path: Path) -> list[str]:
    """The columns of any of a file's runs."""
    return _columns([row for rows in read_tables(path)[1].values() for row in rows])


def _columns(rows: Sequence[Row]) -> list[str]:
    """The columns with any value, in the order of the file."""
    return list(dict.fromkeys(c for row in rows for c, v in row.items() if is_known(v)))
