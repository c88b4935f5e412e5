"""Prompts from a data source: rows -> template -> deduplicated prompts -> train and held-out split.

A prompt's id is the hash of its text (before any chat template), and the held-out prompts are those with
the smallest ids, so the split depends on the texts only. Wrong input is a ConfigError that names the file
and line.
"""

import hashlib
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, DataConfig
from trainer.types import Answer, Prompt
from trainer.verifiers.kinds.reasoning_gym import generate

GENERATED_SIZE = 2000  # items, where data.size is 0
GENERATOR_SEED = 0  # fixed: the items never depend on the run's seed
ID_CHARS = 16  # 64 bits of SHA-256


@dataclass(frozen=True, slots=True)
class Dataset:
    """The prompts of a run; no training prompt is held out."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    sets: dict[str, tuple[Prompt, ...]] = field(default_factory=dict)  # the further held-out sets

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All of them."""
        return (*self.train, *self.held_out, *chain.from_iterable(self.sets.values()))


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a source, and its place for error messages, such as `data.jsonl:3`."""

    place: str
    columns: dict[str, Any]
    needs_answer: bool = True  # False: the task's scorer judges, and there may be no single answer


def load_prompts(config: DataConfig, tokenizer: Any, task: str = "") -> Dataset:
    """Read, check, tokenise and split the prompts of a task. `tokenizer`: a transformers tokenizer."""
    prompts = _prompts(config.source, config, tokenizer, task, limit=config.size)
    if not config.held_out_source:
        if len(prompts) <= config.held_out:
            raise ConfigError(
                f"{config.source}: {len(prompts)} different prompts; data.held_out takes {config.held_out}"
                " and at least one must be left to train on: lower data.held_out or raise data.size"
            )
        held_out = sorted(prompts)[: config.held_out]
        train = tuple(p for i, p in prompts.items() if i > held_out[-1])
        return Dataset(train, tuple(prompts[i] for i in held_out))
    key, source = "data.held_out_source", config.held_out_source
    return Dataset(tuple(prompts.values()), load_held_out(source, key, config, tokenizer, prompts, task))


def load_held_out(
    source: str, key: str, config: DataConfig, tokenizer: Any, train: Mapping[str, Prompt], task: str
) -> tuple[Prompt, ...]:
    """The first config.held_out prompts, by id, of a source that the config names under `key`. ConfigError if
    any of its prompts is in `train`, the training prompts by id."""
    held_out = _prompts(source, config, tokenizer, task)
    shared = sorted(train.keys() & held_out.keys())
    if shared:
        raise ConfigError(
            f"{len(shared)} of {len(train)} training prompts are also in {key} "
            f"{source}, such as {train[shared[0]].text[:60]!r}; remove them from one side"
        )
    return tuple(held_out[i] for i in sorted(held_out)[: config.held_out])


def _prompts(source: str, config: DataConfig, tokenizer: Any, task: str, limit: int = 0) -> dict[str, Prompt]:
    """The different prompts of a source's first `limit` rows (0: all) by id, in their order."""
    pattern = _answer_regex(config.answer_pattern)
    prompts: dict[str, Prompt] = {}
    for count, row in enumerate(_rows(source, config), 1):
        if config.choices_column:
            row = replace(row, columns={**row.columns, "choices": _choices(row, config)})
        text = _render(row, config)
        prompt_id = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:ID_CHARS]
        if prompt_id not in prompts:
            answer = _answer(row, config, pattern)
            token_ids = _token_ids(row, text, config, tokenizer)
            prompts[prompt_id] = Prompt(prompt_id, text, token_ids, answer, row.columns, task, row.place)
        if count == limit and not source.startswith("reasoning_gym:"):
            break
    if not prompts:
        raise ConfigError(f"{source}: it has no rows; expected at least one prompt and answer")
    return prompts


def _render(row: Row, config: DataConfig) -> str:
    """The prompt text: the template filled from the row, with the prompt column as {question}."""
    values = dict(row.columns)
    if config.choices_column:
        lettered = zip(string.ascii_uppercase, values["choices"], strict=False)
        values["choices"] = "\n".join(f"{letter}. {option}" for letter, option in lettered)
    if config.prompt_column in values:
        values["question"] = values[config.prompt_column]
    try:
        names = {n for _, n, _, _ in string.Formatter().parse(config.template) if n is not None}
    except ValueError as e:
        raise ConfigError(_template_help(config, str(e))) from e
    if config.choices_column and "choices" not in names:
        raise ConfigError(f"data.template {config.template!r}: it lacks the {{choices}} of choices_column")
    for name in sorted(names):
        if not name.isidentifier() and name not in values:
            raise ConfigError(_template_help(config, f"{{{name}}} is not a column name"))
        if name not in values:
            column = config.prompt_column if name == "question" else name
            raise _no_column(row, column, "data.prompt_column or data.template")
        if values[name] is None:
            raise ConfigError(f"{row.place}: {name!r} is null; fill it or remove the row")
    text = string.Formatter().vformat(config.template, (), values)
    if not text.strip():
        raise ConfigError(f"{row.place}: the prompt is empty; expected text in {config.prompt_column!r}")
    return text


