"""Reads the files of any trainer as tables: rows of named values, one table for each run in the file."""

import csv
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from trainer.config import ConfigError

Rows = list[dict[str, Any]]
EXPECTED = (
    "expected a run folder, a table (.csv, .tsv, .jsonl, .json, .parquet), a W&B export or TensorBoard events"
)
METRICS = "metrics.jsonl"
WALL_TIME = "wall_time"  # of TensorBoard events, in seconds since 1970


def read_tables(path: Path) -> dict[str, Rows]:
    """The rows by the name of the run, "" if there is one. ConfigError: one line that says what is wrong."""
    if path.is_dir():
        tables = _folder(path)
    elif not path.is_file():
        raise ConfigError(f"{path} does not exist; {EXPECTED}")
    elif "tfevents" in path.name:
        tables = {"": _events(path)}
    else:
        tables = _wandb_runs([_flat(row) for row in _rows(path)])
    tables = {name: rows for name, rows in tables.items() if rows}
    if not tables:
        raise ConfigError(f"{path} is empty; {EXPECTED}")
    return tables


def _folder(path: Path) -> dict[str, Rows]:
    """The metrics of a run folder, or TensorBoard events, where each folder with events is a run."""
    if (path / METRICS).is_file():
        return {"": [_flat(row) for row in _rows(path / METRICS)]}
    runs = sorted(p.parent.name for p in path.glob(f"*/{METRICS}"))
    if runs:
        raise ConfigError(f"{path} is a folder of {len(runs)} runs ({', '.join(runs[:3])} …); give {path}/*")
    folders = sorted({p.parent for p in path.rglob("*tfevents*") if p.is_file()})
    if not folders:
        raise ConfigError(f"{path} holds neither {METRICS} nor TensorBoard events; {EXPECTED}")
    if len(folders) == 1:
        return {"": _events(folders[0])}
    return {str(f.relative_to(path)): _events(f) for f in folders}


def _rows(path: Path) -> Rows:
    kind = path.suffix.lower()
    try:
        if kind in (".parquet", ".pq"):
            return _parquet(path)
        text = path.read_text(encoding="utf-8-sig")
        if "\0" in text:
            raise ValueError("it is not text")
        if kind == ".json" or (kind not in (".csv", ".tsv", ".jsonl", ".ndjson") and text[:1] == "["):
            return _json(text)
        if kind in (".jsonl", ".ndjson") or text[:1] == "{":
            return _json_lines(text)
        return _table(text)
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not text; {EXPECTED}") from e
    except (ValueError, csv.Error, OSError) as e:
        raise ConfigError(f"{path}: {_line(e)}; {EXPECTED}") from e


def _table(text: str) -> Rows:
    """Cells separated by comma, tab or semicolon, whichever is most frequent in the header."""
    header = text.partition("\n")[0]
    cells = csv.DictReader(text.splitlines(), delimiter=max(",\t;", key=header.count), strict=True)
    names = [n for n in cells.fieldnames or () if n]
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


def _json_lines(text: str) -> Rows:
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


def _json(text: str) -> Rows:
    """A list of objects, also as `log_history` (transformers' trainer_state.json), or lists by column."""
    content = json.loads(text) if text.strip() else []
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        content = content["log_history"]
    if isinstance(content, dict):
        columns = {k: list(v.values()) if isinstance(v, dict) else v for k, v in content.items()}
        if not columns or not all(isinstance(v, list) for v in columns.values()):
            raise ValueError("it is neither a list of objects nor lists by column")
        if len({len(v) for v in columns.values()}) > 1:
            raise ValueError("its columns have different lengths")
        content = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return _objects(content)


def _objects(rows: Any) -> Rows:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("a row is not an object")
    return rows


def _parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        return cast(Rows, pyarrow.parquet.read_table(path).to_pylist())
    except pyarrow.ArrowException as e:
        raise ValueError(f"not parquet ({_line(e)})") from e


def _events(path: Path) -> Rows:
    """TensorBoard scalars by step, with the wall time; tags are columns."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of repeated graphs
    try:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    except Exception as e:  # its errors have no common class
        raise ConfigError(f"{path}: not TensorBoard events ({_line(e)}); {EXPECTED}") from e
    tags = events.Tags()
    scalars = [(tag, event, event.value) for tag in tags["scalars"] for event in events.Scalars(tag)]
    for tag in tags["tensors"]:  # TensorFlow 2 and JAX write scalars like this
        for event in events.Tensors(tag):
            if not event.tensor_proto.string_val and (value := make_ndarray(event.tensor_proto)).size == 1:
                scalars.append((tag, event, float(value.item())))
    rows: dict[int, dict[str, Any]] = {}
    for tag, event, value in scalars:
        row = rows.setdefault(event.step, {"step": event.step, WALL_TIME: event.wall_time})
        row[WALL_TIME] = max(row[WALL_TIME], event.wall_time)
        row[tag] = value
    return [rows[step] for step in sorted(rows)]


def _wandb_runs(rows: Rows) -> dict[str, Rows]:
    """The CSV of a W&B chart (`run - metric`, `run - metric__MIN`, …) by run; any other table unchanged."""
    columns = dict.fromkeys(c for row in rows for c in row)
    charted = [c for c in columns if " - " in c and f"{c}__MIN" in columns and f"{c}__MAX" in columns]
    if not charted:
        return {"": rows}
    shared = [c for c in columns if c not in charted and c.removesuffix("__MIN").removesuffix("__MAX") == c]
    runs: dict[str, Rows] = {}
    for run in dict.fromkeys(c.rpartition(" - ")[0] for c in charted):
        metrics = {c: c.rpartition(" - ")[2] for c in charted if c.rpartition(" - ")[0] == run}
        named = {**{c: c for c in shared}, **metrics}
        runs[run] = [{named[c]: row.get(c) for c in named} for row in rows]
    return runs


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as `outer/inner`, without verl's outer `data`."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _flat(value, prefix if key == "data" else f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
