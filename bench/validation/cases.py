"""Simulated runs with a known law: the paper's rows, their ranges, the kinds of noise, and what is fitted.

A curve is the published law with R0 (not published: bench.sources.R0), evaluated every 100 steps, with noise
of sd NOISE. What 100 steps cost is not published either: 250 GPU-hours for the 8B at batch 768 (16,000
GPU-hours are then 6,400 steps), in proportion for other batches, twice that for the 32k length and for Scout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.sources import R0 as ASSUMED_R0
from bench.sources import RANGES, TABLE_1, PublishedFit
from trainer.scaling import Sigmoid
from trainer.scaling.alternatives.paper import PaperGrid

Array = NDArray[np.float64]

NOISE = 0.005  # sd of an evaluation
START = 1500.0  # GPU-hours the paper leaves out
OUTLIER_SHARE, OUTLIER_SIZE = 0.05, 0.1
WEAK = "ScaleRL-math+code-code"  # B = 1.09: its bend is too slow for 8k GPU-hours
R0 = ASSUMED_R0.value


@dataclass(frozen=True, slots=True)
class Row:
    """One run of Table 1: its law, and where the paper fits it and predicts it."""

    published: PublishedFit
    every: float  # GPU-hours between evaluations
    high: float  # end of the fit
    far: float  # what is predicted

    @property
    def name(self) -> str:
        return self.published.name

    @property
    def law(self) -> Sigmoid:
        return Sigmoid(R0, self.published.A, self.published.B, self.published.C_mid)


def _row(published: PublishedFit) -> Row:
    every, high, far = {
        "ScaleRL-32k": (500.0, 50_000.0, 100_000.0),
        "ScaleRL-bs2048": (250.0 * 2048 / 768, 50_000.0, 100_000.0),
        "ScaleRL-Scout": (500.0, 16_000.0, 45_000.0),
        "ScaleRL-bs512": (250.0 * 512 / 768, 8_000.0, 16_000.0),
    }.get(published.name, (250.0, 8_000.0, 16_000.0))
    return Row(published, every, high, far)


ROWS = {p.name: _row(p) for p in TABLE_1}
SHORT = tuple(name for name, row in ROWS.items() if row.high == 8_000)
LONG = "ScaleRL-bs2048"  # the paper's 100k-hour run


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of simulated run."""

    name: str
    noise: str = "independent"  # of NOISES
    ar: float = 0.0  # correlation of neighbours
    told: float = 1.0  # standard errors told, in true ones; 0: not told
    start: str = "given"  # R0 "given", "measured" or "unknown"
    rows: tuple[str, ...] = tuple(ROWS)
    moved: bool = False  # the law moved within a cell of the paper's grid, another way in every run
    low: float = START
    high: float | None = None  # of the fit; None: the row's own
    share: float = 0.3  # of --runs, divided among the rows
    paper: bool = False  # fitted by the paper's procedure as well

    def runs(self, of: int) -> int:
        """How many runs of each row."""
        return max(1, round(of * self.share / len(self.rows)))


@dataclass(frozen=True, slots=True)
class Points:
    """A simulated run: what a fit is given."""

    compute: Array
    reward: Array
    se: Array | None
    R0: float | None
    R0_se: float
    law: Sigmoid  # the truth


def _independent(rng: np.random.Generator, reward: Array, case: Case) -> tuple[Array, Array]:
    return rng.normal(0, NOISE, len(reward)), np.full(len(reward), NOISE)


def _correlated(rng: np.random.Generator, reward: Array, case: Case) -> tuple[Array, Array]:
    """AR(1), stationary, of the same sd as the independent noise."""
    step = rng.normal(0, NOISE, len(reward))
    error = step.copy()
    for i in range(1, len(error)):
        error[i] = case.ar * error[i - 1] + np.sqrt(1 - case.ar**2) * step[i]
    return error, np.full(len(reward), NOISE)


def _student(rng: np.random.Generator, reward: Array, case: Case) -> tuple[Array, Array]:
    """Student's t with 3 degrees of freedom, of sd NOISE."""
    return NOISE * rng.standard_t(3, len(reward)) / np.sqrt(3), np.full(len(reward), NOISE)


