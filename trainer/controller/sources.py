"""The rows of a data source: a JSONL or parquet file, a set of the hub, or a generated task."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, DataConfig
from trainer.verifiers.kinds.reasoning_gym import generate

GENERATED = "reasoning_gym:"
GENERATED_SIZE = 2000  # items, where data.size is 0; the held-out prompts are chosen from so many
GENERATOR_SEED = 0  # fixed: the items never depend on the run's seed


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a source, and its place for error messages, such as `data.jsonl:3`."""

    place: str
    columns: dict[str, Any]
    needs_answer: bool = True  # False: the task's scorer judges, and there may be no single answer

    def value(self, column: str, keys: str) -> Any:
        """The value in a column; ConfigError, with the settings that name it, if there is no such column."""
        if column not in self.columns:
            present = ", ".join(map(repr, self.columns)) or "none"
            raise ConfigError(f"{self.place}: no column {column!r}; there are {present}; set {keys}")
        return self.columns[column]


def rows(source: str, config: DataConfig) -> Iterator[Row]:
    """All rows of a source, in its order. ConfigError with file and line for what cannot be read."""
    kind, _, name = source.partition(":")
    if kind == "reasoning_gym":
        return _generated(name, config)
    if kind == "datasets":
        return _table(source, _hub(name, config.options))
    path = Path(source).expanduser()
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"data source {source!r}: expected reasoning_gym:TASK, datasets:NAME, a .jsonl or .parquet file"
        )
    if not path.is_file():
        raise ConfigError(f"data file {source} does not exist (looked for {path.absolute()})")
    return _jsonl(path) if path.suffix == ".jsonl" else _table(source, _parquet(path))


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                columns = json.loads(line.decode("utf-8-sig"))
            except ValueError as e:  # bad JSON or bad UTF-8
                raise ConfigError(f"{path}:{number}: not a line of JSON: {e}") from e
            if not isinstance(columns, dict):
                raise ConfigError(
                    f'{path}:{number}: expected an object {{"column": value}}, found {line[:40]!r}'
                )
            yield Row(f"{path}:{number}", columns)


def _table(source: str, records: Iterable[dict[str, Any]]) -> Iterator[Row]:
    """The columns as the verifiers get them, through JSON; other values become text."""
    for number, columns in enumerate(records, 1):
        plain = json.loads(json.dumps(columns, default=str, skipkeys=True))
        yield Row(f"{source} row {number}", plain)


def _parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as e:
        raise ConfigError(f"{path}: not a readable parquet file: {' '.join(str(e).split())}") from e


def _hub(name: str, options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError as e:
        raise ConfigError(f"datasets:{name} needs the datasets package: pip install datasets") from e
    try:
        return datasets.load_dataset(name, **{"split": "train", **options})
    except Exception as e:  # of many kinds; its text is the user's clue
        raise ConfigError(f"datasets:{name} with data.options {options}: {' '.join(str(e).split())}") from e


def _generated(task: str, config: DataConfig) -> Iterator[Row]:
    """Items of a reasoning-gym task. The metadata has the whole item and its origin, for the scorer."""
    arguments = {"seed": GENERATOR_SEED, "size": max(config.size, GENERATED_SIZE), **config.options}
    for index, item in enumerate(generate(task, arguments)):
        columns = {**item, "origin": {"task": task, "arguments": arguments}}
        yield Row(f"reasoning_gym:{task} item {index}", columns, needs_answer=False)
