"""One simulated run, with every kind of interval there is: the posterior's beside the two classical ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bench.validation.cases import CASES, OUTLIERS, ROWS, WELL, Case, Points, simulate
from bench.validation.classical_intervals import bootstrap, profile
from bench.validation.fits import ours, truths
from trainer.scaling import Curve, EvalPoint

RESAMPLES = 300
KINDS = (WELL, "AR(1) 0.5", "AR(1) 0.7", "AR(1) 0.9", "Student t, 3 degrees", "errors told at half", OUTLIERS)
INTERVAL_CASES = tuple(replace(case, share=0.06) for case in CASES if case.name in KINDS)
METHODS = ("posterior (default)", "profile likelihood", "bootstrap, residual", "bootstrap, block")
KEYS = ("A", "B", "C_mid")


def measure(task: tuple[Case, str, int, int]) -> dict[str, Any]:
    """Per method [truth, value, low, high] of A, B, C_mid. The runs are those of bench.validation.fits."""
    case, name, i, seed = task
    points = simulate(case, ROWS[name], i, seed)
    curve = _curve(points)
    found = (
        ours(points),
        profile(curve),
        bootstrap(curve, RESAMPLES, "residual"),
        bootstrap(curve, RESAMPLES, "block"),
    )
    record: dict[str, Any] = {"case": case.name, "row": name, "i": i, "seed": seed}
    truth = truths(points)
    for method, interval in zip(METHODS, found, strict=True):
        told = {key: getattr(interval, key) for key in KEYS}
        record[method] = {key: [truth[key], e.value, e.low, e.high] for key, e in told.items()}
    return record


def _curve(points: Points) -> Curve:
    se = np.zeros(len(points.compute)) if points.se is None else points.se
    told = zip(points.compute, points.reward, se, strict=True)
    evaluations = tuple(EvalPoint(k, float(c), float(r), float(e)) for k, (c, r, e) in enumerate(told, 1))
    return Curve("simulated", "GPU-hours", evaluations, points.R0)
