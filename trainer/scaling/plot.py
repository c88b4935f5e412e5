"""Pictures for papers and run folders: curves on linear and logarithmic compute, and the efficiency plot.

In the efficiency plot of arXiv 2510.13786 a sigmoid is a straight line of slope B over log C:

    log[(R − R0) / (A − R)] = B log C − B log C_mid

Sized for a two-column paper (two panels over both columns, the efficiency plot in one), 8 pt, with Okabe and
Ito's colours, which colour-blind readers can tell apart, and a marker for each run for print in grey.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.scaling.compare import CONFIDENCE, DIFFERENT, Comparison, Recipe, at_ceiling
from trainer.scaling.fit import Estimate, Fit, estimate
from trainer.scaling.sigmoid import Curve, EvalPoint, curve_of
from trainer.scaling.text import interval

if TYPE_CHECKING:  # matplotlib takes a second to import, which only a picture needs
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

REACH = 4.0  # a curve is drawn up to this multiple of its last compute,
LINEAR_REACH = 2.0  # and at least up to this multiple of the last of all, where linear axes end
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
BOTH_COLUMNS, ONE_COLUMN = (7.0, 2.5), (3.4, 2.3)  # inches, the legend comes on top
LEGEND_ROW, WIDEST_LABEL, WIDEST_TITLE = 0.15, 56, 52  # inches, characters over both columns, over one
STYLE = {
    **dict.fromkeys(("font.size", "axes.labelsize"), 8),
    **dict.fromkeys(("legend.fontsize", "legend.title_fontsize", "xtick.labelsize", "ytick.labelsize"), 7),
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sigmoid-rl",  # the same picture gives the same file
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
}
MAX_LOGIT = 50.0  # beyond the range of the efficiency plot
Named = tuple[str, Curve, Fit]  # (name in the legend, points, their fit)


def plot_curve(points: Sequence[EvalPoint], fit: Fit, path: Path, unit: str, title: str) -> None:
    """Plot one run, with its evaluation at compute 0 if there is one."""
    plot_curves([(title, curve_of(title, unit, points), fit)], path)


def plot_curves(runs: Sequence[Named], path: Path) -> None:
    """Write PNG, SVG or PDF (by the ending): linear compute on the left, logarithmic on the right."""
    labels = [f"{name}: {ceiling(fit)}" for name, _, fit in runs]
    columns = 1 if max(map(len, labels)) > WIDEST_LABEL else min(2, len(labels))
    width, height = BOTH_COLUMNS
    rows = math.ceil(len(labels) / columns)
    _save(lambda figure: _curves(figure, runs, labels, columns), (width, height + LEGEND_ROW * rows), path)


def plot_efficiency(runs: Sequence[Named], path: Path, title: str = "") -> None:
    """Write the efficiency plot of the runs whose ceiling is identified; runs of one name look alike."""
    shown = [run for run in runs if run[2].identified]
    lines = textwrap.wrap(title, WIDEST_TITLE)
    width, height = ONE_COLUMN
    rows = len({name for name, _, _ in shown}) + len(lines)
    unit = runs[0][1].unit
    size = (width, height + LEGEND_ROW * rows)
    _save(lambda figure: _efficiency(figure, shown, unit, "\n".join(lines)), size, path)


def plot_recipes(comparison: Comparison, path: Path) -> None:
    """The efficiency plot of recipes, at a common ceiling as in the paper unless two ceilings differ.

    Recipes whose ceiling is not identified are only named.
    """
    shown = [recipe for recipe in comparison.recipes if not recipe.doubts]
    hidden = [recipe for recipe in comparison.recipes if recipe.doubts]
    common = None
    if shown and not any(pair.verdict == DIFFERENT for pair in comparison.pairs):
        common = float(np.mean([fit.A.value for recipe in shown for fit in recipe.fits]))
    held = "each at its own ceiling" if common is None else f"all at the mean ceiling, {common:.3f}"
    missing = f"; ceiling not identified: {', '.join(r.name for r in hidden)}" if hidden else ""
    runs = [run for recipe in shown for run in _at_ceiling(recipe, common)]
    runs += [run for recipe in hidden for run in _at_ceiling(recipe, None) if not run[2].identified]
    plot_efficiency(runs, path, f"Efficiency, {held}{missing}")


def _at_ceiling(recipe: Recipe, A: float | None) -> Iterator[Named]:
    """The runs with their fits, the ceiling held at A if that is given."""
    for curve, fit, draws in zip(recipe.curves, recipe.fits, recipe.draws, strict=True):
        if A is None:
            yield recipe.name, curve, fit
            continue
        sigmoid, held = at_ceiling(fit.sigmoid, draws, A)
        B, C_mid, R0 = (
            estimate(getattr(sigmoid, name), getattr(held, name), CONFIDENCE) for name in ("B", "C_mid", "R0")
        )
        yield recipe.name, curve, replace(fit, A=Estimate(A, A, A), B=B, C_mid=C_mid, R0=R0)


@dataclass(frozen=True, slots=True, eq=False)
class Straightened:
    """Points of the efficiency plot and one standard error up and down; (n,) each, natural logarithms."""

    compute: Array
    value: Array
    low: Array  # −inf if the point less its error is not above R0
    high: Array  # inf if the point plus its error is not below A
    left_out: int  # points not between R0 and A, which have no logarithm


def straighten(curve: Curve, fit: Fit) -> Straightened:
    """The curve's points, with the R0 and A of its fit."""
    columns = ([getattr(p, k) for p in curve.points] for k in ("compute", "pass_rate", "pass_rate_se"))
    c, r, se = (np.array(x, np.float64) for x in columns)
    R0, A = fit.R0.value, fit.A.value
    inside = (r > R0) & (r < A)

    def logit(x: Array) -> Array:
        with np.errstate(divide="ignore"):
            result: Array = np.log(np.maximum(x - R0, 0)) - np.log(np.maximum(A - x, 0))
        return result

    r, se = r[inside], se[inside]
    return Straightened(c[inside], logit(r), logit(r - se), logit(r + se), int((~inside).sum()))


