"""Promises of the study of comparisons: the runs are what is said, and the table counts right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import harness
from bench.validation import comparisons
from bench.validation.comparisons import NOISE, Kind, Pairs, simulate
from trainer.scaling.curve.sigmoid import Sigmoid


def rewards(kind: Kind, ceiling: float = 0.58) -> np.ndarray:
    """(runs, evaluations): less what the exact curve has."""
    exact = Sigmoid(0.30, ceiling, 1.8, 2000)
    curves = [simulate(kind, ceiling, i, seed=1) for i in range(400)]
    return np.array([[p.pass_rate - float(exact.reward(p.compute)) for p in c.points] for c in curves])


def test_the_noise_has_the_size_and_the_correlation_that_are_said() -> None:
    for correlation in (0.0, 0.6):
        error = rewards(Kind(False, 5, correlation)) / NOISE
        assert error.std() == pytest.approx(1, abs=0.03)
        assert np.mean(error[:, 1:] * error[:, :-1]) == pytest.approx(correlation, abs=0.05)


def test_seeds_vary_by_what_is_said() -> None:
    """Far beyond C_mid the rewards vary as A does, and at C_mid by dR = .28 · B / 4 · d log C_mid, too."""
    moved = rewards(Kind(True, 500))[:, -1]
    assert moved.std() == pytest.approx(np.hypot(NOISE, 0.006), rel=0.1)
    at_C_mid = rewards(Kind(True, 24))[:, 0]  # 24 evaluations: the first is at C_mid
    expected = np.sqrt(NOISE**2 + (0.006 / 2) ** 2 + (0.28 * 1.8 / 4 * 0.07) ** 2)
    assert at_C_mid.std() == pytest.approx(expected, rel=0.1)


def test_the_table_holds_the_shares_of_each_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(comparisons, "ROWS", [Pairs(Kind(False, 5), 1, gap) for gap in (0.0, 0.04)])
    out = tmp_path / "x.jsonl"
    options = ["--runs=4", "--processes=1", f"--out={out}"]
    assert harness.run("validation.comparisons", comparisons, options) == 0
    assert len(harness.read(out)[1]) == 2 * 4 + 12
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| exact | 5 × | 1 | 0 | ") and "Of 12 groups of three seeds" in lines[-2]
    same, apart = ([float(x) for x in line.split("|")[5:-1]] for line in lines[2:4])
    assert same[0] <= 0.25 and apart[0] >= 0.5
    for shares in (same, apart):
        assert sum(shares[:3]) == pytest.approx(1)
