"""The compute of the rows of a run: a column, steps × GPU-hours, or time × devices."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.config import ConfigError
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.clock import Mask, elapsed
from trainer.scaling.reading.resumed import Survivors
from trainer.scaling.reading.values import Row, Values, filled, numbers


@dataclass(frozen=True, slots=True)
class Compute:
    """C of each row (NaN before the first value), its unit and its source.

    A row without a value gets that of the row before: trainers log rewards and compute in separate rows.
    """

    values: Values  # (rows,)
    unit: str
    source: str
    notes: tuple[str, ...] = ()


def steps_of(
    rows: Sequence[Row], columns: Sequence[str], has_reward: Mask, args: argparse.Namespace
) -> tuple[Values, str | None, tuple[str, ...]]:
    """The step of each row (NaN: unknown), the name of its column, and notes."""
    found = names.step_columns(columns)
    if args.compute_column in found:
        found.insert(0, args.compute_column)
    if not found:
        return np.full(len(rows), np.nan), None, ()
    steps, notes = numbers(rows, found[0]), []
    for other in found[1:]:
        values = numbers(rows, other)
        both = ~np.isnan(steps) & ~np.isnan(values)
        lacks = np.isnan(steps) & ~np.isnan(values)
        if both.any() and lacks.any() and (steps[both] == values[both]).all():
            steps = np.where(lacks, values, steps)
            notes.append(f"Where {found[0]!r} is missing, {other!r} is used, which is equal everywhere else.")
    steps = filled(steps)
    before = np.flatnonzero(np.isnan(steps) & has_reward)
    if len(before) == 1 and len(steps) > 1 and not np.isnan(steps).all():
        steps[: before[0] + 1] = 0.0
        notes.append(f"The first reward, without {found[0]!r}, is taken to be from before step 1.")
    return steps, found[0], tuple(notes)


def compute_of(
    run: Survivors,
    step: str | None,
    columns: Sequence[str],
    has_reward: Mask,
    path: Path,
    args: argparse.Namespace,
) -> Compute:
    """From the column or by the option given, else from the best column."""
    if args.devices is not None:
        seconds, source, notes = elapsed(run, columns, has_reward, args)
        source = f"{source} × {args.devices:g} devices"
        return Compute(filled(seconds) * (args.devices / 3600), args.unit or "GPU-hours", source, notes)
    if args.gpu_hours_per_step is not None:
        column = args.compute_column and names.existing(args.compute_column, columns, "--compute-column")
        if column is None and step is None:
            raise ConfigError(
                f"no column is recognized as steps; set --compute-column to one of {names.listed(columns)}"
            )
        per_step = args.gpu_hours_per_step
        steps = run.steps if column in (None, step) else filled(numbers(run.rows, column))
        source = f"{column or step!r} × {per_step:g} GPU-hours"
        return Compute(steps * per_step, args.unit or "GPU-hours", source)
    column, unit, values, unused = _best(run, step, columns, has_reward, args)
    if column.startswith("compute/"):
        unit = _ledger_unit(path) or unit
    return Compute(values, args.unit or unit, repr(column), unused)


def _best(
    run: Survivors, step: str | None, columns: Sequence[str], has_reward: Mask, args: argparse.Namespace
) -> tuple[str, str, Values, tuple[str, ...]]:
    """The best column that grows over the rewards' rows, with unit and values; a note on the others.

    Some columns are logged only once, at the end (`total_flos` of transformers).
    """
    found = names.compute_columns(columns, args.compute_column)
    if not found:
        if times := names.time_columns(columns, None):
            raise ConfigError(
                f"compute is known only as time, {times[0][0]!r}: give --devices N, the number of GPUs, for "
                "GPU-hours"
            )
        raise ConfigError(
            f"no column is recognized as compute; set --compute-column to one of {names.listed(columns)}"
        )
    unused: list[str] = []
    tried = []
    for column, unit in found:
        values = run.steps if column == step else filled(numbers(run.rows, column))
        tried.append((column, unit, values))
        at_rewards = values[has_reward]
        if len(np.unique(at_rewards[at_rewards > 0])) >= min(2, has_reward.sum()):
            note = f"{_quoted(unused)} has no growing values where rewards are: not used as compute."
            return column, unit, values, (note,) if unused else ()
        unused.append(column)
    return *tried[0], ()


def _quoted(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns))


def _ledger_unit(path: Path) -> str | None:
    """The unit of `compute/...` from the ledger of a run folder, given the folder or a file in it."""
    ledger = next((p / "ledger.json" for p in (path, path.parent) if (p / "ledger.json").is_file()), None)
    if ledger is None:
        return None
    try:
        return str(json.loads(ledger.read_text())["unit"])
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{ledger} has no unit ({e!r}); give --unit") from e
