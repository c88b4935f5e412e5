"""Simulated runs of known curves: the paper's runs, the ranges of their fits, and the kinds of noise.

A simulated run is the published curve with R0 (not published: bench.sources.R0), evaluated every 100 steps,
with noise of sd NOISE. The cost of 100 steps is not published either. Taken here: 250 GPU-hours for the 8B at
batch 768 (16,000 GPU-hours are then 6,400 steps), in proportion for other batches, and twice that for the 32k
length and for Scout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.sources import R0 as ASSUMED_R0
from bench.sources import RANGES, TABLE_1, PublishedCurve
from trainer.scaling import Sigmoid
from trainer.scaling.curve.paper import PaperGrid

Array = NDArray[np.float64]

NOISE = 0.005  # sd of an evaluation
START = 1500.0  # GPU-hours that the paper leaves out of its fits
OUTLIER_SHARE, OUTLIER_SIZE = 0.05, 0.1
WEAK = "ScaleRL-math+code-code"  # B = 1.09: its curve bends too slowly for 8k GPU-hours
R0 = ASSUMED_R0.value


@dataclass(frozen=True, slots=True)
class PaperRun:
    """One run of Table 1: its curve, and where the paper fits and predicts it."""

    published: PublishedCurve
    every: float  # GPU-hours between evaluations
    high: float  # end of the fit
    far: float  # where the reward is predicted

    @property
    def name(self) -> str:
        return self.published.name

    @property
    def curve(self) -> Sigmoid:
        return Sigmoid(R0, self.published.A, self.published.B, self.published.C_mid)


def _paper_run(published: PublishedCurve) -> PaperRun:
    every, high, far = {
        "ScaleRL-32k": (500.0, 50_000.0, 100_000.0),
        "ScaleRL-bs2048": (250.0 * 2048 / 768, 50_000.0, 100_000.0),
        "ScaleRL-Scout": (500.0, 16_000.0, 45_000.0),
        "ScaleRL-bs512": (250.0 * 512 / 768, 8_000.0, 16_000.0),
    }.get(published.name, (250.0, 8_000.0, 16_000.0))
    return PaperRun(published, every, high, far)


PAPER_RUNS = {p.name: _paper_run(p) for p in TABLE_1}
SHORT = tuple(name for name, row in PAPER_RUNS.items() if row.high == 8_000)
LONG = "ScaleRL-bs2048"  # the paper's 100k-hour run


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of simulated run."""

    name: str
    noise: str = "independent"  # of NOISES
    ar: float = 0.0  # correlation of neighbours
    se_factor: float = 1.0  # reported over true standard errors; 0: none are reported
    start: str = "given"  # R0 "given", "measured" or "unknown"
    rows: tuple[str, ...] = tuple(PAPER_RUNS)
    moved: bool = False  # each run's curve is moved at random within a cell of the paper's grid
    low: float = START
    high: float | None = None  # of the fit; None: as the paper fits that run
    share: float = 0.3  # of --runs, divided among the paper's runs
    paper: bool = False  # fitted by the paper's procedure, too

    def count(self, runs: int) -> int:
        """Simulated runs of each of the paper's."""
        return max(1, round(runs * self.share / len(self.rows)))


@dataclass(frozen=True, slots=True)
class Points:
    """The points of a simulated run, as a fit gets them."""

    compute: Array
    reward: Array
    se: Array | None
    R0: float | None
    R0_se: float
    curve: Sigmoid  # the truth


def _independent(rng: np.random.Generator, reward: Array, scenario: Scenario) -> tuple[Array, Array]:
    return rng.normal(0, NOISE, len(reward)), np.full(len(reward), NOISE)


def _correlated(rng: np.random.Generator, reward: Array, scenario: Scenario) -> tuple[Array, Array]:
    """AR(1), stationary, of the same sd as the independent noise."""
    step = rng.normal(0, NOISE, len(reward))
    error = step.copy()
    for i in range(1, len(error)):
        error[i] = scenario.ar * error[i - 1] + np.sqrt(1 - scenario.ar**2) * step[i]
    return error, np.full(len(reward), NOISE)


def _student(rng: np.random.Generator, reward: Array, scenario: Scenario) -> tuple[Array, Array]:
    """Student's t with 3 degrees of freedom, of sd NOISE."""
    return NOISE * rng.standard_t(3, len(reward)) / np.sqrt(3), np.full(len(reward), NOISE)


