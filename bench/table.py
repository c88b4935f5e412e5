"""Tables, made from the records alone: Markdown whose columns are aligned, for a terminal and for a page."""

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell. The first column, and one named "note", are aligned left."""
    widths = [max(4, *(len(line[i]) for line in (head, *rows))) for i in range(len(head))]
    left = [i == 0 or name == "note" for i, name in enumerate(head)]
    lines = [
        [x.ljust(w) if is_left else x.rjust(w) for x, w, is_left in zip(line, widths, left, strict=True)]
        for line in (head, *rows)
    ]
    rule = ["-" * w if is_left else "-" * (w - 1) + ":" for w, is_left in zip(widths, left, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def number(value: Any, form: str = ".3g") -> str:
    """`value` in `form`; a dash for None and NaN, text as it is."""
    if value is None or value != value:
        return "–"
    return value if isinstance(value, str) else format(value, form)
