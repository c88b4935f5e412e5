"""Numbers, names, tables and paragraphs as text for a terminal of 80 columns."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer.scaling.curve.sigmoid import Estimate

WIDTH = 79
MAX_NAMED = 4  # names in a sentence; of more, the others are counted
TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".json")  # file endings that short names leave out
FORMS = {"A": ".3f", "B": ".2f", "C_mid": ""}  # of `interval`, by parameter
Rows = list[Sequence[str]]
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Block:
    """A table with its head first, a title above it and sentences below; any of them may be missing."""

    rows: Sequence[Sequence[str]] = ()
    title: str = ""
    notes: Sequence[str] = ()
    ranked: bool = False  # the rows are numbered

    def __str__(self) -> str:
        """The block for a terminal; long names, in the first column, go on lines of their own."""
        rows = [
            [name, *(cell.replace(" to ", "–") if i else cell for cell in cells)]
            for i, (name, *cells) in enumerate(self.rows)
        ]
        if self.ranked:
            rows = [[f"{i or '':2} {name}", *cells] for i, (name, *cells) in enumerate(rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if max(map(len, lines), default=0) > WIDTH:
            lines = ["  " + "  ".join(map(str.ljust, row[1:], widths[1:])).rstrip() for row in rows]
            lines = [x for row, line in zip(rows, lines, strict=True) for x in (row[0], line)][1:]
        indent = "  " if self.title and not rows else ""
        title = [self.title] if self.title else []
        return "\n".join([*title, *lines, *(paragraph(note, indent) for note in self.notes)])


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values by key, both in their order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def paragraph(text: str, indent: str = "  ") -> str:
    """Wrapped for a terminal."""
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def interval(e: Estimate, form: str = "", quoted: bool = True) -> str:
    """`value (low to high)`, or `low to high` where the value is not to be quoted.

    `form`: of numbers, a name in FORMS, or empty for compute and money.
    """
    form = FORMS.get(form, form)
    xs = e.value, e.low, e.high
    value, low, high = (f"{x:{form}}" if form and math.isfinite(x) else amount(x) for x in xs)
    return f"{value} ({low} to {high})" if quoted else f"{low} to {high}"


def level(p: float) -> str:
    """The level of an interval: `97.5%`."""
    return f"{100 * p:.4g}%"


def percent(p: float) -> str:
    """A probability; the few thousand draws of a posterior cannot resolve more than 99%."""
    return "under 1%" if p < 0.01 else "over 99%" if p > 0.99 else f"{p:.0%}"


def amount(x: float, digits: int = 3) -> str:
    """Compute or money: 2,540 or 0.0513 or 2.54e+21; `digits` are significant."""
    if not math.isfinite(x):
        return "∞" if x > 0 else "–"
    rounded = float(f"{x:.{digits}g}")
    return f"{rounded:,.0f}" if 1000 <= rounded < 1e9 else f"{rounded:.{digits}g}"


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as tell them apart; without the file's ending if that suffices.

    If all are runs in files (`file: run`), the names of the runs, if these differ.
    """
    runs = [name.rpartition(": ")[2] for name in names]
    if all(": " in name for name in names) and len(set(runs)) == len(runs):
        return runs
    paths = [Path(name).resolve() for name in names]
    short = [path.stem if path.suffix in TABLES else path.name for path in paths]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        if len(set(short)) == len(short):
            return short
        short = ["/".join(path.parts[-depth:]) for path in paths]
    return list(names)
