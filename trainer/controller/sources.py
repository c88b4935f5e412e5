"""The rows of a data source: a file of JSON, CSV or parquet, a set of the hub, a generated task, a function.

A column may be nested: `choices.text` is the column `text` within `choices`, be that a record or a list of
records (then it is the list of their values), and a number is a place in a list, from 0.
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.config import Config, ConfigError, DataConfig, SetConfig, TaskConfig
from trainer.environments.pool import EnvironmentPool
from trainer.environments.worker import environment_class
from trainer.verifiers.kinds.function import imported
from trainer.verifiers.kinds.reasoning_gym import generate

GENERATED = "reasoning_gym:"
GENERATED_SIZE = 2000  # items, where data.size is 0; the held-out prompts are chosen from so many
GENERATOR_SEED = 0  # fixed: the items never depend on the run's seed
HUB = "datasets:"
FUNCTION = re.compile(r"[\w.]+:\w+")  # the user's; matches the prefixes of the others, which come first
CELL_CHARS = 2**24  # the longest cell of a CSV file; the module's own limit is 2**17
PARQUET_ROWS = 1024  # in memory at once: of 10 kB each, 0.12 GB in all, where pyarrow's 65,536 took 0.75
STREAMED_SIZE = 10_000  # rows of a stream, which may never end, from which the held-out prompts are chosen


class RowError(Exception):
    """The reason why a row cannot be used; up to a share, such rows are skipped."""


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a source, and its place for error messages, such as `data.jsonl:3`."""

    place: str
    columns: dict[str, Any]
    needs_answer: bool = True  # False: the task's scorer judges, and there may be no single answer
    letter: str = ""  # of the right option, once the options are read
    problem: str = ""  # a reason why it could not be read

    def value(self, column: str, keys: str) -> Any:
        """The value in a column; RowError, with the settings that name it, if there is no such column."""
        return value_at(self.columns, column, f"; set {keys}")


def value_at(columns: Mapping[str, Any], column: str, advice: str = "") -> Any:
    """The value in a column, which may be nested; RowError if there is none."""
    try:
        return columns[column] if column in columns else _within(columns, column.split("."))
    except LookupError as e:
        present = ", ".join(map(repr, columns)) or "none"
        raise RowError(f"no column {column!r}; there are {present}{advice}") from e


def _within(value: Any, path: list[str]) -> Any:
    if not path:
        return value
    name, *rest = path
    if isinstance(value, list) and not name.isdecimal():
        return [_within(item, path) for item in value]
    if not isinstance(value, Mapping | list):
        raise LookupError
    return _within(value[int(name)] if isinstance(value, list) else value[name], rest)


def sources_of(config: Config) -> list[tuple[str, TaskConfig | SetConfig]]:
    """All sources of a run's prompts, each with the task or held-out set that reads it."""
    tasks = [(s, t) for t in config.tasks.values() for s in (t.data.source, t.data.held_out_source) if s]
    return [*tasks, *((one.data.held_out_source or one.data.source, one) for one in config.sets.values())]


def check_sources(config: Config) -> None:
    """ConfigError for what a run cannot read, before anything is loaded."""
    for source, one in sources_of(config):
        check_source(source)
        is_here(source)
        if one.data.map:
            imported("data.map", one.data.map)
        if one.environment.python:  # whose modules may be missing here
            EnvironmentPool(one.environment, print).close()
        elif one.environment.kind:
            environment_class(one.environment.kind, one.environment.options)


def check_source(source: str) -> None:
    """ConfigError for a source that cannot be one, or whose package is missing."""
    if _is_function(source):
        imported("data.source", source)
        return
    local = not source.startswith((GENERATED, HUB))
    if local and Path(source).suffix not in (".jsonl", ".json", ".csv", ".parquet"):
        raise ConfigError(
            f"data source {source!r}: expected reasoning_gym:TASK, datasets:NAME, a .jsonl, .json, .csv "
            "or .parquet file, or module:function"
        )
    package = "datasets" if source.startswith(HUB) else "pyarrow" if source.endswith(".parquet") else ""
    if package and find_spec(package) is None:
        raise ConfigError(f"{source} needs the package {package}: pip install {package}")


def is_here(source: str, needed: bool = False) -> bool:
    """True for a file on this machine; ConfigError if it is not and is needed, or its folder is here."""
    path = Path(source).expanduser()
    if source.startswith((GENERATED, HUB)) or _is_function(source):
        return False
    if not path.is_file() and (needed or path.parent.is_dir()):
        raise ConfigError(f"data file {source} does not exist (looked for {path.absolute()})")
    return path.is_file()


def chosen_from(source: str, config: DataConfig) -> float:
    """The number of a source's first rows from which the held-out prompts are chosen: never by data.size."""
    if source.startswith(GENERATED):
        return GENERATED_SIZE
    streamed = source.startswith(HUB) and config.options.get("streaming")
    return STREAMED_SIZE if streamed else math.inf


def rows(source: str, config: DataConfig) -> Iterator[Row]:
    """All rows of a source, in its order. ConfigError with file and line for what cannot be read."""
    check_source(source)
    kind, _, name = source.partition(":")
    if _is_function(source):
        return _rows_of_function(source, config)
    if kind == "reasoning_gym":
        return _generated(name, config)
    if kind == "datasets":
        return _table(source, _hub(name, config.options))
    is_here(source, needed=True)
    path = Path(source).expanduser()
    if path.suffix == ".parquet":
        return _table(source, _parquet(path))
    return {".jsonl": _jsonl, ".json": _json, ".csv": _csv}[path.suffix](path)


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _row(f"{path}:{number}", *_parsed(line, "not a line of JSON"))


