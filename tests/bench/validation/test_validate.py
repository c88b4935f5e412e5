"""Promises of the validation: known laws and noise, right arithmetic, nothing lost when it is cut."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.sources import TABLE_1
from bench.validation import __main__ as validation
from bench.validation.document import document
from bench.validation.plot import draw
from bench.validation.runs import Task, measure, tasks_of
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
    Scenario,
    simulate,
)
from bench.validation.tables import QUANTITIES, accuracy, coverage, summary
from trainer.scaling import Sigmoid

BY_NAME = {case.name: case for case in SCENARIOS}
LONG_RUN = PaperRun(TABLE_1[0], every=1.0, high=60_000.0, far=1e5)  # many evaluations: moments can be checked


def errors(case: Scenario) -> np.ndarray:
    points = simulate(case, LONG_RUN, 0, seed=1)
    return points.reward - points.curve.reward(points.compute)


def test_every_row_of_the_paper_is_simulated_on_its_range_and_spacing() -> None:
    assert len(PAPER_RUNS) == len(TABLE_1) == 10
    points = simulate(BY_NAME[WELL], PAPER_RUNS["ScaleRL"], 0, seed=1)
    assert points.compute.tolist() == list(range(1500, 8001, 250))
    assert points.curve == Sigmoid(R0, 0.610, 1.92, 2542) and points.R0 == R0
    assert simulate(BY_NAME[TOO_SHORT], PAPER_RUNS["ScaleRL"], 0, 1).compute[-1] == 4000
    assert simulate(BY_NAME[WELL], PAPER_RUNS["ScaleRL-bs2048"], 0, 1).compute[-1] == pytest.approx(50_000)


@pytest.mark.parametrize("name", [case.name for case in SCENARIOS if case.rows == tuple(PAPER_RUNS)])
def test_noise_is_of_the_size_said_and_told_as_said(name: str) -> None:
    case = BY_NAME[name]
    error = errors(case)
    points = simulate(case, LONG_RUN, 0, seed=1)
    if name == OUTLIERS:
        hit = np.abs(error) > 0.08
        assert hit.mean() == pytest.approx(0.05, abs=1e-4)
        error = error[~hit]
    if case.noise == "binomial":
        assert points.se is not None
        assert np.std(error / points.se) == pytest.approx(1, rel=0.02)
        assert points.se.max() > 1.5 * points.se.min()
        return
    assert error.std() == pytest.approx(NOISE, rel=0.15 if "t" in case.noise else 0.05)
    assert np.corrcoef(error[1:], error[:-1])[0, 1] == pytest.approx(case.ar, abs=0.03)
    if case.se_factor:
        assert points.se is not None and (points.se == case.se_factor * NOISE).all()
    else:
        assert points.se is None


def test_a_run_is_the_same_every_time_and_its_twin_differs_by_the_outliers_alone() -> None:
    row, case = PAPER_RUNS["ScaleRL"], BY_NAME[OUTLIERS]
    one, again, other = (simulate(case, row, i, 7) for i in (3, 3, 4))
    assert (one.reward == again.reward).all() and (one.reward != other.reward).any()
    moved = np.abs(one.reward - simulate(case, row, 3, 7, "normal").reward)
    assert np.sort(moved)[-2:] == pytest.approx([0, 0.1], abs=1e-9)  # 5 % of 27 points: one


def test_laws_off_the_grid_stay_within_its_cell() -> None:
    curves = [simulate(BY_NAME[OFF_GRID], PAPER_RUNS["ScaleRL"], i, 7).curve for i in range(50)]
    A, C_mid = np.array([curve.A for curve in curves]), np.array([curve.C_mid for curve in curves])
    assert 0.002 < np.abs(A - 0.610).max() <= 0.0025 and 180 < np.abs(C_mid - 2542).max() <= 201.6


def test_each_kind_has_its_share_of_the_runs() -> None:
    counts = Counter(task.scenario.name for task in tasks_of(1000, seed=1))
    assert counts[WELL] == 1000 and counts[OFF_GRID] == 500 and set(counts) == set(BY_NAME)


def record(case: str, row: str, i: int, A: float, low: float, high: float) -> dict[str, Any]:
    """A run whose every number is off as A is; truth .6."""
    four = {key: [0.6, A, low, high] for key in QUANTITIES}
    theirs = {"A": 0.61, "B": 0.61, "C_mid": 0.6, "far": 0.01}
    return {
        "case": case, "row": row, "i": i, "seed": 0, "fit_ms": 1.0, "identified": high - low < 0.06,
        "ours": {**four, "far": A - 0.6}, "paper": theirs, "paper, finer": theirs,
        "A_moved": 0.002, "A_moved_paper": -0.03,
    }  # fmt: skip


def test_errors_and_shares_by_hand() -> None:
    runs = [record(WELL, "ScaleRL", i, 0.6 + d, 0.6 + d - 0.01, 0.6 + d + 0.01)
            for i, d in enumerate((0.002, -0.004, 0.006, 0.02, -0.02))]  # fmt: skip
    found = accuracy(runs)
    assert found["ours"]["A"][0] == pytest.approx(0.006) and found["ours"]["C_mid"][0] == pytest.approx(0.01)
    assert found["paper"]["A"][0] == pytest.approx(0.01)
    assert found["ours − paper"][0] == pytest.approx(0.0104 - 0.01)
    assert coverage(runs)["A"] == 0.6 and coverage(runs)["width of A"] == pytest.approx(0.02)


def everything(width: float) -> list[dict[str, Any]]:
    """Some runs of every case, a tenth of whose intervals miss."""
    runs = []
    for case in SCENARIOS:
        for row in case.rows:
            for i in range(10):
                half = 0.1 if case.name == TOO_SHORT else width
                A = 0.6 + (1.5 * half if i == 0 else 0.001)
                runs.append(record(case.name, row, i, A, A - half, A + half))
    return runs


def test_the_page_says_which_bars_hold(tmp_path: Path) -> None:
    runs = everything(0.01)
    found = {"runs": 1, "seed": 0, **summary(runs)}
    assert all(bar["holds"] for bar in found["bars"]), [b for b in found["bars"] if not b["holds"]]
    page = document(found)
    assert "**no**" not in page and all(f"| {name}" in page for name in PAPER_RUNS)
    draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    missed = {bar["what"]: bar["holds"] for bar in summary(everything(0.04))["bars"]}
    assert not missed["the paper's ranges: flagged"] and missed["fit of 1.5k–4k: flagged"]
    assert "**no**" in document({**found, **summary(everything(0.04))})


def test_the_command_writes_the_numbers_of_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = everything(0.01)
    monkeypatch.setattr(validation, "work", lambda tasks, processes: runs[: len(tasks)])
    monkeypatch.setattr(validation, "tasks_of", lambda count, seed: runs)
    assert validation.main(["--runs=1", f"--json={tmp_path / 'x.json'}"]) == 0
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["runs"] == len(runs) and written["seed"] == 2510 and written["bars"]
    assert capsys.readouterr().out.startswith(f"{len(runs)} simulated runs, seed 2510; noise of sd 0.005.")


def test_a_run_is_measured_the_same_every_time() -> None:
    task = Task(BY_NAME[TOO_SHORT], "ScaleRL", 1, 5)
    one, again = measure(task), measure(task)
    assert one["ours"] == again["ours"] and one["ours"]["A"][0] == 0.610
