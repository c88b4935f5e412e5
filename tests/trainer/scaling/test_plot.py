"""Promises of the pictures: sized for a paper, every run is named with its ceiling, if that is identified."""

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from simulated import PAPER, simulated

from trainer.scaling import EvalPoint, Sigmoid, curve_of, fit_curve, plot_curve
from trainer.scaling import plot as plot_module
from trainer.scaling.curve.sigmoid import Estimate
from trainer.scaling.plot import COLOURS, Named, _curves, _looks, _reward_axis, ceiling, forecast_end, plot


def named(name: str, law: Sigmoid, last: float = 16_000) -> Named:
    curve = simulated(law, np.arange(500, last, 500.0), 0.005, None, name)
    return name, curve, fit_curve(curve)


@pytest.fixture(scope="module")
def runs() -> list[Named]:
    return [named("ScaleRL", PAPER), named("DAPO", replace(PAPER, A=0.52)), named("short", PAPER, 4000)]


def size(png: Path) -> tuple[int, int]:
    """Pixels, from the PNG's header."""
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    return width, height


def test_pictures_fit_one_and_two_columns_at_300_dpi(runs: list[Named], tmp_path: Path) -> None:
    plot(runs, tmp_path / "c.png")
    plot(runs, tmp_path / "e.png", panels="efficiency")
    assert size(tmp_path / "c.png")[0] == 2100 and size(tmp_path / "e.png")[0] == 1020  # 7 and 3.4 inches
    points = [EvalPoint(0, 0.0, 0.3, 0.01)]  # R0 alone
    plot_curve(points, fit_curve(curve_of("", "", points)), tmp_path / "c.png", "core-hours", "begun")
    assert size(tmp_path / "c.png")[0] == 2100


def test_every_run_is_named_with_its_ceiling_and_colour_in_the_same_file_each_time(
    runs: list[Named], tmp_path: Path
) -> None:
    for name in ("c.svg", "again.svg"):
        plot(runs, tmp_path / name, "val/accuracy")
    text = (tmp_path / "c.svg").read_text(encoding="utf-8")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    A, short = runs[0][2].A, runs[2][2].A
    assert {
        f"ScaleRL: A = {A.value:.3f} ({A.low:.3f} to {A.high:.3f})",
        f"short: A not identified, {short.low:.2f} to {short.high:.2f}",
        "compute (GPU-hours)",
        "compute (GPU-hours, log scale)",
        "val/accuracy",
    } <= set(texts)
    assert all(colour.lower() in text.lower() for colour in COLOURS[:3])
    sizes = [float(x) for x in re.findall(r"font-size: ([\d.]+)px", text)]
    assert sizes and min(sizes) >= 7


def drawn(runs: list[Named], log: bool = False) -> tuple[Any, list[float]]:
    axes = Figure().subplots()
    return axes, _curves(axes, runs, log)


def band(axes: Any) -> Any:
    """The corners of the only band in a panel, (n, 2)."""
    (filled,) = [c for c in axes.collections if isinstance(c, PolyCollection)]
    return filled.get_paths()[0].vertices


def dashes(axes: Any) -> list[str]:
    """The styles of the lines in a panel, without that of the points."""
    return [line.get_linestyle() for line in axes.lines if line.get_linestyle() != "None"]


def test_the_y_axis_holds_the_whole_band(runs: list[Named]) -> None:
    for log in (False, True):
        axes, heights = drawn(runs[:1], log)
        assert min(heights) <= band(axes)[:, 1].min() and max(heights) >= band(axes)[:, 1].max()
        axes, heights = drawn(runs[2:], log)
        _reward_axis(axes, heights, "R")
        low, high = axes.get_ylim()
        bottom, top = band(axes)[:, 1].min(), band(axes)[:, 1].max()
        assert top > runs[2][1].points[-1].pass_rate + 0.05  # there is doubt, and it is seen
        assert low <= bottom and high >= min(1.0, top)


def test_beyond_the_data_an_unidentified_run_has_a_range_and_no_line(runs: list[Named]) -> None:
    assert dashes(drawn(runs[:1])[0]) == ["-", "--", ":"]  # fit, forecast, ceiling
    axes, _ = drawn(runs[2:])
    assert dashes(axes) == ["-"]
    assert band(axes)[:, 0].max() == pytest.approx(2 * runs[2][1].points[-1].compute)


