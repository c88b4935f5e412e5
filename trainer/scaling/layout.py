"""Numbers, names, tables and paragraphs as text for a terminal of 80 columns."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from trainer.scaling.curve.sigmoid import Estimate

WIDTH = 79
TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".json")  # file endings that short names leave out
K = TypeVar("K")
V = TypeVar("V")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns, the head first; long names, in the first column, go on lines of their own."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if max(map(len, lines)) <= WIDTH:
        return lines
    lines = ["  " + "  ".join(map(str.ljust, row[1:], widths[1:])).rstrip() for row in rows]
    return [x for row, line in zip(rows, lines, strict=True) for x in (row[0], line)][1:]


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


def interval(e: Estimate, form: str, quoted: bool = True) -> str:
    """`value (low to high)`, or `low to high` where the value is not to be quoted."""
    ends = f"{e.low:{form}} to {e.high:{form}}"
    return f"{e.value:{form}} ({ends})" if quoted else ends


def level(p: float) -> str:
    """The level of an interval: `97.5%`."""
    return f"{100 * p:.4g}%"


def signed(e: Estimate) -> str:
    """A difference and its interval."""
    return f"{e.value:+.3f} ({e.low:+.3f} to {e.high:+.3f})"


def percent(p: float) -> str:
    """A probability; the few thousand draws of a posterior cannot resolve more than 99%."""
    return "under 1%" if p < 0.01 else "over 99%" if p > 0.99 else f"{p:.0%}"


def amount(x: float, digits: int = 3) -> str:
    """Compute or money: 2,540 or 0.0513 or 2.54e+21; `digits` are significant."""
    if not math.isfinite(x):
        return "∞" if x > 0 else "–"
    rounded = float(f"{x:.{digits}g}")
    return f"{rounded:,.0f}" if 1000 <= rounded < 1e9 else f"{rounded:.{digits}g}"


def amounts(e: Estimate, quoted: bool = True) -> str:
    """The same of compute or money."""
    ends = f"{amount(e.low)} to {amount(e.high)}"
    return f"{amount(e.value)} ({ends})" if quoted else ends


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
