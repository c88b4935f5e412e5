"""Logs of runs for tests of reading: write them as tables, read them as on a command line."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from trainer.scaling.curve.sigmoid import Curve, EvalPoint
from trainer.scaling.reading.options import Parser, ReadOptions
from trainer.scaling.reading.read import Reading, read_groups, read_inputs


def parsed(words: Sequence[object]) -> tuple[list[str], ReadOptions]:
    """The inputs and options of a command line."""
    parser = Parser(prog="")
    parser.add_argument("inputs", nargs="+")
    ReadOptions.add_to(parser)
    arguments = parser.parse_args([str(word) for word in words])
    return arguments.inputs, ReadOptions.from_arguments(arguments)


def readings_of(*words: object) -> list[Reading]:
    return read_inputs(*parsed(words))


def reading_of(*words: object) -> Reading:
    (reading,) = readings_of(*words)
    return reading


def groups_of(*words: object) -> dict[str, list[Reading]]:
    return read_groups(*parsed(words))


def curve_at(*words: object) -> Curve:
    return reading_of(*words).curve


def pairs(curve: Curve) -> list[tuple[float, float]]:
    return [(pytest.approx(p.compute), pytest.approx(p.pass_rate)) for p in curve.points]


def start_of(curve: Curve) -> float | None:
    return curve.R0.pass_rate if isinstance(curve.R0, EvalPoint) else curve.R0


def says(reading: Reading, *parts: str) -> bool:
    """True if a note contains all the parts, in one line."""
    return any(all(part in note for part in parts) and "\n" not in note for note in reading.notes)


def write_csv(path: Path, columns: Mapping[str, Sequence[object]], delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        table = csv.writer(file, delimiter=delimiter)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
    return path


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Logged = Sequence[tuple[int, float, Mapping[str, float]]]  # step, wall time, values by tag


def write_events(folder: Path, rows: Logged, name: str = "1.host.1.0", tensors: bool = False) -> Path:
    """A file of TensorBoard events, of new writers as tensors."""
    writer = EventFileWriter(str(folder), filename_suffix=".new")
    kind = "tensor" if tensors else "simple_value"
    for step, wall_time, values in rows:
        values_of = {k: make_tensor_proto(v) if tensors else v for k, v in values.items()}
        summary = Summary(value=[Summary.Value(tag=k, **{kind: v}) for k, v in values_of.items()])
        writer.add_event(Event(step=step, wall_time=wall_time, summary=summary))
    writer.close()
    next(folder.glob("*.new")).rename(folder / f"events.out.tfevents.{name}")
    return folder
