"""Simulated runs, as curves and as files."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from trainer.scaling import Curve, EvalPoint, Sigmoid, simulate

PAPER = Sigmoid(R0=0.30, A=0.61, B=1.92, C_mid=2542)  # arXiv 2510.13786, Table 1; its R0 is not published


def simulated(sigmoid: Sigmoid, compute: np.ndarray, sd: float, seed: int | None, name: str = "run") -> Curve:
    """A run that follows the sigmoid, with noise if there is a seed; its errors are always `sd`."""
    c = np.concatenate([[0.0], compute])
    noise = np.zeros(len(c)) if seed is None else np.random.default_rng(seed).normal(0, sd, len(c))
    return simulate.simulated(sigmoid.reward, c, noise, sd, name)


def measured(compute: np.ndarray, rewards: np.ndarray, sd: float, R0: float | None = None) -> Curve:
    """A run with these rewards, and errors of `sd`; R0 is measured, too."""
    start = 0 if R0 is None else 1
    c, r = np.r_[[0.0] * start, compute], np.r_[[R0] * start, rewards]
    return simulate.simulated(lambda _: r, c, 0.0, sd, "run")


def falling() -> Curve:
    """A run that rises for half of its compute and then falls."""
    compute = 500.0 * np.arange(22)
    return simulate.simulated(
        lambda c: 0.3 + 0.02 * np.minimum(c, 12_000 - c) / 500, compute, 0.0, 0.005, "falling"
    )


def with_rewards(run: Curve, change: dict[int, float]) -> Curve:
    """The run with the rewards of some points beyond R0 changed."""
    points = [replace(p, pass_rate=change.get(i, p.pass_rate)) for i, p in enumerate(run.points)]
    return replace(run, points=tuple(points))


def write(path: Path, run: Curve, compute: str = "gpu_hours") -> str:
    """As a CSV file."""
    assert isinstance(run.R0, EvalPoint)
    rows = [f"{p.compute},{p.pass_rate:.6f},{p.pass_rate_se}" for p in (run.R0, *run.points)]
    path.write_text(f"{compute},pass_rate,pass_rate_se\n" + "\n".join(rows))
    return str(path)
