"""Time that a run has trained up to each row: from the seconds of its steps, or from a clock."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trainer.config import ConfigError
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.resumed import Survivors
from trainer.scaling.reading.values import Values, is_known, numbers

SINCE_1970 = 1e9  # a clock that starts beyond this many seconds shows a date
MILLISECONDS = 1e11  # a date beyond this many seconds is in milliseconds, or still smaller units
PAUSE = 10.0  # an interval as long as this many steps can be a pause,
LONGER = 3.0  # if it is so many times as long as its neighbours,
LEAST_PAUSE = 60.0  # and longer by this many seconds
NEIGHBOURS = 5  # on either side
FALLS = 0.2  # share of rows from which a column is the time of each step; a clock falls only to begin again

Mask = NDArray[np.bool_]


def elapsed(
    run: Survivors, columns: Sequence[str], has_reward: Mask, options: ReadOptions
) -> tuple[Values, str, tuple[str, ...]]:
    """Seconds of training up to each row (NaN: unknown), the source, and notes."""
    column, per_step = _time_column(run, columns, options)
    unit = options.time_unit or names.time_unit(column)
    seconds = _in_seconds(numbers(run.rows, column), unit)
    notes = []
    if unit is None and per_step is None and column.lower() != "time":
        notes.append(f"{column!r} is taken to be in seconds (--time-unit).")
    if per_step is None:
        falls = np.diff(seconds[~np.isnan(seconds)]) < 0
        per_step = bool(len(falls) and falls.mean() > FALLS)
    if per_step:
        return _added_up(seconds, run.steps), f"the sum of {column!r}", tuple(notes)
    spent, paused = _since_first(seconds, run, has_reward)
    if paused:
        total, where = sum(paused.values()), ", ".join(f"{step:g}" for step in paused)
        length = f"{total / 3600:.1f} h" if total >= 3600 else f"{total / 60:.0f} min"
        notes.append(f"Pauses, which are left out of the time: {length}, before step {where}.")
    offset, note = _before_first(seconds, spent, run.steps, column, options.start)
    return np.maximum(spent + offset, 0.0), repr(column), (*notes, *note)


def _time_column(run: Survivors, columns: Sequence[str], options: ReadOptions) -> tuple[str, bool | None]:
    """The first column of time that is known in two rows or more."""
    found = names.time_columns(columns, options.time_column)
    for column, per_step in found:
        if sum(is_known(row.get(column)) for row in run.rows) >= min(2, len(run.rows)):
            return column, per_step
    if not any(names.likely(column, "--time-column") for column in columns):
        raise ConfigError(
            "there is no column of time, which --devices N needs; give --gpu-hours-per-step X instead, "
            "the seconds of a step × GPUs / 3600"
        )
    listed = names.listed(columns, "--time-column")
    raise ConfigError(f"no column is recognized as time; set --time-column to one of {listed}")


def _in_seconds(values: Values, unit: str | None) -> Values:
    """Dates in milliseconds or less are recognized by their size."""
    seconds = values * names.TIME_UNITS[unit or "s"][0]
    first = next(iter(seconds[~np.isnan(seconds)].tolist()), 0.0)
    thousands = math.ceil(math.log(first / MILLISECONDS, 1000)) if first > MILLISECONDS else 0
    return seconds / 1000.0**thousands


def _added_up(values: Values, steps: Values) -> Values:
    """Sums of seconds per step; a row after several steps counts for all of them."""
    known = ~np.isnan(values) & ~np.isnan(steps)
    seconds = np.zeros(len(values))
    seconds[known] = values[known] * np.diff(np.maximum(steps[known], 0), prepend=0)
    return np.cumsum(seconds)


def _since_first(clock: Values, run: Survivors, has_reward: Mask) -> tuple[Values, dict[float, float]]:
    """Seconds since the first known row without pauses, and the pauses by the step after them."""
    known = np.flatnonzero(~np.isnan(clock))
    steps = run.steps[known]
    resumed = np.diff(np.cumsum(run.resumed)[known]) > 0
    took = _intervals(clock[known], resumed)
    paused: dict[float, float] = {}
    if not np.isnan(steps).any():  # without steps, a long interval may be no pause
        made = np.maximum(np.diff(steps), 1.0)
        usual = _usual(took, np.diff(steps), has_reward[known[1:]])
        pause = (took > PAUSE * usual) & (took > LONGER * usual * made) & (took - usual * made > LEAST_PAUSE)
        excess = np.where(pause | resumed, took - usual * made, 0.0)
        paused = {float(steps[i + 1]): float(excess[i]) for i in np.flatnonzero(pause)}
        took = took - excess
    spent = np.full(len(clock), math.nan)
    spent[known] = np.concatenate([[0.0], np.cumsum(took)])[: len(known)]
    return spent, paused


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


def _usual(took: Values, made: Values, has_reward: Mask) -> Values:
    """The usual seconds of a step in each interval: the median over the neighbours of its kind.

    Intervals that contain an evaluation are of another kind, as are those in which no step was made.
    """
    rate = took / np.maximum(made, 1)
    usual = np.full(len(rate), np.median(rate) if len(rate) else 0.0)
    for kind in (has_reward & (made > 0), has_reward & (made == 0), ~has_reward):
        if kind.sum() > 2:
            window = np.pad(rate[kind], NEIGHBOURS, mode="symmetric")
            usual[kind] = np.median(sliding_window_view(window, 2 * NEIGHBOURS + 1), axis=1)
    return usual


def _before_first(
    clock: Values, spent: Values, steps: Values, column: str, start: float | str | None
) -> tuple[float, tuple[str, ...]]:
    """Seconds of training before the first known row, and notes.

    Without a row of step 0, a clock that starts at 0 is used as it is, and the start of a date is
    extrapolated from the first row at the mean time per step.
    """
    known = np.flatnonzero(~np.isnan(clock))
    if not len(known):
        return 0.0, ()
    t, s, first = spent[known], steps[known], float(clock[known[0]])
    if start is not None:
        return (0.0 if start == "first" else first - float(start)), ()
    if s[0] <= 0:
        return -float(t[s <= 0][-1]), ()
    if first < SINCE_1970:
        note = f"Compute is counted from the zero of {column!r}; --start first: from the first row."
        return first, (note,) if np.isnan(s[0]) and first > 0 else ()
    if s[-1] > s[0]:
        return float(t[-1] * s[0] / (s[-1] - s[0])), ()
    raise ConfigError(
        f"{column!r} is a date and no column counts steps, so the start of the run is unknown: give --start "
        "with the date when training began, or --start first if the first row is from before step 1"
    )
