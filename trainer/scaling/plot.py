"""The picture of a run: points with error bars, the curve, its band, the ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainer.scaling.fit import Fit
from trainer.scaling.points import EvalPoint

AHEAD = 4.0  # the curve is drawn up to this multiple of the last compute
INK, CURVE, GREY = "#1c2733", "#1f6feb", "#7d8793"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
}


def plot_curve(points: Sequence[EvalPoint], fit: Fit, path: Path, unit: str, title: str) -> None:
    """Write a PNG (or SVG, by the ending): linear compute on the left, logarithmic on the right."""
    from matplotlib import rc_context  # imported here: a second that only a picture needs

    with rc_context(rc=STYLE):  # type: ignore[arg-type]  # its keys are literals in the stubs
        _draw(points, fit, path, unit, title)


def _draw(points: Sequence[EvalPoint], fit: Fit, path: Path, unit: str, title: str) -> None:
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    run = sorted(points, key=lambda p: p.compute)
    after = [p for p in run if p.compute > 0]
    for axes, log in zip(panels, (False, True), strict=True):
        shown = after if log else run
        axes.errorbar(
            [p.compute for p in shown], [p.pass_rate for p in shown], [p.pass_rate_se for p in shown],
            fmt="o", ms=4, color=INK, ecolor=GREY, elinewidth=1, label="held-out pass rate", zorder=3,
        )  # fmt: skip
        if fit.band:
            band = np.array([b for b in fit.band if b[0] <= AHEAD * after[-1].compute])
            last = after[-1].compute
            axes.fill_between(band[:, 0], band[:, 2], band[:, 3], color=CURVE, alpha=0.15, lw=0)
            axes.plot(*band[band[:, 0] <= last][:, :2].T, color=CURVE, lw=2, label="sigmoid fit")
            axes.plot(
                *band[band[:, 0] >= 0.9 * last][:, :2].T, color=CURVE, lw=2, ls=(0, (3, 2)), label="forecast"
            )
        if fit.identified:
            label = f"ceiling A = {fit.A.value:.3f} ({fit.A.low:.3f} to {fit.A.high:.3f})"
            axes.axhline(fit.A.value, color=CURVE, lw=1, ls=":", label=label)
        if log:
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0)
        axes.set_xlabel(f"compute ({unit}{', log scale' if log else ''})")
        axes.grid(alpha=0.2)
    panels[0].set_ylim(0, 1)
    panels[0].set_ylabel("held-out pass rate (mean@k)")
    panels[0].legend(loc="lower right", frameon=False, fontsize=9)
    verdict = "" if fit.identified else " - the ceiling is not identified yet"
    figure.suptitle(f"{title}{verdict}", x=0.01, ha="left", fontsize=12, color=INK)
    figure.savefig(path, dpi=130)