def test_a_run_that_has_fallen_has_no_curve_and_no_forecast() -> None:
    name, curve, _ = named("fallen", PAPER)
    points = tuple(replace(p, pass_rate=p.pass_rate - max(0, p.compute - 8000) / 3e4) for p in curve.points)
    curve = replace(curve, points=points)
    fit = fit_curve(curve)
    assert not fit.predictable
    axes, heights = drawn([(name, curve, fit)])
    assert dashes(axes) == ["-"] and axes.lines[-1].get_xdata()[-1] == points[-1].compute
    assert heights == [p.pass_rate for p in curve.evaluations] and ceiling(fit) == "A not identified"


def test_a_forecast_reaches_to_the_longest_run_but_not_beyond_ten_times_its_own(runs: list[Named]) -> None:
    short = runs[2][1]  # up to 3,500
    ends = [forecast_end(short, longest) for longest in (3500, 12_000, 20_000)]
    assert ends == [4 * 3500, 2 * 12_000, 10 * 3500]


def test_seeds_look_alike_and_keep_their_colour_in_both_pictures(runs: list[Named], tmp_path: Path) -> None:
    runs = [runs[2], *(("b", *run[1:]) for run in runs[:2])]
    plot(runs, tmp_path / "c.svg")
    plot(runs, tmp_path / "e.svg", panels="efficiency")
    curves, straight = ((tmp_path / n).read_text(encoding="utf-8").lower() for n in ("c.svg", "e.svg"))
    assert curves.count("b (2 runs)") == 1 and straight.count("b (2 runs)") == 1
    assert COLOURS[2].lower() not in curves and COLOURS[0].lower() not in straight
    assert COLOURS[1].lower() in curves and COLOURS[1].lower() in straight


def test_every_run_has_a_mark_of_its_own_and_no_two_look_alike(runs: list[Named]) -> None:
    several = [(str(i), *runs[0][1:]) for i in range(49)]
    looks = [(look["color"], look["marker"]) for look in _looks(several).values()]
    assert len({mark for _, mark in looks[:7]}) == 7 and len(set(looks)) == 49


def test_the_picture_of_recipes_is_the_paper_s_with_a_mark_per_recipe_and_no_doubtful_one(
    runs: list[Named], tmp_path: Path
) -> None:
    full, dapo, short = (run[1:] for run in runs)
    recipes: list[Named] = [("two", *full), ("two", *dapo), ("one", *dapo)]
    doubtful: list[Named] = [("doubtful", *full), ("doubtful", *short)]
    plot([*recipes, *doubtful], tmp_path / "e.svg", panels="log efficiency")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "e.svg").read_text(encoding="utf-8"))
    names = [text for text in texts if re.match("two|doubtful", text)]
    B = dapo[1].B
    assert names == ["two (2 runs)", "doubtful (2 runs)"]
    assert any(f", B = {B.value:.2f} ({B.low:.2f} to" in text and text[:8] == "one: A =" for text in texts)
    plot(doubtful[1:], tmp_path / "none.svg", panels="log efficiency")
    text = (tmp_path / "none.svg").read_text(encoding="utf-8")
    assert text.count('id="axes_') == 1 and "log [(R" not in text  # the curves alone


def test_the_efficiency_plot_leaves_out_what_has_no_ceiling(runs: list[Named], tmp_path: Path) -> None:
    plot(runs, tmp_path / "e.svg", panels="efficiency")
    text = (tmp_path / "e.svg").read_text(encoding="utf-8")
    assert f"ScaleRL: B = {runs[0][2].B.value:.2f}" in text and "short" not in text
    plot(runs[2:], tmp_path / "none.svg", panels="efficiency")
    assert "no ceiling is identified" in (tmp_path / "none.svg").read_text(encoding="utf-8")


def test_an_svg_of_lines_has_no_date_so_that_the_same_data_are_the_same_file(tmp_path: Path) -> None:
    row = [(1.0, Estimate(0.4, 0.3, 0.5)), (2.0, Estimate(0.5, 0.4, 0.6))]
    plot_module.lines({"half": {"a": row, "b": row}}, tmp_path / "a.svg", "h")
    assert "<dc:date>" not in (tmp_path / "a.svg").read_text()
