"""The curve fit as a pytest-benchmark suite."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.validation.scenarios import NOISE, PAPER_RUNS, SCENARIOS, simulate
from trainer.scaling import fit


def test_fit(benchmark: Any) -> None:
    """27 evaluations of the paper's ScaleRL, with all intervals."""
    p = simulate(SCENARIOS[0], PAPER_RUNS["ScaleRL"], 0, seed=0)
    assert len(p.compute) == 27
    fitted = benchmark(fit, p.compute, p.reward, np.full(27, NOISE), R0=p.R0)
    assert 0.5 < fitted.A.value < 0.7