def _binomial(rng: np.random.Generator, reward: Array, scenario: Scenario) -> tuple[Array, Array]:
    """Right answers out of n, every third evaluation of a quarter of n; errors from the drawn score."""
    n = np.where(np.arange(len(reward)) % 3 == 0, 2_500, 10_000)
    score = rng.binomial(n, reward) / n
    return score - reward, np.sqrt(score * (1 - score) / n)


def _outliers(rng: np.random.Generator, reward: Array, scenario: Scenario) -> tuple[Array, Array]:
    """Independent noise; 5 % of the points, at least one, are off by .1 up or down."""
    error, se = _independent(rng, reward, scenario)
    hit = rng.choice(len(reward), max(1, round(OUTLIER_SHARE * len(reward))), replace=False)
    error[hit] += rng.choice([-OUTLIER_SIZE, OUTLIER_SIZE], len(hit))
    return error, se


NOISES: dict[str, Callable[[np.random.Generator, Array, Scenario], tuple[Array, Array]]] = {
    "independent": _independent,
    "AR(1)": _correlated,
    "Student t, 3": _student,
    "binomial": _binomial,
    "outliers": _outliers,
}
WELL, OFF_GRID, OUTLIERS, TOO_SHORT = "well-specified", "laws off the grid", "5 % outliers of ±.1", "1.5k–4k"
HALF_SE = "standard errors reported at half"
SCENARIOS = (
    Scenario(WELL, share=1.0, paper=True),
    Scenario(OFF_GRID, moved=True, share=0.5, paper=True),
    Scenario("R0 measured", start="measured"),
    Scenario("R0 unknown", start="unknown"),
    *(Scenario(f"AR(1) {ar}", "AR(1)", ar) for ar in (0.3, 0.5, 0.7, 0.9)),
    Scenario("Student t, 3 degrees", "Student t, 3"),
    Scenario("binomial, unequal", "binomial"),
    Scenario(HALF_SE, se_factor=0.5),
    Scenario("standard errors reported at twice", se_factor=2.0),
    Scenario("no standard errors reported", se_factor=0.0),
    Scenario(OUTLIERS, "outliers", paper=True),
    Scenario(TOO_SHORT, rows=SHORT, high=4_000.0),
    *(
        Scenario(f"{LONG} {low:g}–{high:g}", rows=(LONG,), low=low, high=high, share=0.04, paper=True)
        for low, high in dict.fromkeys((r.low, r.high) for r in RANGES)
    ),
)
# These were renamed: with the seeds of their former names, the runs of docs/validation.md are theirs still.
SEEDS = {
    HALF_SE: 3201569975,
    "standard errors reported at twice": 297782287,
    "no standard errors reported": 3647485617,
}


def simulate(scenario: Scenario, run: PaperRun, i: int, seed: int, noise: str | None = None) -> Points:
    """Simulated run `i`, the same for the same arguments. `noise` replaces the scenario's own."""
    stream = SEEDS.get(scenario.name) or zlib.crc32(scenario.name.encode())
    rng = np.random.default_rng([seed, stream, zlib.crc32(run.name.encode()), i])
    curve = _moved(rng, run.curve) if scenario.moved else run.curve
    high = scenario.high or run.high
    first = max(1, int(np.ceil(scenario.low / run.every)))
    compute = run.every * np.arange(first, int(high / run.every + 1e-9) + 1, dtype=np.float64)
    truth = curve.reward(compute)
    error, se = NOISES[noise or scenario.noise](rng, truth, scenario)
    reward = np.clip(truth + error, 0, 1)
    reported = se * scenario.se_factor if scenario.se_factor else None
    if scenario.start == "unknown":
        return Points(compute, reward, reported, None, 0.0, curve)
    if scenario.start == "measured":
        return Points(compute, reward, reported, R0 + float(rng.normal(0, NOISE)), NOISE, curve)
    return Points(compute, reward, reported, R0, 0.0, curve)


def _moved(rng: np.random.Generator, curve: Sigmoid) -> Sigmoid:
    """A and C_mid anywhere in the cell of the paper's grid around them, B within 5 %.

    The printed values are nodes of that grid, so that the paper's grid search could find them exactly.
    """
    shift = rng.uniform(-0.5, 0.5, 3)
    grid = PaperGrid()
    C_step = (grid.C_mid[1] - grid.C_mid[0]) / (grid.C_mid[2] - 1)
    return Sigmoid(
        curve.R0,
        curve.A + grid.A[2] * shift[0],
        curve.B * (1 + 0.1 * shift[1]),
        curve.C_mid + C_step * shift[2],
    )
