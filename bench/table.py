"""Tables, made from the records alone: for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell. The first column, and one named "note", are aligned left."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    aligned_left = {0, len(head) - 1 if head[-1] == "note" else 0}

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return "  ".join(c.ljust(w) if i in aligned_left else c.rjust(w) for i, (c, w) in pairs).rstrip()

    return "\n".join((line(head), "  ".join("-" * w for w in widths), *map(line, rows)))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is aligned left."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: Any, form: str = ".3g") -> str:
    """`value` in `form`; a dash for None and NaN, text as it is."""
    if value is None or value != value:
        return "–"
    return value if isinstance(value, str) else format(value, form)


def bar(name: str, value: float, limit: float, most: bool = False) -> str:
    """A line that says whether the value reaches its bar, or with `most` stays below it."""
    met = value <= limit if most else value >= limit
    return f"{name}: {value:.3g}, bar {'≤' if most else '≥'} {limit:g}: {'met' if met else 'NOT MET'}"
