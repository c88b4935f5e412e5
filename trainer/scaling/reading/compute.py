"""The compute of the rows of a table: a column, steps × GPU-hours, or time × devices."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.tables import Rows

SINCE_1970 = 1e9  # a clock that starts beyond this many seconds shows a date

Values = NDArray[np.float64]  # (rows,); NaN: unknown


def compute_of(
    rows: Rows, columns: Sequence[str], path: Path, args: argparse.Namespace
) -> tuple[Values, str, str]:
    """C of each row (NaN before the first value), its unit, and its source.

    A row without a value gets that of the row before: trainers log rewards and compute in separate rows.
    """
    if args.devices is not None:
        column, per_step = names.seconds_column(columns, args.seconds_column)
        seconds, source = _seconds(rows, columns, column, per_step)
        source = f"{source} × {args.devices:g} devices"
        return seconds * (args.devices / 3600), args.unit or "GPU-hours", source
    if args.gpu_hours_per_step is not None:
        step = names.step_column(columns, args.compute_column)
        source = f"{step!r} × {args.gpu_hours_per_step:g} GPU-hours"
        return _filled(_numbers(rows, step)) * args.gpu_hours_per_step, args.unit or "GPU-hours", source
    column, unit = names.compute_column(columns, args.compute_column)
    if column.startswith("compute/"):
        unit = _ledger_unit(path) or unit
    return _filled(_numbers(rows, column)), args.unit or unit, repr(column)


def _seconds(rows: Rows, columns: Sequence[str], column: str, per_step: bool | None) -> tuple[Values, str]:
    """Seconds of training up to each row: the sum over its steps, or from a clock; and the source."""
    values = _numbers(rows, column)
    step = names.find_step(columns)
    steps = _filled(_numbers(rows, step)) if step else None
    if steps is not None and (back := _fall(steps)):
        raise ConfigError(
            f"{step!r} falls from {back[0]:g} to {back[1]:g}; to count time, remove the rows of steps that a "
            "resumed run repeated, and sort by step"
        )
    falls = _fall(values)
    if per_step is None:  # the seconds of five or more steps never all grow
        per_step = falls is not None
    if per_step:
        return _added_up(values, steps), f"the sum of {column!r}"
    if falls:
        raise ConfigError(
            f"{column!r} falls from {falls[0]:g} to {falls[1]:g}; expected seconds since the start"
        )
    return _since_start(_filled(values), steps, column), f"{column!r}"


def _fall(values: Values) -> tuple[float, float] | None:
    """The first pair of neighbouring values that decrease."""
    known = values[~np.isnan(values)]
    falls = np.flatnonzero(np.diff(known) < 0)
    return (known[falls[0]], known[falls[0] + 1]) if len(falls) else None


def _added_up(values: Values, steps: Values | None) -> Values:
    """Sums of seconds per step; a row after several steps counts for all of them."""
    if steps is None:
        steps = np.cumsum(~np.isnan(values)).astype(float)
    known = ~np.isnan(values) & ~np.isnan(steps)
    seconds = np.zeros(len(values))
    seconds[known] = values[known] * np.diff(np.maximum(steps[known], 0), prepend=0)
    return np.cumsum(seconds)


def _since_start(clock: Values, steps: Values | None, column: str) -> Values:
    """A clock's time since step 0, without start-up.

    If no row is of step 0, a clock that starts at 0 is used as it is, and the start of a date is extrapolated
    from the first row at the mean time per step.
    """
    known = ~np.isnan(clock) if steps is None else ~np.isnan(clock) & ~np.isnan(steps)
    if not known.any():
        return clock
    t, s = clock[known], None if steps is None else steps[known]
    if s is not None and s[0] <= 0:
        start = t[s <= 0][-1]
    elif t[0] < SINCE_1970:
        start = 0.0
    elif s is not None and s[-1] > s[0]:
        start = t[0] - (t[-1] - t[0]) * s[0] / (s[-1] - s[0])
    else:
        raise ConfigError(
            f"{column!r} is a date and no column counts steps, so the start of the run is unknown"
        )
    return np.maximum(clock - start, 0.0)


def _numbers(rows: Rows, column: str) -> Values:
    return np.array([
        math.nan if row.get(column) in (None, "") else number(row, column, i) for i, row in enumerate(rows, 1)
    ])  # fmt: skip


def _filled(values: Values) -> Values:
    """Unknown values get the value of the row before."""
    known = np.where(np.isnan(values), 0, np.arange(len(values)))
    return values[np.maximum.accumulate(known)]


def number(row: dict[str, Any], column: str, line: int) -> float:
    """The value of a cell, as a finite number."""
    try:
        value = float(row[column])
    except (KeyError, TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"row {line}: {column!r} is {row.get(column)!r}; expected a finite number")
    return value


def _ledger_unit(path: Path) -> str | None:
    """The unit of `compute/...` from the ledger of a run folder, given the folder or a file in it."""
    ledger = next((p / "ledger.json" for p in (path, path.parent) if (p / "ledger.json").is_file()), None)
    if ledger is None:
        return None
    try:
        return str(json.loads(ledger.read_text())["unit"])
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{ledger} has no unit ({e!r}); give --unit") from e
