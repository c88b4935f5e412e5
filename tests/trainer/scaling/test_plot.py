"""Promises of the pictures: sized for a paper, every run is named with its ceiling, if that is identified."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainer.scaling import Curve, EvalPoint, Fit, Sigmoid, fit_curve, fit_run, plot_curve
from trainer.scaling.plot import COLOURS, _look, plot_curves, plot_efficiency

LAW = Sigmoid(R0=0.30, A=0.61, B=1.92, C_mid=2542)  # Table 1 of 2510.13786; its R0 is not published


def named(name: str, law: Sigmoid, last: float = 16_000) -> tuple[str, Curve, Fit]:
    points = tuple(
        EvalPoint(i, c, float(law.reward(c)), 0.005) for i, c in enumerate(np.arange(500, last, 500.0))
    )
    curve = Curve(name, "GPU-hours", points, law.R0)
    return name, curve, fit_curve(curve)


@pytest.fixture(scope="module")
def runs() -> list[tuple[str, Curve, Fit]]:
    return [named("ScaleRL", LAW), named("DAPO", replace(LAW, A=0.52)), named("short", LAW, 2000)]


def size(png: Path) -> tuple[int, int]:
    """Pixels, from the PNG's header."""
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    return width, height


def test_pictures_fit_one_and_two_columns_at_300_dpi(
    runs: list[tuple[str, Curve, Fit]], tmp_path: Path
) -> None:
    plot_curves(runs, tmp_path / "c.png")
    plot_efficiency(runs, tmp_path / "e.png")
    assert size(tmp_path / "c.png")[0] == 2100 and size(tmp_path / "e.png")[0] == 1020  # 7 and 3.4 inches


def test_every_run_is_named_with_its_ceiling_and_colour(
    runs: list[tuple[str, Curve, Fit]], tmp_path: Path
) -> None:
    plot_curves(runs, tmp_path / "c.svg")
    text = (tmp_path / "c.svg").read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    fit = runs[0][2]
    assert f"ScaleRL: A = {fit.A.value:.3f} ({fit.A.low:.3f} to {fit.A.high:.3f})" in texts
    assert "short: A not identified" in texts
    assert {"compute (GPU-hours)", "compute (GPU-hours, log scale)", "held-out pass rate"} <= set(texts)
    assert all(colour.lower() in text.lower() for colour in COLOURS[:3])
    assert (
        not re.search(r"font: (\d+)px", text) or min(map(float, re.findall(r"font: ([\d.]+)px", text))) >= 7
    )


def test_every_run_has_a_mark_of_its_own_and_no_two_look_alike() -> None:
    looks = [(x["color"], x["marker"]) for x in map(_look, range(49))]
    assert len({mark for _, mark in looks[:7]}) == 7 and len(set(looks)) == 49


def test_the_efficiency_plot_leaves_out_what_has_no_ceiling(
    runs: list[tuple[str, Curve, Fit]], tmp_path: Path
) -> None:
    plot_efficiency(runs, tmp_path / "e.svg")
    text = (tmp_path / "e.svg").read_text(encoding="utf-8")
    assert f"ScaleRL: B = {runs[0][2].B.value:.2f}" in text and "short" not in text
    plot_efficiency(runs[2:], tmp_path / "none.svg")
    assert "no ceiling is identified" in (tmp_path / "none.svg").read_text(encoding="utf-8")


def test_the_same_picture_is_the_same_file(runs: list[tuple[str, Curve, Fit]], tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot_curves(runs[:1], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_run_with_R0_alone_is_drawn(tmp_path: Path) -> None:
    points = [EvalPoint(0, 0.0, 0.3, 0.01)]
    plot_curve(points, fit_run(points), tmp_path / "c.png", "core-hours", "begun")
    assert size(tmp_path / "c.png")[0] == 2100
