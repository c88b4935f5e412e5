"""The compute of the rows of a run: a column, steps × GPU-hours, or time × devices."""

import json
from pathlib import Path

import numpy as np

from trainer.config import ConfigError
from trainer.scaling.reading import columns as names
from trainer.scaling.reading.clock import elapsed
from trainer.scaling.reading.log import Log
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.values import Values, filled, numbers


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
    listed = names.listed(log.columns, "--compute-column")
    return ConfigError(f"no column is recognized as {meaning}; set --compute-column to one of {listed}")


def _ledger_unit(path: Path) -> str | None:
    """The unit of `compute/...` from the ledger of a run folder, given the folder or a file in it."""
    ledger = next((p / "ledger.json" for p in (path, path.parent) if (p / "ledger.json").is_file()), None)
    try:
        return str(json.loads(ledger.read_text())["unit"]) if ledger else None
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{ledger} has no unit ({e!r}); give --unit") from e
