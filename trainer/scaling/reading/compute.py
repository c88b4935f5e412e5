"""The compute of the rows of a run: a column, steps × GPU-hours, or time × devices."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trainer.config import ConfigError
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.clock import Mask, elapsed
from trainer.scaling.reading.options import ReadOptions
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
    rows: Sequence[Row], columns: Sequence[str], has_reward: Mask, options: ReadOptions
) -> tuple[Values, str | None, tuple[str, ...]]:
    """The step of each row (NaN: unknown), the name of its column, and notes."""
    found = [c for name in names.STEPS for c in names.matching(name, columns)]
    if options.compute_column in found or (options.compute_column and options.gpu_hours_per_step):
        found.insert(0, names.existing(options.compute_column, columns, "--compute-column"))
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
    options: ReadOptions,
) -> Compute:
    """From the column or by the option given, else from the best column."""
    if options.devices is not None:
        seconds, source, notes = elapsed(run, columns, has_reward, options)
        source = f"{source} × {options.devices:g} devices"
        return Compute(filled(seconds) * (options.devices / 3600), options.unit or "GPU-hours", source, notes)
    if options.gpu_hours_per_step is not None:
        if step is None:
            raise _unknown("steps", columns)
        source = f"{step!r} × {options.gpu_hours_per_step:g} GPU-hours"
        return Compute(run.steps * options.gpu_hours_per_step, options.unit or "GPU-hours", source)
    best = _best(run, step, columns, has_reward, options)
    ledger_unit = _ledger_unit(path) if best.source.startswith("'compute/") and best.unit != "FLOPs" else None
    return replace(best, unit=options.unit or ledger_unit or best.unit)


def _best(
    run: Survivors, step: str | None, columns: Sequence[str], has_reward: Mask, options: ReadOptions
) -> Compute:
    """The best column that grows over the rewards' rows, with a note on better ones that do not.

    Some columns are logged only once, at the end (`total_flos` of transformers).
    """
    tried: list[Compute] = []
    for column, unit in names.compute_columns(columns, options.compute_column):
        values = run.steps if column == step else filled(numbers(run.rows, column))
        unused = ", ".join(compute.source for compute in tried)
        note = f"{unused}: not used as compute, as there are no growing values where rewards are."
        tried.append(Compute(values, unit, repr(column), (note,) if unused else ()))
        at_rewards = values[has_reward]
        if len(np.unique(at_rewards[at_rewards > 0])) >= min(2, has_reward.sum()):
            return tried[-1]
    if tried:
        return tried[0]
    if times := names.time_columns(columns, None):
        message = f"compute is known only as time, {times[0][0]!r}: give --devices N, the number of GPUs"
        raise ConfigError(f"{message}, for GPU-hours")
    raise _unknown("compute", columns)


def _unknown(meaning: str, columns: Sequence[str]) -> ConfigError:
    listed = names.listed(columns, "--compute-column")
    return ConfigError(f"no column is recognized as {meaning}; set --compute-column to one of {listed}")


def _ledger_unit(path: Path) -> str | None:
    """The unit of `compute/...` from the ledger of a run folder, given the folder or a file in it."""
    ledger = next((p / "ledger.json" for p in (path, path.parent) if (p / "ledger.json").is_file()), None)
    if ledger is None:
        return None
    try:
        return str(json.loads(ledger.read_text())["unit"])
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{ledger} has no unit ({e!r}); give --unit") from e
