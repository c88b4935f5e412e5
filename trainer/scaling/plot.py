"""Pictures for papers and run folders: curves on linear and logarithmic compute, and the efficiency plot.

In the efficiency plot of arXiv 2510.13786 a sigmoid is a straight line of slope B over log C:

    log[(R − R0) / (A − R)] = B log C − B log C_mid

Sized for a two-column paper (two panels over both columns, the efficiency plot in one), 8 pt, with Okabe and
Ito's colours, which colour-blind readers can tell apart, and a marker for each run for print in grey.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.scaling.curve.average import FURTHEST
from trainer.scaling.curve.fit import Fit
from trainer.scaling.curve.sigmoid import Array, Curve, Estimate, EvalPoint, curve_of
from trainer.scaling.layout import interval

if TYPE_CHECKING:  # matplotlib takes a second to import, which only a picture needs
    from matplotlib.axes import Axes

REACH = 4.0  # a forecast is drawn up to this multiple of the run's last compute,
LINEAR_REACH = 2.0  # or up to this multiple of the last of all, where linear axes end
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
BOTH_COLUMNS, ONE_COLUMN = (7.0, 2.5), (3.4, 2.3)  # inches, the legend comes on top
LEGEND_ROW = 0.15  # inches
LETTERS, WIDEST_Y = 16, 34  # characters of the legend in an inch, and along the y-axis
STYLE = {
    **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize"), 8),
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
    plot([(title, curve_of(title, unit, points), fit)], path, "held-out pass rate")


def plot(
    runs: Sequence[Named], path: Path, reward: str = "held-out reward", panels: str = "linear log"
) -> None:
    """Write PNG, SVG or PDF (by the ending): panels side by side, and above them what is known of each run.

    `panels`: of `linear`, `log` (compute) and `efficiency`, which shows runs whose ceiling is identified, if
    any. Runs of one name look alike. `reward`: the y-axis, as the column that was read.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state
    from matplotlib.lines import Line2D

    identified = [run for run in runs if run[2].identified]
    shown = [panel for panel in panels.split() if panel in ("linear", "log", panels) or identified]
    labels = _labels(runs if "log" in shown else identified, shown)
    width, height = ONE_COLUMN if panels == "efficiency" else BOTH_COLUMNS
    longest = max(map(len, labels.values()), default=1)
    columns = max(1, min(2, len(labels), int(LETTERS * width / longest)))
    size = width, height + LEGEND_ROW * math.ceil(len(labels) / columns)
    looks = _looks(runs)
    with rc_context(rc=STYLE):  # type: ignore[arg-type]  # its keys are literals in the stubs
        figure = Figure(figsize=size, layout="constrained")
        all_axes = figure.subplots(1, len(shown), squeeze=False, sharey="linear" in shown)[0]
        drawn: list[float] = []
        for axes, panel in zip(all_axes, shown, strict=True):
            if panel == "efficiency":
                _efficiency(axes, identified, looks)
            else:
                drawn += _curves(axes, runs, panel == "log")
            at_mean = panel == "efficiency" and any(fit.axis for *_, fit in identified)
            _compute_axis(axes, runs[0][1].unit + " at the mean rate" * at_mean, log=panel != "linear")
        if drawn:
            _reward_axis(all_axes[0], drawn, reward)
        if labels:
            marks = [Line2D([], [], ls="none", ms=3, **looks[name]) for name in labels]
            figure.legend(marks, list(labels.values()), loc="outside upper left", ncols=columns)
        figure.savefig(path, metadata=_metadata(path))


def lines(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, Estimate]]]], path: Path, unit: str
) -> None:
    """Write a picture with a panel for each entry: rewards over compute, a line for each name in it, whose
    colour is its place in their order."""
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    with rc_context(rc=STYLE):  # type: ignore[arg-type]  # its keys are literals in the stubs
        width, height = BOTH_COLUMNS
        figure = Figure(figsize=(width * max(1, len(panels) / 2), height), layout="constrained")
        for axes, (title, named) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            colours = colormaps["viridis"](np.linspace(0, 0.9, len(named)))
            for colour, (name, row) in zip(colours, named.items(), strict=True):
                compute, value, low, high = np.array([(c, *astuple(e)) for c, e in row]).T
                axes.plot(compute, value, "o-", ms=3, lw=1, color=colour, label=name)
                axes.fill_between(compute, low, high, color=colour, alpha=0.15, lw=0)
            _compute_axis(axes, unit, log=True)
            axes.set_ylabel("held-out reward")
            axes.legend(title=title)
        figure.savefig(path, metadata=_metadata(path))


