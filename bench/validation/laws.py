"""Do the intervals hold for curves that are not the paper's? Simulated sigmoids of many sizes.

  python -m bench validation.laws              160 curves in each cell; a few minutes

R0, the rise, B and C_mid are drawn anew for each curve, and so are the number of evaluations, their spacing
and their noise. A cell is a kind of noise and how far the data reach, in multiples of C_mid. R0 is measured
and standard errors are reported.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.harness import Case, Row
from bench.table import markdown, number
from trainer.scaling import Sigmoid, fit
from trainer.scaling.simulate import autocorrelated

Array = NDArray[np.float64]

OPTIONS = {"runs": (160, "curves in each cell")}
PARALLEL = True
SEED = 15
REACHES = (1.5, 2.0, 3.0, 5.0)  # last compute over C_mid
NOISES = {"independent": 0.0, "AR(1) 0.6": 0.6}  # correlation of errors one mean gap apart
EVALUATIONS, SPACINGS, NOISE_SDS = (12, 20, 40), ("linear", "log", "irregular"), (0.004, 0.008, 0.015)


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated run."""

    truth: Sigmoid
    compute: Array  # (n,)
    reward: Array  # (n,)
    sd: float  # of an evaluation
    R0: float  # as measured
    spacing: str


def simulate(reach: float, correlation: float, i: int, seed: int) -> Run:
    """Run `i`: the same curve, evaluations and random numbers for every reach and correlation."""
    rng = np.random.default_rng([seed, i])
    R0 = rng.uniform(0.03, 0.5)
    truth = Sigmoid(
        R0,
        min(R0 + rng.uniform(0.1, 0.5), 0.98),
        *np.exp(rng.uniform(np.log([0.9, 40]), np.log([3.2, 30_000]))),
    )
    n, spacing, sd = rng.choice(EVALUATIONS), str(rng.choice(SPACINGS)), float(rng.choice(NOISE_SDS))
    share = {
        "linear": np.arange(1, n + 1) / n,
        "log": np.geomspace(1 / 30, 1, n),
        "irregular": np.append(np.sort(rng.uniform(0.01, 1, n - 1)), 1.0),
    }[spacing]
    error = rng.normal(0, sd, n)
    if correlation:
        error = autocorrelated(error, correlation ** (np.diff(share, prepend=0.0) * n))
    compute = reach * truth.C_mid * share
    reward = np.clip(truth.reward(compute) + error, 0, 1)
    return Run(truth, compute, reward, sd, float(np.clip(R0 + rng.normal(0, sd), 0, 1)), spacing)


def measure(noise: str, reach: float, i: int, seed: int) -> Row:
    """One run's row: what the fit says of A and of the reward at four times the data, beside the truth."""
    run = simulate(reach, NOISES[noise], i, seed)
    estimate = fit(run.compute, run.reward, np.full(len(run.compute), run.sd), R0=run.R0, R0_se=run.sd)
    compute = 4 * run.compute[-1]
    ahead, truth = estimate.at(compute), float(run.truth.reward(compute))
    return {
        "noise": noise, "reach": reach, "identified": estimate.identified,
        "A": [run.truth.A, estimate.A.value, estimate.A.low, estimate.A.high],
        "4x": [truth, ahead.value, ahead.low, ahead.high],
    }  # fmt: skip


def cases(options: Namespace) -> Iterator[Case]:
    """Every run of every cell."""
    for i in range(options.runs):
        for noise in NOISES:
            for reach in REACHES:
                yield f"{noise}, {reach:g}, {i}", partial(measure, noise, reach, i, SEED)


HEAD = (
    "noise", "data to × C_mid", "median error of A", "width", "A holds", "4 × the data holds", "identified",
    "A holds, where identified",
)  # fmt: skip


def describe(head: Row, runs: Sequence[Row]) -> str:
    """A row for each cell, in Markdown."""
    rows = []
    for noise in NOISES:
        for reach in REACHES:
            cell = [r for r in runs if (r["noise"], r["reach"]) == (noise, reach)]
            truth, value, low, high = np.array([r["A"] for r in cell]).T
            holds, known = (low <= truth) & (truth <= high), np.array([r["identified"] for r in cell])
            ahead = np.mean([r["4x"][2] <= r["4x"][0] <= r["4x"][3] for r in cell])
            error, width = np.median(np.abs(value - truth)), np.median(high - low)
            shares = [f"{x:.2f}" for x in (holds.mean(), ahead, known.mean())]
            where = f"{holds[known].mean():.2f} ({known.sum()})" if known.any() else number(None)
            rows.append([noise, f"{reach:g}", f"{error:.4f}", f"{width:.3f}", *shares, where])
    return markdown(HEAD, rows)
