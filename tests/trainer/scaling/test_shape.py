"""Promises of the checks of the shape: a curve that is no sigmoid, or has fallen at its end, is called so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainer.scaling import Fit, Sigmoid, fit
from trainer.scaling.__main__ import main

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
        found = fitted({-1: -0.2}, seed, reported)
        assert "last-point-low" in found.flags and not found.identified
        assert (
            "the last evaluation is 0.2" in found.reasons
            and "a collapse, or a bad evaluation" in found.reasons
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
