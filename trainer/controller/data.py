"""Prompts from a data source: rows -> text or conversation -> different prompts -> train and held-out split.

A prompt's id is the hash of its text (before any chat template). Held out are the prompts with the smallest
ids among all rows of a source, or the first GENERATED_SIZE items of a generated one, so the split depends on
neither order, seed nor data.size. Wrong input is a ConfigError that names the file and line.
"""

import hashlib
import json
import math
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, DataConfig
from trainer.controller.conversation import Turn, conversation, text_of, token_ids
from trainer.controller.sources import GENERATED, GENERATED_SIZE, Row, rows
from trainer.types import Answer, Prompt
from trainer.verifiers.text import last_boxed

BOXED = "boxed"  # data.answer_pattern: braces may be nested, which no regular expression matches
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
class Question:
    """A prompt before it is tokenised, and its row."""

    prompt_id: str
    text: str
    turns: tuple[Turn, ...]  # the conversation that the row holds; empty if it holds text
    row: Row
    number: int  # of the row in its source, from 1


def load_prompts(config: DataConfig, tokenizer: Any, task: str = "") -> Dataset:
    """Read, check, tokenise and split the prompts of a task. `tokenizer`: a transformers tokenizer."""
    key, source, size = "data.held_out_source", config.held_out_source, config.size or math.inf
    questions = _questions(config.source, config, limit=config.size or None if source else None)
    held_out = {} if source else _held_out(config.source, config, questions)
    chosen = {i: q for i, q in questions.items() if i in held_out or q.number <= size}
    prompts = {i: _prompt(q, config, tokenizer, task) for i, q in chosen.items()}  # in the file's order
    train = {i: prompt for i, prompt in prompts.items() if i not in held_out}
    if not train:
        more = " or raise data.size" if config.size else ""
        raise ConfigError(
            f"{config.source}: {len(questions)} different prompts; data.held_out takes {config.held_out}"
            f" and at least one must be left to train on: lower data.held_out{more}"
        )
    if source:
        return Dataset(tuple(train.values()), load_held_out(source, key, config, tokenizer, train, task))
    return Dataset(tuple(train.values()), tuple(prompts[i] for i in held_out))


class _NoTokenizer:
    """Stands in where the model is not there: a prompt without tokens, whatever the chat template."""

    chat_template = "unknown"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []

    def apply_chat_template(self, turns: list[Turn], **options: Any) -> str:
        return ""


def examine(config: DataConfig) -> str:
    """A line about the data for a dry run, which has no tokenizer. ConfigError if a file here is wrong."""
    files = [x for x in (config.source, config.held_out_source) if x and not re.match(r"\w+:", x)]
    if missing := [x for x in files if not Path(x).expanduser().is_file()]:
        return f"data: {missing[0]} is not on this machine, so it is not checked"
    if config.source not in files or len(files) < bool(config.held_out_source) + 1:
        return f"data: {config.source}, which only a run reads"
    data = load_prompts(config, _NoTokenizer())
    counts = f"{len(data.train)} training prompts and {len(data.held_out)} held out"
    return f"data: {counts}, in {' and '.join(files)}"


def load_held_out(
    source: str, key: str, config: DataConfig, tokenizer: Any, train: Mapping[str, Prompt], task: str
) -> tuple[Prompt, ...]:
    """The config.held_out held-out prompts of a source that the config names under `key`. ConfigError if
    any of its prompts is in `train`, the training prompts by id."""
    questions = _questions(source, config)
    shared = sorted(train.keys() & questions.keys())
    if shared:
        raise ConfigError(
            f"{len(shared)} of {len(train)} training prompts are also in {key} "
            f"{source}, such as {train[shared[0]].text[:60]!r}; remove them from one side"
        )
    held_out = _held_out(source, config, questions)
    return tuple(_prompt(q, config, tokenizer, task) for q in held_out.values())


def _held_out(source: str, config: DataConfig, questions: dict[str, Question]) -> dict[str, Question]:
    """The config.held_out prompts with the smallest ids of a source, by id; data.size does not matter."""
    last = GENERATED_SIZE if source.startswith(GENERATED) else math.inf
    ids = sorted(i for i, q in questions.items() if q.number <= last)
    return {i: questions[i] for i in ids[: config.held_out]}