def _binomial(rng: np.random.Generator, reward: Array, case: Case) -> tuple[Array, Array]:
    """Right answers out of n, every third evaluation of a quarter of n; errors from the drawn score."""
    n = np.where(np.arange(len(reward)) % 3 == 0, 2_500, 10_000)
    score = rng.binomial(n, reward) / n
    return score - reward, np.sqrt(score * (1 - score) / n)


def _outliers(rng: np.random.Generator, reward: Array, case: Case) -> tuple[Array, Array]:
    """Independent noise; 5 % of the points, at least one, are off by .1 up or down."""
    error, se = _independent(rng, reward, case)
    hit = rng.choice(len(reward), max(1, round(OUTLIER_SHARE * len(reward))), replace=False)
    error[hit] += rng.choice([-OUTLIER_SIZE, OUTLIER_SIZE], len(hit))
    return error, se


NOISES: dict[str, Callable[[np.random.Generator, Array, Case], tuple[Array, Array]]] = {
    "independent": _independent,
    "AR(1)": _correlated,
    "Student t, 3": _student,
    "binomial": _binomial,
    "outliers": _outliers,
}
WELL, OFF_GRID, OUTLIERS, TOO_SHORT = "well-specified", "laws off the grid", "5 % outliers of ±.1", "1.5k–4k"
CASES = (
    Case(WELL, share=1.0, paper=True),
    Case(OFF_GRID, moved=True, share=0.5, paper=True),
    Case("R0 measured", start="measured"),
    Case("R0 unknown", start="unknown"),
    *(Case(f"AR(1) {ar}", "AR(1)", ar) for ar in (0.3, 0.5, 0.7, 0.9)),
    Case("Student t, 3 degrees", "Student t, 3"),
    Case("binomial, unequal", "binomial"),
    Case("errors told at half", told=0.5),
    Case("errors told at twice", told=2.0),
    Case("errors not told", told=0.0),
    Case(OUTLIERS, "outliers", paper=True),
    Case(TOO_SHORT, rows=SHORT, high=4_000.0),
    *(
        Case(f"{LONG} {low:g}–{high:g}", rows=(LONG,), low=low, high=high, share=0.04, paper=True)
        for low, high in dict.fromkeys((r.low, r.high) for r in RANGES)
    ),
)


def simulate(case: Case, row: Row, i: int, seed: int, noise: str | None = None) -> Points:
    """Run `i`, the same for the same arguments. `noise` instead of the case's: the run's twin without it."""
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode()), zlib.crc32(row.name.encode()), i])
    law = _moved(rng, row.law) if case.moved else row.law
    high = case.high or row.high
    first = max(1, int(np.ceil(case.low / row.every)))
    compute = row.every * np.arange(first, int(high / row.every + 1e-9) + 1, dtype=np.float64)
    truth = law.reward(compute)
    error, se = NOISES[noise or case.noise](rng, truth, case)
    reward = np.clip(truth + error, 0, 1)
    told = se * case.told if case.told else None
    if case.start == "unknown":
        return Points(compute, reward, told, None, 0.0, law)
    if case.start == "measured":
        return Points(compute, reward, told, R0 + float(rng.normal(0, NOISE)), NOISE, law)
    return Points(compute, reward, told, R0, 0.0, law)


def _moved(rng: np.random.Generator, law: Sigmoid) -> Sigmoid:
    """A and C_mid anywhere in the cell of the paper's grid around them, B within 5 %.

    The printed ones are nodes of a grid, and a search over nodes near the truth has no error of its own.
    """
    shift = rng.uniform(-0.5, 0.5, 3)
    grid = PaperGrid()
    C_step = (grid.C_mid[1] - grid.C_mid[0]) / (grid.C_mid[2] - 1)
    return Sigmoid(
        law.R0, law.A + grid.A[2] * shift[0], law.B * (1 + 0.1 * shift[1]), law.C_mid + C_step * shift[2]
    )
