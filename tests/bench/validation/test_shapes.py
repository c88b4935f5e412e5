"""Promises of the study of other shapes: each run is what its name says, and the table counts right."""

from __future__ import annotations

import numpy as np
import pytest

from bench.validation.shapes import (
    CONTROL,
    EVALUATIONS,
    FALLS,
    KINDS,
    LAST,
    NOISE,
    describe,
    measure,
    simulate,
)


@pytest.mark.parametrize("kind", [CONTROL, *KINDS])
def test_a_run_is_its_shape_with_noise_and_falls_only_where_it_is_said_to(kind: str) -> None:
    fine = np.linspace(0, LAST, 601)
    for i in range(20):
        shape, compute, reward, R0 = simulate(kind, i, seed=1)
        assert len(compute) == EVALUATIONS and compute[-1] == LAST
        assert (
            np.abs(reward - shape(compute)).max() < 5 * NOISE and abs(R0 - shape(np.zeros(1))[0]) < 5 * NOISE
        )
        curve = shape(fine)
        assert curve.min() >= 0 and curve.max() <= 1
        assert (np.diff(curve) >= -1e-12).all() != (kind in FALLS)


def test_a_run_is_right_if_it_is_flagged_or_covered() -> None:
    fell, sigmoid = measure("fast collapse", 0, seed=1), measure(CONTROL, 0, seed=1)
    assert fell["flagged"] and fell["either"] and not fell["covered"] and not fell["wrong"]
    assert sigmoid["covered"] and sigmoid["either"] and not sigmoid["wrong"]
    missed = sigmoid | {"covered": False, "either": False, "flagged": False, "wrong": True}
    runs = [r | {"kind": kind} for kind in (*KINDS, CONTROL) for r in (sigmoid, missed)]
    rows = describe({}, runs).splitlines()[2:]
    assert len(rows) == len(KINDS) + 2 and all("| 0.50 | 0.50 |" in row for row in rows)
