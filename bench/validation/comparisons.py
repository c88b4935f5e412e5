"""Error rates of `compare` on pairs of simulated recipes, with and without a difference. [15 min]

  python -m bench validation.comparisons       100 pairs in each row; ten minutes on two cores

Both recipes of a pair have B 1.8 and C_mid 2,000, with A .58 and .58 + ΔA. A run is evaluated 24 times, with
noise of sd .006, up to 3 or 5 times C_mid. Where seeds vary, each run has an A, B and C_mid of its own, with
standard deviations of .006, 5 % and 7 %. Every number in the table is a share of the pairs.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from bench.harness import Case, Row, repeated
from bench.table import table
from trainer.scaling.compare import DIFFERENT, EQUIVALENT, INCONCLUSIVE, compare_fits
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.curve.sigmoid import Curve, Sigmoid
from trainer.scaling.simulate import autocorrelated, simulated

A, B, C_MID, R0 = 0.58, 1.8, 2000.0, 0.30
EVALUATIONS, NOISE = 24, 0.006
SEED_SD = (0.006, 0.05, 0.07)  # of A, log B and log C_mid, where seeds vary
SEEDS = 3  # of a recipe, where there are several
Run = tuple[Curve, Fit]
OPTIONS = {"runs": (100, "pairs in each row")}
PARALLEL = True
SEED = 0
VERDICTS = (DIFFERENT, EQUIVALENT, INCONCLUSIVE)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of run."""

    vary: bool  # whether seeds vary
    reach: int  # last compute over C_mid
    correlation: float = 0.0  # of the errors of neighbouring evaluations

    def __str__(self) -> str:
        name = "seeds vary" if self.vary else "exact"
        return f"{name}, AR {self.correlation:g}" if self.correlation else name


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of one kind."""

    kind: Kind
    seeds: int
    gap: float  # true difference of the ceilings

    def __str__(self) -> str:
        return f"{self.kind}, {self.kind.reach} ×, {self.seeds} seeds, {self.gap:g}"


ROWS = [
    *(
        Pairs(Kind(vary, reach), seeds, gap)
        for reach in (3, 5)
        for vary in (False, True)
        for seeds in (1, SEEDS)
        for gap in (0.0, 0.02, 0.04)
    ),
    *(Pairs(Kind(False, reach, 0.6), 1, 0.0) for reach in (3, 5)),
]
HEAD = (
    "runs", "data to × C_mid", "seeds", "true ΔA", "A: different", "equivalent", "not known",
    "not identified", "B differs", "C_mid differs", "B or C_mid", "a lead",
)  # fmt: skip


def simulate(kind: Kind, ceiling: float, i: int, seed: int) -> Curve:
    """Simulated run `i`; the same for the same arguments."""
    stream = [seed, i, kind.reach, int(kind.vary), round(1000 * ceiling), round(10 * kind.correlation)]
    rng = np.random.default_rng(stream)
    moved = rng.normal(0, SEED_SD) * kind.vary
    truth = Sigmoid(R0, ceiling + moved[0], B * np.exp(moved[1]), C_MID * np.exp(moved[2]))
    error = rng.normal(0, NOISE, EVALUATIONS + 1)
    error[1:] = autocorrelated(error[1:], kind.correlation)  # that of R0 is its own
    compute = kind.reach * C_MID * np.arange(EVALUATIONS + 1) / EVALUATIONS
    return simulated(truth.reward, compute, error, NOISE, f"run {i}")


@cache
def run(kind: Kind, ceiling: float, i: int, seed: int) -> Run:
    """The simulated run with its fit."""
    curve = simulate(kind, ceiling, i, seed)
    return curve, fit_curve(curve)


def measure(pairs: Pairs, i: int, seed: int = SEED) -> Row:
    """The verdicts of `compare` on pair `i`; every row of a kind has the same runs."""
    two = {
        name: [run(pairs.kind, ceiling, first + pairs.seeds * i + k, seed) for k in range(pairs.seeds)]
        for name, ceiling, first in (("a", A + pairs.gap, 0), ("b", A, 100_000))
    }
    pair = compare_fits(two).pairs[0]
    return {
        **{verdict: pair.verdict == verdict for verdict in VERDICTS},
        "not identified": bool(pair.doubts),
        "B": pair.B_differs,
        "C_mid": pair.C_mid_differs,
        "B or C_mid": pair.B_differs or pair.C_mid_differs,
        "lead": bool(pair.leads),
    }


def cases(options: Namespace) -> Iterator[Case]:
    """Every pair of every row."""
    return repeated(ROWS, options.runs, measure)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """A row for each kind of pair, in Markdown."""
    lines = []
    for pairs in ROWS:
        group = [row for row in rows if row["case"].startswith(f"{pairs}, ")]
        keys = (*VERDICTS, "not identified", "B", "C_mid", "B or C_mid", "lead")
        shares = [f"{np.mean([row[key] for row in group]):.2f}" for key in keys]
        lines.append([str(pairs.kind), f"{pairs.kind.reach} ×", str(pairs.seeds), f"{pairs.gap:g}", *shares])
    return table(HEAD, lines)
