"""The rows of a run in the order of its steps, and the compute of each.

Of steps made twice by a resumed run, the later rows count. Compute is a column, steps × GPU-hours, or time ×
devices; time is the sum of the seconds of the steps, or that of a clock without pauses.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trainer.config import ConfigError
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.values import Row, Values, filled, is_known, numbers

Mask = NDArray[np.bool_]

SINCE_1970 = 1e9  # a clock that starts beyond this many seconds shows a date
PAUSE = (10.0, 3.0, 60.0)  # an interval as long as 10 steps, 3 times as long as its neighbours, 60 s longer
NEIGHBOURS = 5  # on either side
FALLS = 0.2  # share of rows from which a column is the time of each step; a clock falls only to begin again


@dataclass(frozen=True, slots=True)
class Log:
    """A run, sorted by step, without rows that were made again."""

    rows: list[Row]
    columns: list[str]  # with any value, in the order of the file
    reward: str  # column of R
    step: str | None  # column of the steps
    steps: Values  # (rows,)
    resumed: Mask  # (rows,): the first row after a resumption
    notes: list[str]  # what is left out, assumed or chosen while reading it: whole sentences

    @property
    def has_reward(self) -> Mask:
        """(rows,): True where there was an evaluation."""
        return np.array([is_known(row.get(self.reward)) for row in self.rows])


def log_of(rows: Sequence[Row], columns: list[str], reward: str, options: ReadOptions) -> Log:
    """Find the steps, sort by them, and drop the earlier rows where a resumed run went back to a step."""
    notes: list[str] = []
    step, steps = _steps(rows, columns, reward, options, notes)
    keep, resumed = np.ones(len(rows), bool), np.zeros(len(rows), bool)
    for start in _resumptions(rows, steps):
        replaced = keep[:start] & (steps[:start] >= steps[start])
        keep[:start] &= ~replaced
        resumed[start] = True
        text = (
            f"Steps {steps[start]:g} to {steps[:start][replaced].max():g} were made twice, because the run "
            f"was resumed; the later rows count, {replaced.sum()} earlier ones are left out, and their "
            "compute is not counted."
        )
        if steps[start] <= np.nanmin(steps):
            text += " If the file holds several runs instead, split it, or add a column 'run'."
        notes.append(text)
    order = np.flatnonzero(keep)
    order = order[np.argsort(np.nan_to_num(steps[order], nan=-np.inf), kind="stable")]
    return Log([rows[i] for i in order], columns, reward, step, steps[order], resumed[order], notes)


def _steps(
    rows: Sequence[Row], columns: Sequence[str], reward: str, options: ReadOptions, notes: list[str]
) -> tuple[str | None, Values]:
    """The name of the column of steps, and the step of each row (NaN: unknown)."""
    known = [c for name in names.STEPS for c in names.matching(name, columns)]
    if options.compute_column in known or (options.compute_column and options.gpu_hours_per_step):
        known.insert(0, names.existing(options.compute_column, columns, "--compute-column"))
    if not known:
        return None, np.full(len(rows), np.nan)
    step, *others = known
    steps = numbers(rows, step)
    for other in others:
        values = numbers(rows, other)
        lacks, has_other = np.isnan(steps), ~np.isnan(values)
        both = ~lacks & has_other
        if both.any() and (lacks & has_other).any() and (steps[both] == values[both]).all():
            steps = np.where(lacks, values, steps)
            notes.append(f"Where {step!r} is missing, {other!r} is used, which is equal everywhere else.")
    steps = filled(steps)
    evaluated = np.array([row.get(reward) not in (None, "") for row in rows])
    before = np.flatnonzero(np.isnan(steps) & evaluated)
    if len(before) == 1 and len(steps) > 1 and not np.isnan(steps).all():
        steps[: before[0] + 1] = 0.0
        notes.append(f"The first reward, without {step!r}, is taken to be from before step 1.")
    return step, steps


def _resumptions(rows: Sequence[Row], steps: Values) -> list[int]:
    """The rows where a step and most of its columns come again, and the steps after it, too.

    Rows of training and of evaluation may share some columns. A value that is logged late (an evaluation
    beside the training) or once more (an evaluation of an old checkpoint) is no resumption.
    """
    known = np.flatnonzero(~np.isnan(steps)).tolist()
    if not any(steps[a] > steps[b] for a, b in pairwise(known)):
        return []
    labels = set(names.matching(names.LABELS, dict.fromkeys(c for row in rows for c in row)))
    following = {known[-1]: np.inf}  # by row: the step of the first row after it that has another step
    for i, after in reversed(list(pairwise(known))):
        following[i] = following[after] if steps[i] == steps[after] else float(steps[after])
    seen: dict[float, set[str]] = {}
    last, starts = -np.inf, []
    for i in known:
        step = float(steps[i])
        columns = {c for c, value in rows[i].items() if is_known(value)} - labels
        again = 2 * len(columns & seen.get(step, set())) > len(columns)
        if again and step < last and step < following[i] <= last:
            starts.append(i)
            seen = {s: c for s, c in seen.items() if s < step}
            last = step
        seen.setdefault(step, set()).update(columns)
        last = max(last, step)
    return starts


def compute_of(log: Log, path: Path, options: ReadOptions) -> tuple[Values, str, str]:
    """C of each row (NaN before the first value), its unit and its source, as asked for or the best column.

    A row without a value gets that of the row before: trainers log rewards and compute in separate rows.
    """
    if options.devices is not None:
        seconds, source = elapsed(log, options)
        hours = filled(seconds) * (options.devices / 3600)
        return hours, options.unit or "GPU-hours", f"{source} × {options.devices:g} devices"
    if options.gpu_hours_per_step is not None:
        if log.step is None:
            raise _unknown("steps", log)
        source = f"{log.step!r} × {options.gpu_hours_per_step:g} GPU-hours"
        return log.steps * options.gpu_hours_per_step, options.unit or "GPU-hours", source
    column, unit, values = _best(log, options)
    if column.startswith("compute/") and unit != "FLOPs":
        unit = _ledger_unit(path) or unit
    return values, options.unit or unit, repr(column)


def _best(log: Log, options: ReadOptions) -> tuple[str, str, Values]:
    """The best column that grows over the rewards' rows, its unit and values, with a note on better ones.

    Some columns are logged only once, at the end (`total_flos` of transformers).
    """
    tried: list[tuple[str, str, Values]] = []
    for column, unit in names.compute_columns(log.columns, options.compute_column):
        values = log.steps if column == log.step else filled(numbers(log.rows, column))
        at_rewards = values[log.has_reward]
        if len(np.unique(at_rewards[at_rewards > 0])) >= min(2, len(at_rewards)):
            if tried:
                unused = ", ".join(repr(name) for name, _, _ in tried)
                log.notes.append(
                    f"{unused}: not used as compute, as there are no growing values where rewards are."
                )
            return column, unit, values
        tried.append((column, unit, values))
    if tried:
        return tried[0]
    if times := names.time_columns(log.columns, None):
        message = f"compute is known only as time, {times[0][0]!r}: give --devices N, the number of GPUs"
        raise ConfigError(f"{message}, for GPU-hours")
    raise _unknown("compute", log)


def _unknown(meaning: str, log: Log) -> ConfigError:
    listed = names.listed([c for c in log.columns if c != log.reward], "--compute-column")
    advice = f"set --compute-column to one of {listed}" if listed else "add the steps, or the compute"
    return ConfigError(f"no column is recognized as {meaning}; {advice}")


def _ledger_unit(path: Path) -> str | None:
    """The unit of `compute/...` from the ledger of a run folder, given the folder or a file in it."""
    ledger = next((p / "ledger.json" for p in (path, path.parent) if (p / "ledger.json").is_file()), None)
    try:
        return str(json.loads(ledger.read_text())["unit"]) if ledger else None
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{ledger} has no unit ({e!r}); give --unit") from e


def elapsed(log: Log, options: ReadOptions) -> tuple[Values, str]:
    """Seconds of training up to each row (NaN: unknown), and the source."""
    column, per_step = _time_column(log, options)
    unit = options.time_unit or names.time_unit(column)
    seconds = numbers(log.rows, column) * names.TIME_UNITS[unit or "s"][0]
    first = next(iter(seconds[~np.isnan(seconds)].tolist()), 0.0)
    if (beyond := first / (100 * SINCE_1970)) > 1:  # a date in milliseconds, or still smaller units
        seconds /= 1000.0 ** math.ceil(math.log(beyond, 1000))
    if per_step is None:
        if unit is None and column.lower() != "time":
            log.notes.append(f"{column!r} is taken to be in seconds (--time-unit).")
        falls = np.diff(seconds[~np.isnan(seconds)]) < 0
        per_step = bool(len(falls) and falls.mean() > FALLS)
    if per_step:  # a row after several steps counts for all of them
        known = ~np.isnan(seconds) & ~np.isnan(log.steps)
        spent = np.zeros(len(seconds))
        spent[known] = seconds[known] * np.diff(np.maximum(log.steps[known], 0), prepend=0)
        return np.cumsum(spent), f"the sum of {column!r}"
    spent = _since_first(seconds, log)
    return np.maximum(spent + _before_first(seconds, spent, column, log, options), 0.0), repr(column)


def _time_column(log: Log, options: ReadOptions) -> tuple[str, bool | None]:
    """The first column of time that is known in two rows or more."""
    for column, per_step in names.time_columns(log.columns, options.time_column):
        if sum(is_known(row.get(column)) for row in log.rows) >= min(2, len(log.rows)):
            return column, per_step
    if not any(names.likely(column, "--time-column") for column in log.columns):
        raise ConfigError(
            "there is no column of time, which --devices N needs; give --gpu-hours-per-step X instead, "
            "the seconds of a step × GPUs / 3600"
        )
    listed = names.listed(log.columns, "--time-column")
    raise ConfigError(f"no column is recognized as time; set --time-column to one of {listed}")


def _since_first(clock: Values, log: Log) -> Values:
    """Seconds since the first known row, without pauses."""
    known = np.flatnonzero(~np.isnan(clock))
    steps = np.diff(log.steps[known])
    resumed = np.diff(np.cumsum(log.resumed)[known]) > 0
    took = _intervals(clock[known], resumed)
    if not np.isnan(steps).any():  # without steps, a long interval may be no pause
        usual = _usual(took, steps, log.has_reward[known[1:]])
        expected, (in_steps, longer, seconds) = usual * np.maximum(steps, 1.0), PAUSE
        pause = (took > in_steps * usual) & (took > longer * expected) & (took - expected > seconds)
        excess = took - expected
        if pause.any():
            total = excess[pause].sum()
            length = f"{total / 3600:.1f} h" if total >= 3600 else f"{total / 60:.0f} min"
            where = ", ".join(f"{step:g}" for step in log.steps[known[1:]][pause])
            log.notes.append(f"Pauses, which are left out of the time: {length}, before step {where}.")
        took = np.where(pause | resumed, expected, took)
    spent = np.full(len(clock), math.nan)
    spent[known] = np.concatenate([[0.0], np.cumsum(took)])[: len(known)]
    return spent


def _intervals(clock: Values, resumed: Mask) -> Values:
    """The seconds between neighbours; 0 to a value that was logged late.

    A clock that is no date begins again at 0 where the run was resumed, or where it falls by more than half.
    """
    took, high = [], clock[0] if len(clock) else 0.0
    for t, again in zip(clock[1:].tolist(), resumed.tolist(), strict=True):
        if t < high < SINCE_1970 and (again or t < high / 2):
            took.append(t)
            high = t
        else:
            took.append(max(0.0, t - high))
            high = max(high, t)
    return np.array(took)


def _usual(took: Values, steps: Values, has_reward: Mask) -> Values:
    """The usual seconds of a step in each interval: the median over the neighbours of its kind.

    Intervals that contain an evaluation are of another kind, as are those in which no step was made.
    """
    rate = took / np.maximum(steps, 1)
    usual = np.full(len(rate), np.median(rate) if len(rate) else 0.0)
    for kind in (has_reward & (steps > 0), has_reward & (steps == 0), ~has_reward):
        if kind.sum() > 2:
            window = np.pad(rate[kind], NEIGHBOURS, mode="symmetric")
            usual[kind] = np.median(sliding_window_view(window, 2 * NEIGHBOURS + 1), axis=1)
    return usual


def _before_first(clock: Values, spent: Values, column: str, log: Log, options: ReadOptions) -> float:
    """Seconds of training before the first known row.

    Without a row of step 0, a clock that starts at 0 is used as it is, and the start of a date is
    extrapolated from the first row at the mean time per step.
    """
    known = np.flatnonzero(~np.isnan(clock))
    if not len(known) or options.start == "first":
        return 0.0
    t, s, first = spent[known], log.steps[known], float(clock[known[0]])
    if options.start is not None:
        return first - float(options.start)
    if s[0] <= 0:
        return -float(t[s <= 0][-1])
    if first < SINCE_1970:
        if np.isnan(s[0]) and first > 0:
            zero = f"Compute is counted from the zero of {column!r}"
            log.notes.append(f"{zero}; --start first: from the first row.")
        return first
    if s[-1] > s[0]:
        return float(t[-1] * s[0] / (s[-1] - s[0]))
    raise ConfigError(
        f"{column!r} is a date and no column counts steps, so the start of the run is unknown: give --start "
        "with the date when training began, or --start first if the first row is from before step 1"
    )
