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
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from trainer.config import ConfigError, DataConfig
from trainer.controller.bad_rows import BadRows, LeftOut, Skipped, allowed_share
from trainer.controller.choices import lettered, with_options
from trainer.controller.conversation import chat_turns, conversation, text_of, token_ids
from trainer.controller.sources import Row, RowError, chosen_from, plain, rows
from trainer.controller.supervised import completions_of
from trainer.types import Answer, Prompt
from trainer.verifiers.kinds.function import imported
from trainer.verifiers.text import last_boxed
from trainer.verifiers.verifier import Verifier

BOXED = "boxed"  # data.answer_pattern: braces may be nested, which no regular expression matches
ID_CHARS = 16  # 64 bits of SHA-256
SURE = 21  # rows of two options whose right ones are one letter by chance once in 2^20


@dataclass(frozen=True, slots=True)
class Dataset:
    """The prompts of a run; no training prompt is held out."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    sets: dict[str, tuple[Prompt, ...]] = field(default_factory=dict)  # the further held-out sets
    skipped: tuple[Skipped, ...] = ()  # rows that cannot be used, by source

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All of them."""
        return (*self.train, *self.held_out, *chain.from_iterable(self.sets.values()))


@dataclass(frozen=True, slots=True)
class Reader:
    """All that a row needs to become a prompt."""

    config: DataConfig
    tokenizer: Any  # a transformers tokenizer
    task: str = ""
    verifiers: tuple[Verifier, ...] = ()  # which compare completions with the answer
    environment: bool = False  # it scores, so that a row needs no answer
    supervised: bool = False  # the training prompts have completions, which the run learns


@dataclass(frozen=True, slots=True)
class Read:
    """The prompts that were read of a source, by id."""

    train: dict[str, Prompt]  # in the source's order
    held_out: dict[str, Prompt]  # by ascending id
    shared: tuple[str, ...]  # prompts that were known before
    skipped: tuple[Skipped, ...]


def load_prompts(reader: Reader, held_out_only: bool = False) -> Dataset:
    """Read, check, tokenise and split the prompts of a task. `held_out_only`: those alone, or all of a source
    that has no more."""
    config = reader.config
    apart, size = config.held_out_source, config.size or math.inf
    if held_out_only:
        data = read(apart or config.source, reader, 0, config.held_out or math.inf)
        return Dataset((), tuple(data.held_out.values()), skipped=data.skipped)
    if config.options.get("streaming") and not config.size:
        problem = "is streamed, and may never end; expected the number of rows to train on: set data.size"
        raise ConfigError(f"{config.source} {problem}")
    data = read(config.source, reader, size, 0 if apart else config.held_out)
    train = {i: prompt for i, prompt in data.train.items() if i not in data.held_out}
    held_out, skipped = data.held_out, data.skipped
    if apart and train:
        share, key = allowed_share(config.source, config), "data.held_out_source"
        train, held_out, more = without_held_out(train, apart, key, reader, share)
        skipped += more
    if not train:
        raise ConfigError(
            f"{config.source}: {(n := len(data.train | data.held_out))} different prompt{'s' * (n != 1)}; "
            f"data.held_out takes {config.held_out}; one must be left to train on: lower data.held_out"
            + (" or raise data.size" if config.size else "")
            + "; to evaluate only, name it in evaluation.sets or ask python -m trainer.evaluate"
        )
    if config.choices_column and len(train) >= SURE and len({p.answer for p in train.values()}) == 1:
        problem = f"the right option is {next(iter(train.values())).answer} in all {len(train)} rows"
        raise ConfigError(f"{config.source}: {problem}; expected different ones: set data.shuffle_choices")
    return Dataset(tuple(train.values()), tuple(held_out.values()), skipped=skipped)


