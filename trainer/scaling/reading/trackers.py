"""Reads what experiment trackers write, without their packages: Trackio's database, W&B's .wandb files."""

import json
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.scaling.reading.values import Row

WALL_TIME = "wall_time"  # of the last event of a row, in seconds since 1970
DATABASES = (".db", ".sqlite", ".sqlite3")
WANDB_MAGIC, WANDB_BLOCK = b":W&B", 32_768  # of LevelDB's log format, in which it is written


def joined(events: Iterable[tuple[int, float, Mapping[str, Any]]]) -> list[Row]:
    """A row for each step of (step, wall time, values), in their order.

    An event with a name that comes again at its step begins another row, as in a resumed run, and as an
    evaluation that is logged late, together with its compute.
    """
    rows: list[Row] = []
    by_step: dict[int, Row] = {}
    for step, time, values in events:
        row = by_step.get(step)
        if row is None or values.keys() & row.keys():
            row = by_step[step] = {"step": step, WALL_TIME: time}
            rows.append(row)
        row |= {**values, WALL_TIME: max(row[WALL_TIME], time)}
    return rows


def trackio(path: Path) -> dict[str, list[Row]]:
    """The runs of a project's database, by their names; ValueError: it is not Trackio's."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            logged = [dict(row) for row in database.execute("SELECT * FROM metrics ORDER BY id")]
    except sqlite3.Error as e:
        raise ValueError(f"not a database of Trackio ({e})") from e
    try:
        runs = _runs(logged)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise ValueError(f"not the rows that Trackio writes, or damaged ({type(e).__name__}: {e})") from e
    names = [name for name, _ in runs]
    titles = {key: key[0] if names.count(key[0]) == 1 else f"{key[0]}-{key[1][:6]}" for key in runs}
    tables = {titles[key]: joined(events) for key, events in runs.items()}
    return tables if len(tables) != 1 else {"": next(iter(tables.values()))}


def _runs(logged: Iterable[Row]) -> dict[tuple[str, str], list[tuple[int, float, Row]]]:
    """Step, wall time and numbers of each row of the database, by the name and the id of its run."""
    runs: dict[tuple[str, str], list[tuple[int, float, Row]]] = {}
    for row in logged:
        numbers = ((k, v) for k, v in json.loads(row["metrics"]).items() if isinstance(v, int | float))
        values = {key: value for key, value in numbers if not key.startswith("__")}  # __step: its own name's
        if values:
            name = str(row["run_name"]), str(row.get("run_id", ""))  # databases of before 0.24 have no ids
            time = datetime.fromisoformat(row["timestamp"]).timestamp()
            runs.setdefault(name, []).append((int(row["step"]), time, values))
    return runs


def wandb(path: Path) -> list[Row]:
    """The history of a run, up to where its file is damaged or not yet written; ValueError: not W&B's."""
    data = path.read_bytes()
    if data[:4] != WANDB_MAGIC:
        raise ValueError("not a file of W&B")
    try:
        parts = [part for record in _records(data) for number, part in _fields(record) if number == 2]
        histories = [[_item(item) for number, item in _fields(part) if number == 1] for part in parts]
    except (IndexError, TypeError, AttributeError, RecursionError, struct.error) as e:
        # These are not the messages that W&B writes.
        raise ValueError(f"not a history of W&B ({e})") from e
    return [{key: value for key, value in items if value is not None} for items in histories]


def _item(item: bytes) -> tuple[str, Any]:
    """The name and the value of wandb_internal.proto's HistoryItem; None for what is not a number or text."""
    names: list[str] = []
    value: Any = None
    for number, content in _fields(item):
        match number:
            case 1 | 2:  # key, or the parts of a nested one
                names.append(content.decode(errors="replace"))
            case 5:
                value = content >> 1 ^ -(content & 1)
            case 6:
                (value,) = struct.unpack("<d", content)
            case 7:
                value = content.decode(errors="replace")
            case 8 | 16:
                value = json.loads(content)
    return "/".join(filter(None, names)), value


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, of whole ones or of a first, middle and last part; each has a CRC-32."""
    position, parts = 7, b""  # after the file's own header
    while position + 7 <= len(data):
        if (room := WANDB_BLOCK - position % WANDB_BLOCK) < 7:
            position += room
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, position)
        content = data[position + 7 : position + 7 + length]
        if zlib.crc32(content, zlib.crc32(bytes([kind]))) != crc:
            return
        position += 7 + length
        parts = content if kind in (1, 2) else parts + content
        if kind in (1, 4):
            yield parts


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protobuf message: integers as they are, everything else as bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
            continue
        length = {1: 8, 5: 4}.get(tag & 7) or varint()
        yield tag >> 3, message[position : position + length]
        position += length
