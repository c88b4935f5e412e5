"""Simulated runs of known curves: the paper's runs, the ranges of their fits, and the kinds of noise.

A simulated run is the published curve with R0 (not published: bench.sources.R0), evaluated every 100 steps,
with noise of sd NOISE. The cost of 100 steps is not published either. Taken here: 250 GPU-hours for the 8B at
batch 768 (16,000 GPU-hours are then 6,400 steps), in proportion for other batches, and twice that for the 32k
length and for Scout.
"""

import zlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.sources import R0 as ASSUMED_R0
from bench.sources import RANGES, TABLE_1
from trainer.scaling import Curve, EvalPoint, Sigmoid
from trainer.scaling.curve.paper import PaperGrid
from trainer.scaling.simulate import autocorrelated, simulated

Array = NDArray[np.float64]

NOISE = 0.005  # sd of an evaluation
START = 1500.0  # GPU-hours that the paper leaves out of its fits
OUTLIER_SHARE, OUTLIER_SIZE = 0.05, 0.1
WEAK = "ScaleRL-math+code-code"  # B = 1.09: its curve bends too slowly for 8k GPU-hours
R0 = ASSUMED_R0.value
PROCEDURES = ("ours", "paper", "paper, finer")  # that fit a run


@dataclass(frozen=True, slots=True)
class PaperRun:
    """One run of Table 1: its curve, and where the paper fits and predicts it."""

    name: str
    curve: Sigmoid
    every: float = 250.0  # GPU-hours between evaluations
    high: float = 8_000.0  # end of the fit
    far: float = 16_000.0  # where the reward is predicted


LONG = "ScaleRL-bs2048"  # the paper's 100k-hour run
RANGE_OF = {
    "ScaleRL-32k": (500.0, 50_000.0, 100_000.0),
    LONG: (250.0 * 2048 / 768, 50_000.0, 100_000.0),
    "ScaleRL-Scout": (500.0, 16_000.0, 45_000.0),
    "ScaleRL-bs512": (250.0 * 512 / 768,),
}
PAPER_RUNS = {name: PaperRun(name, curve, *RANGE_OF.get(name, ())) for name, curve in TABLE_1.items()}
SHORT = tuple(name for name, row in PAPER_RUNS.items() if row.high == 8_000)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of simulated run."""

    name: str
    noise: str = "normal"  # or "Student t, 3", "binomial", "outliers"
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


WELL, OFF_GRID, OUTLIERS, TOO_SHORT = "well-specified", "laws off the grid", "5 % outliers of ±.1", "1.5k–4k"
SCENARIOS = (
    Scenario(WELL, share=1.0, paper=True),
    Scenario(OFF_GRID, moved=True, share=0.5, paper=True),
    Scenario("R0 measured", start="measured"),
    Scenario("R0 unknown", start="unknown"),
    *(Scenario(f"AR(1) {ar}", ar=ar) for ar in (0.3, 0.5, 0.7, 0.9)),
    Scenario("Student t, 3 degrees", "Student t, 3"),
    Scenario("binomial, unequal", "binomial"),
    Scenario("standard errors reported at half", se_factor=0.5),
    Scenario("standard errors reported at twice", se_factor=2.0),
    Scenario("no standard errors reported", se_factor=0.0),
    Scenario(OUTLIERS, "outliers", paper=True),
    Scenario(TOO_SHORT, rows=SHORT, high=4_000.0),
    *(
        Scenario(f"{LONG} {low:g}–{high:g}", rows=(LONG,), low=low, high=high, share=0.04, paper=True)
        for low, high in dict.fromkeys((r.low, r.high) for r in RANGES)
    ),
)


Simulated = tuple[Sigmoid, Curve]  # the truth, and a run as a fit gets it


def simulate(scenario: Scenario, run: PaperRun, i: int, seed: int, noise: str | None = None) -> Simulated:
    """Simulated run `i`, the same for the same arguments. `noise` replaces the scenario's own."""
    streams = [zlib.crc32(name.encode()) for name in (scenario.name, run.name)]
    rng = np.random.default_rng([seed, *streams, i])
    truth = _moved(rng, run.curve) if scenario.moved else run.curve
    first = max(1, int(np.ceil(scenario.low / run.every)))
    last = int((scenario.high or run.high) / run.every + 1e-9)
    compute = run.every * np.arange(first, last + 1, dtype=np.float64)
    error, se = _errors(rng, truth.reward(compute), noise or scenario.noise, scenario.ar)
    start: EvalPoint | float | None = None if scenario.start == "unknown" else R0
    if scenario.start == "measured":
        start = EvalPoint(0, 0.0, R0 + float(rng.normal(0, NOISE)), NOISE)
    curve = simulated(truth.reward, compute, error, se * scenario.se_factor)
    return truth, replace(curve, R0=start)


def _errors(rng: np.random.Generator, reward: Array, noise: str, ar: float) -> tuple[Array, Array]:
    """The errors of the evaluations, and their standard errors."""
    n = len(reward)
    se = np.full(n, NOISE)
    if noise == "Student t, 3":  # of sd NOISE
        return NOISE * rng.standard_t(3, n) / np.sqrt(3), se
    if noise == "binomial":  # right answers; every third evaluation is of a quarter of the prompts
        prompts = np.where(np.arange(n) % 3 == 0, 2_500, 10_000)
        score = rng.binomial(prompts, reward) / prompts
        return score - reward, np.sqrt(score * (1 - score) / prompts)
    error = autocorrelated(rng.normal(0, NOISE, n), ar)
    if noise == "outliers":  # at least one point is off, up or down
        hit = rng.choice(n, max(1, round(OUTLIER_SHARE * n)), replace=False)
        error[hit] += rng.choice([-OUTLIER_SIZE, OUTLIER_SIZE], len(hit))
    return error, se


def _moved(rng: np.random.Generator, curve: Sigmoid) -> Sigmoid:
    """A and C_mid anywhere in the cell of the paper's grid around them, B within 5 %.

    The printed values are nodes of that grid, so that the paper's grid search could find them exactly.
    """
    shift, grid = rng.uniform(-0.5, 0.5, 3), PaperGrid()
    C_step = (grid.C_mid[1] - grid.C_mid[0]) / (grid.C_mid[2] - 1)
    A, B = curve.A + grid.A[2] * shift[0], curve.B * (1 + 0.1 * shift[1])
    return Sigmoid(curve.R0, A, B, curve.C_mid + C_step * shift[2])
