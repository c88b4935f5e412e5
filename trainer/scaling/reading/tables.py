"""Reads the files of any trainer as tables: rows of named values, one table for each run in the file."""

import csv
import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar, cast

from trainer.config import ConfigError
from trainer.run_folder import EVALUATIONS, RESULTS
from trainer.scaling.reading.console import console, notebook
from trainer.scaling.reading.shapes import runs_of
from trainer.scaling.reading.trackers import DATABASES, joined, trackio, wandb
from trainer.scaling.reading.values import Row

EXPECTED = (
    "expected a run folder, a table (.csv, .tsv, .jsonl, .json, .parquet), a W&B export or .wandb file, "
    "Trackio's database, TensorBoard events, a trainer's console log or a notebook"
)
NUMBER = re.compile(r"\s*[-+]?(?:\d+\.?|\d*\.\d+)(?:[eE][-+]?\d+)?%?\s*")
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".pq")
T = TypeVar("T")
METRICS = "metrics.jsonl"  # of our runs; beside it the results of `python -m trainer.evaluate`
TRAINER_STATE = "trainer_state.json"


def read_tables(path: Path) -> tuple[Path, dict[str, list[Row]]]:
    """The file read, and its rows by the name of the run, "" if there is one. ConfigError: what is wrong.

    FILE/RUN are the rows of one run, or of those whose names match, in a table that has a column of runs.
    """
    if path.parent.is_file():
        return path.parent, _chosen(path)
    file = _file_in(path) if path.is_dir() else path
    if file.is_dir():
        tables = _event_runs(file)
    elif not file.is_file():
        raise ConfigError(f"{file} does not exist; {EXPECTED}")
    elif file.suffix in DATABASES:
        tables = _read(trackio, file)
    elif file.suffix == ".wandb":
        tables = {"": _read(wandb, file)}
    elif "tfevents" in file.name:
        tables = {"": _events([file])}
    else:
        later = file.parent.glob(f"{EVALUATIONS}/*/{RESULTS}") if file.name == METRICS else ()
        tables = runs_of([_flat(row) for part in (file, *sorted(later)) for row in _rows(part)])
    tables = {name: rows for name, rows in tables.items() if rows}
    if not tables:
        raise ConfigError(f"{path} is empty, or holds no metrics; {EXPECTED}")
    return file, tables


def _chosen(path: Path) -> dict[str, list[Row]]:
    """The runs of FILE/RUN."""
    tables = {name or str(rows[0].get("run", "")): rows for name, rows in read_tables(path.parent)[1].items()}
    chosen = {name: rows for name, rows in tables.items() if fnmatchcase(name, path.name)}
    if not chosen:
        raise ConfigError(f"{path.parent} has no run {path.name!r}; it has {', '.join(tables)}")
    return chosen


def _file_in(folder: Path) -> Path:
    """The file of a folder's metrics: ours, or that of transformers' last checkpoint; else the folder."""
    for name in (METRICS, TRAINER_STATE):
        if (folder / name).is_file():
            return folder / name
    runs = sorted(p.parent.name for p in folder.glob(f"*/{METRICS}"))
    if runs:
        raise ConfigError(
            f"{folder} is a folder of {len(runs)} runs ({', '.join(runs[:3])} …); give {folder}/*"
        )
    states = folder.glob(f"checkpoint-*/{TRAINER_STATE}")
    return max(states, key=lambda p: int(p.parent.name.rpartition("-")[2]), default=folder)


def _event_runs(path: Path) -> dict[str, list[Row]]:
    """TensorBoard events, where each folder with events is a run."""
    folders = sorted({p.parent for p in path.rglob("*tfevents*") if p.is_file()})
    beside = sorted(p.name for p in path.iterdir() if p.suffix.lower() in TABLES)
    if beside and path not in folders:
        logs = [*beside, *(str(f.relative_to(path)) for f in folders)]
        listed = ", ".join(logs[:20]) + (" …" if len(logs) > 20 else "")
        raise ConfigError(f"{path} is a folder of several logs; give one: {listed}")
    if not folders:
        offline: dict[str, list[Row]] = {}
        for file in wandb_files(path):
            rows = _read(wandb, file) if file.stat().st_size else []
            offline.setdefault(file.stem.removeprefix("run-"), []).extend(rows)
        if offline:
            return offline
        raise ConfigError(f"{path} holds no {METRICS}, {TRAINER_STATE} or TensorBoard events; {EXPECTED}")
    runs = {str(f.relative_to(path)): _events(sorted(f.glob("*tfevents*"), key=_numbers)) for f in folders}
    return runs if len(runs) > 1 else {"": next(iter(runs.values()))}


def wandb_files(folder: Path) -> list[Path]:
    """The .wandb files in a folder, oldest first: a resumed run has one for each start, a killed one may have
    one without a byte.
    """
    files = {file.resolve() for file in folder.rglob("*.wandb")}  # latest-run is a link
    return sorted(files, key=lambda file: (file.parent.name.removeprefix("offline-"), file))


def _numbers(file: Path) -> list[tuple[int, str]]:
    """The name of a file, with its numbers (the time of its start, a counter) in order of their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", file.name)]


def _events(files: Sequence[Path]) -> list[Row]:
    """A row for each step of TensorBoard's scalars, in the order of the files; tags are columns.

    A file is read up to where it is damaged or not yet written.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # takes a second

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    return [row for file in files for row in joined(_scalars(EventFileLoader(str(file)).Load()))]


