"""The picture of the validation: the coverage of the intervals, and the error of A."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Row
from bench.validation.document import by_row, coverage, errors, kinds_of_noise
from bench.validation.scenarios import OFF_GRID

COLORS = {"ours": "#1f6feb", "paper": "#d1495b", "paper, finer": "#e9a23b"}
INK, GREY = "#1c2733", "#7d8793"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}


def draw(runs: Sequence[Row], path: Path) -> None:
    """Write the PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(rc=STYLE):  # type: ignore[arg-type]  # its keys are literals in the stubs
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        left_axes, right_axes = figure.subplots(1, 2)
        _coverage(left_axes, kinds_of_noise(runs))
        _accuracy(right_axes, by_row(runs, OFF_GRID))
        figure.savefig(path, dpi=130)


def _coverage(axes: Any, groups: dict[str, list[Row]]) -> None:
    names, coverages = list(groups), [coverage(group) for group in groups.values()]
    axes.axvspan(0.87, 0.93, color=GREY, alpha=0.2, lw=0, label=".87 to .93")
    for key, marker in (("A", "o"), ("B", "s"), ("C_mid", "^"), ("2x", "D")):
        label = "reward at 2×" if key == "2x" else key
        shares = [values[key] for values in coverages]
        axes.plot(shares, range(len(names)), marker, ms=5, alpha=0.8, color=COLORS["ours"], label=label)
    axes.set_yticks(range(len(names)), [f"{n} ({len(groups[n])})" for n in names])
    axes.invert_yaxis()
    axes.set_xlim(axes.get_xlim()[0], 1.005)
    axes.set_title("90 % intervals that hold the truth, by noise (runs)", loc="left")
    axes.legend(fontsize=7, loc="upper left", frameon=False)


def _accuracy(axes: Any, rows: dict[str, list[Row]]) -> None:
    for i, (procedure, color) in enumerate(COLORS.items()):
        for y, group in enumerate(rows.values()):
            median, most = np.quantile(errors(group, procedure, "A"), (0.5, 0.95))
            height = y + 0.22 * (i - 1)
            axes.plot([median, most], [height, height], color=color, lw=1.5, alpha=0.7)
            axes.plot(median, height, "o", ms=5, color=color, label=procedure if y == 0 else None)
    for limit in (0.01, 0.02):
        axes.axvline(limit, color=GREY, lw=1, ls=":")
    axes.set_yticks(range(len(rows)), [name.removeprefix("ScaleRL-") for name in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, min(0.06, axes.get_xlim()[1]))
    axes.set_title("error of A, laws off the grid: median (dot) to 95 %", loc="left")
    axes.legend(fontsize=8, frameon=False, loc="upper right")