def _metadata(path: Path) -> dict[str, Any] | None:
    """The metadata of a picture: an SVG is without its date, so that the same data give the same file."""
    return {"Date": None} if path.suffix == ".svg" else None


def straighten(curve: Curve, fit: Fit) -> Array:
    """The points of the efficiency plot, (n, 4): C, logit, and the ends of its standard error.

    C is compute, or work where the curve is fitted to that (`Fit.axis`).
    Points that are not between the R0 and A of the fit have no logit and are left out. An end that is not
    between them is infinite.
    """
    points = [(p.compute, p.pass_rate, p.pass_rate_se) for p in curve.points]
    c, r, se = np.array(points, np.float64).reshape(-1, 3).T
    c = np.interp(c, fit.axis.compute, fit.axis.work) if fit.axis else c
    R0, A = fit.R0.value, fit.A.value
    ends = np.stack([r, r - se, r + se], 1)
    with np.errstate(divide="ignore"):
        logits = np.log(np.maximum(ends - R0, 0)) - np.log(np.maximum(A - ends, 0))
    return np.column_stack([c, logits])[(r > R0) & (r < A)]


def forecast_end(curve: Curve, longest: float) -> float:
    """The compute up to which a run's forecast is drawn beside runs up to `longest`; never unvalidated."""
    last = curve.points[-1].compute
    return min(max(REACH * last, LINEAR_REACH * longest), FURTHEST * last)


def sampled(curve: Curve, fit: Fit, longest: float) -> Array:
    """The fit and its forecast beside runs up to `longest`, (n, 4): compute, reward, and its interval.

    The computes are dense enough for a linear and a logarithmic axis.
    """
    first, last, end = curve.points[0].compute, curve.points[-1].compute, forecast_end(curve, longest)
    linear = np.linspace(0, min(LINEAR_REACH * longest, end), 81)
    grid = np.union1d(np.geomspace(first / 2, end, 60), [last, *linear]).tolist()
    return np.array([(c, *astuple(e)) for c, e in zip(grid, fit.along(grid), strict=True)])


def _curves(axes: Axes, runs: Sequence[Named], log: bool) -> list[float]:
    """All runs in one panel; returns every height that its y-axis must hold."""
    longest = max((p.compute for _, curve, _ in runs for p in curve.points), default=0.0)
    drawn = [p.pass_rate for _, curve, _ in runs for p in curve.evaluations]
    looks = _looks(runs)
    for name, curve, fit in runs:
        drawn += _curve(axes, curve, fit, longest, log, looks[name])
    return drawn


def _curve(
    axes: Axes, curve: Curve, fit: Fit, longest: float, log: bool, look: dict[str, Any]
) -> tuple[float, ...]:
    """One run with its forecast; returns the ends of its band."""
    points = [p for p in curve.evaluations if p.compute > 0 or not log]
    c, r, se = ([getattr(p, k) for p in points] for k in ("compute", "pass_rate", "pass_rate_se"))
    colour = look["color"]
    axes.errorbar(c, r, se, fmt="none", ecolor=colour, elinewidth=0.6, alpha=0.7)
    axes.plot(c, r, ls="none", ms=3, mec="white", mew=0.4, zorder=3, **look)
    if not fit.predictable:  # no sigmoid describes these points
        axes.plot(c, r, color=colour, lw=0.6)
        return ()
    rows = sampled(curve, fit, longest)
    rows = rows[rows[:, 0] >= points[0].compute / 2 if log else rows[:, 0] <= LINEAR_REACH * longest]
    compute, value, low, high = rows.T
    past, ahead = compute <= curve.points[-1].compute, compute >= curve.points[-1].compute
    axes.fill_between(compute, low, high, color=colour, alpha=0.15, lw=0)
    axes.plot(compute[past], value[past], color=colour, lw=1.2)
    if not fit.identified:  # beyond the data the range alone
        return (*low, *high)
    axes.plot(compute[ahead], value[ahead], color=colour, lw=1.2, ls=(0, (3, 2)))
    axes.plot(compute[[0, -1]], [fit.A.value] * 2, color=colour, lw=0.7, ls=":")
    return (*low, *high, fit.A.value)


