"""Numbers, text and curves in the characters of a terminal.

plotext's curve looks as good, but would save only 15 lines, for 3 MB on disk and six times the time a frame.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from rich.text import Text

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # braille bits, by column and row of a cell


def curve(points: Sequence[tuple[float, float]], ceiling: float | None, width: int, rows: int) -> list[Text]:
    """Points (x, y in [0, 1]) joined by braille dots, the ceiling dashed, y labels at the left."""
    ys = [y for _, y in points] + ([] if ceiling is None else [ceiling])
    low = max(0.0, min([int(10 * y) / 10 for y in ys] or [0.0]))
    high = min(1.0, max([low + 0.2, *(-int(-10 * y - 0.999) / 10 for y in ys)]))
    low = min(low, high - 0.2)
    last = max([x for x, _ in points] or [0.0]) or 1.0

    def dot_row(y: float) -> int:
        return round((high - min(y, high)) / (high - low) * (4 * rows - 1))

    dots = [(round(x / last * (2 * width - 1)), dot_row(y)) for x, y in points]
    cells = [[0] * width for _ in range(rows)]
    for (x0, y0), (x1, y1) in pairwise(dots):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(steps + 1):
            x, y = x0 + round((x1 - x0) * i / steps), y0 + round((y1 - y0) * i / steps)
            cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]
    marks = {(y // 4, x // 2) for x, y in dots} if len(dots) <= max(1, width // 4) else set()
    ceiling_row = -1 if ceiling is None else dot_row(ceiling) // 4
    lines = []
    for r in range(rows):
        label = f"{high - (high - low) * r / max(1, rows - 1):.2f}" if r in (0, rows // 2, rows - 1) else ""
        empty = ("╌", "yellow") if r == ceiling_row else (" ", "")
        row = [(chr(0x2800 + bits), "cyan") if bits else empty for bits in cells[r]]
        for c in (c for y, c in marks if y == r):
            row[c] = ("●", "bold cyan")
        line = Text.assemble((f"{label:>4}│", "dim"))
        for style, run in groupby(row, key=lambda cell: cell[1]):
            line.append("".join(char for char, _ in run), style)
        lines.append(line)
    return lines


def clock(seconds: float | None) -> str:
    """3:07 or 1:02:33; – if it is not known."""
    if seconds is None:
        return "–"
    minutes, s = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}" if minutes >= 60 else f"{minutes}:{s:02}"


def number(value: Any) -> float | None:
    """The value if it is a finite number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def with_error(metrics: Mapping[str, Any], key: str) -> str:
    """0.612 ± 0.017."""
    value, error = number(metrics.get(key)), number(metrics.get(f"{key}_se"))
    return "unknown" if value is None else f"{value:.3f}" + ("" if error is None else f" ± {error:.3f}")


def printable(text: str) -> str:
    """One line of text that cannot steer a terminal: newlines as ⏎, other unprintable characters as ·."""
    text = text.replace("\r\n", "\n").replace("\n", " ⏎ ").replace("\t", " ")
    return "".join(c if c.isprintable() else "·" for c in text)
