"""Promises of the paper's procedure: the literal loop's answer, and flags where the grid is wrong."""

import math
from dataclasses import astuple, replace

import numpy as np
import pytest
from scipy.optimize import curve_fit

from trainer.config import ConfigError
from trainer.scaling import Sigmoid
from trainer.scaling.curve.paper import B_TABLE, PaperGrid, paper_fit

# arXiv 2510.13786, Table 1: C_mid, B, A. R0 is not published.
TABLE_1 = {"ScaleRL": (2542, 1.92, 0.610), "Scout": (4242, 1.65, 0.710), "code": (1675, 1.09, 0.615)}
R0 = 0.3


def literal_loop(
    compute: np.ndarray, reward: np.ndarray, R0: float, grid: PaperGrid, tolerance: float = 1e-8
) -> tuple[Sigmoid, float]:
    """The paper's procedure as printed: B by `curve_fit` for every pair; the best curve and its error."""
    best = (math.inf, 0.0, 0.0, 0.0)
    A_values, C_mid_values = grid.values()
    for A in A_values:
        for C_mid in C_mid_values:

            def model(C: np.ndarray, B: float, A: float = A, C_mid: float = C_mid) -> np.ndarray:
                result: np.ndarray = R0 + (A - R0) / (1 + (C_mid / C) ** B)
                return result

            with np.errstate(over="ignore"):
                (B,), _ = curve_fit(model, compute, reward, p0=[1.0], ftol=tolerance, xtol=tolerance)
                sse = float(((reward - model(compute, B)) ** 2).sum())
            best = min(best, (sse, float(A), float(B), float(C_mid)))
    sse, A, B, C_mid = best
    return Sigmoid(R0, A, B, C_mid), sse


def law(row: str) -> Sigmoid:
    C_mid, B, A = TABLE_1[row]
    return Sigmoid(R0, A, B, C_mid)


@pytest.mark.filterwarnings("ignore::scipy.optimize.OptimizeWarning")
@pytest.mark.parametrize(
    ("row", "start", "compute", "sd", "grid"),
    [
        ("ScaleRL", 0.3, np.arange(1500, 8001, 250.0), 0.005, PaperGrid((0.5, 0.7, 0.01), (500, 6000, 23))),
        ("ScaleRL", 0.3, np.arange(1500, 8001, 250.0), 0.0, PaperGrid((0.5, 0.7, 0.02), (500, 6000, 23))),
        ("ScaleRL", 0.2, np.arange(1500, 4001, 125.0), 0.01, PaperGrid((0.45, 0.8, 0.025), (500, 9000, 30))),
        ("Scout", 0.3, np.arange(500, 16001, 500.0), 0.02,
         PaperGrid((0.45, 0.8, 0.025), (100, 40_000, 30), "log")),
        ("code", 0.35, np.geomspace(200, 16000, 12), 0.05, PaperGrid((0.5, 0.75, 0.025), (500, 6000, 30))),
    ],
)  # fmt: skip
def test_the_answer_is_that_of_the_literal_loop(
    row: str, start: float, compute: np.ndarray, sd: float, grid: PaperGrid
) -> None:
    for seed in range(2):
        reward = law(row).reward(compute) + np.random.default_rng(seed).normal(0, sd, len(compute))
        literal, sse = literal_loop(compute, reward, start, grid, tolerance=1e-12)
        result = paper_fit(compute, reward, start, grid)
        assert result.sigmoid == replace(literal, B=pytest.approx(literal.B, abs=1e-4))
        assert result.sse == pytest.approx(sse, rel=1e-6, abs=1e-15)
        assert result.sse == pytest.approx(float(((reward - result.sigmoid.reward(compute)) ** 2).sum()))


def test_the_papers_grid_is_the_default_and_published_midpoints_are_steps_of_a_linear_one() -> None:
    A, C_mid = PaperGrid().values()
    assert len(A) == 71 and A[[0, 1, 2, -1]].tolist() == pytest.approx([0.450, 0.455, 0.460, 0.8])
    assert len(C_mid) == 100 and (C_mid[0], C_mid[-1]) == (100, 40_000)
    _, C_mid = PaperGrid(C_mid=(100, 4000, 100)).values()
    printed = {2542, 3054, 2936, 2818, 2896, 1675}  # Table 1 without 4242, 10909 and 11272; cut, not rounded
    assert printed <= {int(x) for x in C_mid}


def test_a_curve_on_the_grid_is_found_though_its_slope_is_between_the_rows_of_the_table() -> None:
    grid = PaperGrid(A=(0.5, 0.7, 0.001), C_mid=(1000, 4000, 301))
    compute = np.arange(1500, 8001, 250.0)
    for row in range(60, 80, 4):
        truth = Sigmoid(0.3, 0.61, float(np.sqrt(B_TABLE[row] * B_TABLE[row + 1])), 2540.0)
        result = paper_fit(compute, truth.reward(compute), 0.3, grid)
        assert astuple(result.sigmoid) == pytest.approx(astuple(truth), rel=1e-6)
        assert result.flags == () and result.sse < 1e-12


def test_a_grid_that_does_not_contain_the_curve_is_flagged() -> None:
    compute = np.arange(500, 16001, 500.0)
    reward = law("ScaleRL").reward(compute)
    assert paper_fit(compute, reward, 0.3, PaperGrid(A=(0.65, 0.8, 0.005))).flags == ("A-at-grid-edge",)
    assert paper_fit(compute, reward, 0.3, PaperGrid(A=(0.45, 0.55, 0.005))).flags[0] == "A-at-grid-edge"
    assert "C_mid-at-grid-edge" in paper_fit(compute, reward, 0.3, PaperGrid(C_mid=(5000, 40_000, 50))).flags
    step = np.where(compute < 2500, 0.3, 0.6)  # no B is steep enough
    assert "B-at-bound" in paper_fit(compute, step, 0.3, PaperGrid(C_mid=(2000, 3000, 101))).flags


@pytest.mark.parametrize(
    ("compute", "reward", "R0", "grid", "says"),
    [
        ([1, 2], [0.1, 0.2], 0.1, PaperGrid(), "3 or more"),
        ([1, 2, 3], [0.1, 0.2], 0.1, PaperGrid(), "3 computes and 2 rewards"),
        ([0, 2, 3], [0.1, 0.2, 0.3], 0.1, PaperGrid(), "not above 0"),
        ([1, 2, 3], [0.1, np.nan, 0.3], 0.1, PaperGrid(), "not a number"),
        ([1, 2, 3], [0.1, 0.2, 0.3], 0.8, PaperGrid(), "no A of the grid up to 0.8 lies above"),
        ([1, 2, 3], [0.1, 0.2, 0.3], 0.1, PaperGrid(A=(0.8, 0.4, 0.005)), "grid of A is"),
        ([1, 2, 3], [0.1, 0.2, 0.3], 0.1, PaperGrid(C_mid=(0, 10, 5)), "grid of C_mid is"),
    ],
)
def test_what_it_cannot_fit_is_a_clear_error(
    compute: list[float], reward: list[float], R0: float, grid: PaperGrid, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        paper_fit(compute, reward, R0, grid)