def _efficiency(axes: Axes, runs: Sequence[Named], looks: Mapping[str, dict[str, Any]]) -> None:
    ends: list[float] = []
    for name, curve, fit in runs:
        look, (compute, value, low, high) = looks[name], straighten(curve, fit).T
        c = np.geomspace(curve.points[0].compute / 1.3, 1.3 * curve.points[-1].compute, 2)
        straight = fit.B.value * np.log(c / fit.C_mid.value)
        axes.plot(c, straight, color=look["color"], lw=1)
        axes.plot(compute, value, ls="none", ms=3, mec="white", mew=0.4, **look)
        low, high = np.maximum(low, -MAX_LOGIT), np.minimum(high, MAX_LOGIT)
        axes.vlines(compute, low, high, color=look["color"], lw=0.6, alpha=0.7)
        ends += [*value, *straight]
    axes.set_ylabel("log [(R − R0) / (A − R)]")
    if ends:
        axes.set_ylim(min(ends) - 0.5, max(ends) + 0.5)
    else:
        axes.text(0.5, 0.5, "no ceiling is identified", ha="center", transform=axes.transAxes)


def reward_title(columns: Sequence[str]) -> str:
    """The y-axis: the column of the rewards, if all runs have the same."""
    return columns[0] if len(set(columns)) == 1 else "held-out reward (of different columns)"


def ceiling(fit: Fit) -> str:
    """A for a legend: with its interval, its range alone where it is not identified, or neither."""
    if fit.identified:
        return f"A = {interval(fit.A, 'A')}"
    return "A not identified" + f", {interval(fit.A, '.2f', False)}" * fit.predictable


def _labels(runs: Sequence[Named], shown: Sequence[str]) -> dict[str, str]:
    """The legend's text by name: what is known of the run, or how many runs have this name."""
    seeds, labels = Counter(name for name, _, _ in runs), {}
    for name, _, fit in runs:
        known = [ceiling(fit)] if "log" in shown else []
        known += [f"B = {interval(fit.B, 'B')}"] if "efficiency" in shown and fit.identified else []
        labels[name] = f"{name}: {', '.join(known)}" if seeds[name] == 1 else f"{name} ({seeds[name]} runs)"
    return labels


def _looks(runs: Sequence[Named]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each name; repeated colours get other markers."""
    looks = {}
    for i, name in enumerate(dict.fromkeys(name for name, _, _ in runs)):
        marker = MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]
        looks[name] = {"color": COLOURS[i % len(COLOURS)], "marker": marker}
    return looks


def _compute_axis(axes: Axes, unit: str, log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if log:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        major = FuncFormatter(lambda x, _: f"{x:g}" if 1e-4 <= x < 1e5 else f"{x:.0e}")
        minor = FuncFormatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
        axes.xaxis.set_major_formatter(major)
        axes.xaxis.set_minor_formatter(NullFormatter() if high / low > 100 else minor)
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(f"compute ({unit}{', log scale' if log else ''})")
    axes.grid(alpha=0.25, lw=0.5)


def _reward_axis(axes: Axes, drawn: Sequence[float], title: str) -> None:
    """Set the y-axis from the lowest to the highest height drawn, within 0 to 1."""
    room = 0.06 * (max(drawn) - min(drawn)) or 0.05
    axes.set_ylim(max(0.0, min(drawn) - room), min(1.0, max(drawn) + room))
    axes.set_ylabel(title if len(title) <= WIDEST_Y else f"{title[: WIDEST_Y - 1]}…")
