"""Multiple choice: the options of a row in the order in which they are shown, and the right one's letter."""

import hashlib
import string
from dataclasses import replace

from trainer.config import DataConfig
from trainer.controller.sources import Row, RowError, value_at


def with_options(row: Row, config: DataConfig) -> Row:
    """The row with its options, shuffled if data.shuffle_choices says so, and the right one's letter."""
    options = _options(row, config)
    _unnamed_labels(row, options, config)
    right = _right(row, options, config)
    order = list(range(len(options)))
    if config.shuffle_choices:  # by the texts alone, and not by where the right one stands
        question = str(row.value(config.prompt_column, "data.prompt_column"))
        order.sort(
            key=lambda i: hashlib.sha256(f"{question}\n{options[i]}".encode(errors="replace")).digest()
        )
    letter = string.ascii_uppercase[order.index(right)]
    return replace(row, columns=row.columns | {"choices": [options[i] for i in order]}, letter=letter)


def lettered(options: list[str]) -> str:
    """The options as text, one a line after its letter."""
    return "\n".join(f"{a}. {option}" for a, option in zip(string.ascii_uppercase, options, strict=False))


def _options(row: Row, config: DataConfig) -> list[str]:
    key, columns = "data.choices_column", config.choices_column
    value = row.value(columns, key) if isinstance(columns, str) else [row.value(c, key) for c in columns]
    options = [str(option).strip() for option in value] if isinstance(value, list) else []
    if not 2 <= len(set(options)) == len(options) <= 26 or "" in options or None in value:
        part = f"; name the part that is one, such as {columns}.text" * isinstance(value, dict)
        raise RowError(f"expected a list of 2 to 26 different options, given {value!r}{part}")
    return options


def _unnamed_labels(row: Row, options: list[str], config: DataConfig) -> None:
    """RowError if the answer may be one of the labels beside the options, as in ARC, no setting names these,
    and they are neither A, B, C ... nor 0, 1, 2 ...: the label 2 would be read as the third option."""
    columns = config.choices_column
    if config.labels_column or isinstance(columns, tuple) or not columns.endswith(".text"):
        return
    column = columns.removesuffix("text") + "label"
    try:
        labels, value = value_at(row.columns, column), value_at(row.columns, config.answer_column)
    except RowError:
        return
    names = [str(label).strip() for label in labels] if isinstance(labels, list) else []
    plain = [*string.ascii_uppercase[: len(names)]], [*map(str, range(len(names)))]
    text = f"{value:g}" if isinstance(value, float) else str(value).strip()  # a list is none of them
    if names not in plain and names.count(text) == 1:
        other = f", or {columns} if it is an option's text" * (text in options)
        raise RowError(
            f"the answer {text} may be one of the labels {labels}; set data.labels_column {column}{other}"
        )


def _right(row: Row, options: list[str], config: DataConfig) -> int:
    """The place of the right option. The answer's column is one of the options' own, or the answer is one of
    data.labels_column, if that is set; a list with 1 for the right option and 0 for the others; an index from
    0; or, as text, a letter, an option or an index, and RowError if it could be two of these."""
    if isinstance(config.choices_column, tuple) and config.answer_column in config.choices_column:
        return config.choices_column.index(config.answer_column)
    value, names = row.value(config.answer_column, "data.answer_column"), "options"
    text = str(value).strip()
    if config.labels_column:
        labels = row.value(config.labels_column, "data.labels_column")
        labels = labels if isinstance(labels, list) else []
        names, options = "labels", [str(label).strip() for label in labels[: len(options)]]
        matches = [i for i, label in enumerate(options) if label == text]
    elif isinstance(value, list):
        matches = [i for i, label in enumerate(value) if label == 1] if len(value) == len(options) else []
    elif isinstance(value, int | float) and not isinstance(value, bool):
        matches = [i for i in range(len(options)) if i == value]
    else:
        readings = zip(string.ascii_uppercase, options, map(str, range(26)), strict=False)
        matches = [i for i, texts in enumerate(readings) if text in texts]
    if len(matches) != 1:
        raise RowError(f"the answer {value!r} names {len(matches)} of the {names} {options}, not 1")
    return matches[0]
