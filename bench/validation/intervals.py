"""One simulated run with every kind of interval: the posterior's and the classical ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bench.validation.classical_intervals import bootstrap, profile
from bench.validation.fits import ours, truths
from bench.validation.scenarios import (
    HALF_SE,
    OUTLIERS,
    PAPER_RUNS,
    SCENARIOS,
    WELL,
    Points,
    Scenario,
    simulate,
)
from trainer.scaling import Curve, EvalPoint

RESAMPLES = 300
NAMES = (WELL, "AR(1) 0.5", "AR(1) 0.7", "AR(1) 0.9", "Student t, 3 degrees", HALF_SE, OUTLIERS)
INTERVAL_SCENARIOS = tuple(replace(s, share=0.06) for s in SCENARIOS if s.name in NAMES)
METHODS = ("posterior (default)", "profile likelihood", "bootstrap, residual", "bootstrap, block")
KEYS = ("A", "B", "C_mid")


def measure(task: tuple[Scenario, str, int, int]) -> dict[str, Any]:
    """Per method [truth, value, low, high] of A, B, C_mid. The runs are those of bench.validation.fits."""
    scenario, name, i, seed = task
    points = simulate(scenario, PAPER_RUNS[name], i, seed)
    curve = _curve(points)
    intervals = (
        ours(points),
        profile(curve),
        bootstrap(curve, RESAMPLES, "residual"),
        bootstrap(curve, RESAMPLES, "block"),
    )
    record: dict[str, Any] = {"case": scenario.name, "row": name, "i": i, "seed": seed}
    truth = truths(points)
    for method, interval in zip(METHODS, intervals, strict=True):
        estimates = {key: getattr(interval, key) for key in KEYS}
        record[method] = {key: [truth[key], e.value, e.low, e.high] for key, e in estimates.items()}
    return record


def _curve(points: Points) -> Curve:
    se = np.zeros(len(points.compute)) if points.se is None else points.se
    rows = zip(points.compute, points.reward, se, strict=True)
    evaluations = tuple(EvalPoint(k, float(c), float(r), float(e)) for k, (c, r, e) in enumerate(rows, 1))
    return Curve("simulated", "GPU-hours", evaluations, points.R0)