def without_held_out(
    train: dict[str, Prompt], source: str, key: str, reader: Reader, share: float
) -> tuple[dict[str, Prompt], dict[str, Prompt], tuple[Skipped, ...]]:
    """The held-out prompts of a source that the config names under `key`, and the training prompts that are
    not among its prompts. ConfigError if these are more than a `share` of them."""
    data = read(source, reader, 0, reader.config.held_out or math.inf, train)
    if len(data.shared) > share * len(train):
        raise ConfigError(
            f"{len(data.shared)} of {len(train)} training prompts are also in {key} "
            f"{source}, such as {train[data.shared[0]].text[:60]!r}; remove them from one side"
        )
    skipped = data.skipped
    if data.shared:
        places = tuple((train[i].place, f"its prompt is also in {key} {source}") for i in data.shared)
        skipped += (Skipped("the training data", len(train), places),)
    return {i: p for i, p in train.items() if i not in data.shared}, data.held_out, skipped


def read(source: str, reader: Reader, size: float, held_out: float, known: Container[str] = ()) -> Read:
    """The different prompts of a source's first `size` rows, and the `held_out` prompts with the smallest ids
    of those from which they are chosen. Other rows are read, but neither checked, counted nor kept."""
    config, bad = reader.config, BadRows(source, reader.config)
    change = imported("data.map", config.map) if config.map else None
    last = chosen_from(source, config) if held_out else 0
    limit, number, unused, worst = max(size, last), 0, 0, "g"  # after all hexadecimal digits
    train, chosen, shared = dict[str, Prompt](), dict[str, Prompt](), dict[str, None]()
    more = dict[str, dict[tuple[int, ...], None]]()  # completions that later rows add to a prompt
    for number, row in enumerate(islice(rows(source, config), None if limit == math.inf else int(limit)), 1):
        prompt_id = _id(row.place)  # of a row whose prompt cannot be read, for the share of bad rows
        try:
            row, text = _question(row, config, change)
            prompt_id = _id(text)
            if prompt_id in known:
                shared[prompt_id] = None
            wanted = number <= last and prompt_id < worst and prompt_id not in chosen
            if number <= size and prompt_id in train:
                more.setdefault(prompt_id, {}).update(_again(row, train[prompt_id], reader))
            if not wanted and (number > size or prompt_id in train):
                unused += number > size and prompt_id not in chosen
                continue
            prompt = train.get(prompt_id) or _prompt(row, text, prompt_id, reader, number <= size)
        except RowError as e:
            if number <= size or prompt_id < worst:
                bad.add(row.place, e)
            else:
                unused += 1
            continue
        if number <= size:
            train.setdefault(prompt_id, prompt)
        if wanted:
            chosen[prompt_id] = prompt
            if len(chosen) > held_out:
                del chosen[worst]
            if len(chosen) == held_out:
                worst = max(chosen)
    if not number:
        raise ConfigError(f"{source}: it has no rows; expected at least one prompt and answer")
    for prompt_id, completions in more.items():
        first = train[prompt_id].completions
        added = completions.keys() - set(first)
        in_order = tuple(filter(added.__contains__, completions))
        train[prompt_id] = replace(train[prompt_id], completions=first + in_order)
    return Read(train, dict(sorted(chosen.items())), tuple(shared), bad.skipped(number - unused))


def _question(row: Row, config: DataConfig, change: Callable[..., Any] | None) -> tuple[Row, str]:
    """The row, once data.map has changed it and its options are read, and its prompt."""
    if row.problem:
        raise RowError(row.problem)
    if change is not None:
        try:
            columns = change(dict(row.columns))
        except Exception as e:  # the user's function may raise anything
            error = f"{type(e).__name__}: {' '.join(str(e).split())}"
            raise RowError(f"data.map {config.map} raised {error}") from e
        if columns is None:
            raise LeftOut("data.map returned None")
        if not isinstance(columns, dict):
            result = f"returned {columns!r:.60}; expected a row as a dict, or None to leave it out"
            raise RowError(f"data.map {config.map} {result}")
        row = replace(row, columns=plain(columns))
    if config.choices_column:
        row = with_options(row, config)
    turns = conversation(row, config)
    text = text_of(turns) if turns else _render(row, config)
    if not text.strip():
        raise RowError(f"the prompt is empty; expected text in {config.prompt_column!r}")
    return row, text


def _id(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:ID_CHARS]


