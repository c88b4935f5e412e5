"""Promises of the study of other curves: the noise is what is said, and the table counts right."""

from __future__ import annotations

import numpy as np
import pytest

from bench.validation.laws import NOISES, REACHES, describe, measure, simulate


def test_the_errors_have_the_size_and_the_correlation_in_compute_that_are_said() -> None:
    for correlation in NOISES.values():
        z, products, expected = [], [], []
        for i in range(400):
            run = simulate(50.0, correlation, i, seed=1)  # so far beyond C_mid that nothing is cut off
            error = (run.reward - run.truth.reward(run.compute)) / run.sd
            gap = np.diff(run.compute) / (run.compute[-1] / len(run.compute))
            z.append(error)
            products.append(error[1:] * error[:-1])
            expected.append(correlation**gap if correlation else 0 * gap)
        assert np.std(np.concatenate(z)) == pytest.approx(1, abs=0.05)
        assert np.mean(np.concatenate(products)) == pytest.approx(np.mean(np.concatenate(expected)), abs=0.05)


def test_a_run_is_the_same_curve_in_every_cell() -> None:
    runs = [simulate(reach, rho, 3, seed=1) for reach in REACHES for rho in NOISES.values()]
    assert len({run.truth for run in runs}) == 1 and len({len(run.compute) for run in runs}) == 1
    assert [run.compute[-1] / run.truth.C_mid for run in runs[::2]] == pytest.approx(REACHES)


def test_the_table_counts_what_holds() -> None:
    one = measure("independent", 5.0, 0, seed=1) | {"identified": True}
    cells = [one | {"noise": noise, "reach": reach} for noise in NOISES for reach in REACHES]
    wrong = [c | {"A": [0.99, 0.5, 0.4, 0.6], "identified": False} for c in cells]
    rows = describe({}, cells + wrong).splitlines()[2:]
    assert len(rows) == len(cells) and all(row.endswith("| 0.50 | 1.00 (1) |") for row in rows)
    assert all(row.split("|")[5].strip() == "0.50" for row in rows)
