"""Promises of simulated runs: errors as large and as correlated as asked for, about the true curve."""

import numpy as np
import pytest

from trainer.scaling import Sigmoid
from trainer.scaling.simulate import autocorrelated, simulated


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_errors_keep_their_size_and_correlate_by_rho(rho: float) -> None:
    white = np.random.default_rng(0).normal(0, 0.01, 40_000)
    errors = autocorrelated(white, rho)
    assert np.corrcoef(errors[:-1], errors[1:])[0, 1] == pytest.approx(rho, abs=0.02)
    assert errors.std() == pytest.approx(0.01, rel=0.05) and errors[0] == white[0]
    assert autocorrelated(np.zeros(2), [0.5, 0.25], before=0.8).tolist() == [0.4, 0.1]


def test_a_run_is_the_curve_plus_errors_within_0_and_1_and_starts_at_R0() -> None:
    truth = Sigmoid(0.3, 0.99, 2.0, 100.0)
    run = simulated(truth.reward, [0, 100, 200, 1e6], [0.01, -0.02, 0.0, 0.5], 0.005, "run")
    assert (run.R0.pass_rate, run.R0.pass_rate_se) == (0.31, 0.005)  # type: ignore[union-attr]
    assert [p.pass_rate for p in run.points] == pytest.approx([0.625, 0.852, 1.0])
    assert [p.compute for p in run.points] == [100, 200, 1e6]
