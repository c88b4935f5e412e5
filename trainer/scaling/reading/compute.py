"""The compute of the rows of a table: a column, steps × GPU-hours, or time × devices."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.tables import Rows

SINCE_1970 = 1e9  # a clock that starts beyond this many seconds shows a date

Values = list[float | None]  # by row; None: unknown


def compute_of(
    rows: Rows, columns: Sequence[str], path: Path, args: argparse.Namespace
) -> tuple[Values, str, str]:
    """C of each row (None before the first value), its unit, and its source.

    A row without a value gets that of the row before: trainers log rewards and compute in separate rows.
    """
    if args.devices is not None:
        column, per_step = names.seconds_column(columns, args.seconds_column)
        seconds, source = _seconds(rows, columns, column, per_step)
        return (
            _times(seconds, args.devices / 3600),
            args.unit or "GPU-hours",
            f"{source} × {args.devices:g} devices",
        )
    if args.gpu_hours_per_step is not None:
        step = names.step_column(columns, args.compute_column)
        hours = _times(_filled(_numbers(rows, step)), args.gpu_hours_per_step)
        return hours, args.unit or "GPU-hours", f"{step!r} × {args.gpu_hours_per_step:g} GPU-hours"
    column, unit = names.compute_column(columns, args.compute_column)
    if column.startswith("compute/"):
        unit = _ledger_unit(path) or unit
    return _filled(_numbers(rows, column)), args.unit or unit, repr(column)


def _seconds(rows: Rows, columns: Sequence[str], column: str, per_step: bool | None) -> tuple[Values, str]:
    """Seconds of training up to each row: the sum over its steps, or from a clock; and the source."""
    values = _numbers(rows, column)
    step = names.find_step(columns)
    steps = _filled(_numbers(rows, step)) if step else None
    back = _fall(steps or [])
    if back:
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
    known = [v for v in values if v is not None]
    return next(((a, b) for a, b in pairwise(known) if b < a), None)


def _added_up(values: Values, steps: Values | None) -> Values:
    """Sums of seconds per step; a row after several steps counts for all of them."""
    total, before = 0.0, 0.0
    sums: Values = []
    for i, value in enumerate(values):
        step = steps[i] if steps is not None else before + 1
        if value is not None and step is not None:
            total += value * max(0.0, step - before)
            before = max(before, step)
        sums.append(total)
    return sums


def _since_start(clock: Values, steps: Values | None, column: str) -> Values:
    """A clock's time since step 0, without start-up.

    If no row is of step 0, a clock that starts at 0 is used as it is, and the start of a date is extrapolated
    from the first row at the mean time per step.
    """
    known = [(t, s) for t, s in zip(clock, steps or clock, strict=True) if t is not None and s is not None]
    if not known:
        return clock
    (first, from_step), (last, to_step) = known[0], known[-1]
    at_start = [t for t, s in known if s <= 0] if steps is not None else []
    if at_start:
        start = at_start[-1]
    elif first < SINCE_1970:
        start = 0.0
    elif steps is not None and to_step > from_step:
        start = first - (last - first) * from_step / (to_step - from_step)
    else:
        raise ConfigError(
            f"{column!r} is a date and no column counts steps, so the start of the run is unknown"
        )
    return [None if t is None else max(0.0, t - start) for t in clock]


def _numbers(rows: Rows, column: str) -> Values:
    return [
        None if row.get(column) in (None, "") else number(row, column, i) for i, row in enumerate(rows, 1)
    ]


def _filled(values: Values) -> Values:
    """Missing values get the value of the row before."""
    filled: Values = []
    for value in values:
        filled.append(value if value is not None or not filled else filled[-1])
    return filled


def _times(values: Values, factor: float) -> Values:
    return [None if v is None else v * factor for v in values]


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