def _scalars(events: Iterable[Any]) -> Iterator[tuple[int, float, Row]]:
    """Step, wall time and scalars of each event that has some."""
    for event in events:
        values = {summary.tag: _scalar(summary.tensor) for summary in event.summary.value}
        if scalars := {tag: value for tag, value in values.items() if value is not None}:
            yield event.step, event.wall_time, scalars


def _scalar(tensor: Any) -> float | None:
    """The number of a tensor of one, also of those of old writers, which the loader converts."""
    from tensorboard.util.tensor_util import make_ndarray

    if tensor.string_val or tensor.ByteSize() == 0:
        return None
    array = make_ndarray(tensor)
    return float(array.item()) if array.size == 1 else None


def _read(reader: Callable[[Path], T], path: Path) -> T:
    """Read a file by the reader of its format; ConfigError: it is not of that format."""
    try:
        return reader(path)
    except (ValueError, OSError) as e:
        raise ConfigError(f"{path}: {one_line(e)}; {EXPECTED}") from e


def _rows(path: Path) -> list[Row]:
    """The rows of a file by its ending; else by what it begins with."""
    compressed = path.suffix == ".gz"
    kind = (path.with_suffix("") if compressed else path).suffix.lower()
    try:
        if kind in (".parquet", ".pq"):
            return _parquet(path)
        content = gzip.decompress(path.read_bytes()) if compressed else path.read_bytes()
        # A console log may have broken bytes.
        text = content.decode("utf-8-sig", "strict" if kind in READERS else "replace")
        if "\0" in text:
            raise ValueError("it is not text")
        return READERS.get(kind, _any)(text)
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not text; {EXPECTED}") from e
    except (ValueError, csv.Error, OSError, EOFError, zlib.error, RecursionError) as e:
        raise ConfigError(f"{path}: {one_line(e)}; {EXPECTED}") from e


def _any(text: str) -> list[Row]:
    """A file that may be any text: a console log, JSON, JSON lines or a table."""
    reader, problem = {"[": _json, "{": _json_lines}.get(text[:1]), None
    try:
        if reader and (rows := reader(text)):
            return rows
    except ValueError as e:  # a console's lines may begin so, too
        problem = e
    if rows := console(text):
        return rows
    if problem:
        raise problem
    with suppress(ValueError, csv.Error):
        if ((rows := _table(text)) and len(rows[0]) > 1) or not text.strip():
            return rows
    raise ValueError("it is neither a table nor a log with lines of metrics")


def _table(text: str) -> list[Row]:
    """Cells separated by comma, tab or semicolon, whichever is most frequent in the header."""
    header = text.partition("\n")[0]
    cells = csv.DictReader(text.splitlines(), delimiter=max(",\t;", key=header.count), strict=True)
    names = [n for n in cells.fieldnames or () if n]
    if all(map(NUMBER.fullmatch, names)) and names != [str(i) for i in range(len(names))]:  # pandas' own
        raise ValueError(f"its first line is {', '.join(names[:3])}; expected the names of the columns")
    if repeated := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"two columns are named {repeated[0]!r}; rename one")
    rows = []
    for row in cells:
        if None in row:
            raise ValueError(f"line {cells.line_num} has more cells than the header")
        rows.append({k.strip(): v.strip() if v else v for k, v in row.items()})
    if rows and not text.endswith("\n") and None in rows[-1].values():
        rows.pop()  # the last line may be only partly written
    return rows


def _json_lines(text: str) -> list[Row]:
    """One object a line; the last line may be only partly written."""
    rows = []
    *whole, rest = text.split("\n")
    for number, line in enumerate(whole, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as e:
                raise ValueError(f"line {number} is not JSON ({e})") from e
    with suppress(ValueError):  # partly written, or empty
        rows.append(json.loads(rest))
    return _objects(rows)


def _json(text: str) -> list[Row]:
    """A list of objects, also as `log_history` (transformers' trainer_state.json), or lists by column."""
    content = json.loads(text) if text.strip() else []
    if isinstance(content, dict) and not isinstance(content := content.get("log_history", content), list):
        columns = {k: list(v.values()) if isinstance(v, dict) else v for k, v in content.items()}
        if not columns or not all(isinstance(v, list) for v in columns.values()):
            raise ValueError("it is neither a list of objects nor lists by column")
        if len({len(v) for v in columns.values()}) > 1:
            raise ValueError("its columns have different lengths")
        content = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return _objects(content)


def _objects(rows: Any) -> list[Row]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("a row is not an object")
    return rows


READERS: dict[str, Callable[[str], list[Row]]] = {
    **dict.fromkeys((".csv", ".tsv"), _table),
    **dict.fromkeys((".jsonl", ".ndjson"), _json_lines),
    ".json": _json,
    ".ipynb": notebook,
}


def _parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return cast(list[Row], pyarrow.parquet.read_table(path).to_pylist())
    except pyarrow.ArrowException as e:
        raise ValueError(f"not parquet ({one_line(e)})") from e


def _flat(row: Row, prefix: str = "") -> Row:
    """Nested objects as `outer/inner`, without verl's outer `data`."""
    flat: Row = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _flat(value, prefix if key == "data" else f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


def one_line(error: BaseException) -> str:
    """An error's message for an error line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