def _json(path: Path) -> Iterator[Row]:
    """The objects of a list, or, where the file does not begin with one, one a line."""
    content = path.read_bytes()
    if not content.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"["):
        yield from _jsonl(path)
        return
    records, problem = _parsed(content, "not readable as JSON")
    if problem:
        raise ConfigError(f"{path}: {problem}")
    for number, columns in enumerate(records, 1):
        yield _row(f"{path} row {number}", columns)


def _parsed(data: bytes, none: str) -> tuple[Any, str]:
    """The value of JSON in UTF-8, and the problem if the data are `none`."""
    try:
        return json.loads(data.decode("utf-8-sig")), ""
    except UnicodeDecodeError as e:
        return {}, _no_utf8(e.object[e.start])
    except ValueError as e:
        return {}, f"{none}: {e}"


def _row(place: str, columns: Any, problem: str = "") -> Row:
    """The row, with the problem that its value is no object."""
    if isinstance(columns, dict):
        return Row(place, columns, problem=problem)
    return Row(place, {}, problem=f'expected an object {{"column": value}}, found {json.dumps(columns)[:40]}')


def _csv(path: Path) -> Iterator[Row]:
    """The rows below a header, with text in every column. A place is the last line of its row."""
    csv.field_size_limit(CELL_CHARS)
    start = 1  # line of the row
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            names = reader.fieldnames or []
            twice = next((f"the header names {n!r} twice" for n in names if n and names.count(n) > 1), "")
            if problem := _foreign_bytes(names) or twice:
                raise ConfigError(f"{path}:{reader.line_num}: {problem}")
            start = reader.line_num + 1
            for columns in reader:
                wrong = _foreign_bytes(columns.values())
                if columns.pop(None, None):
                    wrong = f"more than the {len(columns)} cells of the header; put quotes around commas"
                yield Row(f"{path}:{reader.line_num}", {} if wrong else columns, problem=wrong)
                start = reader.line_num + 1
        except csv.Error as e:
            advice = "a quote within a quoted cell has to be doubled"
            raise ConfigError(f"{path}:{start}: the row that begins here is not CSV: {e}; {advice}") from e


def _foreign_bytes(cells: Iterable[Any]) -> str:
    text = "".join(map(str, cells))
    return next((_no_utf8(ord(c) & 0xFF) for c in text if "\udc80" <= c <= "\udcff"), "")


def _no_utf8(byte: int) -> str:
    return f"byte 0x{byte:02x} is not UTF-8; convert the file, as with iconv -f latin1 (or utf-16) -t utf-8"


def _table(source: str, records: Iterable[dict[str, Any]]) -> Iterator[Row]:
    """The columns as the verifiers get them, through JSON; other values become text."""
    for number, columns in enumerate(records, 1):
        yield Row(f"{source} row {number}", plain(columns))


def plain(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns as values of JSON; others become text."""
    values: dict[str, Any] = json.loads(json.dumps(columns, default=str, skipkeys=True))
    return values


def _is_function(source: str) -> bool:
    return not source.startswith((GENERATED, HUB)) and bool(FUNCTION.fullmatch(source))


def _rows_of_function(source: str, config: DataConfig) -> Iterator[Row]:
    """The dicts that the user's function yields, in its order."""
    number, place = 0, f"{source} row"
    try:
        for number, columns in enumerate(imported("data.source", source)(**config.options), 1):
            wrong = "" if isinstance(columns, dict) else f"it is {columns!r:.60}; expected a dict"
            yield Row(f"{place} {number}", {} if wrong else plain(columns), problem=wrong)
    except Exception as e:  # the user's function may raise anything
        error = f"{type(e).__name__}: {' '.join(str(e).split())}"
        raise ConfigError(f"data.source {source} raised {error} after {number} rows") from e


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(PARQUET_ROWS):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as e:
        raise ConfigError(f"{path}: not a readable parquet file: {' '.join(str(e).split())}") from e


def _hub(name: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of NAME or NAME:SPLIT; without a split, of that in the options, or `train`."""
    import datasets

    path, _, split = name.partition(":")
    arguments = {"split": "train", **options} | ({"split": split} if split else {})
    try:
        yield from datasets.load_dataset(path, **arguments)
    except Exception as e:  # of many kinds; its text, or its cause's, is the user's clue
        error = " ".join(f"{e} {e.__cause__ or ''}".split())[:500]
        raise ConfigError(f"datasets:{name} with data.options {options}: {error}") from e


def _generated(task: str, config: DataConfig) -> Iterator[Row]:
    """Items of a reasoning-gym task. The metadata has the whole item and its origin, for the scorer."""
    arguments = {"seed": GENERATOR_SEED, "size": max(config.size, GENERATED_SIZE), **config.options}
    for index, item in enumerate(generate(task, arguments)):
        columns = {**item, "origin": {"task": task, "arguments": arguments}}
        yield Row(f"reasoning_gym:{task} item {index}", columns, needs_answer=False)