def _save(draw: Callable[[Figure], None], size: tuple[float, float], path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    with rc_context(rc=STYLE):  # type: ignore[arg-type]  # its keys are literals in the stubs
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _curves(figure: Figure, runs: Sequence[Named], labels: Sequence[str], columns: int) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    far = LINEAR_REACH * max((p.compute for _, curve, _ in runs for p in curve.points), default=0.0)
    for axes, log in zip(panels, (False, True), strict=True):
        for i, (_, curve, fit) in enumerate(runs):
            reach = max(REACH * curve.points[-1].compute if log else 0.0, far) if curve.points else 0.0
            _curve(axes, curve, fit, reach, log, _look(i), labels[i])
        _compute_axis(axes, runs[0][1].unit, log)
    measured = [p.pass_rate for _, curve, _ in runs for p in curve.evaluations]
    known = [x for _, _, fit in runs if fit.identified for x in (fit.A.low, fit.A.high)]
    low, high = min(measured + known), max(measured + known)
    room = 0.06 * (high - low) or 0.05
    panels[0].set_ylim(max(0.0, low - room), min(1.0, high + room))
    panels[0].set_ylabel("held-out pass rate")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=columns)


def _curve(
    axes: Axes, curve: Curve, fit: Fit, reach: float, log: bool, look: dict[str, Any], label: str
) -> None:
    points = [p for p in curve.evaluations if p.compute > 0 or not log]
    colour = look["color"]
    axes.errorbar(
        [p.compute for p in points], [p.pass_rate for p in points], [p.pass_rate_se for p in points],
        fmt="none", ecolor=colour, elinewidth=0.6, alpha=0.7,
    )  # fmt: skip
    axes.plot(
        [p.compute for p in points], [p.pass_rate for p in points],
        ls="none", ms=3, mec="white", mew=0.4, zorder=3, label=label, **look,
    )  # fmt: skip
    if fit.draws is not None:
        last = curve.points[-1].compute
        first = curve.points[0].compute / 2
        past = np.geomspace(first, last, 80) if log else np.linspace(0, last, 80)
        ahead = np.geomspace(last, reach, 40)
        at = [fit.at(float(c)) for c in (*past, *ahead)]
        axes.fill_between(
            [*past, *ahead], [e.low for e in at], [e.high for e in at], color=colour, alpha=0.15, lw=0
        )
        axes.plot(past, fit.sigmoid.reward(past), color=colour, lw=1.2)
        axes.plot(ahead, fit.sigmoid.reward(ahead), color=colour, lw=1.2, ls=(0, (3, 2)))
    if fit.identified:
        axes.axhline(fit.A.value, color=colour, lw=0.7, ls=":")


def _efficiency(figure: Figure, runs: Sequence[Named], unit: str, title: str) -> None:
    axes = figure.subplots()
    ends: list[float] = []
    seeds = Counter(name for name, _, _ in runs)
    looks = {name: _look(i) for i, name in enumerate(seeds)}
    labels = {name: f"{name} ({n} runs)" for name, n in seeds.items() if n > 1}  # once each
    for name, curve, fit in runs:
        look, line = looks[name], straighten(curve, fit)
        c = np.geomspace(curve.points[0].compute / 1.3, 1.3 * curve.points[-1].compute, 2)
        straight = fit.B.value * np.log(c / fit.C_mid.value)
        axes.plot(c, straight, color=look["color"], lw=1)
        with_B = f"{name}: B = {interval(fit.B, '.2f')}"
        label = labels.pop(name, "_") if seeds[name] > 1 else with_B  # "_": not in the legend
        axes.plot(line.compute, line.value, ls="none", ms=3, mec="white", mew=0.4, label=label, **look)
        low, high = np.maximum(line.low, -MAX_LOGIT), np.minimum(line.high, MAX_LOGIT)
        axes.vlines(line.compute, low, high, color=look["color"], lw=0.6, alpha=0.7)
        ends += [*line.value, *straight]
    _compute_axis(axes, unit, log=True)
    if ends:
        axes.set_ylim(min(ends) - 0.5, max(ends) + 0.5)
    axes.set_ylabel("log [(R − R0) / (A − R)]")
    if runs:
        figure.legend(loc="outside upper left", title=title or None, alignment="left")
    else:
        axes.text(0.5, 0.5, "no ceiling is identified", ha="center", transform=axes.transAxes)


def ceiling(fit: Fit) -> str:
    """A with its interval for a legend, or that it is not identified."""
    if not fit.identified:
        return "A not identified"
    return f"A = {interval(fit.A, '.3f')}"


def _look(i: int) -> dict[str, Any]:
    round_ = i // len(COLOURS)  # repeated colours get other markers
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[(i + round_) % len(MARKERS)]}


def _compute_axis(axes: Axes, unit: str, log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if log:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        wide = high / low > 100
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda x, _: f"{x:g}" if 1e-4 <= x < 1e5 else f"{x:.0e}")
        )
        axes.xaxis.set_minor_formatter(
            NullFormatter() if wide else FuncFormatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
        )
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(f"compute ({unit}{', log scale' if log else ''})")
    axes.grid(alpha=0.25, lw=0.5)
