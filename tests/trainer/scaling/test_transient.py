"""Promises of dropping early points: a transient goes, and nothing else does."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from simulated import PAPER, measured

from trainer.scaling import Curve, fit_curve
from trainer.scaling.curve.fit import without_transient

COMPUTE = np.arange(250, 8001, 250.0)
SD = 0.005


def curve(transient: Callable[[np.ndarray], np.ndarray], seed: int = 0) -> Curve:
    noise = np.random.default_rng(seed).normal(0, SD, len(COMPUTE))
    return measured(COMPUTE, PAPER.reward(COMPUTE) + transient(COMPUTE) + noise, SD, 0.30)


def with_errors(run: Curve, se: float) -> Curve:
    return replace(run, points=tuple(replace(p, pass_rate_se=se) for p in run.points))


@pytest.mark.parametrize("size", [0.1, -0.1])
def test_a_transient_is_dropped_and_the_ceiling_is_found(size: float) -> None:
    run = curve(lambda c: size * np.exp(-c / 500))
    rest = without_transient(run)
    # a quarter of the rise is won at C_mid / 3^(1/B) = 1434 GPU-hours
    assert 1000 <= rest.points[0].compute <= 2000 and rest.R0 == run.R0
    before, after = fit_curve(run), fit_curve(rest)
    assert after.A.high - after.A.low < 0.7 * (before.A.high - before.A.low)
    assert after.A.low <= PAPER.A <= after.A.high


def test_without_a_transient_nothing_is_dropped() -> None:
    for seed in range(4):
        run = curve(lambda c: 0 * c, seed)
        assert without_transient(run) is run


def test_early_outliers_drop_nothing() -> None:
    for off in ({500: 0.1}, {500: 0.1, 750: -0.1}):
        run = curve(lambda c, off=off: sum(np.where(c == place, by, 0.0) for place, by in off.items()))
        assert without_transient(run) is run


def test_reported_errors_that_are_too_small_drop_nothing() -> None:
    for seed in (0, 12, 14, 16, 39):  # the last four would, if the errors were believed
        bold = with_errors(curve(lambda c: 0 * c, seed), SD / 10)
        assert without_transient(bold) is bold


def test_where_r0_is_unknown_or_little_is_left_nothing_is_dropped() -> None:
    run = curve(lambda c: 0.1 * np.exp(-c / 500))
    unknown, short = replace(run, R0=None), replace(run, points=run.points[:14])
    assert without_transient(unknown) is unknown and without_transient(short) is short


def test_errors_that_are_not_known_are_taken_from_the_later_points() -> None:
    bare = with_errors(curve(lambda c: 0.1 * np.exp(-c / 500)), 0.0)
    assert without_transient(bare).points[0].compute >= 1000
    bare = with_errors(curve(lambda c: 0 * c), 0.0)
    assert without_transient(bare) is bare
