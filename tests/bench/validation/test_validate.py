"""Promises of the validation: known laws and noise, right arithmetic, nothing lost when it is cut."""

from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.harness import Row
from bench.sources import TABLE_1
from bench.validation import runs as validation
from bench.validation.document import QUANTITIES, bars, coverage, errors, far_beyond
from bench.validation.scenarios import (
    NOISE,
    OFF_GRID,
    OUTLIERS,
    PAPER_RUNS,
    R0,
    SCENARIOS,
    TOO_SHORT,
    WELL,
    PaperRun,
    simulate,
)
from trainer.scaling import Curve, Sigmoid

BY_NAME = {case.name: case for case in SCENARIOS}
# Many evaluations: moments can be checked.
LONG_RUN = PaperRun("ScaleRL", TABLE_1["ScaleRL"], every=1.0, high=60_000.0, far=1e5)


def columns(curve: Curve) -> np.ndarray:
    """(3, n): compute, reward and standard error."""
    return np.array([(p.compute, p.pass_rate, p.pass_rate_se) for p in curve.points]).T


def test_every_row_of_the_paper_is_simulated_on_its_range_and_spacing() -> None:
    assert len(PAPER_RUNS) == len(TABLE_1) == 10
    truth, run = simulate(BY_NAME[WELL], PAPER_RUNS["ScaleRL"], 0, seed=1)
    assert columns(run)[0].tolist() == list(range(1500, 8001, 250))
    assert truth == Sigmoid(R0, 0.610, 1.92, 2542) and run.R0 == R0
    for kind, row, last in ((TOO_SHORT, "ScaleRL", 4_000), (WELL, "ScaleRL-bs2048", 50_000)):
        assert simulate(BY_NAME[kind], PAPER_RUNS[row], 0, 1)[1].points[-1].compute == pytest.approx(last)
    assert simulate(BY_NAME["R0 unknown"], PAPER_RUNS["ScaleRL"], 0, 1)[1].R0 is None


@pytest.mark.parametrize("name", [case.name for case in SCENARIOS if case.rows == tuple(PAPER_RUNS)])
def test_noise_is_of_the_size_said_and_told_as_said(name: str) -> None:
    case = BY_NAME[name]
    truth, run = simulate(case, LONG_RUN, 0, seed=1)
    compute, reward, se = columns(run)
    error = reward - truth.reward(compute)
    if name == OUTLIERS:
        hit = np.abs(error) > 0.08
        assert hit.mean() == pytest.approx(0.05, abs=1e-4)
        error = error[~hit]
    if case.noise == "binomial":
        assert np.std(error / se) == pytest.approx(1, rel=0.02) and se.max() > 1.5 * se.min()
        return
    assert error.std() == pytest.approx(NOISE, rel=0.15 if "t" in case.noise else 0.05)
    assert np.corrcoef(error[1:], error[:-1])[0, 1] == pytest.approx(case.ar, abs=0.03)
    assert (se == case.se_factor * NOISE).all()


def test_a_run_is_the_same_every_time_and_its_twin_differs_by_the_outliers_alone() -> None:
    row, case = PAPER_RUNS["ScaleRL"], BY_NAME[OUTLIERS]
    one, again, other = (columns(simulate(case, row, i, 7)[1])[1] for i in (3, 3, 4))
    assert (one == again).all() and (one != other).any()
    moved = np.abs(one - columns(simulate(case, row, 3, 7, "normal")[1])[1])
    assert np.sort(moved)[-2:] == pytest.approx([0, 0.1], abs=1e-9)  # 5 % of 27 points: one


def test_laws_off_the_grid_stay_within_its_cell() -> None:
    curves = [simulate(BY_NAME[OFF_GRID], PAPER_RUNS["ScaleRL"], i, 7)[0] for i in range(50)]
    A, C_mid = np.array([curve.A for curve in curves]), np.array([curve.C_mid for curve in curves])
    assert 0.002 < np.abs(A - 0.610).max() <= 0.0025 and 180 < np.abs(C_mid - 2542).max() <= 201.6


def test_each_kind_has_its_share_of_the_runs() -> None:
    counts = Counter(case.split(", ScaleRL")[0] for case, _ in validation.cases(Namespace(runs=1000)))
    assert counts[WELL] == 1000 and counts[OFF_GRID] == 500 and set(counts) == set(BY_NAME)


def record(kind: str, row: str, A: float, low: float, high: float) -> Row:
    """A run whose every number is off as A is; truth .6."""
    four = {key: [0.6, A, low, high] for key in QUANTITIES}
    theirs = {"A": 0.61, "B": 0.61, "C_mid": 0.6, "far": 0.01}
    return {
        "kind": kind, "row": row, "identified": high - low < 0.06, "ours": {**four, "far": A - 0.6},
        "paper": theirs, "paper, finer": theirs, "A_moved": 0.002, "A_moved_paper": -0.03,
    }  # fmt: skip


def test_errors_and_shares_by_hand() -> None:
    runs = [record(WELL, "ScaleRL", 0.6 + d, 0.6 + d - 0.01, 0.6 + d + 0.01)
            for d in (0.002, -0.004, 0.006, 0.02, -0.02)]  # fmt: skip
    assert errors(runs, "ours", "A") == pytest.approx([0.002, 0.004, 0.006, 0.02, 0.02])
    assert errors(runs, "ours", "C_mid")[2] == pytest.approx(0.01)
    assert errors(runs, "paper", "A") == pytest.approx([0.01] * 5)
    assert far_beyond(runs, "paper")[0] == pytest.approx(0.0104 - 0.01)
    assert coverage(runs)["A"] == 0.6 and coverage(runs)["width of A"] == pytest.approx(0.02)


def everything(width: float) -> list[Row]:
    """Some runs of every case, a tenth of whose intervals miss."""
    runs = []
    for case in SCENARIOS:
        for row in case.rows:
            for i in range(10):
                half = 0.1 if case.name == TOO_SHORT else width
                A = 0.6 + (1.5 * half if i == 0 else 0.001)
                runs.append(record(case.name, row, A, A - half, A + half))
    return runs


def test_the_page_says_which_bars_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = everything(0.01)
    assert all(holds for *_, holds in bars(runs)), bars(runs)
    page = tmp_path / "docs" / "validation.md"
    page.parent.mkdir()
    page.write_text(f"before\n{validation.BEGIN}\nof before\n{validation.END}\nafter\n")
    monkeypatch.setattr(validation, "ROOT", tmp_path)
    validation.publish({}, runs)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "of before" not in text
    assert "**no**" not in text and all(f"| {name}" in text for name in PAPER_RUNS)
    missed = {title: holds for title, *_, holds in bars(everything(0.04))}
    assert not missed["the paper's ranges: flagged"] and missed["fit of 1.5k–4k: flagged"]
    assert "**no**" in validation.describe({}, everything(0.04))


def test_a_run_is_measured_the_same_every_time() -> None:
    one, again = (validation.measure(BY_NAME[TOO_SHORT], "ScaleRL", 1, 5) for _ in range(2))
    assert one["ours"] == again["ours"] and one["ours"]["A"][0] == 0.610
