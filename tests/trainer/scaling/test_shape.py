"""Promises of the checks of the shape: a curve that is no sigmoid, or has fallen at its end, is called so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.validation.runs import ours
from bench.validation.scenarios import PAPER_RUNS, SCENARIOS, WELL, simulate
from trainer.scaling import Fit, Sigmoid, fit
from trainer.scaling.__main__ import main
from trainer.scaling.curve.families import Axis, Family
from trainer.scaling.curve.marginal import NOISE_PRIOR_POINTS, Data, noise_models
from trainer.scaling.curve.shape import evidence

PAPER = Sigmoid(R0=0.30, A=0.61, B=1.92, C_mid=2542)  # Table 1 of 2510.13786; its R0 is not published
SD = 0.005
COMPUTE = np.arange(250, 8001, 250.0)


def fitted(change: dict[int, float], seed: int = 0, reported: bool = True) -> Fit:
    """A run of the paper's curve with some evaluations changed."""
    reward = PAPER.reward(COMPUTE) + np.random.default_rng(seed).normal(0, SD, len(COMPUTE))
    for i, by in change.items():
        reward[i] += by
    return fit(COMPUTE, reward, np.full(len(COMPUTE), SD) if reported else None, R0=0.3)


@pytest.mark.parametrize("reported", [True, False])
def test_a_last_evaluation_far_below_the_curve_is_a_collapse_or_a_bad_one(reported: bool) -> None:
    for seed in range(4):
        result = fitted({-1: -0.2}, seed, reported)
        assert "last-point-low" in result.flags and not result.identified
        assert (
            "the last evaluation is 0.2" in result.reasons
            and "a collapse, or a bad evaluation" in result.reasons
        )
        assert not {"last-point-low", "falling"}.isdisjoint(
            fitted({-1: -0.2, -2: -0.1}, seed, reported).flags
        )


def test_neither_noise_nor_an_outlier_elsewhere_nor_above_is_a_low_last_point() -> None:
    for change in ({}, {-1: -0.02}, {12: -0.2}, {-4: -0.2}, {-1: 0.2}, {-1: -0.2, 10: -0.2, 20: 0.2}):
        for reported in (True, False):
            assert "last-point-low" not in fitted(change, 1, reported).flags, change


def test_every_command_says_that_the_last_point_is_low(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = PAPER.reward(np.r_[0, COMPUTE]) + np.random.default_rng(0).normal(0, SD, len(COMPUTE) + 1)
    reward[-1] -= 0.2
    path = tmp_path / "run.csv"
    rows = "".join(f"{c},{r}\n" for c, r in zip(np.r_[0, COMPUTE], reward, strict=True))
    path.write_text(f"gpu_hours,pass_rate\n{rows}")
    for command in (["fit", str(path)], ["predict", str(path), "--at", "16000"]):
        assert main(command) == 0
        assert "0.20 below the curve: a collapse, or a bad evaluation" in " ".join(
            capsys.readouterr().out.split()
        )


SHAPES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "exponential": (lambda x: 1 - np.exp(-3 * x), "an exponential approach describes the points"),
    "hard cap": (
        lambda x: np.minimum(x / 0.6, 1),
        "a straight rise to a hard cap describes the points better",
    ),
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


def test_a_sigmoid_is_rarely_called_something_else() -> None:
    well = next(scenario for scenario in SCENARIOS if scenario.name == WELL)
    fits = [ours(simulate(well, row, i, 7)) for row in PAPER_RUNS.values() for i in range(3)]
    assert sum(not {"not-sigmoid", "other-shape"}.isdisjoint(result.flags) for result in fits) <= 2


def test_the_evidence_is_the_brute_force_integral() -> None:
    """R0 given, white noise: Z ∝ mean over the parameter of ∫ dA (ν₀ + Σ z²)^-((n + ν₀) / 2)."""
    c = np.arange(1.0, 25)
    reward = 0.2 + 0.4 * (1 - np.exp(-c / 8)) + np.random.default_rng(0).normal(0, 0.01, 24)
    data = Data(c, reward, np.full(24, 0.01), True, 0.2, 0.0)
    noise = noise_models(data, np.ones(24))[:1]
    families = (
        Family("exponential", lambda c, t: 1 - np.exp(-c / t), (Axis(0.5, 240, 60),)),
        Family("logarithm", lambda c, t: np.log1p(c / t) / np.log1p(24 / t), (Axis(0.03, 240, 40),)),
    )
    result = [evidence(data, noise, family) for family in families]
    by_hand = []
    A = np.linspace(0.2, 1, 4001)[:, None]
    for family in families:
        axis, power = family.axes[0], -(24 + NOISE_PRIOR_POINTS) / 2
        values = np.exp(np.linspace(np.log(axis.low), np.log(axis.high), 2001))
        curves = (0.2 + (A - 0.2) * family.fraction(c, t) for t in values)
        each = [((NOISE_PRIOR_POINTS + (((x - reward) / 0.01) ** 2).sum(1)) ** power).mean() for x in curves]
        by_hand.append(np.log(np.mean(each)))
    assert result[0].log - result[1].log == pytest.approx(by_hand[0] - by_hand[1], abs=0.05)
    assert by_hand[0] - by_hand[1] > 2
    assert abs(result[0].curve[1] - 0.6) < 0.02


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