def _prompt(row: Row, text: str, prompt_id: str, reader: Reader, trained: bool) -> Prompt:
    """The prompt with token ids, gold answer, and the completions of a row that a supervised run is `trained`
    on. Such a row needs no answer if the held-out prompts come from elsewhere."""
    config, completions = reader.config, tuple[tuple[int, ...], ...]()
    if learned := reader.supervised and trained:
        completions = completions_of(row, config, reader.tokenizer)
    scored = not (reader.environment or (learned and config.held_out_source))
    answer = (row.letter or _answer(row, config)) if scored else ""
    ids = token_ids(row, text, config, reader.tokenizer)
    if reader.environment and chat_turns(row.columns, text, config):
        if learned:
            raise ConfigError(
                "objective.loss sft: with environment.kind a prompt has no tokens yet; expected none"
            )
        ids = ids[:1]  # the rest depends on the environment's messages and tools
    prompt = Prompt(prompt_id, text, ids, answer, row.columns, reader.task, row.place, completions)
    for verifier in reader.verifiers if scored else ():
        if problem := verifier.problem(prompt):
            case = f"the answer to {text[-60:]!r} is {str(answer)[:60]!r}{problem}"
            raise RowError(f"verifier.kind {verifier.kind}, but {case}")
    return prompt


def _again(row: Row, first: Prompt, reader: Reader) -> dict[tuple[int, ...], None]:
    """The completions to learn that a row adds to the prompt of an earlier one."""
    if reader.supervised:
        return dict.fromkeys(completions_of(row, reader.config, reader.tokenizer))
    if first.answer and (answer := row.letter or _answer(row, reader.config)) != first.answer:
        problem = f"its prompt is that of {first.place}, whose answer is {first.answer!r:.40}"
        raise LeftOut(f"{problem} and not {answer!r:.40}")
    return {}


class _Filler(string.Formatter):
    """Fills in columns by their whole names, in which a dot has no further meaning."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return kwargs[field_name], field_name


def _render(row: Row, config: DataConfig) -> str:
    """The prompt text: the template filled from the row, with the prompt column as {question}."""
    try:
        names = {n for _, n, _, _ in string.Formatter().parse(config.template) if n is not None}
    except ValueError as e:
        raise ConfigError(_template_help(config, str(e))) from e
    if config.choices_column and "choices" not in names:
        raise ConfigError(f"data.template {config.template!r}: it lacks the {{choices}} of choices_column")
    values = {}
    for name in sorted(names):
        if not name.replace(".", "").isidentifier() and name not in row.columns:
            raise ConfigError(_template_help(config, f"{{{name}}} is not a column name"))
        column = config.prompt_column if name == "question" else name
        value = row.value(column, "data.prompt_column or data.template")
        shown = lettered(value) if name == "choices" and config.choices_column else value
        values[name] = _text(name, shown)
    return _Filler().vformat(config.template, (), values)


def _text(name: str, value: Any) -> str | float:
    """A template's value: text, a number, or a list of texts, one a line."""
    if value is None:
        raise RowError(f"{name!r} is null; fill it or remove the row")
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return "\n".join(value)
    if not isinstance(value, str | int | float):
        raise RowError(
            f"{name!r} is {str(value)[:60]}; expected text, a number or a list of texts, or in "
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


def _answer(row: Row, config: DataConfig) -> Answer:
    """The gold answer, or all that are accepted. Tests of programs become JSON text."""
    column = config.answer_column
    value = row.value(column, "data.answer_column")
    values = value if isinstance(value, list) and value else [value]
    if any(isinstance(v, dict) for v in values):
        return json.dumps(value)
    single = (_single_answer(row, column, v, config.answer_pattern) for v in values)
    answers = tuple(dict.fromkeys(single))
    return answers if len(answers) > 1 else answers[0]


def _single_answer(row: Row, column: str, value: Any, pattern: str) -> str:
    """The value, or what the pattern takes of it. 145.0 becomes '145'."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool):
        value = str(value).lower()
    if not isinstance(value, str | int | float | None):
        raise RowError(f"{column!r} is {type(value).__name__}; expected text or a number")
    text = "" if value is None else str(value).strip()
    if (answer := _gold(text, pattern)) is None:
        raise RowError(f"data.answer_pattern {pattern!r} matches nothing in {text[-60:]!r}")
    answer = answer.strip()
    if not answer and row.needs_answer:
        raise RowError(f"the answer in {column!r} is empty; fill it or remove the row")
    return answer
