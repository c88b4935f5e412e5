"""Error rates of `compare` on pairs of simulated recipes, with and without a difference in the ceiling.

  python -m bench validation.comparisons       100 pairs in each row; ten minutes on two cores

Both recipes of a pair have B 1.8 and C_mid 2,000, with A .58 and .58 + ΔA. A run is evaluated 24 times, with
noise of sd .006, up to 3 or 5 times C_mid. Where seeds vary, each run has an A, B and C_mid of its own, with
standard deviations of .006, 5 % and 7 %. Every number in the table is a share of the pairs.

Then groups of three seeds: how often their interval of a parameter is no wider than the narrowest one of the
three alone (with the variance over seeds assumed that single runs get), and their ceiling identified where
any of the three alone is.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from bench.harness import Case, Row
from bench.table import markdown
from trainer.scaling.compare import DIFFERENT, EQUIVALENT, INCONCLUSIVE, compare_fits
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.curve.sigmoid import Curve, Sigmoid
from trainer.scaling.seeds import PARAMETERS
from trainer.scaling.simulate import autocorrelated, simulated

A, B, C_MID, R0 = 0.58, 1.8, 2000.0, 0.30
EVALUATIONS, NOISE = 24, 0.006
SEED_SD = (0.006, 0.05, 0.07)  # of A, log B and log C_mid, where seeds vary
SEEDS = 3  # of a group
Run = tuple[Curve, Fit]
OPTIONS = {"runs": (100, "pairs in each row, and a third of the groups")}
PARALLEL = True
SEED = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of run."""

    vary: bool  # whether seeds vary
    reach: int  # last compute over C_mid
    correlation: float = 0.0  # of the errors of neighbouring evaluations

    def __str__(self) -> str:
        return ("seeds vary" if self.vary else "exact") + (
            f", AR {self.correlation:g}" * (self.correlation > 0)
        )


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


def measure_pair(pairs: Pairs, i: int, seed: int) -> Row:
    """The verdicts of `compare` on pair `i`; every row of a kind has the same runs."""
    two = {
        name: [run(pairs.kind, ceiling, first + pairs.seeds * i + k, seed) for k in range(pairs.seeds)]
        for name, ceiling, first in (("a", A + pairs.gap, 0), ("b", A, 100_000))
    }
    pair = compare_fits(two).pairs[0]
    return {
        DIFFERENT: pair.verdict == DIFFERENT,
        EQUIVALENT: pair.verdict == EQUIVALENT,
        INCONCLUSIVE: pair.verdict == INCONCLUSIVE,
        "not identified": bool(pair.doubts),
        "B": pair.B_differs,
        "C_mid": pair.C_mid_differs,
        "B or C_mid": pair.B_differs or pair.C_mid_differs,
        "lead": bool(pair.leads),
    }


def measure_group(kind: Kind, i: int, seed: int) -> Row:
    """Group `i` of seeds beside each of them alone."""
    runs = [run(kind, A, SEEDS * i + k, seed) for k in range(SEEDS)]
    group = compare_fits({"all": runs}).recipes[0]
    alone = compare_fits({str(k): [one] for k, one in enumerate(runs)}).recipes
    result: Row = {"identified": not group.doubts or all(recipe.doubts for recipe in alone)}
    for name in PARAMETERS:
        widths = [np.log(e.high / e.low) for e in (r.estimate(name) for r in (group, *alone))]
        result[name] = bool(widths[0] <= min(widths[1:]))
    return result


def cases(options: Namespace) -> Iterator[Case]:
    """Every pair of every row, and the groups."""
    for pairs in ROWS:
        for i in range(options.runs):
            yield f"{pairs}, {i}", partial(measure_pair, pairs, i, SEED)
    for i in range(3 * options.runs):
        yield f"group, {i}", partial(measure_group, Kind(True, (3, 5)[i % 2]), i // 2, SEED)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """Both tables, in Markdown."""
    lines = []
    for pairs in ROWS:
        group = [row for row in rows if row["case"].startswith(f"{pairs}, ")]
        keys = (DIFFERENT, EQUIVALENT, INCONCLUSIVE, "not identified", "B", "C_mid", "B or C_mid", "lead")
        shares = [f"{np.mean([row[key] for row in group]):.2f}" for key in keys]
        lines.append([str(pairs.kind), f"{pairs.kind.reach} ×", str(pairs.seeds), f"{pairs.gap:g}", *shares])
    groups = [row for row in rows if row["case"].startswith("group, ")]
    more = {key: np.mean([row[key] for row in groups]) for key in (*PARAMETERS, "identified")}
    widths = ", ".join(f"{name} in {more[name]:.3f}" for name in PARAMETERS)
    return (
        f"{markdown(HEAD, lines)}\n\n"
        f"Of {len(groups)} groups of three seeds that vary, the interval is no wider than the narrowest "
        f"of the three alone for {widths};\n"
        f"the ceiling is identified if that of any of them is in {more['identified']:.3f}."
    )
