"""Do the intervals hold for sigmoids that are not the paper's? [5 min]

  python -m bench validation.laws              160 curves in each cell; a few minutes

R0, the rise, B and C_mid are drawn anew for each curve, and so are the number of evaluations, their spacing
and their noise. A cell is a kind of noise and how far the data reach, in multiples of C_mid. R0 is measured
and standard errors are reported.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from bench.harness import Case, Row, grouped
from bench.table import number, table
from trainer.scaling import Curve, Sigmoid, fit
from trainer.scaling.simulate import autocorrelated, simulated

OPTIONS = {"runs": (160, "curves in each cell")}
PARALLEL = True
SEED = 15
REACHES = (1.5, 2.0, 3.0, 5.0)  # last compute over C_mid
NOISES = {"independent": 0.0, "AR(1) 0.6": 0.6}  # correlation of errors one mean gap apart
EVALUATIONS, SPACINGS, NOISE_SDS = (12, 20, 40), ("linear", "log", "irregular"), (0.004, 0.008, 0.015)


def simulate(reach: float, correlation: float, i: int, seed: int) -> tuple[Sigmoid, Curve]:
    """Run `i` and its truth: the same law, evaluations and random numbers for every reach and correlation."""
    rng = np.random.default_rng([seed, i])
    R0 = rng.uniform(0.03, 0.5)
    A = min(R0 + rng.uniform(0.1, 0.5), 0.98)
    truth = Sigmoid(R0, A, *np.exp(rng.uniform(np.log([0.9, 40]), np.log([3.2, 30_000]))))
    n, spacing, sd = rng.choice(EVALUATIONS), str(rng.choice(SPACINGS)), float(rng.choice(NOISE_SDS))
    share = {
        "linear": np.arange(1, n + 1) / n,
        "log": np.geomspace(1 / 30, 1, n),
        "irregular": np.append(np.sort(rng.uniform(0.01, 1, n - 1)), 1.0),
    }[spacing]
    error = rng.normal(0, sd, n)
    if correlation:
        error = autocorrelated(error, correlation ** (np.diff(share, prepend=0.0) * n))
    compute = reach * truth.C_mid * np.append(0.0, share)
    return truth, simulated(truth.reward, compute, np.append(rng.normal(0, sd), error), sd)


def measure(noise: str, reach: float, i: int, seed: int) -> Row:
    """One run's row: what the fit says of A and of the reward at four times the data, beside the truth."""
    truth, run = simulate(reach, NOISES[noise], i, seed)
    estimate, compute = fit(run), 4 * run.points[-1].compute
    A, ahead = estimate.A, estimate.at(compute)
    return {
        "noise": noise, "reach": reach, "identified": estimate.identified,
        "A": [truth.A, A.value, A.low, A.high],
        "4x": [float(truth.reward(compute)), ahead.value, ahead.low, ahead.high],
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
    for (noise, reach), cell in grouped(runs, "noise", "reach").items():
        truth, value, low, high = np.array([r["A"] for r in cell]).T
        holds, known = (low <= truth) & (truth <= high), np.array([r["identified"] for r in cell])
        ahead = np.mean([r["4x"][2] <= r["4x"][0] <= r["4x"][3] for r in cell])
        error, width = np.median(np.abs(value - truth)), np.median(high - low)
        shares = [f"{x:.2f}" for x in (holds.mean(), ahead, known.mean())]
        where = f"{holds[known].mean():.2f} ({known.sum()})" if known.any() else number(None)
        rows.append([noise, f"{reach:g}", f"{error:.4f}", f"{width:.3f}", *shares, where])
    return table(HEAD, rows)