def _template_help(config: DataConfig, error: str) -> str:
    return f"data.template {config.template!r}: {error}; write a literal brace twice, as in \\boxed{{{{}}}}"


def _no_column(row: Row, column: str, keys: str) -> ConfigError:
    present = ", ".join(map(repr, row.columns)) or "none"
    return ConfigError(f"{row.place}: no column {column!r}; there are {present}; set {keys}")


def _answer_regex(pattern: str) -> re.Pattern[str] | None:
    if not pattern:
        return None
    try:
        regex = re.compile(pattern)
    except re.error as e:
        raise ConfigError(f"data.answer_pattern {pattern!r} is not a regular expression: {e}") from e
    if not regex.groups:
        raise ConfigError(f"data.answer_pattern {pattern!r} has no group; put the answer in parentheses")
    return regex


def _choices(row: Row, config: DataConfig) -> list[str]:
    """The options of a multiple-choice question."""
    if config.choices_column not in row.columns:
        raise _no_column(row, config.choices_column, "data.choices_column")
    column = row.columns[config.choices_column]
    options = [str(option).strip() for option in column] if isinstance(column, list) else []
    if not 2 <= len(set(options)) == len(options) <= 26:
        raise ConfigError(f"{row.place}: expected a list of 2 to 26 different options, given {column!r}")
    return options


def _letter(row: Row, value: Any, options: list[str]) -> str:
    """The letter of the right option, given as a letter, an index from 0, or the option's text."""
    letters = string.ascii_uppercase[: len(options)]
    if isinstance(value, int) and not isinstance(value, bool):
        matches = {letters[value]} if 0 <= value < len(options) else set()
    else:
        text = str(value).strip()
        matches = {a for a, option in zip(letters, options, strict=True) if text in (a, option)}
    if len(matches) != 1:
        raise ConfigError(
            f"{row.place}: the answer {value!r} names {len(matches)} of the options {options}, not 1"
        )
    return matches.pop()


def _answer(row: Row, config: DataConfig, pattern: re.Pattern[str] | None) -> Answer:
    """The gold answer, or all that are accepted. Tests of programs become JSON text."""
    column = config.answer_column
    if column not in row.columns:
        raise _no_column(row, column, "data.answer_column")
    value = row.columns[column]
    if config.choices_column:
        return _letter(row, value, row.columns["choices"])
    values = value if isinstance(value, list) and value else [value]
    if any(isinstance(v, dict) for v in values):
        return json.dumps(value)
    answers = tuple(_single_answer(row, column, v, pattern) for v in values)
    return answers if len(answers) > 1 else answers[0]


def _single_answer(row: Row, column: str, value: Any, pattern: re.Pattern[str] | None) -> str:
    """The value, or the pattern's last match in it. 145.0 becomes '145'."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int | float)):
        raise ConfigError(f"{row.place}: {column!r} is {type(value).__name__}; expected text or a number")
    answer = "" if value is None else str(value).strip()
    if pattern is not None:
        matches = list(pattern.finditer(answer))
        if not matches:
            raise ConfigError(
                f"{row.place}: data.answer_pattern {pattern.pattern!r} matches nothing in {answer[-60:]!r}"
            )
        answer = (matches[-1].group(1) or "").strip()
    if not answer and row.needs_answer:
        raise ConfigError(f"{row.place}: the answer in {column!r} is empty; fill it or remove the row")
    return answer


def _token_ids(row: Row, text: str, config: DataConfig, tokenizer: Any) -> tuple[int, ...]:
    if config.chat:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("data.chat is on, but this tokenizer has no chat template; turn data.chat off")
        turn = [{"role": "user", "content": text}]
        wrapped = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(wrapped, add_special_tokens=False)  # the template contains them
    else:
        ids = tokenizer.encode(text)
    if len(ids) > config.max_prompt_tokens:
        raise ConfigError(
            f"{row.place}: the prompt has {len(ids)} tokens, data.max_prompt_tokens is "
            f"{config.max_prompt_tokens}; raise it or remove the row"
        )
    return tuple(int(i) for i in ids)


def _rows(source: str, config: DataConfig) -> Iterator[Row]:
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
    arguments = {"seed": GENERATOR_SEED, "size": config.size or GENERATED_SIZE, **config.options}
    for index, item in enumerate(generate(task, arguments)):
        columns = {**item, "origin": {"task": task, "arguments": arguments}}
        yield Row(f"reasoning_gym:{task} item {index}", columns, needs_answer=False)
