"""Promises of the checks of the shape: a curve that is no sigmoid, or has fallen at its end, is called so."""

from collections.abc import Callable

import numpy as np
import pytest
from simulated import PAPER

from trainer.scaling import Fit, fit
from trainer.scaling.curve.marginal import Data, noise_models

SD = 0.005
COMPUTE = np.arange(250, 8001, 250.0)


def fitted(change: dict[int, float], seed: int = 0, reported: bool = True) -> Fit:
    """A run of the paper's curve with some evaluations changed."""
    reward = PAPER.reward(COMPUTE) + np.random.default_rng(seed).normal(0, SD, len(COMPUTE))
    for i, by in change.items():
        reward[i] += by
    return fit(COMPUTE, reward, np.full(len(COMPUTE), SD) if reported else None, R0=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("reported", [True, False])
def test_a_last_evaluation_far_below_the_curve_is_a_collapse_or_a_bad_one(reported: bool) -> None:
    for seed in range(4):
        result = fitted({-1: -0.2}, seed, reported)
        assert "last-point-low" in result.flags and not result.identified
        assert "the last evaluation is 0.2" in result.reasons
        assert "a collapse, or a bad evaluation" in result.reasons
        two = fitted({-1: -0.2, -2: -0.1}, seed, reported)
        assert not {"last-point-low", "falling"}.isdisjoint(two.flags)


@pytest.mark.slow
def test_neither_noise_nor_an_outlier_elsewhere_nor_above_is_a_low_last_point() -> None:
    for change in ({}, {-1: -0.02}, {12: -0.2}, {-4: -0.2}, {-1: 0.2}, {-1: -0.2, 10: -0.2, 20: 0.2}):
        for reported in (True, False):
            assert "last-point-low" not in fitted(change, 1, reported).flags, change


SHAPES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "exponential": (
        lambda x: 1 - np.exp(-3 * x),
        "an exponential approach describes the points as well as a sigmoid and ends at 0.6",
    ),
    "hard cap": (lambda x: np.minimum(x / 0.6, 1), "a straight rise to a hard cap describes the points bet"),
    "no cap yet": (lambda x: 0.8 * x, "a straight line describes the points"),
    "logistic": (lambda x: 1 / (1 + np.exp(-14 * (x - 0.45))), "a logistic describes the points better"),
    "two stages": (lambda x: 0.5 / (1 + (0.03 / x) ** 2) + 0.5 / (1 + (0.8 / x) ** 4), "rises in two stages"),
    "second rise": (
        lambda x: 0.7 / (1 + (0.15 / x) ** 2) + 0.3 * np.maximum(x - 0.8, 0) / 0.2,
        "in the last 20% of the compute the reward rises above the sigmoid of the rest",
    ),
    "decline": (
        lambda x: 1 / (1 + (0.12 / x) ** 2.2) - 0.12 * np.maximum(x - 0.6, 0) / 0.4,
        "in the last 40% of the compute the reward falls below the sigmoid of the rest",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_is_no_sigmoid_is_named(name: str) -> None:
    shape, says = SHAPES[name]
    share = np.arange(1, 33) / 32
    reward = 0.3 + 0.3 * shape(share) + np.random.default_rng(2).normal(0, 0.003, 32)
    result = fit(8000 * share, reward, np.full(32, 0.003), R0=0.3)
    flag = "other-shape" if name == "exponential" else "not-sigmoid"  # that is as good as a sigmoid
    assert result.flags[0] == flag and not result.identified
    assert says in result.reasons and result.to_json()["details"][flag] in result.reasons


def test_an_added_term_is_a_part_of_the_covariance() -> None:
    c = np.arange(1.0, 9)
    data = Data(c, c / 10, np.full(8, 0.02), True, 0.1, 0.01)
    for noise in noise_models(data, np.ones(8)):
        h = np.r_[0.0, np.linspace(0, 0.5, 8)]
        more = noise.plus(h)
        before, after = (np.linalg.inv(x.whiten.T @ x.whiten) for x in (noise, more))
        assert after == pytest.approx(before + np.outer(h, h), rel=1e-6, abs=1e-12)
        log_ratio = 0.5 * (np.linalg.slogdet(before)[1] - np.linalg.slogdet(after)[1])
        assert more.log_prior - noise.log_prior == pytest.approx(log_ratio)
