"""TensorBoard scalars as rows. Imported only where there are any: tensorboard takes a second to load."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from trainer.scaling.reading.values import Row

WALL_TIME = "wall_time"  # of the last event of a row, in seconds since 1970


def read_events(files: Sequence[Path]) -> list[Row]:
    """A row for each step, in the order of the files; tags are columns.

    An event with a tag that comes again at its step begins another row, as in the files of a resumed run, and
    as an evaluation that is logged late, together with its compute.
    """
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    rows: list[Row] = []
    for file in files:
        by_step: dict[int, Row] = {}
        for step, wall_time, scalars in _events(file):
            row = by_step.get(step)
            if row is None or scalars.keys() & row.keys():
                row = by_step[step] = {"step": step, WALL_TIME: wall_time}
                rows.append(row)
            row |= scalars
            row[WALL_TIME] = max(row[WALL_TIME], wall_time)
    return rows


def _events(file: Path) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Step, wall time and values by tag, up to where the file is damaged or not yet written."""
    for event in EventFileLoader(str(file)).Load():
        values = {summary.tag: _scalar(summary.tensor) for summary in event.summary.value}
        if scalars := {tag: value for tag, value in values.items() if value is not None}:
            yield event.step, event.wall_time, scalars


def _scalar(tensor: Any) -> float | None:
    """Scalars are tensors of one number, also those of old writers, which the loader converts."""
    if tensor.string_val or tensor.ByteSize() == 0:
        return None
    array = make_ndarray(tensor)
    return float(array.item()) if array.size == 1 else None
