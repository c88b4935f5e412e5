"""The curve fit as a pytest-benchmark suite; bench.validation.fit_speed adds the other procedures."""

from __future__ import annotations

from typing import Any

from bench.validation.fit_speed import example
from trainer.scaling import fit_curve


def test_fit(benchmark: Any) -> None:
    """27 evaluations of the paper's ScaleRL, with all intervals."""
    assert 0.5 < benchmark(fit_curve, example()).A.value < 0.7