def _questions(source: str, config: DataConfig, limit: int | None = None) -> dict[str, Question]:
    """The different prompts of a source's first `limit` rows (None: all) by id, in their order."""
    questions: dict[str, Question] = {}
    for number, row in enumerate(islice(rows(source, config), limit), 1):
        if config.choices_column:
            row = replace(row, columns={**row.columns, "choices": _choices(row, config)})
        turns = conversation(row, config)
        text = text_of(turns) if turns else _render(row, config)
        if not text.strip():
            raise ConfigError(f"{row.place}: the prompt is empty; expected text in {config.prompt_column!r}")
        prompt_id = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:ID_CHARS]
        questions.setdefault(prompt_id, Question(prompt_id, text, turns, row, number))
    if not questions:
        raise ConfigError(f"{source}: it has no rows; expected at least one prompt and answer")
    return questions


def _prompt(question: Question, config: DataConfig, tokenizer: Any, task: str) -> Prompt:
    """The prompt of a question, with its gold answer and token ids."""
    row = question.row
    answer = _answer(row, config)
    ids = token_ids(row, question.turns, question.text, config, tokenizer)
    return Prompt(question.prompt_id, question.text, ids, answer, row.columns, task, row.place)


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
            values[name] = row.value(column, "data.prompt_column or data.template")
        values[name] = _text(row, name, values[name])
    return string.Formatter().vformat(config.template, (), values)


def _text(row: Row, name: str, value: Any) -> str | float:
    """A template's value: text, a number, or a list of texts, one a line."""
    if value is None:
        raise ConfigError(f"{row.place}: {name!r} is null; fill it or remove the row")
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return "\n".join(value)
    if not isinstance(value, str | int | float):
        raise ConfigError(
            f"{row.place}: {name!r} is {str(value)[:60]}; expected text, a number or a list of texts, or in "
            'data.prompt_column a list of messages {"role": ..., "content": ...}'
        )
    return value


def _template_help(config: DataConfig, error: str) -> str:
    return f"data.template {config.template!r}: {error}; write a literal brace twice, as in \\boxed{{{{}}}}"


def _gold(text: str, pattern: str) -> str | None:
    """The part of the answer column that is the answer; None if there is none."""
    if not pattern:
        return text
    if pattern == BOXED:
        return last_boxed(text)
    try:
        regex = re.compile(pattern)
    except re.error as e:
        raise ConfigError(f"data.answer_pattern {pattern!r} is not a regular expression: {e}") from e
    if not regex.groups:
        raise ConfigError(f"data.answer_pattern {pattern!r} has no group; put the answer in parentheses")
    matches = list(regex.finditer(text))
    return matches[-1].group(1) or "" if matches else None


def _choices(row: Row, config: DataConfig) -> list[str]:
    """The options of a multiple-choice question."""
    column = row.value(config.choices_column, "data.choices_column")
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


def _answer(row: Row, config: DataConfig) -> Answer:
    """The gold answer, or all that are accepted. Tests of programs become JSON text."""
    column = config.answer_column
    value = row.value(column, "data.answer_column")
    if config.choices_column:
        return _letter(row, value, row.columns["choices"])
    values = value if isinstance(value, list) and value else [value]
    if any(isinstance(v, dict) for v in values):
        return json.dumps(value)
    answers = tuple(_single_answer(row, column, v, config.answer_pattern) for v in values)
    return answers if len(answers) > 1 else answers[0]


def _single_answer(row: Row, column: str, value: Any, pattern: str) -> str:
    """The value, or what the pattern takes of it. 145.0 becomes '145'."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int | float)):
        raise ConfigError(f"{row.place}: {column!r} is {type(value).__name__}; expected text or a number")
    text = "" if value is None else str(value).strip()
    if (answer := _gold(text, pattern)) is None:
        raise ConfigError(f"{row.place}: data.answer_pattern {pattern!r} matches nothing in {text[-60:]!r}")
    answer = answer.strip()
    if not answer and row.needs_answer:
        raise ConfigError(f"{row.place}: the answer in {column!r} is empty; fill it or remove the row")
    return answer
